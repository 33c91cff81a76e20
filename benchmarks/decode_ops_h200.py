"""Times of the small ops of a decode step: paged attention, rotary and KV write, LoRA, norms, sampling.

    python benchmarks/decode_ops_h200.py [--model 7B] [--batch 1 8 64 256] [--out FILE]
    python benchmarks/decode_ops_h200.py --sweep 8      # launch parameters of decode attention at batch 8

Every op is first compared with its reference; a failed check ends the run without figures. Times are medians over
replays of a CUDA graph that walks through enough copies of the KV cache (or factors) to defeat the L2 cache.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from kernels_h200 import COPY_BYTES_PER_US, MODELS, copies_past_l2, layer_shapes, median_us, rms_ratio

from qerl.kernels.device import multiprocessor_count
from qerl.kernels.lora import LoraSegment, PackedB, lora_expand, lora_shrink
from qerl.kernels.paged_attention import launch as attention_launch
from qerl.kernels.paged_attention import paged_attention_decode, reference
from qerl.kernels.paged_attention.launch import DEFAULT_CONFIG, DecodeConfig
from qerl.kernels.rms_norm import add_rms_norm
from qerl.kernels.rotary import rotary_kv_write
from qerl.kernels.sampling import sample_rows
from qerl.kernels.silu_mul import silu_mul

CONTEXT, BLOCK_SIZE, VOCAB, RANK = 1280, 16, 152_064, 32
Row = dict[str, object]


class PagedCaches:
    """Enough K and V pools to miss the L2 cache, with one block table over each."""

    def __init__(self, model: str, batch: int, dtype: torch.dtype) -> None:
        _, _, heads, kv_heads, head_dim = MODELS[model]
        blocks = batch * CONTEXT // BLOCK_SIZE
        self.kv_bytes = 2.0 * batch * CONTEXT * kv_heads * head_dim * dtype.itemsize
        self.copies = copies_past_l2(self.kv_bytes, 1)
        shape = (self.copies, blocks, BLOCK_SIZE, kv_heads, head_dim)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
        self.q = torch.randn(batch, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        self.table = torch.randperm(blocks, device="cuda").int().view(batch, -1)
        self.lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
        self.scale = head_dim**-0.5

    def inputs(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.q, self.k[index], self.v[index], self.table, self.lens

    def decode(self, config: DecodeConfig, index: int) -> torch.Tensor:
        """Decode attention over pool `index` with the launch parameters `config`."""
        sequences, kv_heads = self.q.shape[0], self.k.shape[3]
        slices = attention_launch.num_slices(sequences, kv_heads, CONTEXT, multiprocessor_count(0), config)
        return attention_launch.decode(*self.inputs(index), self.scale, slices, config)


def require(name: str, error: float, bound: float) -> None:
    if not error <= bound:
        raise SystemExit(f"{name}: error {error:.2e} is above {bound:.2e}")


def measure_attention(model: str, batch: int, dtype: torch.dtype) -> Row:
    """Time, and the share of copy bandwidth of the KV reads."""
    caches = PagedCaches(model, batch, dtype)
    expected = reference.paged_attention_decode(*caches.inputs(0), caches.scale).double()
    require(
        f"attention {model} {batch}", rms_ratio(paged_attention_decode(*caches.inputs(0), caches.scale), expected), 6e-3
    )
    us = median_us(lambda i: paged_attention_decode(*caches.inputs(i), caches.scale), caches.copies)
    share = caches.kv_bytes / us / COPY_BYTES_PER_US
    return {"op": f"attention {str(dtype).removeprefix('torch.')}", "us": us, "share_of_copy": round(share, 3)}


def measure_rotary(model: str, batch: int) -> Row:
    _, _, heads, kv_heads, head_dim = MODELS[model]
    rows = torch.randn(8, batch, (heads + 2 * kv_heads) * head_dim, device="cuda").bfloat16()
    rope = torch.rand(4096, head_dim, device="cuda")
    k_cache, v_cache = torch.zeros(2, batch + 1, BLOCK_SIZE, kv_heads, head_dim, device="cuda").bfloat16()
    slots, positions = torch.arange(batch, device="cuda") * BLOCK_SIZE, torch.arange(batch, device="cuda")
    us = median_us(lambda i: rotary_kv_write(rows[i], rope, positions, k_cache, v_cache, slots), len(rows))
    return {"op": "rotary + KV write", "us": us}


def measure_elementwise(model: str, batch: int) -> list[Row]:
    hidden, inter, *_ = MODELS[model]
    x, weight = torch.randn(8, batch, hidden, device="cuda").bfloat16(), torch.ones(hidden, device="cuda").bfloat16()
    residual, noise = torch.randn(batch, hidden, device="cuda"), torch.zeros(hidden, device="cuda")
    gate_up = torch.randn(8, batch, 2 * inter, device="cuda").bfloat16()
    return [
        {"op": "add + RMSNorm", "us": median_us(lambda i: add_rms_norm(x[i], residual, weight, noise, 1e-6), 8)},
        {"op": "SiLU-mul", "us": median_us(lambda i: silu_mul(gate_up[i]), 8)},
    ]


def measure_lora(model: str, batch: int, layer: str) -> list[Row]:
    segments, k = layer_shapes(model)[layer]
    starts = [sum(segments[:index]) for index in range(len(segments))]
    members = [LoraSegment(start, n, RANK * i, RANK) for i, (start, n) in enumerate(zip(starts, segments, strict=True))]
    ranks, every = RANK * len(members), (True,) * len(members)
    copies = copies_past_l2(2.0 * ranks * k, 1)
    x, a = (
        torch.randn(batch, k, device="cuda").bfloat16(),
        torch.randn(copies, ranks, k, device="cuda").bfloat16() / k**0.5,
    )
    factors = [PackedB(members, torch.bfloat16, x.device) for _ in range(8)]
    for factor in factors:
        factor.buffer.normal_()
    y, u = torch.zeros(batch, sum(segments), device="cuda").bfloat16(), lora_shrink(x, a[0])
    require(f"shrink {layer}", rms_ratio(u, x.double() @ a[0].double().t()), 3e-3)
    return [
        {"op": f"LoRA shrink {layer}", "us": median_us(lambda i: lora_shrink(x, a[i]), copies)},
        {"op": f"LoRA expand {layer}", "us": median_us(lambda i: lora_expand(y, u, factors[i], every), 8)},
    ]


def measure_sampling(batch: int) -> list[Row]:
    logits = torch.randn(2, batch, VOCAB, device="cuda") * 3
    keys, positions = torch.randint(0, 1 << 32, (batch, 2), device="cuda"), torch.arange(batch, device="cuda")
    return [
        {"op": f"sampling T={t}", "us": median_us(lambda i, t=t: sample_rows(logits[i], keys, positions, t), 2)}
        for t in (0.0, 1.0)
    ]


def sweep(model: str, batch: int) -> None:
    """Print the best launch parameters of decode attention."""
    caches = PagedCaches(model, batch, torch.bfloat16)
    found = []
    choices = itertools.product((32, 64, 128), (2, 3, 4, 6), (4, 8), (2, 3, 4, 5), (8, 16, 32))
    for block_n, per_sm, warps, stages, most in choices:
        config = DecodeConfig(block_n, per_sm, 64, most, warps, stages)
        try:
            found.append((median_us(partial(caches.decode, config), caches.copies), config))
        except triton.runtime.errors.OutOfResources:
            continue
    current = median_us(partial(caches.decode, DEFAULT_CONFIG), caches.copies)
    print(f"{model} batch {batch}: copy speed {caches.kv_bytes / COPY_BYTES_PER_US:.1f} us, now {current:.1f} us")
    for us, config in sorted(found, key=lambda pair: pair[0])[:8]:
        print(f"   {us:7.2f} us  {config}")


def measure(model: str, batch: int) -> list[Row]:
    steps: list[Callable[[], Row | list[Row]]] = [
        partial(measure_attention, model, batch, torch.bfloat16),
        partial(measure_attention, model, batch, torch.float8_e4m3fn),
        partial(measure_rotary, model, batch),
        partial(measure_elementwise, model, batch),
        *(partial(measure_lora, model, batch, layer) for layer in layer_shapes(model)),
        partial(measure_sampling, batch),
    ]
    rows: list[Row] = []
    for step in steps:
        result = step()
        rows += result if isinstance(result, list) else [result]
    for row in rows:
        row |= {"model": model, "batch": batch, "us": round(float(row["us"]), 2)}
        print(f"{model} {batch:4d}  {row['op']:24s} {row['us']:8.2f} us  {row.get('share_of_copy', '')}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--sweep", type=int, metavar="BATCH")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.sweep is not None:
        for model in options.model:
            sweep(model, options.sweep)
        return
    rows = [row for model in options.model for batch in options.batch for row in measure(model, batch)]
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
