"""When the output of a program counts as the expected one."""

from __future__ import annotations

import math


def outputs_match(expected: str, actual: str, tolerance: float | None = None) -> bool:
    """Compare line by line.

    White space at the end of a line, and empty lines at the end of the output, do not count; everything else does
    (leading and inner spaces, case, the spelling of numbers).

    Args:
        tolerance: For tasks that ask for approximate numbers: words are compared instead of characters, and two
            finite numbers ``a`` (expected) and ``b`` are equal if |a - b| <= tolerance * max(1, |a|).
    """
    mine, theirs = _lines(expected), _lines(actual)
    if mine == theirs:
        return True
    if tolerance is None or len(mine) != len(theirs):
        return False
    return all(_words_match(a.split(), b.split(), tolerance) for a, b in zip(mine, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _words_match(expected: list[str], actual: list[str], tolerance: float) -> bool:
    return len(expected) == len(actual) and all(
        a == b or _close(a, b, tolerance) for a, b in zip(expected, actual, strict=True)
    )


def _close(expected: str, actual: str, tolerance: float) -> bool:
    try:
        a, b = float(expected), float(actual)
    except ValueError:
        return False
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(a))
