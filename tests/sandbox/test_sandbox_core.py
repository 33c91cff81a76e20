"""Limits and the reading of exit statuses."""

import pytest

from qerl.sandbox.core import Limits, Status, classify

SYNTAX = "  File \"/main.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"
HEADER = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("code", "stderr", "status"),
    [
        (0, "MemoryError", Status.OK),
        (1, SYNTAX, Status.COMPILE_ERROR),
        (1, HEADER + SYNTAX, Status.RUNTIME_ERROR),
        (1, "IndentationError: unexpected indent\n", Status.COMPILE_ERROR),
        (1, HEADER + "MemoryError\n", Status.MEMORY),
        (1, HEADER + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate\n", Status.MEMORY),
        (1, HEADER + "ValueError: MemoryError\n", Status.RUNTIME_ERROR),
        (3, "", Status.RUNTIME_ERROR),
        (-11, "", Status.RUNTIME_ERROR),
    ],
)
def test_classify(code, stderr, status):
    assert classify(code, stderr) is status


@pytest.mark.parametrize(
    ("field", "value"),
    [("wall_s", 0), ("wall_s", float("nan")), ("cpu_s", 1.5), ("memory_bytes", -1), ("processes", 1)],
)
def test_limits_that_mean_nothing(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value!r}"):
        Limits(**{field: value})
