"""The kernels beside the linears: decode attention, dequantization, quantization."""

import time
from collections.abc import Callable, Sequence

import torch

from qerl.benchmarking.ceilings import Ceilings
from qerl.benchmarking.geometry import Geometry
from qerl.benchmarking.results import Row
from qerl.benchmarking.timing import CheckFailedError, median_us, rms_ratio, rotation, synchronize
from qerl.formats.base import get_format
from qerl.kernels.paged_attention import paged_attention_decode
from qerl.kernels.paged_attention import reference as attention_reference
from qerl.kernels.paged_attention.rotary import newest_places, rotary_decode
from qerl.kernels.quant_matmul import dequantize
from qerl.kernels.rotary import rotary_kv_write
from qerl.nn.random_weights import STD, random_group

ATTENTION_BATCHES = (1, 8, 16, 32, 64, 128, 256)
ATTENTION_CONTEXT = 1280
_BLOCK_SIZE = 16
# Probabilities and output are each rounded once to bf16 on the GPU.
_ATTENTION_LIMIT = {torch.bfloat16: 0.006, torch.float32: 1e-5}


def measure_attention(
    geometry: Geometry, ceilings: Ceilings, device: torch.device, batches: Sequence[int], context: int, kv_dtype: str
) -> list[Row]:
    """Paged decode attention of one layer: time and share of the read ceiling, for each number of sequences.

    ``rotary_us`` is its time with rotary embedding and KV write, as decode steps ask for it.

    Args:
        kv_dtype: ``auto`` (the compute dtype) or ``fp8``.

    Raises:
        CheckFailedError: an output too far from the reference.
    """
    rows = []
    dtype = ceilings.dtype
    cache_dtype = torch.float8_e4m3fn if kv_dtype == "fp8" else dtype
    heads, kv_heads, head_dim = geometry.heads, geometry.kv_heads, geometry.head_dim
    for batch in batches:
        width = -(-context // _BLOCK_SIZE)
        kv_bytes = 2.0 * batch * context * kv_heads * head_dim * cache_dtype.itemsize
        copies = rotation(kv_bytes, device)
        shape = (copies, batch * width, _BLOCK_SIZE, kv_heads, head_dim)
        k, v = (torch.randn(shape, device=device, dtype=dtype).to(cache_dtype) for _ in range(2))
        q = torch.randn(batch, heads, head_dim, device=device, dtype=dtype)
        table = torch.randperm(batch * width, device=device).int().view(batch, width)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        rest = (table, lens, head_dim**-0.5)
        few = min(batch, 8)
        found = paged_attention_decode(q[:few], k[0], v[0], table[:few], lens[:few], rest[2])
        expected = attention_reference.paged_attention_decode(
            q[:few].float(), k[0].float(), v[0].float(), table[:few], lens[:few], rest[2]
        )
        error = rms_ratio(found, expected)
        if not error <= _ATTENTION_LIMIT[dtype]:
            raise CheckFailedError(
                f"decode attention, batch {batch}: error {error:.6f}, allowed {_ATTENTION_LIMIT[dtype]}"
            )
        us = median_us(lambda i, q=q, k=k, v=v, rest=rest: paged_attention_decode(q, k[i], v[i], *rest), copies, device)
        floor = kv_bytes / ceilings.read_bytes_per_us
        row = {"model": geometry.name, "kv_dtype": kv_dtype, "batch": batch, "context": context, "us": round(us, 2)}
        row |= {"roofline_us": round(floor, 2), "roofline_share": round(floor / us, 4)}
        rows.append(row | {"rotary_us": round(_rotary_us(heads, k, v, *rest), 2)})
    return rows


def _rotary_us(
    heads: int, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, scale: float
) -> float:
    """Time of :func:`rotary_decode` over the caches ``k`` and ``v`` [copies, blocks, block_size, Hkv, D] (mutated).

    Raises:
        CheckFailedError: an output too far from that of two ops.
    """
    device, kv_heads, head_dim = k.device, *k.shape[-2:]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    qkv = torch.randn(len(table), (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.rand(table.shape[1] * _BLOCK_SIZE, head_dim // 2, device=device)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)  # turns in place, again and again: lengths must stay
    found = rotary_decode(qkv.clone(), rope, k[0], v[0], table, lens, scale)
    places = newest_places(table, lens, _BLOCK_SIZE)
    q, _, _ = rotary_kv_write(qkv.clone(), rope, places[0], k[0], v[0], places[1])
    error = rms_ratio(found, paged_attention_decode(q, k[0], v[0], table, lens, scale))
    if not error <= _ATTENTION_LIMIT[dtype]:
        raise CheckFailedError(f"decode attention with rotary, batch {len(table)}: error {error:.6f} against two ops")
    return median_us(lambda i: rotary_decode(qkv, rope, k[i], v[i], table, lens, scale), len(k), device)


def measure_dequantize(geometry: Geometry, format: str, ceilings: Ceilings, device: torch.device) -> list[Row]:
    """Packed weights to 16 bit (fp32 on the CPU) for each linear of a layer, against the copy ceiling."""
    rows = []
    dtype = ceilings.dtype
    for layer, (segments, k) in geometry.linears().items():
        num_bytes = sum(segments) * k * (dtype.itemsize + get_format(format).bits_per_weight / 8)
        copies = rotation(num_bytes, device)
        weights = [random_group(format, segments, k, dtype, device).group_weight() for _ in range(copies)]
        outs = torch.empty(copies, sum(segments), k, dtype=dtype, device=device)
        us = median_us(lambda i, weights=weights, outs=outs: dequantize(weights[i], outs[i]), copies, device)
        floor = num_bytes / ceilings.copy_bytes_per_us
        row = {"model": geometry.name, "layer": layer, "format": format, "us": round(us, 2)}
        rows.append(row | {"roofline_us": round(floor, 2), "roofline_share": round(floor / us, 4)})
    return rows


def measure_quantizer(
    geometry: Geometry,
    format: str,
    device: torch.device,
    layers: int,
    on_row: Callable[[Row], None],
) -> None:
    """Seconds to quantize the linears of ``layers`` layers, one fused group at a time, by each method of the format.

    Weights are drawn on the device outside the measured time. ``seconds_all_layers`` is scaled up by the number of
    layers, which are alike.
    """
    weight_format = get_format(format)
    shapes = list(geometry.linears().values())
    weights_a_layer = sum(sum(segments) * k for segments, k in shapes)
    for method in weight_format.methods:
        _quantize_layer(weight_format, method, shapes, device)
        seconds = sum(_quantize_layer(weight_format, method, shapes, device) for _ in range(layers))
        on_row(
            {
                "model": geometry.name,
                "format": format,
                "method": method,
                "layers": layers,
                "seconds": round(seconds, 4),
                "seconds_all_layers": round(seconds * geometry.layers / layers, 3),
                "weights_per_s": round(weights_a_layer * layers / seconds),
            }
        )


def _quantize_layer(weight_format, method: str, shapes: list, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    seconds = 0.0
    for segments, k in shapes:
        members = [torch.randn(n, k, device=device, dtype=torch.bfloat16) * STD for n in segments]
        synchronize(device)
        started = time.perf_counter()
        packed = weight_format.quantize(members, method)
        synchronize(device)
        seconds += time.perf_counter() - started
        del members, packed
    return seconds
