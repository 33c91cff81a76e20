"""``qerl task check NAME``: what a task asks, what it accepts, and what it pays for, before any training."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl.cli.errors import user_errors

if TYPE_CHECKING:
    from qerl.evaluation.prompts import PromptRenderer
    from qerl.evaluation.task_probes import Census, ProbeResult
    from qerl.tasks.base import Example, Task

_IDS_SHOWN = 5
_ROWS_SHOWN = 10

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _group() -> None:
    """Look at tasks before a model is trained or evaluated on them."""


@app.command()
@user_errors()
def check(
    name: Annotated[str, typer.Argument(help="gsm8k, reasoning_gym:NAME, a .jsonl or .parquet file, a hub data set.")],
    task_option: Annotated[
        list[str] | None, typer.Option("--task-option", help="KEY=VALUE for the task; repeatable.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts to show.")] = 1,
    problems: Annotated[int, typer.Option(min=1, help="Problems to try made-up completions on.")] = 5,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder: show prompts through its chat template, count tokens.")
    ] = None,
    allow_partial: Annotated[
        float, typer.Option(min=0.0, help="Score that a wrong answer may get, where partial credit is meant.")
    ] = 0.0,
) -> None:
    """Show prompts, golds and counts of a task, and score right, wrong, empty and hacked completions.

    Exit code 1 when a right answer is not paid, or one that deserves nothing is.
    """
    from qerl.cli.evaluate import parse_options
    from qerl.cli.progress import quiet_libraries
    from qerl.evaluation.task_probes import asked_format, census, run_probes, spread
    from qerl.tasks.registry import load_task
    from qerl.tasks.workers import RewardPool

    quiet_libraries()
    with _quiet_loading():
        task = load_task(name, **parse_options(task_option or []))
    examples = [*task.test, *task.train]
    if not examples:
        raise ValueError(f"task {name} has no examples; give it a size")
    typer.echo(f"{task.name}: answer format asked for: {asked_format(task)}")
    _show_census(census(task))
    findings = _show_prompts(task, examples, prompts, tokenizer)
    with RewardPool() as pool:
        results = run_probes(task, spread(examples, problems), pool, allow_partial=allow_partial)
    _show_probes(results)
    findings += _findings(results)
    for finding in findings:
        typer.echo(f"problem: {finding}", err=True)
    if findings:
        raise typer.Exit(1)
    if any(result.probe.pays for result in results):
        typer.echo("ok: right answers are paid, and nothing else")
    else:
        typer.echo(
            "ok: nothing is paid that should not be; no right answer could be made up (no golds), so none was tried"
        )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """What loading warns of is in the task's report, which is shown with the counts: it is not logged as well."""
    logger = logging.getLogger("qerl.tasks")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _show_census(counts: "Census") -> None:
    typer.echo(f"examples: {counts.train} train, {counts.test} test")
    for file in counts.missing_files:
        typer.echo(f"not in the data folder: {file}")
    typer.echo(f"excluded, answers cannot be checked: {len(counts.excluded)}")
    for row_id, reason in counts.excluded[:_ROWS_SHOWN]:
        typer.echo(f"  {row_id}: {reason}")
    if len(counts.excluded) > _ROWS_SHOWN:
        typer.echo(f"  and {len(counts.excluded) - _ROWS_SHOWN} more")
    for label, ids in (
        ("dropped, question repeated in train", counts.duplicates),
        ("dropped from train, question is in test", counts.overlap),
    ):
        shown = f" ({', '.join(ids[:_IDS_SHOWN])}{', ...' if len(ids) > _IDS_SHOWN else ''})" if ids else ""
        typer.echo(f"{label}: {len(ids)}{shown}")
    repeated_train, repeated_test = counts.repeated
    typer.echo(f"still repeated: {repeated_train} in train, {repeated_test} in test, {counts.shared} in both")
    if counts.without_gold:
        typer.echo(f"without a gold answer, scored by the task's own rule: {counts.without_gold}")


def _show_prompts(task: "Task", examples: "Sequence[Example]", count: int, tokenizer: Path | None) -> list[str]:
    """Print prompts with their golds; returns what is wrong with them."""
    from qerl.evaluation.task_probes import spread

    renderer = None if tokenizer is None else _renderer(tokenizer)
    for example in spread(examples, count):
        if renderer is None:
            text = "\n".join(f"[{message['role']}]\n{message['content']}" for message in task.messages(example))
            heading = f"prompt of {example.id}"
        else:
            rendered = renderer.render(task.messages(example))
            text, heading = rendered.text, f"prompt of {example.id}, {len(rendered.token_ids)} tokens"
        typer.echo(f"\n--- {heading}\n{text}\n--- gold: {example.answer or '(none)'}")
    typer.echo("")
    if renderer is None:
        return []
    lengths = {example.id: len(renderer.render(task.messages(example)).token_ids) for example in examples}
    longest = max(lengths, key=lambda example_id: lengths[example_id])
    typer.echo(f"longest prompt: {longest}, {lengths[longest]} tokens")
    opened = renderer.render(task.messages(examples[0])).text.rstrip().endswith("<think>")
    if opened == task.think_opened:
        return []
    state = "opens <think>" if opened else "does not open <think>"
    return [f"the chat template {state}; load the task with think_opened={opened}"]


def _renderer(folder: Path) -> "PromptRenderer":
    from transformers import AutoTokenizer

    from qerl.evaluation.prompts import PromptRenderer

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the model's local folder with --tokenizer")
    return PromptRenderer(AutoTokenizer.from_pretrained(folder))


def _show_probes(results: "Sequence[ProbeResult]") -> None:
    """One line per kind of probe: how often it was paid, and the first reason."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("completion", no_wrap=True)
    table.add_column("should", no_wrap=True)
    table.add_column("scores", no_wrap=True)
    table.add_column("why (first)", overflow="fold")
    kinds: dict[str, list[ProbeResult]] = {}
    for result in results:
        kinds.setdefault(result.probe.name, []).append(result)
    for name, group in kinds.items():
        scores = " ".join("-" if r.outcome.score is None else f"{r.outcome.score:g}" for r in group)
        first = next((r for r in group if r.problem), group[0])
        table.add_row(name, "be paid" if first.probe.pays else "get 0", scores, first.outcome.reason)
    console = Console()
    console.print(table, markup=False)


def _findings(results: "Sequence[ProbeResult]") -> list[str]:
    """One sentence per kind of probe that was scored wrongly."""
    found: dict[str, list[ProbeResult]] = {}
    for result in results:
        if result.problem:
            found.setdefault(result.probe.name, []).append(result)
    sentences = []
    for name, group in found.items():
        first = group[0]
        hint = "" if first.probe.pays else "; if partial credit is meant, --allow-partial SCORE accepts it"
        sentences.append(
            f"{name}: {first.problem} in {len(group)} problems, first {first.example.id} (gold "
            f"{first.example.answer!r}, completion {first.probe.completion!r}: {first.outcome.reason}){hint}"
        )
    return sentences
