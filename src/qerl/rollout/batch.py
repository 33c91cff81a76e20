"""One step's chunks as the tensors of a forward pass, in an order that attention can process cheaply.

Pure functions: no queue, no cache and no model is touched.
"""

from collections.abc import Sequence

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
    width = max(len(chunk.owner.blocks) for chunk in chunks)
    token_ids, positions, slots, table = [], [], [], []
    bounds, drawing, logits_index = [0], [], []
    for chunk in chunks:
        blocks = chunk.owner.blocks
        span = range(chunk.start, chunk.end)
        token_ids += chunk.owner.token_ids[chunk.start : chunk.end]
        positions += span
        slots += [blocks[at // block_size] * block_size + at % block_size for at in span]
        bounds.append(len(token_ids))
        table.append(blocks + [NULL_BLOCK] * (width - len(blocks)))
        if chunk.samples_from_last:
            drawing.append(chunk)
            logits_index.append(len(token_ids) - 1)
    batch = ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32, device=device),
        context_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
        block_table=torch.tensor(table, dtype=torch.int32, device=device),
        max_q_len=max(chunk.count for chunk in chunks),
        max_context_len=max(chunk.end for chunk in chunks),
        logits_index=torch.tensor(logits_index, dtype=torch.int64, device=device),
        segments=segments,
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
