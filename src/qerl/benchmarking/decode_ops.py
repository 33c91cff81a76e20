"""The small ops of a decode step: its inputs, rotary embedding with the KV write, norm, SiLU-mul, LoRA, sampling.

Every op is first run on the same inputs on the CPU, where it is the plain torch reference, and compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from qerl.benchmarking.ceilings import Ceilings
from qerl.benchmarking.geometry import Geometry
from qerl.benchmarking.results import Row
from qerl.benchmarking.timing import CheckFailedError, median_us, rms_ratio, rotation
from qerl.kernels.decode_rows import fields, prepare_rows
from qerl.kernels.lora import LoraSegment, PackedB, lora_expand, lora_shrink
from qerl.kernels.rms_norm import add_rms_norm
from qerl.kernels.rotary import rotary_kv_write
from qerl.kernels.sampling import sample_rows
from qerl.kernels.silu_mul import silu_mul

# One rounding to bf16 is 0.0017; a result that is rounded differently now and then is off by more, rarely.
_LIMIT = {torch.bfloat16: 0.005, torch.float32: 1e-5}
_CHECKED_ROWS = 8
_BLOCK_SIZE = 16
# Small operands are rotated over this many copies at most.
_MAX_COPIES = 8
# A factors are small: 229 kB for 7B at rank 32.
_MOST_FACTORS = 2048
_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class _Op:
    """An op at one size: its call on copy ``i``, the bytes it must move, and how far a sample is from the CPU's."""

    name: str
    call: Callable[[int], object]
    copies: int
    num_bytes: float
    error: float


def measure_decode_ops(
    geometry: Geometry, ceilings: Ceilings, device: torch.device, batch: int, rank: int = 32
) -> list[Row]:
    """Time, and share of the copy ceiling, of each op for ``batch`` rows.

    Raises:
        CheckFailedError: a result too far from the CPU's.
    """
    rows = []
    for op in _ops(geometry, ceilings.dtype, device, batch, rank):
        limit = _LIMIT[ceilings.dtype]
        if not op.error <= limit:
            raise CheckFailedError(f"{op.name}, batch {batch}: error {op.error:.6f} against the CPU, allowed {limit}")
        us = median_us(op.call, op.copies, device)
        floor = op.num_bytes / ceilings.copy_bytes_per_us
        row = {"model": geometry.name, "op": op.name, "batch": batch, "us": round(us, 2)}
        rows.append(row | {"roofline_us": round(floor, 2), "roofline_share": round(floor / us, 4)})
    return rows


def _ops(geometry: Geometry, dtype: torch.dtype, device: torch.device, batch: int, rank: int) -> Iterator[_Op]:
    yield _inputs(device, batch)
    yield _rotary(geometry, dtype, device, batch)
    yield _add_norm(geometry.hidden, dtype, device, batch)
    yield _silu(geometry.intermediate, dtype, device, batch)
    for layer, (segments, k) in geometry.linears().items():
        yield from _lora(layer, segments, k, dtype, device, batch, rank)
    for temperature in (0.0, 1.0):
        yield _sampling(geometry.vocab, device, batch, temperature)


def _copies(num_bytes: float, device: torch.device) -> int:
    return min(_MAX_COPIES, rotation(num_bytes, device))


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """The first rows, on the CPU: what is compared."""
    return tensor[:_CHECKED_ROWS].cpu()


def _inputs(device: torch.device, batch: int) -> _Op:
    width = _POSITIONS // _BLOCK_SIZE
    inputs = torch.zeros(fields.NUM_FIELDS, batch, dtype=torch.int64, device=device)
    inputs[fields.SOURCE : fields.POSITION + 1] = torch.arange(batch, device=device)
    inputs[fields.TABLE_ROW] = torch.arange(batch, device=device)
    sampled = torch.arange(batch, device=device).flip(0)
    table = torch.randint(1 << 20, (batch, width), device=device, dtype=torch.int32)
    shapes = (
        ((batch,), torch.int64),
        ((batch,), torch.int32),
        ((batch, width), torch.int32),
        ((batch, 2), torch.int64),
    )
    outs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (*shapes, shapes[0])]
    prepare_rows(inputs, sampled, table, *outs)
    error = float(not (torch.equal(outs[0], sampled) and torch.equal(outs[2], table)))
    num_bytes = 2.0 * table.nbytes + inputs.nbytes
    return _Op("inputs of a step", lambda i: prepare_rows(inputs, sampled, table, *outs), 1, num_bytes, error)


def _rotary(geometry: Geometry, dtype: torch.dtype, device: torch.device, batch: int) -> _Op:
    heads, kv_heads, dim = geometry.heads, geometry.kv_heads, geometry.head_dim
    width = (heads + 2 * kv_heads) * dim
    copies = _copies(batch * width * dtype.itemsize, device)
    qkv = torch.randn(copies, batch, width, device=device).to(dtype)
    rope = torch.rand(_POSITIONS, dim, device=device)
    k_cache, v_cache = torch.zeros(2, batch + 1, _BLOCK_SIZE, kv_heads, dim, device=device, dtype=dtype)
    positions = torch.arange(batch, device=device)
    slots = positions * _BLOCK_SIZE
    rest = (rope, positions, k_cache, v_cache, slots)
    found = rotary_kv_write(qkv[0].clone(), *rest)[0]
    few = (positions[:_CHECKED_ROWS], k_cache, v_cache, slots[:_CHECKED_ROWS])
    expected = rotary_kv_write(_few(qkv[0]), rope.cpu(), *(tensor.cpu() for tensor in few))[0]
    num_bytes = batch * (2 * width + 2 * kv_heads * dim) * dtype.itemsize
    return _Op(
        "rotary + KV write",
        lambda i: rotary_kv_write(qkv[i], *rest),
        copies,
        num_bytes,
        rms_ratio(_few(found), expected),
    )


def _add_norm(hidden: int, dtype: torch.dtype, device: torch.device, batch: int) -> _Op:
    num_bytes = batch * hidden * (2 * dtype.itemsize + 8)
    copies = _copies(num_bytes, device)
    weight, noise = torch.ones(hidden, device=device, dtype=dtype), torch.zeros(hidden, device=device)
    x = torch.randn(copies, batch, hidden, device=device).to(dtype)
    residual = torch.randn(copies, batch, hidden, device=device)
    found = add_rms_norm(x[0], residual[0], weight, noise, 1e-6)[0]
    expected = add_rms_norm(_few(x[0]), _few(residual[0]), weight.cpu(), noise.cpu(), 1e-6)[0]
    return _Op(
        "add + RMSNorm",
        lambda i: add_rms_norm(x[i], residual[i], weight, noise, 1e-6),
        copies,
        num_bytes,
        rms_ratio(_few(found), expected),
    )


def _silu(intermediate: int, dtype: torch.dtype, device: torch.device, batch: int) -> _Op:
    num_bytes = 3.0 * batch * intermediate * dtype.itemsize
    copies = _copies(num_bytes, device)
    gate_up = torch.randn(copies, batch, 2 * intermediate, device=device).to(dtype)
    error = rms_ratio(_few(silu_mul(gate_up[0])), silu_mul(_few(gate_up[0])))
    return _Op("SiLU-mul", lambda i: silu_mul(gate_up[i]), copies, num_bytes, error)


def _lora(
    layer: str, segments: tuple[int, ...], k: int, dtype: torch.dtype, device: torch.device, batch: int, rank: int
) -> Iterator[_Op]:
    starts = [sum(segments[:index]) for index in range(len(segments))]
    members = [LoraSegment(start, n, rank * i, rank) for i, (start, n) in enumerate(zip(starts, segments, strict=True))]
    ranks, every = rank * len(members), (True,) * len(members)
    copies = rotation(ranks * k * dtype.itemsize, device, _MOST_FACTORS)
    x = torch.randn(batch, k, device=device).to(dtype)
    a = (torch.randn(copies, ranks, k, device=device) / k**0.5).to(dtype)
    u = lora_shrink(x, a[0])
    error = rms_ratio(_few(u), lora_shrink(_few(x), a[0].cpu()))
    yield _Op(f"LoRA shrink {layer}", lambda i: lora_shrink(x, a[i]), copies, a[0].nbytes + x.nbytes, error)

    b_copies = _copies(sum(segments) * rank * dtype.itemsize, device)
    factors = [PackedB(members, dtype, device) for _ in range(b_copies)]
    for factor in factors:
        factor.buffer.normal_(0.0, 0.1)
    on_cpu = PackedB(members, dtype, torch.device("cpu"))
    on_cpu.buffer.copy_(factors[0].buffer)
    y = torch.randn(batch, sum(segments), device=device).to(dtype)
    found, expected = y.clone(), _few(y).clone()
    lora_expand(found, u, factors[0], every)
    lora_expand(expected, _few(u), on_cpu, every)
    yield _Op(
        f"LoRA expand {layer}",
        lambda i: lora_expand(y, u, factors[i], every),
        b_copies,
        2.0 * y.nbytes + sum(segments) * rank * dtype.itemsize,
        rms_ratio(_few(found), expected),
    )


def _sampling(vocab: int, device: torch.device, batch: int, temperature: float) -> _Op:
    num_bytes = 4.0 * batch * vocab
    copies = min(2, rotation(num_bytes, device))
    logits = torch.randn(copies, batch, vocab, device=device) * 3
    keys = torch.randint(0, 1 << 32, (batch, 2), device=device)
    positions = torch.arange(batch, device=device)
    tokens, found = sample_rows(logits[0], keys, positions, temperature)
    expected = logits[0].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return _Op(
        f"sampling T={temperature:g}",
        lambda i: sample_rows(logits[i], keys, positions, temperature),
        copies,
        num_bytes,
        rms_ratio(found, expected),
    )
