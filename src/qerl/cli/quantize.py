"""``qerl quantize MODEL OUT``: a 4-bit (or plain bf16) copy of a checkpoint."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from qerl.formats.quantizer import QuantizeReport


def quantize(
    model: Annotated[
        Path,
        typer.Argument(help="Local checkpoint folder (safetensors), or a GGUF file.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    format: Annotated[
        str, typer.Option("--format", help="nvfp4, nf4, mxfp4, or bf16 for a plain 16-bit copy.")
    ] = "nvfp4",
    method: Annotated[
        str,
        typer.Option("--method", help="rtn (as llm-compressor), or mse: searched block scales, lower error."),
    ] = "rtn",
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", help="Module or pattern to leave in 16 bit besides lm_head; repeatable."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint at OUT.")] = False,
) -> None:
    """Quantize a model, tensor by tensor; memory does not grow with its size."""
    # torch and rich take longer to import than `--help` may.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from qerl.cli.signals import exit_on_sigterm
    from qerl.formats.quantizer import quantize as run

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with exit_on_sigterm(), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, description=name, completed=done, total=total)

        report = run(
            model,
            out,
            format=format,
            method=method,
            keep=keep or (),
            device=device,
            force=force,
            progress=show,
        )
    console = Console()
    console.print(_summary(report, out))
    for line in _remarks(report):
        console.print(line, markup=False)


def _summary(report: "QuantizeReport", out: Path) -> "Table":
    """The figures of a run as a table of two columns."""
    from rich.table import Table

    table = Table(title=str(out), show_header=False)
    method = f" ({report.method})" if report.quantized else ""
    table.add_row("format", f"{report.format}{method}")
    table.add_row("layers in 4 bit", f"{len(report.quantized)}")
    table.add_row("bits per weight", f"{report.bits_per_weight:.3f}")
    for kind, decibel in report.sqnr_db.items():
        table.add_row(f"SQNR {kind}", f"{decibel:.2f} dB")
    ratio = report.bytes_before / report.bytes_after
    table.add_row("weights on disk", f"{_mb(report.bytes_before)} -> {_mb(report.bytes_after)} ({ratio:.2f}x)")
    table.add_row("time", f"{report.seconds:.1f} s")
    table.add_row("peak memory", _mb(report.peak_rss_bytes))
    return table


def _remarks(report: "QuantizeReport") -> list[str]:
    """Notes, and why matrices were kept in 16 bit, with their number."""
    reasons = Counter(report.kept.values())
    return [*report.notes, *(f"kept in 16 bit: {count} x {reason}" for reason, count in reasons.items())]


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
