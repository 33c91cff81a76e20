"""One step after another over a scheduler: schedule, run the model, sample, append.

:class:`StepLoop` serves both a ``generate`` call and a session. Steps with prefill are built from lists and run
synchronously. When every running sample wants one token, :class:`~qerl.rollout.decode_run.DecodeRun` takes over: static
buffers, CUDA graphs, look-ahead; or, where few run and drafts pay,
:class:`~qerl.rollout.speculative_run.SpeculativeRun`. Samples that draw from different distributions share the forward
pass and are drawn group by group.
"""

import time

import torch

from qerl.rollout.batch import build_batch
from qerl.rollout.config import EngineStats
from qerl.rollout.decode_run import DecodeRun, can_decode
from qerl.rollout.decoder import Decoder
from qerl.rollout.drawn import DrawnTokens
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.sampler import SampledTokens, keys_tensor, sample
from qerl.rollout.scheduler import Chunk, Prefix, ScheduledStep, Scheduler
from qerl.rollout.speculation import Speculation
from qerl.rollout.speculative_run import SpeculativeRun


class StepLoop:
    """Runs what ``scheduler`` plans over ``kv`` and counts it in ``stats`` (all are mutated).

    ``eager_refill``: see :class:`~qerl.rollout.decode_run.DecodeRun`. ``speculation``: None decodes without drafts.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        scheduler: Scheduler,
        stats: EngineStats,
        *,
        eager_refill: bool,
        speculation: Speculation | None = None,
    ) -> None:
        self.runner = decoder.runner
        self.kv = kv
        self.scheduler = scheduler
        self.stats = stats
        self.finished = 0
        self._decoder = decoder
        self._graphs_before = decoder.graphs.captures, decoder.graphs.replays
        self._speculation = speculation
        self._plain = DecodeRun(decoder, kv, scheduler, eager_refill=eager_refill, speculation=speculation)
        self._drafting = None if speculation is None else SpeculativeRun(decoder, kv, scheduler, speculation)
        self._run: DecodeRun | SpeculativeRun = self._plain
        if decoder.graphs.enabled:
            decoder.graphs.validate((kv.k.data_ptr(), kv.v.data_ptr(), kv.k.shape, self.runner.capture_key()))

    @property
    def unfinished(self) -> bool:
        """True while a sample runs or waits, or its tokens are on the way."""
        return self.scheduler.unfinished or self._run.in_flight > 0

    def add(self, prefix: Prefix) -> None:
        """Queue a group (between steps)."""
        self.scheduler.add(prefix)
        self._run.interrupted = True

    def abort(self, prefix: Prefix) -> None:
        """Drop a group and free its blocks (between steps)."""
        if self._run.active:
            self._run.abort(prefix)
        self.scheduler.abort(prefix)

    def step(self) -> DrawnTokens:
        """Append the tokens of one forward pass to their samples; the passes after it may already run.

        Inside a decode run the samples' lists are behind by some tokens until they finish.

        Raises:
            NonFiniteLogitsError: the model returned NaN.
        """
        started = time.perf_counter()
        drawn = self._decode()
        if drawn is None:
            step = self.scheduler.schedule()
            self.kv.copy_blocks([source for source, _ in step.copies], [copy for _, copy in step.copies])
            if can_decode(step, self.scheduler):
                self._run = self._choose_run()
                self._run.enter(step)
                drawn = self._decode()
            else:
                drawn = self._mixed(step)
                self.scheduler.advance(step)
                self.stats.prefill_seconds += time.perf_counter() - started
                self._count(sum(chunk.count for chunk in step.chunks))
        if self._run.active:
            self.stats.decode_seconds += time.perf_counter() - started
        self.finished += sum(reason is not None for reason in drawn.reasons())
        self.stats.generated_tokens += len(drawn.samples)
        return drawn

    def record(self) -> None:
        """Bring the counters of ``stats`` up to date."""
        stats, scheduler, graphs = self.stats, self.scheduler, self._decoder.graphs
        stats.preemptions = scheduler.preemptions
        stats.peak_running = scheduler.peak_running
        stats.peak_blocks = scheduler.allocator.peak_used
        stats.num_blocks = self.kv.num_blocks
        stats.kv_bytes = self.kv.bytes
        stats.peak_kv_bytes = stats.peak_blocks * (self.kv.bytes // (self.kv.num_blocks + 1))
        stats.graph_captures = graphs.captures - self._graphs_before[0]
        stats.graph_replays = graphs.replays - self._graphs_before[1]
        if self._speculation is not None:
            stats.speculative_steps = self._speculation.steps
            stats.drafted_tokens = self._speculation.drafted
            stats.accepted_tokens = self._speculation.accepted
        stats.lora_sync_ms = getattr(self.runner, "sync_ms", 0.0)

    def _choose_run(self) -> DecodeRun | SpeculativeRun:
        """Who decodes the running samples until it cannot or should not go on."""
        if self._drafting is not None and self._speculation.wanted(len(self.scheduler.running)):
            return self._drafting
        return self._plain

    def _decode(self) -> DrawnTokens | None:
        """The next tokens of the decode run; None if there is none, or if it just ended."""
        run = self._run
        if not run.active:
            return None
        while run.in_flight <= run.look_ahead:
            rows = run.launch()
            if rows == 0:
                break
            self.stats.decode_steps += 1
            self._count(rows)
        if run.in_flight == 0:
            run.leave()
            return None
        return run.collect()

    def _mixed(self, step: ScheduledStep) -> DrawnTokens:
        """Run a step of any kind and wait for its tokens."""
        batch, drawing = build_batch(step.chunks, self.kv.block_size, self.runner.device)
        logits = self.runner.forward(batch, self.kv)
        if not drawing:
            return DrawnTokens([], [], [], [])
        samples = [drawer for chunk in drawing for drawer in chunk.drawers]
        drawn = DrawnTokens(samples, *draw(logits, drawing).tolist())
        for drawer, token, logprob, temperature_logprob in zip(
            samples, drawn.token_ids, drawn.logprobs, drawn.temperature_logprobs, strict=True
        ):
            drawer.append(token, logprob, temperature_logprob)
        return drawn

    def _count(self, tokens: int) -> None:
        self.stats.steps += 1
        self.stats.computed_tokens += tokens


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
