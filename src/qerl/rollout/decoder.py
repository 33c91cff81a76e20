"""How decode steps are formed and run: what the runs over them (``decode_run``, ``speculative_run``) share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qerl.rollout.core import Runner, SamplingParams
from qerl.rollout.decode_step import DecodeBuffers, draw_rows, forward_rows
from qerl.rollout.graphs import StepGraphs
from qerl.rollout.kv_cache import KVCache

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

    def run(self, kv: KVCache, size: int, longest: int, groups: DrawGroups) -> None:
        """Forward and sampling of the first ``size`` rows of the buffers, captured whole or the forward alone (mutates
        ``kv`` and the buffers). ``longest`` bounds the context of every row.

        Truncated sampling stays outside: it is dozens of ops beside a sort of the vocabulary, and a server may see any
        number of such settings. So does sampling in more than one way.
        """
        buffers, graphs = self.buffers, self.graphs
        # A graph serves every length. The kernel reads lengths on the device, so a generous bound costs nothing.
        bound = buffers.table.shape[1] * kv.block_size if graphs.enabled else longest

        def forward() -> torch.Tensor:
            return forward_rows(self.runner, kv, buffers, size, bound)

        sampling = groups[0][0]
        if len(groups) == 1 and not sampling.truncates:
            graphs.run(sampling.distribution, size, lambda: draw_rows(buffers, forward(), sampling, 0))
            return
        if graphs.enabled:
            logits = buffers.logits(size, self.runner.vocab_size)
            graphs.run("forward alone", size, lambda: logits.copy_(forward()))
        else:
            logits = forward()
        for sampling, start, end in groups:
            draw_rows(buffers, logits[start:end], sampling, start)
