"""Launches of the Hopper kernels over weights in the tile layout (see ``tiles.py`` and ``cuda/``)."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from qerl.kernels.cuda import Launch, load_kernel
from qerl.kernels.device import multiprocessor_count
from qerl.kernels.quant_matmul.hopper_plan import FEW_ROWS, FewRowsPlan, ManyRowsPlan, few_rows_group, few_rows_plan, many_rows_plan
from qerl.kernels.quant_matmul.tiles import TILE_ROWS
from qerl.kernels.quant_matmul.weight import GroupWeight

_SOURCES = Path(__file__).parent / "cuda"
MAX_SEGMENTS = 4
# Tiles store code x scale x 2^-9 after decoding (cuda/tiles.cuh); the epilogue takes the power back.
_SCALE = 512.0


class _Lora(ctypes.Structure):
    _fields_ = [
        ("u", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("column", ctypes.c_int * MAX_SEGMENTS),
        ("rank", ctypes.c_int * MAX_SEGMENTS),
        ("offset", ctypes.c_int * MAX_SEGMENTS),
    ]


class _Params(ctypes.Structure):
    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("segment_scale", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("slices", ctypes.c_int),
        ("segments", ctypes.c_int),
        ("segment_end", ctypes.c_int * MAX_SEGMENTS),
        ("lora", _Lora),
    ]


class _Dequantize(ctypes.Structure):
    _fields_ = [("tiles", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int), ("k", ctypes.c_int)]


def matmul(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``x`` bf16 [M, K] contiguous, M >= 1 -> bf16 [M, N]; weights in tiles."""
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    sms = multiprocessor_count(x.device.index)
    plan = few_rows_plan(m, n, k, sms) if m <= FEW_ROWS else None
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    if plan is not None:
        run_few_rows(plan, x, weight, bias, y)
    else:
        run_many_rows(many_rows_plan(m, n, k, sms), x, weight, bias, y)
    return y


def run_few_rows(
    plan: FewRowsPlan, x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """Launch one few-row kernel into `y` (mutated)."""
    params = _params(x, weight, bias, y)
    tiles = weight.out_features // TILE_ROWS
    params.slices = plan.slices
    if plan.slices > 1:
        _set_workspace(params, plan.slices * tiles * plan.blocks * 512, tiles, x.device)
    grid = few_rows_group(multiprocessor_count(x.device.index), plan.slices) * plan.slices
    _launch("few_rows", plan.name, 32 * plan.warps, (grid, 1, 1), plan.shared_bytes, x.device.index)(params)


def run_many_rows(
    plan: ManyRowsPlan, x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """Launch one many-row kernel into `y` (mutated)."""
    params = _params(x, weight, bias, y)
    warps = 4 * plan.groups
    grid = plan.grid(*x.shape[:1], weight.out_features, weight.in_features, multiprocessor_count(x.device.index))
    params.slices = int(plan.whole)
    if not plan.whole:
        tiles = -(-weight.out_features // (16 * warps)) * -(-x.shape[0] // plan.tokens)
        _set_workspace(params, grid * 2 * warps * plan.tokens * 64, tiles * warps, x.device)
    launch = _launch("many_rows", plan.name, 128 * plan.groups + 128, (grid, 1, 1), plan.shared_bytes, x.device.index)
    launch(params, _tensor_map(x.data_ptr(), *x.shape, plan.tokens))


def dequantize_into(weight: GroupWeight, out: torch.Tensor) -> None:
    """Write ``[N, K]`` without the global scale into `out` (bf16 or fp32, contiguous)."""
    n, k = out.shape
    params = _Dequantize(weight.codes.data_ptr(), out.data_ptr(), n, k)
    name = "dequantize_bf16" if out.dtype == torch.bfloat16 else "dequantize_fp32"
    grid = (-(-k // (64 * 4 * 4)), n // TILE_ROWS, 1)
    _launch("dequantize", name, 128, grid, 0, out.device.index)(params)


def _params(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, y: torch.Tensor) -> _Params:
    params = _Params()
    params.tiles, params.x, params.y = weight.codes.data_ptr(), x.data_ptr(), y.data_ptr()
    params.m, params.n, params.k = x.shape[0], weight.out_features, weight.in_features
    if bias is not None:
        params.bias = bias.data_ptr()
    if weight.uniform_scale is None:
        params.segment_scale = _inverse(weight).data_ptr()
    else:
        params.scale = _SCALE * weight.uniform_scale
    params.segments = len(weight.segments)
    end = 0
    for index, rows in enumerate(weight.segments):
        end += rows // TILE_ROWS
        params.segment_end[index] = end
    return params


def _inverse(weight: GroupWeight) -> torch.Tensor:
    return weight.global_scale.reciprocal()


_workspaces: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _set_workspace(params: _Params, partial_bytes: int, counters: int, device: torch.device) -> None:
    held = _workspaces.get(device)
    if held is None or held[0].numel() < partial_bytes or held[1].numel() < counters:
        sizes = (0, 0) if held is None else (held[0].numel(), held[1].numel())
        held = (
            torch.empty(max(partial_bytes, sizes[0]), dtype=torch.uint8, device=device),
            torch.zeros(max(counters, sizes[1], 1 << 16), dtype=torch.int32, device=device),
        )
        _workspaces[device] = held
    params.partial, params.arrivals = held[0].data_ptr(), held[1].data_ptr()


@cache
def _launch(source: str, name: str, threads: int, grid: tuple[int, int, int], shared: int, device: int) -> Launch:
    kernel = load_kernel(_SOURCES / f"{source}.cu", name, threads, shared > 0, device)
    return Launch(kernel, grid, shared, overlap=source != "dequantize")


@cache
def _tensor_map(address: int, rows: int, columns: int, box_rows: int) -> ctypes.Array:
    """Descriptor of a bf16 matrix [rows, columns] for tensor copies of [box_rows, 64] with the 128-byte swizzle."""
    from cuda.bindings import driver

    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(2 * columns)],
        [driver.cuuint32_t(64), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status.value != 0:
        raise ValueError(f"no tensor map for [{rows}, {columns}] at {address:#x}: {status!r}")
    words = [int(word) for word in encoded.opaque]
    # 64-byte aligned inside a larger buffer: the driver copies it as a kernel parameter.
    return (ctypes.c_uint64 * 16)(*words)
