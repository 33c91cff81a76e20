"""Launch parameters of paged decode attention: the best ones for a number of sequences of 1,280 tokens.

python benchmarks/sweep_attention.py --model 7B --batch 8
"""

import argparse

import torch
import triton

from qerl.benchmarking.geometry import KNOWN
from qerl.benchmarking.timing import median_us, rotation
from qerl.kernels.device import multiprocessor_count
from qerl.kernels.paged_attention import hopper, launch, paged_attention_decode
from qerl.kernels.paged_attention.launch import DecodeConfig

CONTEXT, BLOCK_SIZE = 1280, 16
# block_n, programs_per_sm, num_warps, num_stages
SWEPT = (
    *((64, 4, 4, 3), (64, 5, 4, 3), (64, 5, 4, 2), (64, 6, 4, 2), (64, 3, 4, 5), (64, 2, 8, 5), (64, 4, 2, 3)),
    *((32, 4, 4, 5), (32, 5, 4, 5), (32, 6, 4, 3), (32, 8, 2, 3), (32, 8, 2, 5), (128, 2, 8, 3), (128, 3, 4, 2)),
)


def sweep(model: str, batch: int) -> None:
    device, sizes = torch.device("cuda"), KNOWN[model]
    blocks = batch * CONTEXT // BLOCK_SIZE
    copies = rotation(4.0 * batch * CONTEXT * sizes.kv_heads * sizes.head_dim, device)
    shape = (copies, blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, sizes.heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=device).int().view(batch, -1)
    lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device=device)

    def decode(config: DecodeConfig, i: int) -> None:
        slices = launch.num_slices(batch, sizes.kv_heads, CONTEXT, multiprocessor_count(0), config)
        launch.decode(q, k[i], v[i], table, lens, sizes.head_dim**-0.5, slices, config)

    scale = sizes.head_dim**-0.5
    found: list[tuple[float, object]] = []
    for shape in hopper.SHAPES if hopper.serves(q, k[0], v[0]) else ():
        us = median_us(lambda i, shape=shape: hopper.decode(q, k[i], v[i], table, lens, scale, shape), copies, device)
        found.append((us, f"Hopper: clusters of {shape[0]} blocks of {shape[1]} warps"))
    for block_n, per_sm, warps, stages in SWEPT:
        config = DecodeConfig(block_n, per_sm, num_warps=warps, num_stages=stages)
        try:
            found.append((median_us(lambda i, config=config: decode(config, i), copies, device), config))
        except triton.runtime.errors.OutOfResources:
            continue
    now = median_us(lambda i: paged_attention_decode(q, k[i], v[i], table, lens, scale), copies, device)
    print(f"{model} batch {batch}: as chosen now {now:.1f} us")
    for us, what in sorted(found, key=lambda pair: pair[0]):
        print(f"   {us:7.2f} us  {what}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=KNOWN, default="7B")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    options = parser.parse_args()
    for sequences in options.batch:
        sweep(options.model, sequences)
