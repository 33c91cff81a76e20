"""How decode steps are formed and run: what the runs over them (``decode_run``, ``speculative_run``) share."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from qerl.kernels.decode_rows import fields
from qerl.rollout.core import NonFiniteLogitsError, Runner, SamplingParams
from qerl.rollout.decode_step import DecodeBuffers, draw_rows, forward_rows
from qerl.rollout.graphs import StepGraphs
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.scheduler import Chunk, Scheduler

# (how, first row, end): rows that are drawn alike.
DrawGroups = Sequence[tuple[SamplingParams, int, int]]


@dataclass(slots=True)
class Decoder:
    """What outlives a call: static buffers, graphs, and how decode steps are formed.

    Attributes:
        sizes: batch sizes to round up to; None: no rounding (nothing is captured, so padding would be waste).
        look_ahead: steps launched before the oldest one's tokens are read.
    """

    runner: Runner
    buffers: DecodeBuffers
    graphs: StepGraphs
    sizes: tuple[int, ...] | None
    look_ahead: int

    def size_of(self, rows: int) -> int:
        """The batch size of a step of ``rows`` rows."""
        return rows if self.sizes is None else next(size for size in self.sizes if size >= rows)

    def staging(self, turn: int, rows: int, size: int) -> np.ndarray:
        """The host's matrix int64 [9, capacity] of a turn whose rows from ``rows`` to ``size`` are padding."""
        stage = self.buffers.staging(turn)
        stage[: fields.CELL_INDEX, rows:size] = self.buffers.padding
        return stage

    def run(self, kv: KVCache, size: int, longest: int, groups: DrawGroups, *, drafts: bool) -> None:
        """Forward and sampling of the first ``size`` rows of the buffers, captured whole or the forward alone (mutates
        ``kv`` and the buffers). ``longest`` bounds the context of every row; ``drafts`` says whether there are several
        rows of a sample.

        Truncated sampling stays outside: it is dozens of ops beside a sort of the vocabulary, and a server may see any
        number of such settings. So does sampling in more than one way.
        """
        buffers, graphs = self.buffers, self.graphs
        # A graph serves every length. The kernel reads lengths on the device, so a generous bound costs nothing.
        bound = buffers.table.shape[1] * kv.block_size if graphs.enabled else longest

        def forward() -> torch.Tensor:
            return forward_rows(self.runner, kv, buffers, size, bound, drafts)

        shape = (size, drafts)
        sampling = groups[0][0]
        if len(groups) == 1 and not sampling.truncates:
            graphs.run(sampling.distribution, shape, lambda: draw_rows(buffers, forward(), sampling, 0))
            return
        if graphs.enabled:
            logits = buffers.logits(size, self.runner.vocab_size)
            graphs.run("forward alone", shape, lambda: logits.copy_(forward()))
        else:
            logits = forward()
        for sampling, start, end in groups:
            draw_rows(buffers, logits[start:end], sampling, start)


@dataclass(frozen=True, slots=True)
class DrawOrder:
    """Samples in an order in which those that draw alike lie together, so that their rows are drawn in one go.

    Attributes:
        chunks: what was given, in that order; as it came among those that draw alike.
        kinds: int64 [chunks], which of ``ways`` each of them draws in; never decreasing.
    """

    chunks: list[Chunk]
    kinds: np.ndarray
    ways: list[SamplingParams]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "DrawOrder":
        """The order of ``chunks``, each of one sample."""
        ways: dict[Hashable, SamplingParams] = {}
        for chunk in chunks:
            ways.setdefault(chunk.owner.prefix.sampling.distribution, chunk.owner.prefix.sampling)
        numbers = {distribution: number for number, distribution in enumerate(ways)}
        kinds = [numbers[chunk.owner.prefix.sampling.distribution] for chunk in chunks]
        order = sorted(range(len(chunks)), key=kinds.__getitem__)
        return cls([chunks[i] for i in order], np.array([kinds[i] for i in order], dtype=np.int64), list(ways.values()))

    def groups(self, kinds: np.ndarray) -> DrawGroups:
        """(how, first row, end) of each run of rows that draw alike; ``kinds`` int64 [rows], those of the rows."""
        bounds = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        return [(self.ways[kinds[start]], start, end) for start, end in pairwise(bounds)]


def can_admit(scheduler: Scheduler, *, arrived: bool, freed: bool) -> bool:
    """Whether a run has to end because the scheduler could admit waiting work now: ``freed`` says if a run has freed
    enough for that to be worth it, ``arrived`` if work has come since it began."""
    waits = bool(scheduler.waiting) and len(scheduler.running) < scheduler.max_num_seqs
    return waits and (arrived or freed)


def check_finite(values: np.ndarray) -> None:
    """Refuse results float64 [3, R] of rows that had NaN logits.

    Raises:
        NonFiniteLogitsError: naming the rows.
    """
    bad = np.flatnonzero(~np.isfinite(values[fields.TEMPERATURE_LOGPROB]))
    if len(bad):
        raise NonFiniteLogitsError.of_rows(bad.tolist(), values.shape[1])
