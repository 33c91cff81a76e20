"""``qerl doctor``: what this machine offers, and what is missing for a run."""

from pathlib import Path
from typing import Any

import typer

REQUIRED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "math-verify")
# 4-bit weights are decoded to bf16, which Ampere (8.0) is the first to multiply in tensor cores.
MIN_CAPABILITY = (8, 0)


def doctor() -> None:
    """Check this machine: packages, GPU, memory, disk. Exit code 1 when something needed is missing."""
    from qerl.evaluation.environment import describe_environment, free_disk_gb, package_versions

    missing = [name for name in REQUIRED if name not in package_versions()]
    if "torch" in missing:
        typer.echo("problem: torch is not installed; pip install qerl", err=True)
        raise typer.Exit(1)
    environment = describe_environment()
    for label, text in (
        ("python", f"{environment['python']} on {environment['system']}"),
        ("cpu", f"{environment['cpu']}, {environment['cpu_cores']} usable cores"),
        ("memory", f"{environment['memory_gb']} GB"),
        ("disk", f"{free_disk_gb(Path.cwd())} GB free here"),
        ("packages", ", ".join(f"{name} {found}" for name, found in environment["packages"].items())),
        *(("gpu", _gpu_line(index, gpu)) for index, gpu in enumerate(environment["gpus"])),
    ):
        typer.echo(f"{label:<10}{text}")
    problems = [f"{name} is not installed; pip install qerl" for name in missing]
    problems += gpu_problems(environment)
    for problem in problems:
        typer.echo(f"problem: {problem}", err=True)
    if not environment["gpus"]:
        typer.echo("note: no CUDA GPU, so everything runs on the CPU: fine for the demo and models below 1B")
    if problems:
        raise typer.Exit(1)
    typer.echo("ok")


def gpu_problems(environment: dict[str, Any]) -> list[str]:
    """What stands in the way of the GPUs in ``environment`` (see ``describe_environment``)."""
    problems = []
    for gpu in environment["gpus"]:
        capability = tuple(int(part) for part in gpu["capability"].split("."))
        if capability < MIN_CAPABILITY:
            problems.append(f"{gpu['name']} has compute capability {gpu['capability']}; 8.0 or later is needed")
    if environment["gpus"] and "triton" not in environment["packages"]:
        problems.append("triton is not installed, which the GPU kernels need; pip install triton")
    return problems


def _gpu_line(index: int, gpu: dict[str, Any]) -> str:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    return f"{gpu['name']}, {memory}, compute capability {gpu['capability']}"
