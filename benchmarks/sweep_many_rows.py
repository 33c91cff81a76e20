"""Tile shapes of the Hopper many-row kernel: the time of every plan that may be the best for a linear and a number of
rows, beside what is estimated for it.

python benchmarks/sweep_many_rows.py --model 7B --rows 64 256 --rank 32 --out sweep.json
"""

import argparse
import json
from pathlib import Path

import torch

from qerl.benchmarking.geometry import KNOWN
from qerl.benchmarking.timing import Timed, medians_us, rms_ratio, rotation
from qerl.kernels.device import multiprocessor_count
from qerl.kernels.quant_matmul import LoraUpdate, hopper
from qerl.kernels.quant_matmul.hopper_plan import ManyRowsPlan, all_many_rows_plans, many_rows_plan
from qerl.nn.random_weights import random_group

# Plans whose estimate is further above the least one are left out.
WORTH_A_TRY = 1.5


def random_update(segments: tuple[int, ...], k: int, rank: int, device: torch.device) -> LoraUpdate:
    """Factors of `rank` for every member of a group."""
    a = torch.randn(len(segments) * rank, k, device=device, dtype=torch.bfloat16) / k**0.5
    b = torch.randn(sum(segments) * rank, device=device, dtype=torch.bfloat16)
    places = tuple((i * rank, rank, sum(segments[:i]) * rank) for i in range(len(segments)))
    return LoraUpdate(a, b, places)


def sweep(model: str, layers: list[str], rows: list[int], rank: int) -> list[dict]:
    device, found = torch.device("cuda", 0), []
    sms = multiprocessor_count(0)
    for layer, (segments, k) in KNOWN[model].linears().items():
        if layer not in layers:
            continue
        n = sum(segments)
        copies = rotation(n * k * 0.5625, device)
        weights = [random_group("nvfp4", segments, k, torch.bfloat16, device).group_weight() for _ in range(copies)]
        updates = [random_update(segments, k, rank, device) if rank else None for _ in range(copies)]
        for m in rows:
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            y, u = (torch.empty(m, c, device=device, dtype=torch.bfloat16) for c in (n, max(1, len(segments) * rank)))

            def call(i: int, plan: ManyRowsPlan, x=x, y=y, u=u, weights=weights, updates=updates) -> torch.Tensor:  # type: ignore[no-untyped-def]
                hopper.run_many_rows(plan, x, weights[i], None, updates[i], y, u)
                return y

            ranks = len(segments) * rank
            chosen = many_rows_plan(m, n, k, sms, ranks=ranks)
            plans = [p for p in all_many_rows_plans() if p.tokens < max(2 * m, 17) and p.fits(m, n, k, sms)]
            plans = [p for p in plans if p.cost(m, n, k, sms, ranks) < WORTH_A_TRY * chosen.cost(m, n, k, sms, ranks)]
            expected = call(0, ManyRowsPlan(16, 2, True)).clone()
            for plan in plans:
                error = rms_ratio(call(0, plan), expected)
                assert error < 1e-3, f"{plan}: {error}"
            works = [Timed(lambda i, plan=plan, call=call: call(i, plan), copies) for plan in plans]
            times = medians_us(works, device)
            print(f"{model}.{layer} M={m}, {n} x {k}")
            for us, plan in sorted(zip(times, plans, strict=True), key=lambda pair: pair[0])[:8]:
                way = f"clusters of {plan.cluster}" if plan.cluster > 1 else "whole" if plan.whole else "shared"
                mark = " <- chosen" if plan == chosen else ""
                print(f"   {us:7.2f} us, estimated {plan.cost(m, n, k, sms, ranks):6.1f}  {plan.name} {way}{mark}")
            for us, plan in zip(times, plans, strict=True):
                shape = {"tokens": plan.tokens, "groups": plan.groups, "whole": plan.whole, "cluster": plan.cluster}
                found.append(
                    {"model": model, "rank": rank, "layer": layer, "m": m, "n": n, "k": k, **shape, "us": round(us, 3)}
                )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=KNOWN, nargs="+", default=["7B"])
    parser.add_argument("--layer", nargs="+", default=["qkv", "o", "down"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--rank", type=int, default=0, help="of LoRA, u made on the way where a plan can")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = [row for model in options.model for row in sweep(model, options.layer, options.rows, options.rank)]
    if options.out:
        options.out.write_text(json.dumps(results))
