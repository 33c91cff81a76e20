"""Times of the four linears of a Qwen2.5-7B and 32B layer with NVFP4 weights, against cuBLAS bf16 and the roofline.

    python benchmarks/kernels_h200.py [--out FILE] [--model 7B] [--rows 1 8 64]
    python benchmarks/kernels_h200.py --sweep 8        # tile sizes of the few-row kernel at M = 8, no file written

Every kernel is first compared with an fp64 product; a failed check ends the run without figures. Times are medians over
replays of a CUDA graph that walks through enough copies of the weight to defeat the L2 cache. Roofline: the packed
bytes over the measured read bandwidth, or the FLOPs over the best measured bf16 rate, whichever is larger.
"""

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from qerl.kernels.paged_attention import paged_attention_decode
from qerl.kernels.quant_matmul import FEW_ROWS, GroupWeight, dequantize, quant_matmul, quant_matmul_dx
from qerl.kernels.quant_matmul import launch as matmul_launch
from qerl.kernels.quant_matmul.config import FewRowsConfig

READ_BYTES_PER_US = 4.7e6
COPY_BYTES_PER_US = 4.2e6
FLOPS_PER_US = 820e6
BYTES_PAST_L2 = 260e6
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# hidden, intermediate, query heads, KV heads, head size
MODELS = {"7B": (3584, 18944, 28, 4, 128), "32B": (5120, 27648, 40, 8, 128)}
DEFAULT_OUT = Path(__file__).parent / "results" / "kernels-h200.json"


def layer_shapes(model: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """Segments and in_features of the four fused linears of a layer."""
    hidden, inter, heads, kv_heads, head_dim = MODELS[model]
    return {
        "qkv": ((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), hidden),
        "o": ((hidden,), heads * head_dim),
        "gate_up": ((inter, inter), hidden),
        "down": ((hidden,), inter),
    }


def random_weight(segments: tuple[int, ...], k: int) -> GroupWeight:
    """Random codes under random block scales between 0.5 and 15: any bytes decode to finite weights."""
    n = sum(segments)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x30, 0x58, (n, k // 16), dtype=torch.uint8, device="cuda")
    divisor = 1344.0
    global_scale = torch.full((len(segments),), divisor, device="cuda")
    return GroupWeight("nvfp4", segments, k, codes, scales.view(torch.float8_e4m3fn), global_scale, 1.0 / divisor)


def copies_past_l2(num_bytes: float, m: int) -> int:
    """Weights to rotate through; at large M a pass is long and the weight is read once in it anyway."""
    wanted = BYTES_PAST_L2 if m < 2048 else BYTES_PAST_L2 / 2
    return max(1, round(wanted / num_bytes + 0.5))


def median_us(call: Callable[[int], object], copies: int) -> float:
    """Median time of ``call(i)`` over replays of a graph that runs i = 0 .. copies - 1."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            call(index)
    times = []
    graph.replay()
    while len(times) < 15 and (len(times) < 5 or sum(times) < 40e3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times) / copies


def rms_ratio(result: torch.Tensor, expected: torch.Tensor) -> float:
    error = (result.double() - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt())


def check(name: str, weight: GroupWeight) -> None:
    """Stop unless the error against fp64 is that of cuBLAS on the same weights, and bits repeat."""
    values = dequantize(weight)
    wide = values.double()
    for m in (1, 16, 33, FEW_ROWS, 256):
        x = torch.randn(m, weight.in_features, device="cuda").bfloat16()
        y = quant_matmul(x, weight)
        product = x.double() @ wide.t()
        ours = rms_ratio(y, product * weight.uniform_scale)
        cublas = rms_ratio(F.linear(x, values), product)
        # 0.0018: one rounding of a normal number to bf16.
        if not ours <= 1.02 * max(cublas, 0.0018):
            raise SystemExit(f"{name} M={m}: error {ours:.5f} against fp64, cuBLAS {cublas:.5f}")
        if not torch.equal(y, quant_matmul(x, weight)):
            raise SystemExit(f"{name} M={m}: two runs differ")
    dy = torch.randn(256, weight.out_features, device="cuda").bfloat16()
    gradient = rms_ratio(quant_matmul_dx(dy, weight), dy.double() @ wide * weight.uniform_scale)
    if not gradient <= 0.002:
        raise SystemExit(f"{name}: error of dx {gradient:.5f} against fp64")


def roofline_us(n: int, k: int, m: int) -> float:
    return max(n * k * (0.5 + 1 / 16) / READ_BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US)


def measure_linear(model: str, layer: str, rows: list[int]) -> list[dict[str, object]]:
    """Check one linear, then time it for every M; also the backward product where training meets it."""
    segments, k = layer_shapes(model)[layer]
    n = sum(segments)
    packed = [random_weight(segments, k) for _ in range(copies_past_l2(n * k * 0.5625, 1))]
    dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies_past_l2(2.0 * n * k, 1))]
    check(f"{model}.{layer}", packed[0])
    results = []
    for m in rows:
        x = torch.randn(m, k, device="cuda").bfloat16()
        ours = median_us(lambda i, x=x: quant_matmul(x, packed[i]), min(len(packed), copies_past_l2(n * k * 0.5625, m)))
        bf16 = median_us(lambda i, x=x: F.linear(x, dense[i]), min(len(dense), copies_past_l2(2.0 * n * k, m)))
        row = {"model": model, "layer": layer, "M": m, "lora_rank": 0, "us": round(ours, 2), "bf16_us": round(bf16, 2)}
        row["roofline_us"] = round(roofline_us(n, k, m), 2)
        row["path"] = "triton-few-rows" if m <= FEW_ROWS else "dequantize+cublas"
        if m >= 2048:
            dy = torch.randn(m, n, device="cuda").bfloat16()
            row["dx_us"] = round(median_us(lambda i, dy=dy: quant_matmul_dx(dy, packed[i]), 1), 2)
        results.append(row)
    return results


def measure_attention(model: str) -> list[dict[str, object]]:
    """Paged decode attention at 1,280 tokens: time, and the share of copy bandwidth of its KV reads."""
    _, _, heads, kv_heads, head_dim = MODELS[model]
    context, block_size, results = 1280, 16, []
    for batch in (1, 8, 64, 256):
        blocks = batch * context // block_size
        kv_bytes = 2.0 * 2 * batch * context * kv_heads * head_dim
        copies = copies_past_l2(kv_bytes, 1)
        shape = (copies, blocks, block_size, kv_heads, head_dim)
        k_cache, v_cache = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(batch, heads, head_dim, device="cuda").bfloat16()
        table = torch.randperm(blocks, device="cuda").int().view(batch, -1)
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        scale = head_dim**-0.5

        us = median_us(
            lambda i, q=q, k=k_cache, v=v_cache, rest=(table, lens, scale): paged_attention_decode(
                q, k[i], v[i], *rest
            ),
            copies,
        )
        share = kv_bytes / us / COPY_BYTES_PER_US
        results.append(
            {"model": model, "batch": batch, "context": context, "us": round(us, 2), "share_of_copy": round(share, 3)}
        )
    return results


def sweep(model: str, m: int) -> None:
    """Print the best launch parameters of the few-row kernel for each linear at `m` rows."""
    tiles = [(64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8)]
    for layer, (segments, k) in layer_shapes(model).items():
        n = sum(segments)
        packed = [random_weight(segments, k) for _ in range(copies_past_l2(n * k * 0.5625, 1))]
        x = torch.randn(m, k, device="cuda").bfloat16()
        current = median_us(partial(_indexed, quant_matmul, x, packed), len(packed))
        found = []
        for (block_n, block_k, warps), stages, slices in itertools.product(tiles, (3, 4, 6), (1, 2, 4, 8)):
            if slices > 1 and k // slices < 256:
                continue
            config = FewRowsConfig(block_n, block_k, slices, warps, stages)
            call = partial(_indexed, matmul_launch.few_rows_matmul, x, packed, None, config)
            try:
                found.append((median_us(call, len(packed)), config))
            except triton.runtime.errors.OutOfResources:
                continue
        floor = roofline_us(n, k, m)
        print(f"{model}.{layer} M={m}: roofline {floor:.1f} us, with the current choice {current:.1f} us")
        for us, config in sorted(found, key=lambda pair: pair[0])[:5]:
            print(f"   {us:7.2f} us  {config}")


def _indexed(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weights: list[GroupWeight], *rest: object
) -> torch.Tensor:
    *arguments, index = rest
    return function(x, weights[index], *arguments)


def print_table(rows: list[dict[str, object]], attention: list[dict[str, object]]) -> None:
    print("model layer      M        us   bf16 us   ratio  roofline  share  path")
    for row in rows:
        us, bf16, floor = row["us"], row["bf16_us"], row["roofline_us"]
        extra = f"  dx {row['dx_us']:.1f} us" if "dx_us" in row else ""
        print(
            f"{row['model']:5} {row['layer']:8} {row['M']:4} {us:9.1f} {bf16:9.1f} {bf16 / us:7.2f} {floor:9.1f}"
            f" {floor / us:6.2f}  {row['path']}{extra}"
        )
    print("\nsum of the four linears")
    for model, m in sorted({(row["model"], row["M"]) for row in rows}, key=lambda key: (key[0] != "7B", key[1])):
        part = [row for row in rows if (row["model"], row["M"]) == (model, m)]
        us, bf16, floor = (sum(row[name] for row in part) for name in ("us", "bf16_us", "roofline_us"))
        print(f"{model:5} {m:5} {us:9.1f} us, bf16 {bf16:9.1f}, roofline {floor:9.1f}, share {floor / us:.2f}")
    for row in attention:
        print(
            f"{row['model']} decode attention batch {row['batch']} x {row['context']}: {row['us']:.1f} us, "
            f"{100 * row['share_of_copy']:.0f}% of copy bandwidth"
        )


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else "uncommitted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--sweep", type=int, metavar="M", nargs="+")
    parser.add_argument("--commit", default=None, help="of the code that is measured, where there is no git")
    options = parser.parse_args()
    torch.manual_seed(0)
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        warm @ warm
    models = options.model or list(MODELS)
    if options.sweep:
        for model, m in itertools.product(models, options.sweep):
            sweep(model, m)
        return
    rows = [
        row for model in models for layer in layer_shapes(model) for row in measure_linear(model, layer, options.rows)
    ]
    attention = [row for model in models for row in measure_attention(model)]
    print_table(rows, attention)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "commit": options.commit or commit(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
        "attention": attention,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
