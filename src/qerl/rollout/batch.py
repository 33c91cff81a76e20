"""One step's chunks as the tensors of a forward pass, in an order that attention can process cheaply.

Pure functions: no queue, no cache and no model is touched.
"""

from collections.abc import Sequence

import numpy as np
import torch

from qerl.rollout.core import ForwardBatch, Segment
from qerl.rollout.kv_cache import NULL_BLOCK
from qerl.rollout.scheduler import Chunk

# Sequences are padded to a common shape for attention as long as that at most doubles the work.
MAX_PADDING_RATIO = 2


def build_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> tuple[ForwardBatch, list[Chunk]]:
    """Tensors of one forward pass on ``device``, and the chunks that draw tokens in the order of its logits
    rows.

    The blocks of every chunk's owner must already cover ``chunk.end`` tokens.
    """
    segments, chunks = plan_segments(chunks)
    counts = np.array([chunk.count for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    table = np.full((len(chunks), max(len(chunk.owner.blocks) for chunk in chunks)), NULL_BLOCK, dtype=np.int32)
    for row, chunk in enumerate(chunks):
        table[row, : len(chunk.owner.blocks)] = chunk.owner.blocks
    bounds = np.concatenate(([0], counts.cumsum()))
    sequence = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(bounds[-1]) - (bounds[:-1] - starts)[sequence]
    slots = table[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.owner.token_ids[chunk.start : chunk.end]
    drawing = [chunk for chunk in chunks if chunk.samples_from_last]
    wants_logits = np.array([chunk.samples_from_last for chunk in chunks])

    def tensor(values: np.ndarray | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    batch = ForwardBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        cu_seqlens_q=tensor(bounds, torch.int32),
        context_lens=tensor(starts + counts, torch.int32),
        block_table=tensor(table, torch.int32),
        max_q_len=int(counts.max()),
        max_context_len=int((starts + counts).max()),
        logits_index=tensor(bounds[1:][wants_logits] - 1, torch.int64),
        segments=segments,
        # A block that is written belongs to one sequence alone, and a sequence has one chunk a step.
        independent_rows=all(segment.kind == "decode" for segment in segments),
    )
    return batch, drawing


def plan_segments(chunks: Sequence[Chunk]) -> tuple[tuple[Segment, ...], list[Chunk]]:
    """Order chunks into decode, chunk and fresh segments whose padding at most doubles their work."""
    kinds: dict[str, list[Chunk]] = {"decode": [], "chunk": [], "fresh": []}
    for chunk in chunks:
        kinds["decode" if chunk.count == 1 else "fresh" if chunk.start == 0 else "chunk"].append(chunk)
    segments: list[Segment] = []
    ordered: list[Chunk] = []
    tokens = 0
    for kind, members in kinds.items():
        if kind != "decode":
            members.sort(key=lambda chunk: (chunk.end, chunk.count))
        for group in [members] if kind == "decode" and members else _split_by_padding(members):
            count = sum(chunk.count for chunk in group)
            first = len(ordered)
            ordered += group
            segments.append(
                Segment(
                    kind,
                    first,
                    len(ordered),
                    tokens,
                    tokens + count,
                    max(chunk.count for chunk in group),
                    max(chunk.end for chunk in group),
                )
            )
            tokens += count
    return tuple(segments), ordered


def _split_by_padding(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Cut a sorted list greedily where one more sequence would make padded attention cost too much."""
    groups: list[list[Chunk]] = []
    max_count = max_end = work = 0
    for chunk in chunks:
        max_count, max_end = max(max_count, chunk.count), max(max_end, chunk.end)
        work += chunk.count * chunk.end
        if groups and (len(groups[-1]) + 1) * max_count * max_end <= MAX_PADDING_RATIO * work:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
            max_count, max_end, work = chunk.count, chunk.end, chunk.count * chunk.end
    return groups
