"""Train SmolLM2-135M on the demo task with each weight format and several seeds; write one JSON with all curves.

Runs are separate processes, a few at a time on one GPU:

    PYTHONPATH=src python benchmarks/train_smollm2.py --model models/smollm2-bf16 --out OUT.json --commit abc1234
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

VARIANTS = {
    "bf16 LoRA": {"weights": "bf16", "aqn_schedule": "none"},
    "NF4": {"weights": "nf4", "aqn_schedule": "none"},
    "NVFP4": {"weights": "nvfp4", "aqn_schedule": "none"},
    "NVFP4 + AQN": {"weights": "nvfp4", "aqn_schedule": "exponential"},
    "MXFP4": {"weights": "mxfp4", "aqn_schedule": "none"},
}
DEFAULT_VARIANTS = "bf16 LoRA,NF4,NVFP4,NVFP4 + AQN"
CURVES = ("reward", "length", "entropy", "sigma", "mismatch_mean", "mismatch_max", "ess", "tokens_per_s")
TIMES = ("time_generate", "time_score", "time_train")


def run_values(model: str, out: Path, variant: str, seed: int, steps: int) -> dict:
    """Fields of one run: the demo's, with more steps and a full parity probe."""
    from qerl.cli.demo import demo_values

    return {
        **demo_values(model, str(out), seed, steps, "auto"),
        **VARIANTS[variant],
        "num_stages": 10,
        "parity_tokens": 512,
        "reward_workers": 1,
        "disable_tqdm": True,
    }


def run_one(model: str, folder: Path, variant: str, seed: int, steps: int) -> dict:
    """One training process; returns its curves."""
    out = folder / f"{variant.replace(' ', '').replace('+', '-')}-{seed}"
    values = run_values(model, out, variant, seed, steps)
    code = (
        "import json, sys\n"
        "from qerl.cli.progress import quiet_libraries\n"
        "quiet_libraries()\n"
        "from qerl.trainer.parsing import build_configs\n"
        "from qerl.trainer.run import Run\n"
        "Run(*build_configs(json.loads(sys.argv[1])), print).execute()\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(values)], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-1500:] + done.stderr[-3000:])
        return {"variant": variant, "seed": seed, "error": done.stderr.strip().splitlines()[-1:]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    late = rows[20:] or rows
    return {
        "variant": variant,
        "seed": seed,
        "before": summary["before"],
        "after": summary["after"],
        "seconds": summary["seconds"],
        "memory_gb": rows[-1]["memory_gb"],
        "mismatch_mean_after_20_steps": sum(r["mismatch_mean"] for r in late) / len(late),
        "seconds_per_step": {name: sum(r[name] for r in rows[2:]) / max(len(rows) - 2, 1) for name in TIMES},
        "curves": {name: [r[name] for r in rows] for name in CURVES},
    }


def main() -> None:
    """Run the variants and seeds, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/train-smollm2"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, help=f"with commas, of: {', '.join(VARIANTS)}")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    variants = args.variants.split(",")
    if not set(variants) <= VARIANTS.keys():
        parser.error(f"--variants {args.variants!r}: choose from {', '.join(VARIANTS)}")
    from qerl.evaluation.environment import describe_environment

    document = {
        "benchmark": "train_smollm2",
        "commit": args.commit,
        "date": datetime.date.today().isoformat(),
        "environment": describe_environment(),
        "steps": args.steps,
        "runs": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = [(variant, seed) for seed in range(args.seeds) for variant in variants]
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        futures = [pool.submit(run_one, args.model, args.folder, v, s, args.steps) for v, s in jobs]
        for future in concurrent.futures.as_completed(futures):
            document["runs"].append(future.result())
            args.out.write_text(json.dumps(document))  # after every run: a session may end early
            print(describe(document["runs"][-1]), flush=True)


def describe(result: dict) -> str:
    """One line about a finished run."""
    head = f"{result['variant']:14} seed {result['seed']}"
    if "error" in result:
        return f"{head}  FAILED {result['error']}"
    return (
        f"{head}  {result['before']['accuracy']:.3f} -> {result['after']['accuracy']:.3f}  mismatch "
        f"{result['mismatch_mean_after_20_steps']:.2e}  train {result['seconds']['train']:.0f} s  "
        f"{result['memory_gb']:.2f} GB"
    )


if __name__ == "__main__":
    main()
