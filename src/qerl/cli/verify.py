"""``qerl verify``: compare predictions with gold answers, one JSON line a row."""

from pathlib import Path
from typing import Annotated

import typer


def verify(
    file: Annotated[Path, typer.Argument(help="A .jsonl file; each row has `gold` and `prediction`.")],
    workers: Annotated[int | None, typer.Option(help="Worker processes (default: one a CPU).")] = None,
    deadline: Annotated[float, typer.Option(help="Seconds one row may take.")] = 5.0,
    think_opened: Annotated[
        bool, typer.Option(help="The chat template opens <think>: a prediction without </think> has no answer.")
    ] = False,
) -> None:
    """Print one JSON line a row: its id (or number), `equal`, `reason`; a summary goes to stderr."""
    import json

    from qerl.tasks.sources import read_file
    from qerl.tasks.workers import RewardPool

    rows = read_file(file)
    for number, row in enumerate(rows, start=1):
        for column in ("gold", "prediction"):
            if not isinstance(row.get(column), str):
                raise ValueError(f"{file}, row {number}: the column {column!r} must be text, got {row.get(column)!r}")
    with RewardPool(workers, deadline_s=deadline) as pool:
        outcomes = pool.verify(
            [row["gold"] for row in rows], [row["prediction"] for row in rows], think_opened=think_opened
        )
    for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True), start=1):
        line = {"id": row.get("id", number), "equal": outcome.score == 1.0, "reason": outcome.reason}
        typer.echo(json.dumps(line, ensure_ascii=False))
    equal = sum(outcome.score == 1.0 for outcome in outcomes)
    stuck = sum(outcome.counter in ("timeout", "exhausted") for outcome in outcomes)
    typer.echo(f"{equal} of {len(rows)} equal, {stuck} stopped at a limit", err=True)
