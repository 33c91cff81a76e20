"""Times of a layer's linears for a number of rows: packed weights, LoRA, the gradient of the input, and their peers.

Every weight is first compared with the fp64 product of its dequantized values; a failed check ends the measurement.
The weights of a pass are together larger than the cache.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from qerl.benchmarking.ceilings import Ceilings
from qerl.benchmarking.geometry import Geometry
from qerl.benchmarking.results import Row
from qerl.benchmarking.timing import CheckFailedError, Timed, medians_us, rms_ratio, rotation
from qerl.formats.base import get_format
from qerl.kernels.quant_matmul import FEW_ROWS, hopper_grad, hopper_plan, quant_matmul_dx
from qerl.kernels.silu_mul import silu_mul
from qerl.nn.group import WeightGroup
from qerl.nn.lora import LoraQuantLinear
from qerl.nn.random_weights import random_group, random_lora_handles
from qerl.rollout.lora import LoraShadows
from qerl.rollout.runner import FusedLinear

# RMS error of one rounding to bf16 (0.0017 on spread-out values), and of fp32 sums.
ROUNDING = {torch.bfloat16: 0.0018, torch.float32: 1e-5}
# What a plain dense product of the same weights errs is allowed too, and 2 % for another order of summation. The
# gradient and LoRA are sums of separately rounded parts.
ALLOWED_OVER_DENSE, ALLOWED_DX, ALLOWED_LORA = 1.02, 1.15, 2.0
CHECKED_ROWS = (1, 16, 33, 64, 128, 256)
DX_FROM_ROWS = 2048
# With this many rows a product takes long, and a weight read once from the cache changes nothing.
MANY_ROWS, COPIES_AT_MANY_ROWS = 1024, 4
ALL_FOUR = "fused"


@dataclass(frozen=True, slots=True)
class LinearBench:
    """What is measured of each linear.

    Attributes:
        format: of the packed weights.
        rows: numbers of rows M.
        lora_rank: 0 without LoRA.
        rest_ms: rest before each measured turn; see `medians_us`.
        dx_from: smallest M whose backward product is timed too.
    """

    format: str
    rows: tuple[int, ...]
    lora_rank: int = 0
    rest_ms: float = 0.0
    dx_from: int = DX_FROM_ROWS


def measure_linears(
    geometry: Geometry,
    bench: LinearBench,
    ceilings: Ceilings,
    device: torch.device,
    on_row: Callable[[Row], None],
) -> None:
    """Rows for the four fused linears of a layer, then for the four one after another (``fused``).

    Raises:
        CheckFailedError: a product that is too far from fp64, or differs between two calls.
    """
    dtype = ceilings.dtype
    shapes = geometry.linears()
    for layer, (segments, k) in shapes.items():
        copies = rotation(_packed_bytes(bench.format, segments, k), device)
        groups = [random_group(bench.format, segments, k, dtype, device) for _ in range(copies)]
        check_group(f"{geometry.name}.{layer}", groups[0], dtype, bench.rows)
        if bench.lora_rank:
            check_lora(f"{geometry.name}.{layer}", groups[0], bench.lora_rank, dtype)
        packed = [_forward(group, bench.lora_rank, dtype) for group in groups]
        dense_copies = rotation(sum(segments) * k * dtype.itemsize, device)
        dense = [random_group("bf16", segments, k, dtype, device).dense() for _ in range(dense_copies)]
        for m in bench.rows:
            on_row(_linear_row(geometry, layer, bench, ceilings, groups, packed, dense, m))
    _measure_chain(geometry, bench, ceilings, device, on_row)


Forward = Callable[[torch.Tensor], torch.Tensor]


def _forward(group: WeightGroup, rank: int, dtype: torch.dtype) -> Forward:
    """The group's product as the engine calls it, with LoRA of ``rank`` where it is not 0."""
    return _with_lora(group, rank, dtype)[0] if rank else group.matmul


def _with_lora(group: WeightGroup, rank: int, dtype: torch.dtype) -> tuple[FusedLinear, list[LoraQuantLinear]]:
    """The engine's fused linear with a random adapter, and the adapter layers of its members."""
    holder, projections = random_lora_handles(group, rank)
    shadows = LoraShadows(holder, dtype)
    fused = FusedLinear(projections, shadows)
    shadows.sync()
    return fused, projections


def _linear_row(
    geometry: Geometry,
    layer: str,
    bench: LinearBench,
    ceilings: Ceilings,
    groups: list[WeightGroup],
    packed: list[Forward],
    dense: list[torch.Tensor],
    m: int,
) -> Row:
    group = groups[0]
    device, dtype = dense[0].device, ceilings.dtype
    n, k = group.out_features, group.in_features
    if m >= MANY_ROWS:
        groups, packed, dense = (copies[:COPIES_AT_MANY_ROWS] for copies in (groups, packed, dense))
    x = torch.randn(m, k, device=device, dtype=dtype)
    works = {
        "us": Timed(lambda i: packed[i](x), len(packed)),
        "bf16_us": Timed(lambda i: F.linear(x, dense[i]), len(dense)),
    }
    if bench.lora_rank:
        works["plain_us"] = Timed(lambda i: groups[i].matmul(x), len(packed))
    if x.is_cuda and importlib.util.find_spec("bitsandbytes") is not None:
        works["bitsandbytes_nf4_us"] = _bitsandbytes_work(dense, x)
    if layer == "gate_up":
        works |= _silu_works(groups, packed, x)
    with_dx = m >= bench.dx_from and group.format != "bf16"
    if with_dx:
        dy = torch.randn(m, n, device=device, dtype=dtype)
        weights = [g.group_weight() for g in groups]
        works["dx_us"] = Timed(lambda i: quant_matmul_dx(dy, weights[i]), len(weights))
        works["dx_bf16_us"] = Timed(lambda i: dy @ dense[i], len(dense))
    times = dict(zip(works, medians_us(list(works.values()), device, bench.rest_ms / 1e3), strict=True))
    floor = _floor_us(ceilings, [group], bench.lora_rank, m)
    row = _row(geometry, layer, bench, m, times.pop("us"), times.pop("bf16_us"), floor)
    row["path"] = path_of(group, m, device, bench.lora_rank)
    row |= {name: round(us, 2) for name, us in times.items()}
    if with_dx:
        row["dx_path"] = dx_path_of(group, device)
    return row


def _silu_works(groups: list[WeightGroup], packed: list[Forward], x: torch.Tensor) -> dict[str, Timed]:
    """gate_up and SiLU-mul as the engine calls them, and one after the other.

    Raises:
        CheckFailedError: the two differ by more than sums in another order do.
    """
    both = [
        forward.silu_mul if isinstance(forward, FusedLinear) else group.silu_matmul
        for group, forward in zip(groups, packed, strict=True)
    ]
    error, limit = rms_ratio(both[0](x), silu_mul(packed[0](x))), ROUNDING[x.dtype]
    if not error <= limit:
        raise CheckFailedError(f"gate_up with SiLU-mul, M={len(x)}: error {error:.6f}, allowed {limit}")
    return {
        "silu_us": Timed(lambda i: both[i](x), len(both)),
        "silu_apart_us": Timed(lambda i: silu_mul(packed[i](x)), len(packed)),
    }


Layers = list[list[tuple[WeightGroup, Forward]]]


def _run_layer(layers: Layers, inputs: list[torch.Tensor], plain: bool, index: int) -> None:
    """The linears of a layer one after another; `plain`: without LoRA."""
    for (group, forward), x in zip(layers[index], inputs, strict=True):
        (group.matmul if plain else forward)(x)


def _measure_chain(
    geometry: Geometry, bench: LinearBench, ceilings: Ceilings, device: torch.device, on_row: Callable[[Row], None]
) -> None:
    """The four linears of one layer one after another, as a layer runs them."""
    dtype = ceilings.dtype
    shapes = list(geometry.linears().values())

    def layers(format: str, num_bytes: float, rank: int) -> Layers:
        made = []
        for _ in range(rotation(num_bytes, device)):
            groups = [random_group(format, segments, k, dtype, device) for segments, k in shapes]
            made.append([(group, _forward(group, rank, dtype)) for group in groups])
        return made

    packed_bytes = sum(_packed_bytes(bench.format, segments, k) for segments, k in shapes)
    packed = layers(bench.format, packed_bytes, bench.lora_rank)
    dense = layers("bf16", sum(sum(segments) * k * dtype.itemsize for segments, k in shapes), 0)
    for m in bench.rows:
        inputs = [torch.randn(m, k, device=device, dtype=dtype) for _, k in shapes]
        works = {
            "us": Timed(partial(_run_layer, packed, inputs, False), len(packed)),
            "bf16_us": Timed(partial(_run_layer, dense, inputs, False), len(dense)),
        }
        if bench.lora_rank:
            works["plain_us"] = Timed(partial(_run_layer, packed, inputs, True), len(packed))
        times = dict(zip(works, medians_us(list(works.values()), device, bench.rest_ms / 1e3), strict=True))
        floor = sum(_floor_us(ceilings, [group], bench.lora_rank, m) for group, _ in packed[0])
        row = _row(geometry, ALL_FOUR, bench, m, times.pop("us"), times.pop("bf16_us"), floor)
        row |= {name: round(us, 2) for name, us in times.items()}
        on_row(row | {"path": path_of(packed[0][0][0], m, device, bench.lora_rank)})


def _row(geometry: Geometry, layer: str, bench: LinearBench, m: int, us: float, bf16_us: float, floor_us: float) -> Row:
    return {
        "model": geometry.name,
        "layer": layer,
        "format": bench.format,
        "M": m,
        "lora_rank": bench.lora_rank,
        "us": round(us, 2),
        "bf16_us": round(bf16_us, 2),
        "roofline_us": round(floor_us, 2),
        "roofline_share": round(floor_us / us, 4),
        "bf16_over_ours": round(bf16_us / us, 3),
        **({"rest_ms": bench.rest_ms} if bench.rest_ms else {}),
    }


def _packed_bytes(format: str, segments: Sequence[int], k: int) -> float:
    return sum(segments) * k * get_format(format).bits_per_weight / 8


def _floor_us(ceilings: Ceilings, groups: Sequence[WeightGroup], rank: int, m: int) -> float:
    """Packed bytes and LoRA factors once, or the FLOPs; activations are left out."""
    num_bytes = flops = 0.0
    for group in groups:
        n, k = group.out_features, group.in_features
        lora = rank * (len(group.segments) * k + n)
        num_bytes += group.resident_bytes + lora * ceilings.dtype.itemsize
        flops += 2.0 * m * (n * k + lora)
    return ceilings.floor_us(num_bytes, flops)


def dequantized(group: WeightGroup) -> torch.Tensor:
    """The group's weight in fp32, by the plain torch definition of its format: ``[N, K]``."""
    if group.format == "bf16":
        return group.packed.detach().float()
    weight_format = get_format(group.format)
    return torch.cat([weight_format.dequantize(group.packed_tensor(i)) for i in range(len(group.segments))])


def check_group(name: str, group: WeightGroup, dtype: torch.dtype, rows: Sequence[int]) -> None:
    """Compare products of a few M (up to the largest that is timed) with fp64, and two calls with each other.

    Raises:
        CheckFailedError: with the errors.
    """
    wide = dequantized(group).double()
    rounded = wide.to(dtype)
    for m in [m for m in CHECKED_ROWS if m <= max(rows)] or [max(rows)]:
        x = torch.randn(m, group.in_features, device=wide.device, dtype=dtype)
        y = group.matmul(x)
        error = rms_ratio(y, x.double() @ wide.t())
        dense = rms_ratio(F.linear(x, rounded), x.double() @ rounded.double().t())
        limit = ALLOWED_OVER_DENSE * max(ROUNDING[dtype], dense)
        if not error <= limit:
            raise CheckFailedError(f"{name} M={m}: error {error:.6f} against fp64, allowed {limit:.6f}")
        if not torch.equal(y, group.matmul(x)):
            raise CheckFailedError(f"{name} M={m}: two calls differ")
    if group.format == "bf16":
        return
    dy = torch.randn(min(256, max(rows)), group.out_features, device=wide.device, dtype=dtype)
    error, limit = (
        rms_ratio(quant_matmul_dx(dy, group.group_weight()), dy.double() @ wide),
        ALLOWED_DX * ROUNDING[dtype],
    )
    if not error <= limit:
        raise CheckFailedError(f"{name}: error {error:.6f} of dX against fp64, allowed {limit}")


def check_lora(name: str, group: WeightGroup, rank: int, dtype: torch.dtype) -> None:
    """Compare the product with a random adapter with fp64, from the fp32 masters.

    Raises:
        CheckFailedError: with the error.
    """
    fused, members = _with_lora(group, rank, dtype)
    wide = dequantized(group).double() + torch.cat([member.get_delta_weight("default") for member in members]).double()
    x = torch.randn(16, group.in_features, device=wide.device, dtype=dtype)
    error, limit = rms_ratio(fused(x), x.double() @ wide.t()), ALLOWED_LORA * ROUNDING[dtype]
    if not error <= limit:
        raise CheckFailedError(f"{name} with LoRA: error {error:.6f} against fp64, allowed {limit}")


def path_of(group: WeightGroup, m: int, device: torch.device, lora_rank: int = 0) -> str:
    """Which implementation multiplies ``m`` rows."""
    if device.type != "cuda":
        return "torch"
    if group.format == "bf16":
        return "cublas"
    if group.layout == "tiles":
        few, many = hopper_plan.FEW_ROWS, hopper_plan.PACKED_ROWS
        return "cuda-few-rows" if m <= few else "cuda-many-rows" if m <= many or lora_rank else "dequantize+cublas"
    return "triton-few-rows" if m <= FEW_ROWS else "dequantize+cublas"


def dx_path_of(group: WeightGroup, device: torch.device) -> str:
    """Which implementation computes the gradient of the input."""
    if device.type != "cuda":
        return "torch"
    return "dequantize+cublas" if hopper_grad.plan_for(1, group.group_weight()) is None else "cuda-input-grad"


def _bitsandbytes_work(dense: list[torch.Tensor], x: torch.Tensor) -> Timed:
    """bitsandbytes' NF4 product on the same shapes."""
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    copies = rotation(dense[0].numel() * get_format("nf4").bits_per_weight / 8, x.device)
    packed = [
        quantize_4bit(dense[i % len(dense)], blocksize=64, compress_statistics=False, quant_type="nf4")
        for i in range(copies)
    ]
    return Timed(lambda i: bitsandbytes.matmul_4bit(x, packed[i][0].t(), quant_state=packed[i][1]), copies)
