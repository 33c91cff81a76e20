"""Files of evaluations and runs: whole files replaced atomically, JSON lines that survive a kill.

JSON has no NaN or infinity, yet a NaN loss is exactly what a log must be able to say. Non-finite floats are
therefore written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` and read back as floats where a
number is expected (:func:`as_number`). A lone surrogate, which data sets do contain and UTF-8 cannot hold, is
written as its JSON escape (``errors="backslashreplace"``).
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def as_number(value: Any) -> float | None:
    """A JSON value as a float; ``None`` for null, text and containers. Booleans are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def dump_line(row: Mapping[str, Any]) -> str:
    """One JSON object on one line, newline included, valid JSON whatever the floats are."""
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` (UTF-8): readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name holds the process id: two processes that write the same file do not share a temporary one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` with ``value`` as indented JSON, atomically."""
    write_text(path, json.dumps(_finite(value), ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ValueError: the file is not JSON, or not an object; names the file and the position.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete or restore it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object; delete or restore it")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file, in order.

    A last line without its newline is what a kill in mid-write leaves: it is dropped with a note in the log.

    Raises:
        ValueError: a complete line is not a JSON object; names file and line number.
    """
    rows: list[dict[str, Any]] = []
    # bytes and "\n" only: text mode and splitlines() would also split at U+2028 inside a completion.
    *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_parse_line(path, number, line))
    if rest.strip():
        logger.warning("%s: dropped a half-written last line (%d bytes)", path, len(rest))
    return rows


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        # The error's own text counts lines within this line.
        reason = f"{error.msg}, column {error.colno}"
        raise ValueError(f"{path}, line {number}: not valid JSON ({reason}); remove the line") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error}); remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: a JSON {type(row).__name__}, not an object; remove the line")
    return row


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
