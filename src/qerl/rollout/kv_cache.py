"""The paged KV pool: two tensors, one write per layer, and how many blocks the pool gets.

A block holds ``block_size`` consecutive tokens of one sequence in every layer. Block 0 is the null block:
the allocator never hands it out, so block tables can be padded with it and padded rows of a captured graph
can write to it. The pool starts as zeros because masked positions are read: attention multiplies them by a
zero weight, which is harmless for finite values only.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from qerl.kernels.rotary.reference import write_cache

NULL_BLOCK = 0


class KVCache:
    """K and V of all layers, ``[L, num_blocks + 1, block_size, Hkv, D]``; ``num_blocks`` are usable, plus
    the null block. ``dtype`` is the compute dtype, or float8_e4m3fn with a scale of 1: half the memory and traffic.

    Raises:
        ValueError: a dimension is smaller than 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_blocks + 1, block_size, num_kv_heads, head_dim)
        if min(num_blocks, *shape) < 1:
            raise ValueError(
                "every dimension of the KV cache must be at least 1, got "
                f"layers={num_layers} blocks={num_blocks} block_size={block_size} "
                f"kv_heads={num_kv_heads} head_dim={head_dim}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k = _zeros(shape, dtype, torch.device(device))
        self.v = _zeros(shape, dtype, torch.device(device))

    @property
    def bytes(self) -> int:
        """Size of the pool in bytes, null block included."""
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store ``k``, ``v`` [T, Hkv, D] of ``layer`` at ``slot_mapping`` int64 [T] (block * block_size +
        offset).

        Mutates the pool. Values are cast to the pool's dtype (float8_e4m3fn saturates at 448).
        """
        for pool, new in ((self.k, k), (self.v, v)):
            write_cache(pool[layer], slot_mapping, new)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks in every layer (copy-on-write). Mutates the pool.

        All sources are read before any destination is written, so a source may be another pair's destination.
        """
        if not sources:
            return
        source = torch.tensor(sources, dtype=torch.int64, device=self.k.device)
        destination = torch.tensor(destinations, dtype=torch.int64, device=self.k.device)
        for pool in (self.k, self.v):
            # Bytes where an element is one: float8 has neither of the two ops.
            pool = pool.view(torch.uint8) if pool.itemsize == 1 else pool
            pool.index_copy_(1, destination, pool.index_select(1, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU the system gives each page when it is first written (torch would write them all now).

    The allocator hands out the blocks freed last first, so that a pool takes what its fullest moment needed.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in the pool: K and V of ``block_size`` tokens in all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def blocks_in_memory(memory_bytes: int, block_bytes: int) -> int:
    """How many usable blocks of ``block_bytes`` fit into ``memory_bytes`` beside the null block.

    Raises:
        ValueError: not even one block fits.
    """
    blocks = memory_bytes // block_bytes - 1
    if blocks < 1:
        raise ValueError(
            f"{memory_bytes:,} bytes hold no KV cache: one block and the null block take "
            f"{2 * block_bytes:,} bytes; raise memory_bytes or lower block_size"
        )
    return blocks


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens of one sequence."""
    return -(-num_tokens // block_size)


def worst_case_blocks(prompt_lens: Sequence[int], n: int, max_tokens: int, block_size: int, max_num_seqs: int) -> int:
    """Blocks with which a call of these prompts can never run out, whatever the samples' lengths.

    At most ``max_num_seqs`` samples run at once, in the worst case each of another group: a group holds its
    shared full prompt blocks plus a partial one, a sample everything behind them. The last sampled token is
    never stored.
    """
    groups = sorted((blocks_for_tokens(length, block_size) for length in prompt_lens), reverse=True)
    own = sorted(
        (blocks_for_tokens(length + max_tokens - 1, block_size) - length // block_size for length in prompt_lens),
        reverse=True,
    )
    total, unplaced = sum(groups[:max_num_seqs]), max_num_seqs
    for blocks in own:
        running = min(n, unplaced)
        total += running * blocks
        unplaced -= running
    return total
