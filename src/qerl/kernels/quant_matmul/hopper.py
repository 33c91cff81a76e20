"""Launches of the Hopper kernels over weights in the tile layout (see ``tiles.py`` and ``cuda/``)."""

import ctypes
import itertools
import logging
import os
import threading
from functools import cache
from pathlib import Path

import torch

from qerl.kernels.cuda import Launch, load_kernel, load_module
from qerl.kernels.device import dependent_launch, multiprocessor_count
from qerl.kernels.quant_matmul.hopper_plan import (
    COUNTERS,
    FEW_ROWS,
    FewRowsPlan,
    ManyRowsPlan,
    few_rows_plan,
    many_rows_plan,
    shrink_plan,
    workspace_bytes,
)
from qerl.kernels.quant_matmul.tensor_map import bf16_map
from qerl.kernels.quant_matmul.tiles import MAX_SEGMENTS, TILE_ROWS
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate

logger = logging.getLogger(__name__)

# Set to anything, this environment variable keeps NVFP4 weights in the row-major layout of the Triton kernels.
DISABLE_VARIABLE = "QERL_NO_CUDA_KERNELS"
_SOURCES = Path(__file__).parent / "cuda"
# Tiles store code x scale x 2^-9 after decoding (cuda/tiles.cuh); the epilogue takes the power back.
_SCALE = 512.0
_SLOTS = 1024
_COUNTERS = COUNTERS + 2 * _SLOTS
_slots = itertools.count()
# (device, thread) -> slot of a shrink whose product is to be launched next.
_open_pairs: dict[tuple[torch.device, int], int] = {}


class UnannouncedSlotError(ValueError):
    """A product was given the slot of another shrink than the last: it could wait for an announcement for ever."""


class _Lora(ctypes.Structure):
    _fields_ = [
        ("u", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("column", ctypes.c_int * MAX_SEGMENTS),
        ("rank", ctypes.c_int * MAX_SEGMENTS),
        ("offset", ctypes.c_int * MAX_SEGMENTS),
        ("announced", ctypes.c_void_p),
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
        ("announced", ctypes.c_void_p),
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
        for source in ("few_rows", "many_rows", "input_grad", "dequantize", "lora_shrink"):
            load_module(_SOURCES / f"{source}.cu", index)
    except (ImportError, RuntimeError) as error:  # cuda.bindings raises a RuntimeError where a library is missing
        logger.warning(
            "the fast Hopper kernels cannot be built (%s): NVFP4 products use the Triton kernels. "
            "They need NVRTC and cuda-bindings, which torch's CUDA packages bring along",
            error,
        )
        return False
    _workspace(torch.device("cuda", index))
    return True


def matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``x`` bf16 [M, K] contiguous, 1 <= M <= 2048 -> bf16 or fp32 [M, N]; weights in tiles."""
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    sms = multiprocessor_count(x.device.index)
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    plan = few_rows_plan(m, n, k, sms) if m <= FEW_ROWS else None
    if plan is not None:
        run_few_rows(plan, x, weight, bias, lora, y)
    else:
        run_many_rows(many_rows_plan(m, n, k, sms), x, weight, bias, lora, y)
    return y


def run_few_rows(
    plan: FewRowsPlan,
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    y: torch.Tensor,
) -> None:
    """Launch one few-row kernel into `y` (mutated), bf16 or fp32."""
    shape, sms = (x.shape[0], weight.out_features, weight.in_features), multiprocessor_count(x.device.index)
    params = _params(x, weight, bias, lora, y)
    params.slices = plan.slices
    shared = plan.shared_bytes(*shape, sms)
    grid = plan.group(weight.out_features, sms) * plan.slices
    wide = _wide(y)
    _launch(f"few_rows{wide}", plan.name + wide, 32 * plan.warps, (grid, 1, 1), shared, x.device.index)(params)
    _end_pair(x.device, lora)


def run_many_rows(
    plan: ManyRowsPlan,
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    y: torch.Tensor,
) -> None:
    """Launch one many-row kernel into `y` (mutated), bf16 or fp32."""
    shape, sms = (x.shape[0], weight.out_features, weight.in_features), multiprocessor_count(x.device.index)
    params = _params(x, weight, bias, lora, y)
    params.slices = int(plan.whole)
    grid = plan.grid(*shape, sms)
    wide, threads = _wide(y), 128 * plan.groups + 128
    launch = _launch(f"many_rows{wide}", plan.name + wide, threads, (grid, 1, 1), plan.shared_bytes, x.device.index)
    launch(params, bf16_map(x.data_ptr(), *x.shape, plan.tokens))
    _end_pair(x.device, lora)


def _wide(y: torch.Tensor) -> str:
    """What the names of the kernel and of its file end in: those with an fp32 result stand apart."""
    return "_wide" if y.dtype == torch.float32 else ""


def next_slot() -> int:
    """A place for the announcement of x between a shrink and its product (see ``tiles.cuh``).

    Places are handed out in turn: as many pairs lie between two uses of one as no GPU holds at once.
    """
    return next(_slots) % _SLOTS


def lora_shrink(x: torch.Tensor, a: torch.Tensor, slot: int | None = None) -> torch.Tensor:
    """``x a^T``: bf16 [M, K] and [R, K], both contiguous, K a multiple of 32 -> bf16 [M, R].

    With a `slot`, the next launch on the stream must be the product of the same x with this ``LoraUpdate.slot``. Where
    that product is never launched, the thread's next shrink or product takes the announcement down.
    """
    (m, k), r = x.shape, a.shape[0]
    u = torch.empty(m, r, dtype=torch.bfloat16, device=x.device)
    partial, arrivals = _workspace(x.device)
    announced = _begin_pair(x.device, arrivals, slot)
    params = _Shrink(
        x.data_ptr(), a.data_ptr(), u.data_ptr(), partial.data_ptr(), arrivals.data_ptr(), announced, m, k, r
    )
    blocks, slices = shrink_plan(m, r, k, multiprocessor_count(x.device.index))
    grid = (-(-r // 16), slices, -(-m // (8 * blocks)))
    _launch("lora_shrink", f"lora_shrink_{blocks}", 512 if blocks < 8 else 256, grid, 0, x.device.index)(params)
    return u


def dequantize_into(weight: GroupWeight, out: torch.Tensor) -> None:
    """Write ``[N, K]`` without the global scale into `out` (bf16 or fp32, contiguous)."""
    n, k = out.shape
    params = _Dequantize(weight.codes.data_ptr(), out.data_ptr(), n, k)
    name = "dequantize_bf16" if out.dtype == torch.bfloat16 else "dequantize_fp32"
    grid = (-(-k // (64 * 4 * 4)), n // TILE_ROWS, 1)
    _launch("dequantize", name, 128, grid, 0, out.device.index)(params)


def _params(
    x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, lora: LoraUpdate | None, y: torch.Tensor
) -> _Params:
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
    partial, arrivals = _workspace(x.device)
    params.partial, params.arrivals = partial.data_ptr(), arrivals.data_ptr()
    if lora is not None:
        params.lora.u, params.lora.b, params.lora.width = lora.u.data_ptr(), lora.b.data_ptr(), lora.u.shape[1]
        for index, (column, rank, place) in enumerate(lora.places):
            params.lora.column[index], params.lora.rank[index], params.lora.offset[index] = column, rank, place
    slot = None if lora is None else lora.slot
    _abandon_pair(x.device, arrivals, slot)
    if slot is not None:
        if _open_pairs.get(_here(x.device)) != slot:
            raise UnannouncedSlotError(f"slot {slot} is not that of the last shrink on {x.device}: pass slot=None")
        params.lora.announced = _announcement(arrivals, slot)
    return params


def _announcement(arrivals: torch.Tensor, slot: int) -> int:
    """Address of the two counters of a slot: the last ones, which no sum of parts reaches."""
    return arrivals.data_ptr() + 4 * _slot_start(slot)


def _slot_start(slot: int) -> int:
    return _COUNTERS - 2 * (slot + 1)


def _here(device: torch.device) -> tuple[torch.device, int]:
    return device, threading.get_ident()


def _abandon_pair(device: torch.device, arrivals: torch.Tensor, unless: int | None = None) -> None:
    """Take down the announcement of a shrink whose product was never launched (it raised), so that no later pair with
    this slot, in a captured graph perhaps, finds it."""
    slot = _open_pairs.get(_here(device))
    if slot is not None and slot != unless:
        arrivals[_slot_start(slot) : _slot_start(slot) + 2].zero_()
        del _open_pairs[_here(device)]


def _begin_pair(device: torch.device, arrivals: torch.Tensor, slot: int | None) -> int | None:
    """Address of the announcement of a shrink to come; None where it has no slot."""
    _abandon_pair(device, arrivals)
    if slot is None:
        return None
    _open_pairs[_here(device)] = slot
    return _announcement(arrivals, slot)


def _end_pair(device: torch.device, lora: LoraUpdate | None) -> None:
    """The product of a shrink was launched: it takes the announcement down."""
    if lora is not None and lora.slot is not None:
        del _open_pairs[_here(device)]


@cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of shared tiles (fp32) and the counters of their parts (zero between launches).

    Of fixed size and address, because captured graphs bake it in; first asked for outside a capture. Launches on one
    device must be ordered by a stream.
    """
    sms = multiprocessor_count(device.index)
    size = workspace_bytes(sms)
    return torch.empty(size, dtype=torch.uint8, device=device), torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


@cache
def _launch(source: str, name: str, threads: int, grid: tuple[int, int, int], shared: int, device: int) -> Launch:
    kernel = load_kernel(_SOURCES / f"{source}.cu", name, threads, shared > 0, device)
    return Launch(
        kernel, grid, shared, overlap=source != "dequantize" and dependent_launch(torch.device("cuda", device))
    )
