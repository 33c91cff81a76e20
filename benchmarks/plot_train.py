"""Draw the reward curves of a train_smollm2 JSON: one panel per weight format, one thin line per seed, bold mean.

python benchmarks/plot_train.py benchmarks/results/train-smollm2-h200.json docs/img/train-smollm2-h200.png
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Trailing mean."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def main() -> None:
    """Read argv[1], write argv[2]."""
    source, target = map(Path, sys.argv[1:3])
    document = json.loads(source.read_text())
    variants = ["bf16 LoRA", "NF4", "NVFP4", "NVFP4 + AQN"]
    figure, axes = plt.subplots(1, 4, figsize=(12, 2.8), sharey=True, constrained_layout=True)
    for axis, variant in zip(axes, variants, strict=True):
        curves = [smooth(r["curves"]["reward"]) for r in document["runs"] if r["variant"] == variant and "curves" in r]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color="#4c78a8", alpha=0.4, linewidth=1)
        if curves:
            mean = [sum(step) / len(step) for step in zip(*curves, strict=True)]
            axis.plot(range(1, len(mean) + 1), mean, color="#1f3b57", linewidth=2)
        axis.set_title(f"{variant} ({len(curves)} seeds)", fontsize=10)
        axis.set_xlabel("update")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("reward, mean of 5 updates")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
