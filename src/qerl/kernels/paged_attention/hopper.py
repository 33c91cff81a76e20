"""Launch of the CUDA C++ decode attention for sm_90 (``cuda/decode.cuh``), alone or with the rotary embedding."""

import ctypes
import logging
import math
import os
from functools import cache
from pathlib import Path

import torch

from qerl.kernels.cuda import DISABLE_VARIABLE, Launch, load_kernel
from qerl.kernels.device import dependent_launch, multiprocessor_count

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "cuda"
# Entry points of a cache's dtype begin with the name of its source; "rotary_" comes before it where they rotate.
_SOURCES = {torch.bfloat16: "decode", torch.float8_e4m3fn: "decode_fp8"}
HEAD_DIMS = (64, 128)
# A tile of the tensor core has 16 rows.
MAX_GROUP = 16
# (blocks of a cluster, warps of a block), as compiled. Small blocks share a multiprocessor by two, three where rows are
# short; a large one has it to itself.
SHAPES = ((1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
_TOKENS = 16
# Stages of a warp's ring by bytes of a token's keys; fewer of the longest in a large block.
_STAGES = {256: 3, 128: 4, 64: 6}
_STAGES_LARGE = {**_STAGES, 256: 2}
_BLOCKS_PER_SM = 2
# Rows of a grid.
_MAX_SEQUENCES = 65_535


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
        ("width", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("hints", ctypes.c_int),
    ]


class _Rotation(ctypes.Structure):
    _fields_ = [
        ("rope", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("wide_norms", ctypes.c_int),
    ]


def serves(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rotary: bool = False) -> bool:
    """Whether the kernel (or the one that rotates first) takes these tensors: a Hopper GPU, bf16 queries, a bf16 or
    E4M3 cache, known head size and group, aligned rows."""
    unit = 16 // k_cache.element_size()
    return (
        q.dtype == torch.bfloat16
        and k_cache.dtype in _SOURCES
        and q.shape[0] <= _MAX_SEQUENCES
        and q.shape[2] in HEAD_DIMS
        and q.shape[1] // k_cache.shape[2] <= MAX_GROUP
        and all(stride % unit == 0 for stride in k_cache.stride()[:3])
        and q.stride(0) % 2 == 0
        and q.data_ptr() % 4 == 0
        and (k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
        and is_supported(q.device.index, k_cache.dtype, rotary)
    )


@cache
def is_supported(index: int, dtype: torch.dtype, rotary: bool) -> bool:
    """Whether the kernel for a cache of `dtype` can be built for CUDA device `index`; says once why not, where a Hopper
    GPU is there."""
    if torch.cuda.get_device_capability(index) != (9, 0) or os.environ.get(DISABLE_VARIABLE):
        return False
    try:
        name, macro = _entry(dtype, rotary, HEAD_DIMS[0], SHAPES[0])
        load_kernel(_source(dtype, rotary), name, 128, True, index, macro)  # the others will be built as it can be
    except (ImportError, RuntimeError) as error:  # cuda.bindings raises a RuntimeError where a library is missing
        logger.warning(
            "the Hopper kernel of decode attention cannot be built (%s): the Triton kernel serves it. It needs NVRTC "
            "and cuda-bindings, which torch's CUDA packages bring along",
            error,
        )
        return False
    return True


@cache
def _source(dtype: torch.dtype, rotary: bool) -> Path:
    return _FOLDER / f"{'rotary_' if rotary else ''}{_SOURCES[dtype]}.cu"


def _entry(dtype: torch.dtype, rotary: bool, head_dim: int, shape: tuple[int, int]) -> tuple[str, str]:
    """A kernel's name in its source, and the macro call that defines it."""
    stem, (cluster, warps) = _source(dtype, rotary).stem, shape
    is_fp8 = str(dtype.itemsize == 1).lower()
    macro = f"{'ROTARY_' if rotary else ''}KERNEL({stem}, {is_fp8}, {head_dim}, {cluster}, {warps})"
    return f"{stem}_{head_dim}_{cluster}_{warps}", macro


def decode_shape(sequences: int, num_kv_heads: int, longest: int, multiprocessors: int) -> tuple[int, int]:
    """(blocks that share a sequence and KV head, warps of each), from shapes alone.

    As many blocks as leave a quarter of the multiprocessors free (fitted to an H200: docs/log.md) and each warp a step;
    else one. Large blocks where each has a multiprocessor.
    """
    pairs = sequences * num_kv_heads
    fitting = [n for n, warps in SHAPES if 4 * n * pairs <= 3 * multiprocessors and n * warps * _TOKENS <= longest]
    cluster = max(fitting, default=1)
    return cluster, 8 if cluster * pairs <= multiprocessors else 4


def shared_bytes(head_dim: int, element_size: int, cluster: int, warps: int) -> int:
    """Dynamic shared memory of a block: the rings, in which the warps' sums are merged afterwards, and what the other
    blocks of its cluster send it."""
    row = head_dim * element_size
    stages = (_STAGES_LARGE if warps == 8 else _STAGES)[row]
    inbox = 16 * head_dim * 4 + 16 * 8 if cluster > 1 else 0
    return warps * stages * 2 * _TOKENS * (row + 16) + inbox


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    shape: tuple[int, int] | None = None,
    rotate: ctypes.Structure | None = None,
) -> torch.Tensor:
    """Shapes as the public function; rows of `q` may be strided. One launch, of clusters and blocks of `shape` (one of
    `SHAPES`) or as `decode_shape` chooses.

    With `rotate` (see :func:`rotation`), `q` are the queries of qkv rows [S, (Hq + 2 Hkv) D] before norm and rotation,
    behind which lie the newest tokens' keys and values; the caches are mutated.
    """
    sequences = q.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    device = q.device.index
    if shape is None:
        longest = block_table.shape[1] * k_cache.shape[1]
        shape = decode_shape(sequences, num_kv_heads, longest, multiprocessor_count(device))
    grid = (num_kv_heads * shape[0], sequences, 1)
    overlap = dependent_launch(q.device)
    # Hints cost a trip to L2, which is hidden only where all blocks can be there before their predecessor has ended.
    hints = overlap and grid[0] * grid[1] <= _BLOCKS_PER_SM * multiprocessor_count(device)
    params = parameters(q, k_cache, v_cache, block_table, context_lens, out, scale, hints)
    launch = _launch(k_cache.dtype, rotate is not None, head_dim, shape, grid, overlap, device)
    launch(params, *([] if rotate is None else [rotate]))
    return out


def rotation(
    rope: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float
) -> ctypes.Structure:
    """Further arguments of the kernel that rotates; shapes as those of ``kernels.rotary``, the norms of one dtype."""
    if q_norm is None or k_norm is None:
        return _Rotation(rope.data_ptr(), None, None, eps, False)
    return _Rotation(rope.data_ptr(), q_norm.data_ptr(), k_norm.data_ptr(), eps, q_norm.dtype == torch.float32)


def parameters(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    hints: bool,
) -> ctypes.Structure:
    """Arguments of the kernel."""
    blocks, block_size, num_kv_heads = k_cache.shape[:3]
    return _Params(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), context_lens.data_ptr(),
        out.data_ptr(), q.stride(0), *k_cache.stride()[:3], block_table.stride(0), scale * math.log2(math.e),
        block_size.bit_length() - 1, num_kv_heads, q.shape[1] // num_kv_heads, block_table.shape[1], blocks, hints,
    )  # fmt: skip


@cache
def _launch(
    dtype: torch.dtype,
    rotary: bool,
    head_dim: int,
    shape: tuple[int, int],
    grid: tuple[int, int, int],
    overlap: bool,
    device: int,
) -> Launch:
    name, macro = _entry(dtype, rotary, head_dim, shape)
    kernel = load_kernel(_source(dtype, rotary), name, 32 * shape[1], True, device, macro)
    return Launch(kernel, grid, shared_bytes(head_dim, dtype.itemsize, *shape), overlap)
