"""A paged cache whose unused slots are NaN, with the exact attention over it."""

from dataclasses import dataclass

import torch
from kernel_cases import rms_ratio


@dataclass
class PagedCase:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    expected: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.context_lens

    def worst_ratio(self, out: torch.Tensor) -> float:
        """RMS error over RMS of the worst sequence: long ones have small results that short ones would hide.

        NaN in any of them gives NaN (Python's ``max`` would lose it).
        """
        full = (self.context_lens > 0).nonzero()[:, 0].tolist()
        return float(torch.tensor([rms_ratio(out[index], self.expected[index]) for index in full]).max())


def make_case(
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    cache_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Sequences of `lengths` in shuffled blocks; table entries and slots past a context are poison.

    With ``cache_dtype`` keys and values are rounded to it, and so are those of the expectation.
    """
    per_sequence = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(per_sequence) + 1).tolist()
    shape = (len(order), block_size, kv_heads, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=dtype)
    v_cache = torch.full(shape, float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(per_sequence) + 2), 1 << 30, dtype=torch.int32)
    q = torch.randn(len(lengths), heads, head_dim).to(dtype)
    scale = head_dim**-0.5
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for index, length in enumerate(lengths):
        keys, values = (torch.randn(length, kv_heads, head_dim).to(cache_dtype or dtype).to(dtype) for _ in range(2))
        for position in range(length):
            if position % block_size == 0:
                table[index, position // block_size] = order.pop()
            block = int(table[index, position // block_size])
            k_cache[block, position % block_size] = keys[position]
            v_cache[block, position % block_size] = values[position]
        if length:
            wide = [t.double().repeat_interleave(heads // kv_heads, 1) for t in (keys, values)]
            scores = torch.einsum("hd,nhd->hn", q[index].double(), wide[0]) * scale
            expected[index] = torch.einsum("hn,nhd->hd", scores.softmax(-1), wide[1])
    lens = torch.tensor(lengths, dtype=torch.int32)
    k_cache, v_cache = (cache.to(cache_dtype or dtype) for cache in (k_cache, v_cache))
    moved = [tensor.to(device) for tensor in (q, k_cache, v_cache, table, lens)]
    return PagedCase(*moved, scale, expected.to(device))
