"""The device half of a decode step: one token in, one token out for every row, over tensors that never move.

A step (:func:`forward_rows`, then :func:`draw_rows`) reads nothing but static buffers and the KV pool, so it can be
captured in a CUDA graph and replayed; on the CPU the same functions simply run. The host sends one small matrix a step
(:class:`DecodeBuffers`): where each row's input token comes from (the row of the *previous* step that sampled it, which
the host need not know yet, or a value), its position, KV slot, random key and row of the block table. Tokens and
log-probs come back through a ring of pinned buffers, so the next step can be launched before the last one's tokens are
read.

The number of rows is rounded up to a bucket. Padding rows feed token 0 at position 0 into the null block with a context
of one token: always finite, never read by others.
"""

import numpy as np
import torch

from qerl.kernels.decode_rows import fields, prepare_rows
from qerl.rollout.core import ForwardBatch, Runner, SamplingParams, Segment
from qerl.rollout.kv_cache import NULL_BLOCK, KVCache
from qerl.rollout.sampler import sample_into

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_BUCKET_STEP = 64
# Views of the rows start at multiples of 16 bytes: Triton compiles other kernels for odd addresses.
_ROW_ALIGNMENT = 16


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that graphs are captured for: every number of rows up to ``max_rows`` is rounded up to one."""
    sizes = [size for size in _BUCKETS if size < max_rows]
    sizes += range(_BUCKETS[-1] + _BUCKET_STEP, max_rows, _BUCKET_STEP)
    return (*sizes, max_rows)


class DecodeBuffers:
    """Static tensors of decode steps of up to ``max_rows`` rows.

    Args:
        max_rows: rows of the largest step.
        table_width: blocks of the longest sequence.
        device: where the model is.
        depth: steps that may be in flight at once, plus the one being prepared.
        seats: samples that run at once; a sample and its drafts have several rows, but one block table.

    Attributes:
        inputs: int64 [9, capacity], the rows of :mod:`qerl.kernels.decode_rows.fields`.
        padding: int64 [7, 1], the input fields of a padding row (of the host).
        table: int32 [seats + 1, table_width], block tables by slot; the last row is the null row of padding.
        tokens: int64 [capacity], what the last step sampled.
        results: float64 [3, capacity], token ids and both log-probs of the last step (float64 holds both exactly).
        fed: int64 [capacity], tokens that the step feeds; this and what follows is filled by :func:`forward_rows`.
        context_lens: int32 [capacity].
        block_table: int32 [capacity, table_width], block tables by row of the batch.
        keys: int64 [capacity, 2], random keys.
        draw_positions: int64 [capacity], where the tokens to draw will stand.
    """

    def __init__(self, max_rows: int, table_width: int, device: torch.device, depth: int, seats: int) -> None:
        capacity = -(-max_rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self.max_rows = max_rows
        self.padding = np.array((-1, 0, 0, NULL_BLOCK, 0, 0, seats), dtype=np.int64)[:, None]
        self.device = device
        self.inputs = torch.zeros(fields.NUM_FIELDS, capacity, dtype=torch.int64, device=device)
        self.table = torch.full((seats + 1, table_width), NULL_BLOCK, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.results = torch.zeros(fields.NUM_RESULTS, capacity, dtype=torch.float64, device=device)
        self.fed = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.block_table = torch.full((capacity, table_width), NULL_BLOCK, dtype=torch.int32, device=device)
        self.keys = torch.zeros(capacity, 2, dtype=torch.int64, device=device)
        self.draw_positions = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.bounds = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self._logits: torch.Tensor | None = None
        pinned = device.type == "cuda"
        self._staging = [
            torch.zeros(fields.NUM_FIELDS, capacity, dtype=torch.int64, pin_memory=pinned) for _ in range(depth)
        ]
        self._staging_arrays = [tensor.numpy() for tensor in self._staging]
        self._table_staging = torch.zeros(self.table.shape, dtype=torch.int32, pin_memory=pinned)
        self._returned = [
            torch.zeros(fields.NUM_RESULTS, capacity, dtype=torch.float64, pin_memory=pinned) for _ in range(depth)
        ]
        self._returned_arrays = [tensor.numpy() for tensor in self._returned]
        # Recorded when the copies of a turn are done; the last one belongs to the table.
        self._events = [torch.cuda.Event() for _ in range(depth + 1)] if pinned else []

    @property
    def depth(self) -> int:
        """Places of the rings."""
        return len(self._returned)

    def logits(self, size: int, vocab_size: int) -> torch.Tensor:
        """fp32 [size, vocab_size] at a fixed address, for logits that leave a graph; allocated at the first call."""
        if self._logits is None:
            self._logits = torch.zeros(len(self.tokens), vocab_size, dtype=torch.float32, device=self.device)
        return self._logits[:size]

    def staging(self, turn: int) -> np.ndarray:
        """The host's matrix int64 [9, capacity] of a turn, once the turn that used it before is done."""
        if self._events:
            self._events[turn % self.depth].synchronize()
        return self._staging_arrays[turn % self.depth]

    def upload_table(self, table: np.ndarray) -> None:
        """Replace all block tables by int32 ``table``."""
        if self._events:
            self._events[-1].synchronize()
        self._table_staging.numpy()[:] = table
        self.table.copy_(self._table_staging, non_blocking=True)
        if self._events:
            self._events[-1].record()

    def upload(self, turn: int, num_cells: int) -> None:
        """Send the matrix of ``turn`` and set ``num_cells`` cells of the block tables from its last two fields."""
        self.inputs.copy_(self._staging[turn % self.depth], non_blocking=True)
        if num_cells:
            cells = self.inputs[fields.CELL_INDEX :, :num_cells]
            self.table.view(-1).index_copy_(0, cells[0], cells[1].int())

    def send_back(self, turn: int) -> None:
        """Start copying the results to the host."""
        self._returned[turn % self.depth].copy_(self.results, non_blocking=True)
        if self._events:
            self._events[turn % self.depth].record()

    def read(self, turn: int) -> np.ndarray:
        """Wait for the results of ``turn``: float64 [3, capacity], valid until ``depth`` turns later."""
        if self._events:
            self._events[turn % self.depth].synchronize()
        return self._returned_arrays[turn % self.depth]


def forward_rows(
    runner: Runner, kv: KVCache, buffers: DecodeBuffers, size: int, max_context_len: int, drafts: bool
) -> torch.Tensor:
    """Logits fp32 [size, V] of the first ``size`` rows of ``buffers``, whose inputs of the step are made (``kv`` and
    ``buffers`` are mutated). Nothing waits for the device, nothing depends on values that the host holds.

    ``max_context_len`` bounds the context of every row; it matters only where attention gathers the cache. ``drafts``:
    whether there are several rows of a sample.
    """
    inputs, context_lens, block_table = buffers.inputs, buffers.context_lens[:size], buffers.block_table[:size]
    fed, keys, draw_positions = buffers.fed[:size], buffers.keys[:size], buffers.draw_positions[:size]
    prepare_rows(inputs, buffers.tokens, buffers.table, fed, context_lens, block_table, keys, draw_positions)
    batch = ForwardBatch(
        token_ids=fed,
        positions=inputs[fields.POSITION, :size],
        slot_mapping=inputs[fields.SLOT, :size],
        cu_seqlens_q=buffers.bounds[: size + 1],
        context_lens=context_lens,
        block_table=block_table,
        max_q_len=1,
        max_context_len=max_context_len,
        logits_index=None,
        segments=(Segment("decode", 0, size, 0, size, 1, max_context_len),),
        independent_rows=not drafts,
    )
    return runner.forward(batch, kv)


def draw_rows(buffers: DecodeBuffers, logits: torch.Tensor, sampling: SamplingParams, start: int) -> None:
    """Draw for the rows of ``logits`` fp32 [R, V], which are the rows from ``start`` on of what :func:`forward_rows`
    last ran; their tokens and results in ``buffers`` are mutated."""
    rows = slice(start, start + logits.shape[0])
    keys, positions = buffers.keys[rows], buffers.draw_positions[rows]
    sample_into(logits, sampling, keys, positions, buffers.tokens[rows], buffers.results[:, rows])
