"""The engine in the place of TRL's ``vllm_generation``: the seam that brings TRL's importance-sampling correction,
tool loop and metrics along without overriding its generation code.

TRL calls ``sync_weights()`` once per optimizer step and ``generate(...)`` for every turn. The bridge fills the AQN
slots before sampling and clears them after it, and probes parity in between.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from qerl.rl.aqn import NoiseInjector
from qerl.rl.schedule import NoiseSchedule
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.transformers_backend import TransformersEngine
from qerl.trainer.parity import Parity, ParityError, probe_parity

if TYPE_CHECKING:
    from qerl.trainer.trainer import QeRLTrainer

logger = logging.getLogger(__name__)

# Row ids of one turn stay below the first, turns of one rank below the second over the first: no two calls of an update
# share a random stream, whatever the number of rows in a later turn of the tool loop.
_ROWS_PER_TURN = 1 << 24
_MAX_TURNS = 1 << 16
# Evaluations draw from a turn of their own, so that they never change what training draws.
_EVALUATION_TURN = _MAX_TURNS


def group_rows(prompts: list[list[int]]) -> list[tuple[int, int]]:
    """(first row, count) of each run of equal consecutive prompts: the groups that share a prefill."""
    groups: list[tuple[int, int]] = []
    for row, prompt in enumerate(prompts):
        if groups and prompts[groups[-1][0]] == prompt:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append((row, 1))
    return groups


class RolloutBridge:
    """Serves TRL's generation calls from a :class:`RolloutEngine` (or the transformers fallback).

    Args:
        trainer: reads ``state``, ``model``, ``accelerator`` and ``args`` only.
        engine: the rollout engine.
        injector: owner of the noise slots, or None without AQN.
        max_model_len: longest prompt + completion the engine serves.
    """

    def __init__(
        self,
        trainer: "QeRLTrainer",
        engine: RolloutEngine | TransformersEngine,
        injector: NoiseInjector | None,
        max_model_len: int,
    ) -> None:
        self.trainer = trainer
        self.engine = engine
        self.injector = injector
        self.sigma = 0.0
        self.norms_touched = 0
        self.generate_seconds = 0.0
        self.sync_seconds = 0.0
        self.generated_tokens = 0
        self.parity: Parity | None = None
        self._turn_of_step = (-1, 0)
        # TRL's tool loop asks the colocated vLLM for its context limit through this path.
        limit = SimpleNamespace(max_model_len=max_model_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=limit))

    def sync_weights(self) -> None:
        """Cast the LoRA masters into the engine's shadows; base weights are shared and never move."""
        start = time.perf_counter()
        if isinstance(self.engine, RolloutEngine):
            self.engine.runner.sync()
        self.sync_seconds = time.perf_counter() - start

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Sample one completion per row.

        Args:
            prompts: token ids per row; the rows of a group are consecutive and equal.
            images: must be None.
            num_generations: group size (unused: equal neighbours are found by value, also across turns).
            profiler: TRL's context manager.

        Returns:
            prompts, completion ids, log-probs [row][token][1] under the distribution that was sampled, None.
        """
        if images is not None:
            raise NotImplementedError("the rollout engine samples text only; images are not supported")
        # TRL syncs once per update; the adapter may have changed without one (best model loaded, a second train()).
        self.sync_weights()
        start = time.perf_counter()
        with profiler, self._noise():
            outputs = self._sample(prompts)
            self.generate_seconds += time.perf_counter() - start
            self._probe(prompts, outputs)
        self.generated_tokens += sum(len(o.token_ids) for o in outputs)
        logprobs = [[[value] for value in o.logprobs] for o in outputs]
        return prompts, [o.token_ids for o in outputs], logprobs, None

    def _turn(self) -> int:
        """0 for the first call after an update, then 1, 2, ... (the tool loop's turns)."""
        if not self.trainer.model.training:
            return _EVALUATION_TURN
        step = self.trainer.state.global_step
        turn = self._turn_of_step[1] + 1 if self._turn_of_step[0] == step else 0
        self._turn_of_step = (step, turn)
        return turn

    def _sample(self, prompts: list[list[int]]) -> list[CompletionOutput]:
        args, state = self.trainer.args, self.trainer.state
        groups = group_rows(prompts)
        # Ids of the first turn count rows over all ranks, so the same global batch draws the same samples on any number
        # of ranks that leaves groups whole (the part of a group on a second rank is keyed by its own first row). Later
        # turns have other numbers of rows on every rank and get a range per rank.
        rank, turn = self.trainer.accelerator.process_index, self._turn()
        first_row = rank * len(prompts) + turn * _ROWS_PER_TURN
        if 0 < turn < _EVALUATION_TURN:
            first_row = ((rank + 1) * _MAX_TURNS + turn + 1) * _ROWS_PER_TURN
        by_size: dict[int, list[tuple[int, int]]] = {}
        for group in groups:
            by_size.setdefault(group[1], []).append(group)
        rows: list[CompletionOutput | None] = [None] * len(prompts)
        for size, members in by_size.items():
            sampling = SamplingParams(
                n=size,
                max_tokens=self.trainer.max_completion_length,
                temperature=args.temperature,
                seed=args.seed,
            )
            results = self.engine.generate(
                [prompts[row] for row, _ in members],
                sampling,
                step=state.global_step,
                prompt_ids=[first_row + row for row, _ in members],
            )
            for (row, _), samples in zip(members, results, strict=True):
                rows[row : row + size] = samples
        return rows

    def _schedule(self) -> NoiseSchedule:
        """The noise schedule over the run's planned updates (known once training has begun)."""
        args = self.trainer.args
        updates = self.trainer.state.max_steps
        return NoiseSchedule(args.aqn_schedule, args.sigma_start, args.sigma_end, args.num_stages, updates)

    @contextmanager
    def _noise(self) -> Iterator[None]:
        """Fill the slots for a training rollout; clear them afterwards unless the scope is ``both``."""
        if self.injector is None:
            yield
            return
        if not self.trainer.model.training:
            with self.injector.suspended():
                yield
            return
        update = self.trainer.state.global_step + 1
        self.sigma = self._schedule().sigma(update)
        self.norms_touched = self.injector.fill(self.sigma, update)
        try:
            yield
        finally:
            if self.trainer.args.aqn_scope == "rollout":
                self.injector.clear()

    def _probe(self, prompts: list[list[int]], outputs: list[CompletionOutput]) -> None:
        args = self.trainer.args
        if args.parity_tokens == 0 or not self.trainer.model.training:
            return
        parity = probe_parity(
            self.trainer.model,
            prompts,
            outputs,
            args.parity_tokens,
            self.trainer.processing_class.pad_token_id,
        )
        self.parity = parity
        if not parity.mean <= args.parity_stop:  # also catches NaN
            raise ParityError(
                f"engine and trainer disagree by {parity.mean:.3g} per token (mean |log-prob difference| over "
                f"{parity.tokens} tokens; parity_stop={args.parity_stop}): they run different policies. Check that the "
                "adapter reaches the engine and that dtype is the same; rollout_backend='transformers' is the control."
            )
        if parity.mean > args.parity_warn:
            logger.warning(
                "parity: engine and trainer differ by %.3g per token (max %.3g, alarm at %.3g)",
                parity.mean, parity.max, args.parity_warn,
            )  # fmt: skip

    def take_timings(self) -> tuple[float, int]:
        """Seconds spent sampling and tokens sampled since the last call (resets both)."""
        timings = (self.generate_seconds, self.generated_tokens)
        self.generate_seconds, self.generated_tokens = 0.0, 0
        return timings
