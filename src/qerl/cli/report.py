"""``qerl report``: the HTML report of a training run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Output folder of a training run.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default RUN/report.html.")] = None,
) -> None:
    """Write one self-contained HTML file with curves, results and samples, and a PNG of the curves."""
    from qerl.evaluation.report import write_report

    typer.echo(write_report(run, out))
