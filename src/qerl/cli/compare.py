"""``qerl compare``: is the difference between two evaluations more than chance?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qerl.evaluation.paired import Comparison
    from qerl.evaluation.result import EvalSettings

_LEVEL = 0.05


def compare(
    run_a: Annotated[Path, typer.Argument(help="Evaluation folder, or one that holds several.")],
    run_b: Annotated[Path, typer.Argument(help="The other one.")],
    allow: Annotated[
        list[str] | None, typer.Option(help="Accept this difference besides the model, such as seed; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the permutation test and the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Compare two evaluations problem by problem: difference B - A, its 95 % interval, an exact or permutation test.

    Refuses evaluations that differ in the task, the problems, the prompts or any setting but the model.
    """
    from qerl.evaluation.comparable import require_comparable
    from qerl.evaluation.folders import finished_evaluations
    from qerl.evaluation.paired import compare as paired

    first, second = finished_evaluations(run_a), finished_evaluations(run_b)
    if len(first) == len(second) == 1:
        # one evaluation each: their tasks must agree, which require_comparable says by name
        matched = [(*first.values(), *second.values())]
    else:
        matched = [(result, second[task]) for task, result in first.items() if task in second]
    if not matched:
        raise ValueError(f"no task in common: {', '.join(first)} in {run_a}; {', '.join(second)} in {run_b}")
    for one, two in matched:
        require_comparable(one, two, allow or ())
    compared = {one.task: paired(one.outcomes(), two.outcomes(), seed=seed) for one, two in matched}
    left_out = sorted(first.keys() ^ second.keys())
    if as_json:
        typer.echo(_json(run_a, run_b, compared, left_out))
        return
    _print_table(compared)
    typer.echo(f"A: {_describe(matched[0][0].settings)}\nB: {_describe(matched[0][1].settings)}")
    for task, result in compared.items():
        typer.echo(f"{task}: {_verdict(result)}")
    if len(compared) > 1:
        typer.echo(f"{len(compared)} tests were made; the p-values are not corrected for that")
    if left_out:
        typer.echo(f"in one folder only, not compared: {', '.join(left_out)}")


def _describe(settings: "EvalSettings") -> str:
    """Model, weights and adapter of one side."""
    weights = None if settings.weights is None else f"weights {settings.weights}"
    head = None if settings.head is None else f"head {settings.head}"
    adapter = None if settings.adapter is None else f"adapter {settings.adapter}"
    return ", ".join(part for part in (settings.model or "unnamed model", weights, head, adapter) if part)


def _verdict(result: "Comparison") -> str:
    change = f"{result.gained} problems better, {result.lost} worse of {result.pairs}; {result.test}"
    if result.p_value >= _LEVEL:
        return f"no evidence of a difference at the 5 % level ({change})"
    return f"B is {'better' if result.difference > 0 else 'worse'} than A at the 5 % level ({change})"


def _print_table(compared: "dict[str, Comparison]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", overflow="fold")
    for heading in ("problems", "A", "B", "B - A", "95 % interval", "better/worse", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    for task, result in compared.items():
        table.add_row(
            task,
            str(result.pairs),
            f"{result.before:.1%}",
            f"{result.after:.1%}",
            f"{100 * result.difference:+.1f}",
            f"{100 * result.low:+.1f} to {100 * result.high:+.1f}",
            f"{result.gained}/{result.lost}",
            f"{result.p_value:.3f}" if result.p_value >= 0.001 else f"{result.p_value:.1e}",
        )
    Console().print(table)


def _json(run_a: Path, run_b: Path, compared: "dict[str, Comparison]", left_out: list[str]) -> str:
    """``before`` is A, ``after`` is B; shares in [0, 1]."""
    from dataclasses import asdict

    values = {
        "a": str(run_a),
        "b": str(run_b),
        "tasks": {task: asdict(result) for task, result in compared.items()},
        "not_compared": left_out,
    }
    return json.dumps(values, ensure_ascii=False, indent=2)
