"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups whose rewards are all equal are sampled again.

Such a group has advantage zero and teaches nothing, so a batch with many of them is a smaller batch than it seems.
Before TRL scores a generated batch, more prompts are drawn and sampled, a whole batch at a time, until there are
enough *mixed* groups or the rounds run out. TRL then gets the chosen completions with their rewards in the place of
its own generation, and everything after it (log-probs, advantages, metrics) runs once, as without dynamic sampling.

Further prompts come from a second seeded order over the training data, which depends on seed and epoch alone; how far
it was used is stored with every checkpoint. Every decision is made from rewards gathered over all ranks, so all ranks
make the same one and end with the same number of rows.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from qerl.trainer.config import ConfigError

if TYPE_CHECKING:
    from qerl.trainer.trainer import QeRLTrainer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SampledRow:
    """One completion: its data set row, what TRL's ``_generate`` made of it, and its rewards."""

    inputs: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any
    logprobs: list[float]
    rewards: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The chosen completions of this rank, in the form that TRL's generation and scoring return them.

    Attributes:
        inputs: data set rows.
        generated: the result of ``GRPOTrainer._generate``.
        rewards: float32 [rows over all ranks, functions].
    """

    inputs: list[dict[str, Any]]
    generated: tuple[Any, ...]
    rewards: torch.Tensor


class PromptOrder:
    """Indices of a data set without end: one permutation an epoch, a function of seed and epoch.

    Args:
        size: rows of the data set.
        seed: run seed.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epoch, self._order = -1, []

    def __getitem__(self, position: int) -> int:
        epoch = position // self.size
        if epoch != self._epoch:
            digest = hashlib.blake2b(f"dynamic/{self.seed}/{epoch}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            self._epoch, self._order = epoch, torch.randperm(self.size, generator=generator).tolist()
        return self._order[position % self.size]


class DynamicSampling(TrainerCallback, ExportableState):
    """Chooses the batch of an update; the cursor into its prompt order is part of every checkpoint.

    Args:
        dataset: the training data.
        seed: run seed.
        max_rounds: batches sampled for one update at most, the first included.
        reward_index: function whose values must differ inside a group; None: the weighted sum.
    """

    def __init__(self, dataset: Dataset, seed: int, max_rounds: int, reward_index: int | None) -> None:
        self.dataset = dataset
        self.order = PromptOrder(len(dataset), seed)
        self.max_rounds = max_rounds
        self.reward_index = reward_index
        self.cursor = 0

    def state(self) -> dict[str, Any]:
        """What transformers writes to ``trainer_state.json``."""
        return {"args": {}, "attributes": {"cursor": self.cursor}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue where the checkpoint was; a run from the start begins at the first prompt."""
        stored = state.stateful_callbacks.get(type(self).__name__) if state.global_step > 0 else None
        self.cursor = 0 if stored is None else stored["attributes"]["cursor"]

    def prepare(self, trainer: "QeRLTrainer", inputs: list[dict[str, Any]]) -> PreparedBatch:
        """Sample ``inputs`` and, as long as groups are missing, further prompts; keep whole groups.

        Groups that are mixed come first; where rounds or prompts run out, others fill the batch (their advantage
        is zero). Advances the cursor.
        """
        size, world = trainer.num_generations, trainer.accelerator.num_processes
        wanted = len(inputs) * world // size
        metrics = trainer._metrics["train"]
        mixed, equal, rounds = [], [], 0
        seen: set[str] = set()
        rows: list[dict[str, Any]] | None = inputs
        while rows is not None:
            sampled = self._sample(trainer, rows)
            groups = [sampled[first : first + size] for first in range(0, len(sampled), size)]
            if rounds == 0:
                totals = [self._total(trainer, row) for row in sampled if _is_scored(row)]
                metrics["dynamic_sampling/first_round_reward"].append(sum(totals) / max(1, len(totals)))
            for group in groups:
                seen.add(_key(group[0].inputs))
                (mixed if self._is_mixed(trainer, group) else equal).append(group)
            rounds += 1
            done = len(mixed) >= wanted or rounds == self.max_rounds
            rows = None if done else self._draw(inputs[0].keys(), wanted, size, seen, trainer)
        metrics["dynamic_sampling/rounds"].append(rounds)
        metrics["dynamic_sampling/mixed_share"].append(len(mixed) / (len(mixed) + len(equal)))
        metrics["dynamic_sampling/filled"].append(max(0, wanted - len(mixed)))
        if len(mixed) < wanted:
            logger.warning(
                "dynamic sampling: %d of %d groups have equal rewards after %d rounds (%d prompts)",
                wanted - len(mixed), wanted, rounds, len(mixed) + len(equal),
            )  # fmt: skip
        return self._prepared(trainer, [*mixed, *equal][:wanted], len(inputs))

    def _sample(self, trainer: "QeRLTrainer", rows: list[dict[str, Any]]) -> list[SampledRow]:
        """Completions and rewards of this rank's ``rows``, gathered over all ranks in order."""
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids, _, completions, logprobs, *_ = trainer.sample_batch(prompts)
        rewards = trainer._calculate_rewards(rows, prompts, completions, completion_ids).tolist()
        logged = {name: list(values) for name, values in trainer._pending_extra_logs.items()}
        trainer._pending_extra_logs.clear()
        parts = zip(rows, prompt_ids, completion_ids, completions, logprobs, strict=True)
        local = [SampledRow(*part) for part in parts]
        for name, values in logged.items():
            for row, value in zip(local, values, strict=False):
                row.extra[name] = value
        gathered = gather_object(local)
        for row, values in zip(gathered, rewards, strict=True):
            row.rewards = values
        return gathered

    def _draw(
        self, columns: Sequence[str], groups: int, size: int, seen: set[str], trainer: "QeRLTrainer"
    ) -> list[dict[str, Any]] | None:
        """This rank's rows of ``groups`` prompts that the update has not sampled yet; None where too few are left."""
        chosen: list[dict[str, Any]] = []
        position = self.cursor
        taken = set(seen)
        while len(chosen) < groups and position - self.cursor < 2 * self.order.size:
            row = self.dataset[self.order[position]]
            position += 1
            if _key(row) not in taken:
                taken.add(_key(row))
                chosen.append({name: row[name] for name in columns})
        if len(chosen) < groups:
            return None
        self.cursor = position
        local = groups * size // trainer.accelerator.num_processes
        first = trainer.accelerator.process_index * local
        return [dict(chosen[row // size]) for row in range(first, first + local)]

    def _total(self, trainer: "QeRLTrainer", row: SampledRow) -> float:
        """TRL's weighted sum of the rewards that were given; 0 where none was."""
        pairs = zip(row.rewards, trainer.reward_weights.tolist(), strict=True)
        return sum(value * weight for value, weight in pairs if value == value)

    def _is_mixed(self, trainer: "QeRLTrainer", group: list[SampledRow]) -> bool:
        if self.reward_index is not None:
            values = [row.rewards[self.reward_index] for row in group]
        else:
            values = [self._total(trainer, row) for row in group if _is_scored(row)]
        return len({value for value in values if value == value}) > 1

    @staticmethod
    def _prepared(trainer: "QeRLTrainer", groups: list[list[SampledRow]], local: int) -> PreparedBatch:
        rows = [row for group in groups for row in group]
        first = trainer.accelerator.process_index * local
        mine = rows[first : first + local]
        for name in sorted({name for row in rows for name in row.extra}):
            trainer._pending_extra_logs[name] = [row.extra.get(name) for row in mine]
        generated = (
            [row.prompt_ids for row in mine],
            [row.completion_ids for row in mine],
            None,
            [row.completion for row in mine],
            [row.logprobs for row in mine],
            {},
            None,
            [],
        )
        rewards = torch.tensor([row.rewards for row in rows], dtype=torch.float32, device=trainer.accelerator.device)
        return PreparedBatch([row.inputs for row in mine], generated, rewards)


def make_dynamic_sampling(trainer: "QeRLTrainer", options: dict[str, Any]) -> DynamicSampling | None:
    """Dynamic sampling for ``trainer`` as one of its callbacks (added here); None where its config leaves it off.

    Args:
        trainer: after TRL's constructor.
        options: what that got besides model, rewards, config and data.

    Raises:
        ConfigError: tools, environments, own rollouts, streaming data, or a reward that the run does not have.
    """
    args, names = trainer.args, trainer.reward_func_names
    if not args.dynamic_sampling:
        return None
    refused = [name for name in ("tools", "environment_factory", "rollout_func") if options.get(name)]
    if refused or not isinstance(trainer.train_dataset, Dataset):
        what = refused[0] if refused else "a streaming data set"
        raise ConfigError(f"dynamic_sampling does not work with {what}; leave it off")
    wanted = args.dynamic_sampling_reward
    if wanted is not None and wanted not in names:
        raise ConfigError(f"dynamic_sampling_reward={wanted!r} is no reward of this run: {', '.join(names)}")
    index = None if wanted is None else names.index(wanted)
    dynamic = DynamicSampling(trainer.train_dataset, args.seed, args.max_dynamic_rounds, index)
    trainer.add_callback(dynamic)
    return dynamic


def _is_scored(row: SampledRow) -> bool:
    """Whether any function gave the row a reward (None is NaN by now)."""
    return any(value == value for value in row.rewards)


def _key(row: dict[str, Any]) -> str:
    """Equal for rows with the same prompt."""
    return json.dumps(row["prompt"], sort_keys=True, default=str)
