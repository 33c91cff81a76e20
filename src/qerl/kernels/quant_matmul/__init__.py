"""Products with frozen 4-bit weights: forward, gradient of the input, dequantization.

CPU tensors take the plain torch reference. On CUDA, weights in tiles go through the Hopper kernels (``cuda/``) up
to `PACKED_ROWS` rows, with LoRA at any number, and so do bf16 gradients under one global scale; weights in rows go
through a Triton kernel up to `FEW_ROWS`. All three keep weights packed until registers. Whatever else there is
dequantizes into a reused workspace and multiplies with cuBLAS. All multiply by the same bf16 weights, accumulate in
fp32, apply the global scale to the accumulator and round once, or not at all where an fp32 result is asked for.
Hopper's kernels can multiply SiLU of gate with up before they store.

The ops are registered with torch.library (torch.compile and CUDA graphs see opaque calls); autograd is the
caller's.
Same input, same bits: partial sums are added in a fixed order everywhere.
"""

from collections.abc import Sequence

import torch

from qerl.kernels.device import launch_on
from qerl.kernels.quant_matmul import reference
from qerl.kernels.quant_matmul.checks import (
    DTYPES,
    ActivationDtypeError,
    check_activation,
    check_lora,
    check_product,
    is_wide,
)
from qerl.kernels.quant_matmul.config import FEW_ROWS
from qerl.kernels.quant_matmul.hopper_plan import PACKED_ROWS
from qerl.kernels.quant_matmul.tiles import TileLayoutError, from_tiles, group_fits_tiles, to_tiles
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate
from qerl.kernels.quant_matmul.workspace import reserve_workspace, workspace_bytes
from qerl.kernels.rows import aligned_rows
from qerl.kernels.silu_mul import reference as silu_reference

__all__ = [
    "FEW_ROWS",
    "PACKED_ROWS",
    "ActivationDtypeError",
    "GroupWeight",
    "LoraUpdate",
    "TileLayoutError",
    "dequantize",
    "from_tiles",
    "group_fits_tiles",
    "quant_lora_matmul",
    "quant_matmul",
    "quant_matmul_dx",
    "quant_silu_matmul",
    "reserve_workspace",
    "tiles_supported",
    "to_tiles",
    "workspace_bytes",
]


def tiles_supported(device: torch.device) -> bool:
    """Whether products with weights in tiles run on `device`: a Hopper GPU on which the CUDA kernels can be built."""
    from qerl.kernels.quant_matmul import hopper

    return hopper.is_supported(device)


def quant_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None = None,
    lora: LoraUpdate | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``y = x W^T + (x a^T) b^T + bias`` with packed W.

    Args:
        x: bf16 or fp32 ``[..., K]``, any strides.
        weight: packed ``[N, K]`` on the device of `x`.
        bias: ``[N]`` in the dtype of `x`, or None.
        lora: added in fp32 before rounding; only with x ``[M, K]``. Ranks in multiples of 8.
        out_dtype: of the result: that of `x` (None), or fp32, for which nothing is rounded.

    Returns:
        ``[..., N]`` in `out_dtype`: fp32 accumulation, global scale, LoRA and bias in fp32, rounded once.
        fp32 `x` is multiplied by the weights in fp32.

    Raises:
        ActivationDtypeError: another `out_dtype`, or fp16. The product without the global scale reaches 2688 |x| per
            term and split-K libraries may round such partial sums to fp16, where they overflow (vllm#33972).
        ValueError: shapes or devices that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    if lora is not None:
        return quant_lora_matmul(x, weight, bias, lora, out_dtype)[0]
    wide = check_product(x, weight, bias, out_dtype)
    y = _matmul_op(x.reshape(-1, x.shape[-1]), *_parts(weight), bias, wide)
    return y.view(*x.shape[:-1], weight.out_features)


def quant_lora_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quant_matmul` with LoRA, for x ``[M, K]``; also returns u = ``x a^T`` [M, R], rounded to the dtype of `x`.

    On a Hopper GPU both come from one launch for every 2,048 rows, where making u in it takes no longer than a kernel
    before it (``ManyRowsPlan.lora_cut``).
    """
    wide = check_product(x, weight, bias, out_dtype)
    check_lora(x, weight, lora)
    places = [number for place in lora.places for number in place]
    return _lora_matmul_op(x, *_parts(weight), bias, lora.a, lora.b, places, wide)


def quant_silu_matmul(
    x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None = None, lora: LoraUpdate | None = None
) -> torch.Tensor:
    """``silu(gate) * up`` of ``[gate | up] = quant_matmul(x, weight, bias, lora)``, a weight of two equal segments.

    Args:
        x: bf16 or fp32 ``[M, K]``, any strides.
        weight, bias, lora: as for `quant_matmul`.

    Returns:
        ``[M, N / 2]`` in the dtype of `x`. gate and up are each rounded to it as `quant_matmul` does, silu and product
        are computed in fp32 and rounded once, as `qerl.kernels.silu_mul` does. The Hopper kernels do it in the product,
        unless that cuts k (some weights, up to 8 rows) or goes by way of the workspace (above `PACKED_ROWS` rows
        without LoRA); elsewhere `silu_mul` follows.

    Raises:
        ValueError: not two equal segments, or x is no matrix.
        As `quant_matmul`.
    """
    check_product(x, weight, bias, None)
    if x.ndim != 2 or len(weight.segments) != 2 or weight.segments[0] != weight.segments[1]:
        raise ValueError(
            f"gate and up must be two segments of equal size and x a matrix, got {weight.segments} and {list(x.shape)}"
        )
    if lora is None:
        return _silu_matmul_op(x, *_parts(weight), bias, None, None, [])
    check_lora(x, weight, lora)
    places = [number for place in lora.places for number in place]
    return _silu_matmul_op(x, *_parts(weight), bias, lora.a, lora.b, places)


def quant_matmul_dx(dy: torch.Tensor, weight: GroupWeight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``dx = dy W``: the gradient of the input of `quant_matmul`.

    Args:
        dy: bf16 or fp32 ``[..., N]``, any strides.
        weight, out_dtype: as in the forward.

    Returns:
        ``[..., K]`` in `out_dtype`; fp32 accumulation, rounded once.

    Raises:
        As `quant_matmul`.
    """
    check_activation("dy", dy, weight, weight.out_features)
    dx = _matmul_dx_op(dy.reshape(-1, dy.shape[-1]), *_parts(weight), is_wide(dy, out_dtype))
    return dx.view(*dy.shape[:-1], weight.in_features)


def dequantize(
    weight: GroupWeight, out: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The weight ``[N, K]`` without its global scale; exact in bf16 for nvfp4, rounded to bf16 for nf4.

    Args:
        weight: packed ``[N, K]``.
        out: contiguous ``[N, K]`` bf16 or fp32 to write (mutated), or None to allocate one of `dtype`.
        dtype: of the result where `out` is None; fp32 holds the same values as bf16.

    Raises:
        ValueError: `out` or `dtype` do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    shape = (weight.out_features, weight.in_features)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
    if out.dtype not in DTYPES or tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(
            f"dequantize writes a contiguous bf16 or fp32 {list(shape)}, "
            f"got {out.dtype} {list(out.shape)} with strides {out.stride()}"
        )
    if out.device != weight.device:
        raise ValueError(f"out is on {out.device}, the weight on {weight.device}")
    _dequantize_op(out, *_parts(weight))
    return out


_Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, str, list[int], float | None]


def _parts(weight: GroupWeight) -> _Parts:
    """A weight as torch.library can pass it."""
    return (
        weight.codes,
        weight.block_scale,
        weight.global_scale,
        weight.format,
        list(weight.segments),
        weight.uniform_scale,
    )


def _weight(
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
) -> GroupWeight:
    columns = _columns(codes)
    return GroupWeight(weight_format, tuple(segments), columns, codes, block_scale, global_scale, uniform_scale)


def _columns(codes: torch.Tensor) -> int:
    """K of rows [N, K/2] and of tiles [N/16, K/64, 576]."""
    return 2 * codes.shape[1] if codes.ndim == 2 else 64 * codes.shape[1]


@torch.library.custom_op("qerl::quant_matmul", mutates_args=())
def _matmul_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
    bias: torch.Tensor | None,
    wide: bool = False,
) -> torch.Tensor:
    out_dtype = torch.float32 if wide else x.dtype
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    if not x.is_cuda:
        return reference.quant_matmul(x, weight, bias, None, None, out_dtype)
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(x.device):
        return paths.matmul(aligned_rows(x), weight, bias, out_dtype)


@_matmul_op.register_fake
def _(x, codes, block_scale, global_scale, weight_format, segments, uniform_scale, bias, wide=False):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], sum(segments), dtype=torch.float32 if wide else x.dtype)


@torch.library.custom_op("qerl::quant_lora_matmul", mutates_args=())
def _lora_matmul_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    places: Sequence[int],
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    out_dtype = torch.float32 if wide else x.dtype
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    lora = _lora(a, b, places)
    if not x.is_cuda:
        u = reference.lora_shrink(x, a)
        return reference.quant_matmul(x, weight, bias, lora, u, out_dtype), u
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(x.device):
        return paths.lora_matmul(aligned_rows(x), weight, bias, lora, out_dtype)


@_lora_matmul_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, codes, block_scale, global_scale, weight_format, segments, uniform_scale, bias, a, b, places, wide=False
):
    y = x.new_empty(x.shape[0], sum(segments), dtype=torch.float32 if wide else x.dtype)
    return y, x.new_empty(x.shape[0], a.shape[0])


def _lora(a: torch.Tensor, b: torch.Tensor, places: Sequence[int]) -> LoraUpdate:
    """An update as torch.library passes it; on a GPU aligned, because views into a flat buffer of parameters may start
    anywhere."""
    if a.is_cuda:
        a, b = aligned_rows(a), aligned_rows(b[None])[0]
    return LoraUpdate(a, b, tuple(zip(places[::3], places[1::3], places[2::3], strict=True)))


@torch.library.custom_op("qerl::quant_silu_matmul", mutates_args=())
def _silu_matmul_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
    bias: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    places: Sequence[int],
) -> torch.Tensor:
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    lora = None if a is None or b is None else _lora(a, b, places)
    if not x.is_cuda:
        u = None if lora is None else reference.lora_shrink(x, lora.a)
        return silu_reference.silu_mul(reference.quant_matmul(x, weight, bias, lora, u))
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(x.device):
        return paths.silu_matmul(aligned_rows(x), weight, bias, lora)


@_silu_matmul_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, codes, block_scale, global_scale, weight_format, segments, uniform_scale, bias, a, b, places
):
    return x.new_empty(x.shape[0], sum(segments) // 2)


@torch.library.custom_op("qerl::quant_matmul_dx", mutates_args=())
def _matmul_dx_op(
    dy: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
    wide: bool = False,
) -> torch.Tensor:
    out_dtype = torch.float32 if wide else dy.dtype
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    if not dy.is_cuda:
        return reference.quant_matmul_dx(dy, weight, out_dtype)
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(dy.device):
        return paths.matmul_dx(aligned_rows(dy), weight, out_dtype)


@_matmul_dx_op.register_fake
def _(dy, codes, block_scale, global_scale, weight_format, segments, uniform_scale, wide=False):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape[0], _columns(codes), dtype=torch.float32 if wide else dy.dtype)


@torch.library.custom_op("qerl::dequantize", mutates_args=("out",))
def _dequantize_op(
    out: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
) -> None:
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    if not out.is_cuda:
        out.copy_(reference.dequantize(weight, out.dtype))
        return
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(out.device):
        paths.dequantize_into(weight, out)
