"""The JSON file of a measurement: what was measured, on what, with which code."""

import datetime
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qerl.evaluation.environment import cpu_name, package_versions
from qerl.kernels import device as device_settings

Row = dict[str, Any]


_WORK = (
    "engine", "model", "layer", "op", "format", "method", "M", "layers", "lora_rank", "weights", "kv_dtype",
    "head_dtype", "batch", "context", "prompt", "new", "sequences", "slots", "samples", "mean_new", "max_new",
    "compile_caches", "adapter", "dtype", "temperature", "speculative_tokens", "group", "epoch",
)  # fmt: skip


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


def use_dependent_launch(wanted: bool) -> dict[str, bool]:
    """Let kernels start before the one before them has ended, where they can, or not (mutates the process's setting).

    Returns:
        the setting, for the header of a result file.
    """
    device_settings.DEPENDENT_LAUNCH = wanted
    return {"dependent_launch": wanted}


Print = Callable[[str], object]
Add = Callable[[str, Row], None]


class OtherMachineError(ValueError):
    """Results of two machines in one file."""


class ResultFile:
    """Rows by part, written after each one, so that a run that is killed leaves what it has.

    The part ``rows`` holds the main rows; others (``prefill``, ``attention``, ...) appear once they have some.

    Args:
        path: of the JSON file; None: rows are only kept.
        device: that is measured.
        commit: of the code; None: asked from git.
        append: keep the rows of an earlier file. A row of the same work is replaced; rows of another commit carry it.
        extra: more of the header.

    Raises:
        OtherMachineError: the earlier file is of another device.
    """

    def __init__(
        self, path: Path | None, device: torch.device, *, commit: str | None = None, append: bool = False, **extra: Any
    ) -> None:
        self.path = path
        self.parts: dict[str, list[Row]] = {"rows": []}
        self._header = {
            "gpu": device_name(device),
            "versions": {**package_versions(), "cuda": torch.version.cuda},
            "commit": commit or code_commit(),
            "date": datetime.date.today().isoformat(),
        }
        self._extra = extra
        if append and path is not None and path.exists():
            self._take_over(json.loads(path.read_text(encoding="utf-8")))

    def add(self, part: str, row: Row) -> None:
        """Append a row (or replace the one of the same work) and write the file."""
        rows = self.parts.setdefault(part, [])
        rows[:] = [old for old in rows if _work(old) != _work(row)] + [row]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """The whole file."""
        others = {part: rows for part, rows in self.parts.items() if part != "rows"}
        return {**self._header, "rows": self.parts["rows"], **self._extra, **others}

    def _take_over(self, old: dict[str, Any]) -> None:
        if old.get("gpu") != self._header["gpu"]:
            raise OtherMachineError(
                f"{self.path} holds results of {old.get('gpu')}, this is {self._header['gpu']}: write another file"
            )
        for part, rows in old.items():
            if not isinstance(rows, list):
                continue
            if old.get("commit") != self._header["commit"]:
                rows = [{"commit": old.get("commit"), **row} for row in rows]
            self.parts[part] = rows


def _work(row: Row) -> tuple[Any, ...]:
    """What tells the work of one row from another's."""
    return tuple(row.get(name) for name in _WORK)


def recorder(results: ResultFile, say: Print, describe: Callable[[str, Row], str]) -> Add:
    """What takes the rows of a measurement: (part, row) is written to ``results`` and said as ``describe`` puts it."""

    def add(part: str, row: Row) -> None:
        results.add(part, row)
        say(describe(part, row))

    return add
