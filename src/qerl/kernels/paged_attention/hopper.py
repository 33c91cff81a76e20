"""Launch of the CUDA C++ decode attention for sm_90 (``cuda/decode.cu``)."""

import ctypes
import math
from functools import cache
from pathlib import Path

import torch

from qerl.kernels.cuda import Launch, load_kernel
from qerl.kernels.device import dependent_launch, multiprocessor_count
from qerl.kernels.quant_matmul import hopper

_SOURCE = Path(__file__).parent / "cuda" / "decode.cu"
HEAD_DIMS = (64, 128)
# A tile of the tensor core has 16 rows.
MAX_GROUP = 16
CLUSTERS = (1, 2, 4, 8)
_WARPS, _STAGES, _TOKENS = 4, 3, 16
# Blocks that share a multiprocessor, and tokens below which a block's part of a context is not cut.
_BLOCKS_PER_SM = 2
_MIN_PART = 64


class _Params(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("lens", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_longlong),
        ("block_stride", ctypes.c_longlong),
        ("token_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        ("table_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        ("block_shift", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("group", ctypes.c_int),
    ]


def serves(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors: a Hopper GPU, bf16, known head size and group, aligned rows."""
    strides = (q.stride(0), *k_cache.stride()[:3])
    return (
        q.dtype == k_cache.dtype == torch.bfloat16
        and q.shape[2] in HEAD_DIMS
        and q.shape[1] // k_cache.shape[2] <= MAX_GROUP
        and all(stride % 8 == 0 for stride in strides)
        and q.data_ptr() % 4 == 0
        and k_cache.data_ptr() % 16 == 0
        and hopper.is_supported(q.device)
    )


def cluster_size(sequences: int, num_kv_heads: int, longest: int, multiprocessors: int) -> int:
    """Blocks that share a sequence and KV head, from shapes alone: enough to fill the GPU, each with enough to do."""
    wanted = _BLOCKS_PER_SM * multiprocessors
    fitting = [size for size in CLUSTERS if size == 1 or size * _MIN_PART <= longest]
    return next((size for size in fitting if sequences * num_kv_heads * size >= wanted), fitting[-1])


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block: the rings, in which the sums are merged afterwards."""
    return _WARPS * _STAGES * 2 * _TOKENS * (2 * head_dim + 16)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    cluster: int,
) -> torch.Tensor:
    """Shapes as the public function; rows of `q` may be strided. One launch."""
    sequences, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    params = _Params(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), context_lens.data_ptr(),
        out.data_ptr(), q.stride(0), *k_cache.stride()[:3], block_table.stride(0), scale * math.log2(math.e),
        block_size.bit_length() - 1, num_kv_heads, num_heads // num_kv_heads,
    )  # fmt: skip
    _launch(head_dim, cluster, num_kv_heads, sequences, q.device.index)(params)
    return out


@cache
def _launch(head_dim: int, cluster: int, num_kv_heads: int, sequences: int, device: int) -> Launch:
    kernel = load_kernel(_SOURCE, f"decode_{head_dim}_{cluster}", 32 * _WARPS, True, device)
    grid = (num_kv_heads * cluster, sequences, 1)
    overlap = dependent_launch(torch.device("cuda", device))
    return Launch(kernel, grid, shared_bytes(head_dim), overlap)


def default_cluster(q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor) -> int:
    """The cluster size for these tensors."""
    longest = block_table.shape[1] * k_cache.shape[1]
    return cluster_size(q.shape[0], k_cache.shape[2], longest, multiprocessor_count(q.device.index))
