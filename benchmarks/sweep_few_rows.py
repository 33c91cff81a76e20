"""Tile sizes of the Triton few-row kernel: the best launch parameters of each linear for a number of rows.

python benchmarks/sweep_few_rows.py --model 7B --rows 8
"""

import argparse
import itertools

import torch
import triton

from qerl.benchmarking.geometry import KNOWN
from qerl.benchmarking.timing import median_us, rotation
from qerl.kernels.quant_matmul import launch as matmul_launch
from qerl.kernels.quant_matmul.config import FewRowsConfig
from qerl.nn.random_weights import random_group

TILES = [(64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8)]


def sweep(model: str, m: int) -> None:
    device = torch.device("cuda")
    for layer, (segments, k) in KNOWN[model].linears().items():
        copies = rotation(sum(segments) * k * 0.5625, device)
        groups = [random_group("nvfp4", segments, k, torch.bfloat16, device) for _ in range(copies)]
        weights = [group.group_weight() for group in groups]
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        found = []
        for (block_n, block_k, warps), stages, slices in itertools.product(TILES, (3, 4, 6), (1, 2, 4, 8)):
            if slices > 1 and k // slices < 256:
                continue
            config = FewRowsConfig(block_n, block_k, slices, warps, stages)

            def call(i: int, x: torch.Tensor = x, config: FewRowsConfig = config, weights: list = weights) -> None:
                matmul_launch.few_rows_matmul(x, weights[i], None, config)

            try:
                found.append((median_us(call, copies, device), config))
            except triton.runtime.errors.OutOfResources:
                continue
        now = median_us(lambda i, x=x, groups=groups: groups[i].matmul(x), copies, device)
        print(f"{model}.{layer} M={m}: as chosen now {now:.1f} us")
        for us, config in sorted(found, key=lambda pair: pair[0])[:5]:
            print(f"   {us:7.2f} us  {config}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=KNOWN, default="7B")
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    options = parser.parse_args()
    torch.manual_seed(0)
    for rows in options.rows:
        sweep(options.model, rows)
