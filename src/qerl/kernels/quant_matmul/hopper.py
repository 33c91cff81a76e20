"""Launches of the Hopper kernels over weights in the tile layout (see ``tiles.py`` and ``cuda/``)."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

from qerl.kernels.cuda import DISABLE_VARIABLE, Launch, load_kernel, load_module
from qerl.kernels.device import dependent_launch, multiprocessor_count
from qerl.kernels.quant_matmul.hopper_plan import (
    COUNTERS,
    LORA_BYTES,
    LORA_COUNTERS,
    LORA_WARPS_FEW,
    SHARED_BYTES,
    FewRowsPlan,
    ManyRowsPlan,
    all_many_rows_plans,
    product_plan,
    shrink_plan,
    silu_plan,
    workspace_bytes,
)
from qerl.kernels.quant_matmul.tensor_map import TensorMapError, bf16_map, bf16_windows_map, tiles_map
from qerl.kernels.quant_matmul.tiles import MAX_SEGMENTS, TILE_ROWS, WINDOW_COLUMNS
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "cuda"
# Tiles store code x scale x 2^-9 after decoding (cuda/tiles.cuh); the epilogue takes the power back.
_SCALE = 512.0
# Above so many rows, or numbers of x, cuBLAS multiplies x A^T faster: the kernel took some 30 us at 256 rows of 27,648
# columns, cuBLAS takes about 10 at 512 (H200, differences of whole products).
MAX_SHRINK_ROWS, MAX_SHRINK_NUMBERS = 256, 1 << 21


class _Lora(ctypes.Structure):
    _fields_ = [
        ("u", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("column", ctypes.c_int * MAX_SEGMENTS),
        ("rank", ctypes.c_int * MAX_SEGMENTS),
        ("offset", ctypes.c_int * MAX_SEGMENTS),
        ("a", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("slices", ctypes.c_int),
        ("sharers", ctypes.c_int),
    ]


class _Params(ctypes.Structure):
    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("global_scale", ctypes.c_void_p),
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


class _Shrink(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("u", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("k", ctypes.c_int),
        ("r", ctypes.c_int),
    ]


class _Dequantize(ctypes.Structure):
    _fields_ = [("tiles", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int), ("k", ctypes.c_int)]


def is_supported(device: torch.device) -> bool:
    """Whether the kernels of this module can be built for `device`; says once why not, where a Hopper GPU is there."""
    return device.type == "cuda" and _is_supported(device.index if device.index is not None else 0)


@cache
def _is_supported(index: int) -> bool:
    if torch.cuda.get_device_capability(index) != (9, 0):
        return False
    if os.environ.get(DISABLE_VARIABLE):
        logger.info("%s is set: NVFP4 products use the Triton kernels", DISABLE_VARIABLE)
        return False
    try:
        # The others are built when they are first needed, as this one can be.
        load_module(_SOURCES / "many_rows.cu", index, all_many_rows_plans()[0].macro)
    except (ImportError, RuntimeError) as error:  # cuda.bindings raises a RuntimeError where a library is missing
        logger.warning(
            "the fast Hopper kernels cannot be built (%s): NVFP4 products use the Triton kernels. "
            "They need NVRTC and cuda-bindings, which torch's CUDA packages bring along",
            error,
        )
        return False
    sums = _workspace(torch.device("cuda", index))[0]
    try:
        # A map whose outer stride is less than the middle one: driver 580 takes it, others were not tried.
        bf16_windows_map(sums.data_ptr(), 16, 128, 16, 2)
    except TensorMapError as error:
        logger.warning("this driver refuses a tensor map (%s): NVFP4 products use the Triton kernels", error)
        return False
    return True


def plan_for(m: int, weight: GroupWeight, silu: bool = False, ranks: int = 0) -> FewRowsPlan | ManyRowsPlan | None:
    """The kernel for 1 <= `m` <= `MANY_ROWS` rows of x and `weight`, in tiles, with so many ranks of LoRA.

    With `silu` one that stores silu(gate) * up of its two equal segments, or None where none does.
    """
    shape = m, weight.out_features, weight.in_features, multiprocessor_count(weight.device.index)
    return silu_plan(*shape, ranks=ranks) if silu else product_plan(*shape, ranks=ranks)


def run(
    plan: FewRowsPlan | ManyRowsPlan,
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    y: torch.Tensor,
    u: torch.Tensor | None = None,
) -> None:
    """Launch the kernel of `plan`, which is for the rows of `x`, bf16 [M, K] contiguous.

    `y` [M, N] bf16 or fp32 (of a plan with SiLU: [M, N / 2] bf16) and, with LoRA, `u` bf16 [M, R] are contiguous and
    mutated.
    """
    launch = run_few_rows if isinstance(plan, FewRowsPlan) else run_many_rows
    launch(plan, x, weight, bias, lora, y, u)


def run_few_rows(
    plan: FewRowsPlan,
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    y: torch.Tensor,
    u: torch.Tensor | None = None,
) -> None:
    """`run` of a few-row kernel."""
    shape, sms = (x.shape[0], weight.out_features, weight.in_features), multiprocessor_count(x.device.index)
    params = product_params(x, weight, bias, y)
    params.slices = plan.slices
    shared, warps = plan.shared_bytes(*shape, sms), plan.warps
    grid = plan.group(weight.out_features, sms) * plan.slices
    if lora is not None:
        assert u is not None, "u is written beside y"
        with_lora = plan.shared_bytes(*shape, sms, u.shape[1])
        fits = with_lora <= SHARED_BYTES
        slices = plan.lora_slices(*u.shape, x.shape[1], grid) if fits else None
        if _set_lora(params, x, lora, u, slices):
            shared, warps = with_lora, warps + LORA_WARPS_FEW
    result, place = _result(plan, y), ((grid, 1, 1), shared, x.device.index)
    kernel_launch(f"few_rows{result}", plan.name + result, 32 * warps, *place, plan.macro)(params)


def run_many_rows(
    plan: ManyRowsPlan,
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    y: torch.Tensor,
    u: torch.Tensor | None = None,
) -> None:
    """`run` of a many-row kernel."""
    shape, sms = (x.shape[0], weight.out_features, weight.in_features), multiprocessor_count(x.device.index)
    params = product_params(x, weight, bias, y)
    params.slices = plan.cluster if plan.whole else 0
    grid = plan.grid(*shape, sms)
    windows, tiles = weight.in_features // WINDOW_COLUMNS, weight.out_features // TILE_ROWS
    x_map = bf16_windows_map(x.data_ptr(), *x.shape, plan.tokens, plan.unit)
    maps = [tiles_map(weight.codes.data_ptr(), windows, tiles, plan.unit, plan.tiles_at_once), x_map, x_map]
    if lora is not None:
        assert u is not None, "u is written beside y"
        cut = plan.lora_cut(*u.shape, *shape[1:], sms)
        params.lora.sharers = cut.sharers
        _set_lora(params, x, lora, u, cut.slices)
        maps[2] = bf16_map(u.data_ptr(), *u.shape, plan.tokens)
    result, place = _result(plan, y), ((grid, 1, 1), plan.shared_bytes, x.device.index)
    kernel_launch(f"many_rows{result}", plan.name + result, plan.threads, *place, plan.macro, plan.cluster)(
        params, *maps
    )


def _result(plan: FewRowsPlan | ManyRowsPlan, y: torch.Tensor) -> str:
    """What the names of the kernel and of its file end in: those with SiLU or an fp32 result stand apart."""
    if plan.silu:
        return "_silu"
    return "_wide" if y.dtype == torch.float32 else ""


def lora_shrink(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """``x a^T``: bf16 [M, K] and [R, K], both contiguous, K a multiple of 32 -> bf16 [M, R]."""
    u = torch.empty(x.shape[0], a.shape[0], dtype=torch.bfloat16, device=x.device)
    shrink_into(x, a, u)
    return u


def shrink_into(x: torch.Tensor, a: torch.Tensor, u: torch.Tensor) -> None:
    """As `lora_shrink`, into `u` (mutated)."""
    (m, k), r = x.shape, a.shape[0]
    if m > MAX_SHRINK_ROWS or m * k > MAX_SHRINK_NUMBERS:
        torch.mm(x, a.t(), out=u)
        return
    partial, arrivals, _ = _workspace(x.device)
    params = _Shrink(x.data_ptr(), a.data_ptr(), u.data_ptr(), partial.data_ptr(), arrivals.data_ptr(), m, k, r)
    blocks, slices = shrink_plan(m, r, k, multiprocessor_count(x.device.index))
    grid = (-(-r // 16), slices, -(-m // (8 * blocks)))
    kernel_launch("lora_shrink", f"lora_shrink_{blocks}", 512 if blocks < 8 else 256, grid, 0, x.device.index)(params)


def dequantize_into(weight: GroupWeight, out: torch.Tensor) -> None:
    """Write ``[N, K]`` without the global scale into `out` (bf16 or fp32, contiguous)."""
    n, k = out.shape
    params = _Dequantize(weight.codes.data_ptr(), out.data_ptr(), n, k)
    name = "dequantize_bf16" if out.dtype == torch.bfloat16 else "dequantize_fp32"
    grid = (-(-k // (64 * 4 * 4)), n // TILE_ROWS, 1)
    kernel_launch("dequantize", name, 128, grid, 0, out.device.index)(params)


def product_params(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, y: torch.Tensor) -> _Params:
    """Arguments of a product without LoRA and without its slices, which its plan sets."""
    params = _Params()
    params.tiles, params.x, params.y = weight.codes.data_ptr(), x.data_ptr(), y.data_ptr()
    params.m, params.n, params.k = x.shape[0], weight.out_features, weight.in_features
    if bias is not None:
        params.bias = bias.data_ptr()
    if weight.uniform_scale is None:
        params.global_scale = weight.global_scale.data_ptr()
    else:
        params.scale = _SCALE * weight.uniform_scale
    params.segments = len(weight.segments)
    end = 0
    for index, rows in enumerate(weight.segments):
        end += rows // TILE_ROWS
        params.segment_end[index] = end
    partial, arrivals, _ = _workspace(x.device)
    params.partial, params.arrivals = partial.data_ptr(), arrivals.data_ptr()
    return params


def _set_lora(params: _Params, x: torch.Tensor, lora: LoraUpdate, u: torch.Tensor, slices: int | None) -> bool:
    """Add LoRA to a launch that makes `u` (mutated) on the way in `slices` of k, and return True; where it does not
    (None), launch the kernel that makes u before."""
    params.lora.u, params.lora.b, params.lora.width = u.data_ptr(), lora.b.data_ptr(), u.shape[1]
    for index, (column, rank, place) in enumerate(lora.places):
        params.lora.column[index], params.lora.rank[index], params.lora.offset[index] = column, rank, place
    if slices is None:
        shrink_into(x, lora.a, u)
        return False
    _, arrivals, partial = _workspace(x.device)
    params.lora.a, params.lora.partial, params.lora.slices = lora.a.data_ptr(), partial.data_ptr(), slices
    params.lora.counters = arrivals.data_ptr() + 4 * COUNTERS
    return True


@cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of shared tiles (fp32), the counters of their parts (zero between launches), slices of u (fp32).

    Of fixed size and address, because captured graphs bake it in; first asked for outside a capture. Launches on one
    device are ordered by ``launch_on``.
    """
    sums = workspace_bytes(multiprocessor_count(device.index))
    partial, slices = (torch.empty(size, dtype=torch.uint8, device=device) for size in (sums, LORA_BYTES))
    return partial, torch.zeros(COUNTERS + LORA_COUNTERS, dtype=torch.int32, device=device), slices


@cache
def kernel_launch(
    source: str,
    name: str,
    threads: int,
    grid: tuple[int, int, int],
    shared: int,
    device: int,
    macro: str | None = None,
    cluster: int = 1,
) -> Launch:
    """A kernel of `source` (the name of a file in ``cuda/``), ready to be launched on a CUDA device; `macro` defines it
    where the source has many. Blocks run in groups of `cluster`."""
    kernel = load_kernel(_SOURCES / f"{source}.cu", name, threads, shared > 0, device, macro)
    overlap = source != "dequantize" and dependent_launch(torch.device("cuda", device))
    return Launch(kernel, grid, shared, overlap, cluster)
