"""The JSON file of a measurement: what was measured, on what, with which code."""

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from qerl.evaluation.environment import cpu_name, package_versions

Row = dict[str, Any]


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def code_commit() -> str:
    """Commit of the package's checkout (with ``+changes`` where files differ from it), or ``unknown``."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.returncode else "")


def result_file(rows: list[Row], device: torch.device, commit: str | None = None, **extra: Any) -> dict[str, Any]:
    """The header of a result file over ``rows``; ``extra`` is appended.

    Args:
        rows: JSON values.
        device: that was measured.
        commit: of the code, where there is no git to ask.
    """
    return {
        "gpu": device_name(device),
        "versions": {**package_versions(), "cuda": torch.version.cuda},
        "commit": commit or code_commit(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
        **extra,
    }


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write ``results`` as JSON; folders are made, an older file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
