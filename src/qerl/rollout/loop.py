"""One step after another over a scheduler: schedule, run the model, sample, append.

:class:`StepLoop` serves both a ``generate`` call and a session. A step takes any mix of prefill and decode; samples
with different sampling distributions are drawn group by group.
"""

import time
from dataclasses import dataclass, field

import torch

from qerl.rollout.batch import build_batch
from qerl.rollout.config import EngineStats
from qerl.rollout.core import FinishReason, Runner
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.sampler import SampledTokens, keys_tensor, sample
from qerl.rollout.scheduler import Chunk, Prefix, Sample, ScheduledStep, Scheduler


@dataclass(slots=True)
class DrawnTokens:
    """The tokens that one step gave, column by column. ``Sample.finish_reason`` says who ended with it."""

    samples: list[Sample] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperature_logprobs: list[float] = field(default_factory=list)

    def columns(self) -> tuple[list, list[int], list[float], list[float], list[FinishReason | None]]:  # type: ignore[type-arg]
        """samples, token ids, both log-probs, and the reason why the sample ended with this token, or None."""
        reasons = [sample.finish_reason for sample in self.samples]
        return self.samples, self.token_ids, self.logprobs, self.temperature_logprobs, reasons


class StepLoop:
    """Runs what ``scheduler`` plans over ``kv`` and counts it in ``stats`` (both are mutated)."""

    def __init__(self, runner: Runner, kv: KVCache, scheduler: Scheduler, stats: EngineStats) -> None:
        self.runner = runner
        self.kv = kv
        self.scheduler = scheduler
        self.stats = stats
        self.finished = 0

    @property
    def unfinished(self) -> bool:
        """True while a sample runs or waits."""
        return self.scheduler.unfinished

    def abort(self, prefix: Prefix) -> None:
        """Drop a group and free its blocks (between steps)."""
        self.scheduler.abort(prefix)

    def step(self) -> DrawnTokens:
        """Run one forward pass and append its tokens to their samples.

        Raises:
            NonFiniteLogitsError: the model returned NaN.
        """
        started = time.perf_counter()
        step = self.scheduler.schedule()
        drawn = self._run(step)
        self.scheduler.advance(step)
        self._count(step, time.perf_counter() - started)
        return drawn

    def _run(self, step: ScheduledStep) -> DrawnTokens:
        """Copy the blocks that would be written while shared, run the model, sample, wait for the tokens."""
        self.kv.copy_blocks([source for source, _ in step.copies], [copy for _, copy in step.copies])
        batch, drawing = build_batch(step.chunks, self.kv.block_size, self.runner.device)
        logits = self.runner.forward(batch, self.kv)
        if not drawing:
            return DrawnTokens()
        samples = [drawer for chunk in drawing for drawer in chunk.drawers]
        drawn = DrawnTokens(samples, *draw(logits, drawing).tolist())
        for drawer, token, logprob, temperature_logprob in zip(
            samples, drawn.token_ids, drawn.logprobs, drawn.temperature_logprobs, strict=True
        ):
            drawer.append(token, logprob, temperature_logprob)
            self.finished += drawer.finish_reason is not None
        self.stats.generated_tokens += len(samples)
        return drawn

    def _count(self, step: ScheduledStep, seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += sum(chunk.count for chunk in step.chunks)
        if all(chunk.count == 1 for chunk in step.chunks):
            stats.decode_steps += 1
            stats.decode_seconds += seconds
        else:
            stats.prefill_seconds += seconds


def draw(logits: torch.Tensor, drawing: list[Chunk]) -> SampledTokens:
    """One token for each sample of ``drawing`` from ``logits`` fp32 [R, V], a row for each chunk; all samples of a
    fresh prompt draw from its one row."""
    device = logits.device
    drawers = [drawer for chunk in drawing for drawer in chunk.drawers]
    rows = [row for row, chunk in enumerate(drawing) for _ in chunk.drawers]
    keys = keys_tensor([drawer.key for drawer in drawers], device)
    positions = torch.tensor([drawing[row].end for row in rows], dtype=torch.int64, device=device)
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, drawer in enumerate(drawers):
        groups.setdefault(drawer.prefix.sampling.distribution, []).append(index)
    if len(groups) == 1:
        shared = len(drawers) > len(drawing)
        picked = torch.tensor(rows, dtype=torch.int64, device=device) if shared else None
        return sample(logits, drawers[0].prefix.sampling, keys, positions, picked)
    parts, order = [], []
    for members in groups.values():
        index = torch.tensor(members, dtype=torch.int64, device=device)
        picked = torch.tensor([rows[member] for member in members], dtype=torch.int64, device=device)
        sampling = drawers[members[0]].prefix.sampling
        parts.append(sample(logits, sampling, keys[index], positions[index], picked))
        order.append(index)
    back = torch.cat(order).argsort()
    return SampledTokens(
        torch.cat([part.token_ids for part in parts])[back],
        torch.cat([part.logprobs for part in parts])[back],
        torch.cat([part.temperature_logprobs for part in parts])[back],
    )
