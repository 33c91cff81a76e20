"""``qerl export RUN OUT``: what a run trained, for other tools."""

from pathlib import Path
from typing import Annotated

import typer

FORMATS = ("adapter", "merged")


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, checkpoint or adapter folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    format: Annotated[
        str,
        typer.Option("--format", help="adapter: the plain PEFT adapter; merged: a 16-bit model with it merged in."),
    ] = "merged",
    model: Annotated[
        Path | None, typer.Option(help="Base model; default: the run's, or the one the adapter names.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights that were trained on (auto, bf16, nvfp4, nf4, mxfp4); default: the run's."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Output head that was trained on (auto, bf16, nvfp4); default: the run's.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export at OUT.")] = False,
) -> None:
    """Export a trained run. Merged weights are bf16(base + s B A), with the base as the 4 bits decode to."""
    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is unknown; choose from {', '.join(FORMATS)}")
    from qerl.cli.progress import quiet_libraries
    from qerl.cli.signals import exit_on_sigterm
    from qerl.evaluation.folders import find_adapter, run_settings

    adapter = find_adapter(run)
    settings = run_settings(adapter)
    base = str(model) if model is not None else settings.get("model") or _named_base(adapter)
    if format == "merged" and (base is None or not Path(base).is_dir()):
        raise ValueError(
            f"the base model of {adapter} is not here ({base or 'not named in its config'}): give its folder with "
            "--model"
        )
    quiet_libraries()
    with exit_on_sigterm():
        if format == "adapter":
            from qerl.nn.merge import export_adapter

            export_adapter(adapter, out, base=base, force=force)
            typer.echo(f"adapter {adapter} -> {out} (base model: {base or 'not named'})")
            return
        from qerl.nn.merge import merge_adapter

        chosen = weights or settings.get("weights") or "auto"
        chosen_head = head or settings.get("head") or "auto"
        report = merge_adapter(base, adapter, out, weights=chosen, head=chosen_head, device=device, force=force)
    typer.echo(
        f"{adapter} merged into {base} ({report.weights} weights): {len(report.merged)} modules, "
        f"{report.total_bytes / 1e6:.1f} MB of bf16 in {out}"
    )


def _named_base(adapter: Path) -> str | None:
    import json

    return json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
