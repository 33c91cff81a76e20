"""``qerl eval``: evaluate a model, with or without an adapter, on one or several tasks."""

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from qerl.cli.options import Adapter, Device, Head, MaxModelLen, Model, Seed, Weights

if TYPE_CHECKING:
    from qerl.evaluation.result import EvalResult
    from qerl.tasks.base import Task

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
# how tasks without a preset are sampled where nothing is said
_SAMPLING: dict[str, int | float] = {"n": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 512}

Tasks = Annotated[
    str | None,
    typer.Option(help="Comma-separated: gsm8k, math500, reasoning_gym:NAME, code:FILE, a .jsonl or .parquet file."),
]
Presets = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Instead of --tasks: benchmarks with prompt, n, temperature, top-p and token limit as documented in "
        "qerl.evaluation.presets; gsm8k, math500, aime24, aime25, amc23. Options given here win.",
    ),
]
Samples = Annotated[
    int | None, typer.Option("--n", min=1, help="Samples per problem (above 1: temperature > 0); default 1.")
]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy, and the default.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; default 1, off.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Token limit of a completion; default 512.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first problems of each task.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Problems per batch and write.")]
TaskOptions = Annotated[
    list[str] | None, typer.Option("--task-option", help="KEY=VALUE for the tasks, such as test_size=128.")
]
Out = Annotated[Path | None, typer.Option(help="Results folder; default evals/MODEL[+ADAPTER]-DIGEST.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing stored results.")]


class Planned(NamedTuple):
    """A task to evaluate, with ``n``, ``temperature``, ``top_p`` and ``max_new_tokens``."""

    task: "Task"
    sampling: dict[str, Any]


def evaluate(
    model: Model,
    tasks: Tasks = None,
    preset: Presets = None,
    adapter: Adapter = None,
    weights: Weights = "auto",
    head: Head = "auto",
    n: Samples = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    seed: Seed = 0,
    batch_size: BatchSize = None,
    task_option: TaskOptions = None,
    out: Out = None,
    fresh: Fresh = False,
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Evaluate a model on tasks: accuracy with 95 % intervals, pass@k, maj@k; keeps every completion."""
    given = {"n": n, "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    # Before the model is loaded: an unknown task or a bad option must not cost minutes.
    planned = plan(
        tasks, preset, task_option or [], {name: value for name, value in given.items() if value is not None}
    )
    folder = out or Path("evals") / folder_name(model, adapter)

    from qerl.cli.progress import quiet_libraries
    from qerl.evaluation.eval_report import write_eval_report
    from qerl.evaluation.fingerprint import model_fingerprint
    from qerl.evaluation.presets import MAX_PROMPT_TOKENS
    from qerl.evaluation.runner import evaluate as run_evaluation
    from qerl.rollout.build import build_engine

    quiet_libraries()
    if preset is not None and max_model_len is None:
        max_model_len = MAX_PROMPT_TOKENS + max(sampling["max_new_tokens"] for _, sampling in planned)
    source = {"weights": weights, "head": head, "adapter": None if adapter is None else str(adapter)}
    engine, tokenizer, _ = build_engine(model, **source, device=device, max_model_len=max_model_len)
    results = []
    for task, sampling in planned:
        with _progress(task.name) as progress:
            result = run_evaluation(
                engine,
                tokenizer,
                task,
                **sampling,
                limit=limit,
                seed=seed,
                batch_size=batch_size,
                output_dir=folder / _slug(task.name),
                resume=not fresh,
                progress=progress,
                model=model,
                fingerprint=model_fingerprint(Path(model), adapter),
                **source,
            )
        results.append(result)
    _print_table(results)
    typer.echo(f"results: {folder}\nreport:  {write_eval_report(folder)}")


def plan(tasks: str | None, preset: str | None, pairs: list[str], given: dict[str, Any]) -> list[Planned]:
    """What ``--tasks`` or ``--preset`` asks for, under the task options ``pairs`` and the sampling options ``given``.

    Raises:
        ValueError: both or neither of the two, an unknown name or option.
        GreedySamplesError: several samples at temperature 0.
    """
    from qerl.evaluation.presets import get_preset

    if (tasks is None) == (preset is None):
        raise ValueError("give either --tasks or --preset; for example --tasks gsm8k,reasoning_gym:chain_sum")
    if preset is None:
        _check_sampling("--tasks", sampling := _SAMPLING | given)
        return [Planned(task, sampling) for task in load_tasks(tasks or "", pairs)]
    presets = [get_preset(name.strip()) for name in preset.split(",")]
    samplings = [chosen.sampling() | given for chosen in presets]
    for chosen, sampling in zip(presets, samplings, strict=True):
        _check_sampling(f"preset {chosen.task}", sampling)
    loaded = [load_tasks(chosen.task, pairs, chosen.task_options())[0] for chosen in presets]
    return [Planned(task, sampling) for task, sampling in zip(loaded, samplings, strict=True)]


def _check_sampling(where: str, sampling: dict[str, Any]) -> None:
    n, top_p = sampling["n"], sampling["top_p"]
    if sampling["temperature"] > 0:
        return
    if n > 1:
        from qerl.rollout.core import GreedySamplesError

        raise GreedySamplesError(
            f"{where}: --n {n} at temperature 0 makes {n} equal samples; set --temperature above 0, or --n 1"
        )
    if top_p < 1:
        raise ValueError(
            f"{where}: --top-p {top_p:g} has no effect at temperature 0; set --temperature above 0, or --top-p 1"
        )


def load_tasks(tasks: str, pairs: list[str], defaults: dict[str, Any] | None = None) -> "list[Task]":
    """The tasks of a comma-separated list, each with the options ``pairs``, or else ``defaults``.

    Raises:
        ValueError: no task, an unknown one, or a bad option.
    """
    from qerl.tasks.registry import load_task

    specs = [spec.strip() for spec in tasks.split(",") if spec.strip()]
    if not specs:
        raise ValueError("--tasks names no task; for example --tasks gsm8k,reasoning_gym:chain_sum")
    options = (defaults or {}) | parse_options(pairs)
    # A file given for evaluation is the test side unless the user says otherwise.
    sides = [{"split": "test"} if spec.endswith(_FILE_SUFFIXES) else {} for spec in specs]
    return [load_task(spec, **{**side, **options}) for spec, side in zip(specs, sides, strict=True)]


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """``["size=64", "prompt=number"]`` as keyword arguments; values are YAML scalars.

    Raises:
        ValueError: a pair without ``=``.
    """
    import yaml

    options = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"--task-option {pair!r} is not KEY=VALUE")
        options[key.strip()] = yaml.safe_load(value)
    return options


def folder_name(model: str, adapter: Path | None) -> str:
    """``MODEL[+ADAPTER]-DIGEST``: last parts of the paths to read, and a digest of the whole paths to tell apart.

    Many models are called ``model`` and most adapters ``adapter``; the same paths give the same name, so that an
    evaluation that was interrupted continues.
    """
    paths = [Path(model).resolve(), *([] if adapter is None else [adapter.resolve()])]
    digest = hashlib.sha256("\0".join(map(str, paths)).encode()).hexdigest()[:8]
    return f"{_slug('+'.join(path.name for path in paths))}-{digest}"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "task"


def _progress(label: str) -> Any:
    """A context manager that yields the progress callback: a bar on stderr, silent when it is no terminal."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def bar() -> Any:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            row = progress.add_task(label, total=None, tokens=0)
            yield lambda done, total, tokens: progress.update(row, completed=done, total=total, tokens=tokens)

    return bar()


def _print_table(results: "list[EvalResult]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", overflow="fold")
    for heading in ("problems", "accuracy", "95 % interval", "truncated", "tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.task,
            str(result.problems) if result.n == 1 else f"{result.problems} × {result.n}",
            f"{result.accuracy:.1%}",
            f"{100 * result.low:.1f} to {100 * result.high:.1f} %",
            f"{result.truncated_share:.1%}",
            "stored" if result.tokens_per_s is None else f"{result.tokens_per_s:,.0f}",
        )
    Console().print(table)
    for result in results:
        if result.n > 1:
            passes = "  ".join(f"pass@{k} {value:.1%}" for k, value in result.pass_at_k.items())
            typer.echo(f"{result.task}: {passes}  maj@{result.n} {result.majority_at_k[result.n]:.1%}")
