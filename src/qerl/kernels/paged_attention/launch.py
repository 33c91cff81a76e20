"""Launch of the paged attention kernel. Tensors are checked by the caller."""

import math
from dataclasses import dataclass

import torch

from qerl.kernels.arrival import arrival_counters
from qerl.kernels.device import dependent_launch
from qerl.kernels.paged_attention import triton as kernels

# A tile of the tensor core has at least 16 rows.
_MIN_GROUP = 16
# Numbers of partial results that a merging program holds at once (64 registers a thread).
_MERGED_AT_ONCE = 1 << 13
# E4M3 bytes are read as fp16 numbers times 2^-8.
_FP8_FACTOR = 256.0


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """What a benchmark may sweep.

    Attributes:
        block_n: tokens of a step, a power of two.
        programs_per_sm: how many programs share an SM at least, if the contexts are long enough; their registers are
            limited so that they do.
        min_slice: tokens below which a context is not cut, a multiple of 16.
        max_slices: most slices of a context.
        num_warps, num_stages: as in Triton.
    """

    block_n: int = 64
    programs_per_sm: int = 4
    min_slice: int = 64
    max_slices: int = 32
    num_warps: int = 4
    num_stages: int = 3

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread with which the programs fit an SM together (65,536 registers); None: no limit."""
        # Registers are given out in eights.
        fitting = (1 << 16) // (self.programs_per_sm * self.num_warps * 32) // 8 * 8
        return fitting if fitting < 255 else None


# Contexts that one program walks through whole: enough programs hide each other's latency.
WHOLE_CONFIG = DecodeConfig()
# A slice is a few steps long: short steps, two of them on their way before the first is needed.
SPLIT_CONFIG = DecodeConfig(block_n=32, num_stages=5)


def num_slices(
    sequences: int,
    num_kv_heads: int,
    max_context_len: int,
    multiprocessors: int,
    config: DecodeConfig = SPLIT_CONFIG,
) -> int:
    """Slices of the context that give every SM its programs, from shapes alone."""
    wanted = config.programs_per_sm * multiprocessors // (sequences * num_kv_heads)
    longest = -(-max_context_len // config.min_slice)
    return max(1, min(wanted, longest, config.max_slices))


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    slices: int,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Shapes as the public function; rows of `q` may be strided. One launch."""
    if config is None:
        config = SPLIT_CONFIG if slices > 1 else WHOLE_CONFIG
    sequences, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = lse = counters = None
    if slices > 1:
        pairs = sequences * num_kv_heads
        partial = torch.empty(pairs, slices, group, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(pairs, slices, group, dtype=torch.float32, device=q.device)
        counters = arrival_counters(pairs, q.device)
    dim_padded, heads_padded = (1 << (width - 1).bit_length() for width in (head_dim, group))
    at_once = max(1, _MERGED_AT_ONCE // (dim_padded * heads_padded))
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    # Products in fp32 have no tensor core and take more registers than a limit would leave.
    registers = None if q.dtype == torch.float32 else config.max_registers
    factor = _FP8_FACTOR if fp8 else 1.0
    pdl = dependent_launch(q.device)
    kernels.paged_attention_kernel[(num_kv_heads, slices, sequences)](
        q, k_cache, v_cache, block_table, context_lens, out, partial, lse, counters,
        scale * math.log2(math.e) * factor, factor,
        q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0), slices,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=max(_MIN_GROUP, heads_padded),
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n, SPLIT=slices > 1, MIN_SLICE=config.min_slice,
        HEADS_PADDED=heads_padded, AT_ONCE=at_once, FP8=fp8, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=registers,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
