"""Test cases from the rows of programming data sets.

Which columns make the cases (the first that the row has decides; see :func:`cases_of`):

1. ``test_list``: one assertion a case, after ``test_setup_code`` or ``test_imports`` (MBPP),
2. ``test`` and ``entry_point``: one case, the prompt run before the program and ``check(entry_point)`` after the test
   (HumanEval),
3. ``tests``, ``test_cases``, ``official_tests``, ``public_tests``, ``private_tests``, all of them: lists of
   ``{"input", "output"}`` or of assertions, an object of two lists, or one text of assertions,
4. ``input_output``: an object, or its JSON text, with ``inputs`` and ``outputs`` (APPS, TACO),
5. ``inputs`` and ``outputs``, or ``input`` and ``output``: texts or lists of texts,
6. ``examples``: as 3 (the samples of a statement are a weak test, so they come last).

A number in the column ``tolerance`` makes the comparison of outputs approximate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qerl.sandbox.cases import AssertCase, Case, StdioCase

QUESTION_COLUMNS = ("question", "problem", "prompt", "description", "text")
_TEST_COLUMNS = ("tests", "test_cases", "official_tests", "public_tests", "private_tests")
_PAIRS = (("inputs", "outputs"), ("input", "output"))


class RowError(ValueError):
    """No test cases can be made of a row; the message says why."""


def question_of(row: Mapping[str, Any], column: str | None = None, show_tests: int = 0) -> str:
    """The text of the task: of ``column``, or of the first of the usual columns that is not empty.

    Args:
        show_tests: With ``test_list``, how many of its assertions are shown: they alone name the function wanted.

    Raises:
        RowError: No such text.
    """
    names = QUESTION_COLUMNS if column is None else (column,)
    text = next((row[name].strip() for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
    if text is None:
        raise RowError(f"no text in {' or '.join(names)}")
    shown = list(row.get("test_list") or ())[:show_tests]
    return text if not shown else f"{text}\n\nThe code must pass:\n" + "\n".join(shown)


def cases_of(
    row: Mapping[str, Any], *, tolerance: float | None = None, max_cases: int | None = None
) -> tuple[Case, ...]:
    """The cases of a row, in its order, at most ``max_cases``.

    Args:
        tolerance: Where the row has none of its own.

    Raises:
        RowError: No cases, lists of unequal length, or a kind of row that is not known.
    """
    if row.get("tolerance") is not None:
        tolerance = float(row["tolerance"])
    cases = _find(row, tolerance)
    if not cases:
        raise RowError("no test cases")
    return tuple(cases[:max_cases])


def _find(row: Mapping[str, Any], tolerance: float | None) -> list[Case]:
    if row.get("test_list"):
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
        return [AssertCase(test, setup) for test in row["test_list"]]
    if row.get("test") and row.get("entry_point"):
        if not str(row["entry_point"]).isidentifier():
            raise RowError(f"entry_point={row['entry_point']!r} is not a name")
        return [AssertCase(f"{row['test']}\n\ncheck({row['entry_point']})", row.get("prompt") or "")]
    cases = [case for name in _TEST_COLUMNS for case in _listed(row.get(name), row, tolerance)]
    if cases:
        return cases
    if row.get("input_output"):
        value = row["input_output"]
        return _paired(_decoded(value) if isinstance(value, str) else value, tolerance)
    return _paired(row, tolerance) or _listed(row.get("examples"), row, tolerance)


def _listed(value: Any, row: Mapping[str, Any], tolerance: float | None) -> list[Case]:
    if not value:
        return []
    if isinstance(value, str):
        return [AssertCase(value, row.get("test_setup_code") or "")]
    if isinstance(value, Mapping):
        return _paired(value, tolerance)
    cases: list[Case] = []
    for entry in value:
        if isinstance(entry, str):
            cases.append(AssertCase(entry, row.get("test_setup_code") or ""))
        else:
            cases += _paired(entry, tolerance)
    return cases


def _paired(value: Any, tolerance: float | None) -> list[Case]:
    """Cases of an object that has inputs and outputs."""
    if not isinstance(value, Mapping):
        raise RowError(f"a {type(value).__name__} where an object with input and output was expected")
    if value.get("fn_name"):
        raise RowError(f"calls the function {value['fn_name']!r}; only programs with input and output, or assertions")
    for input_name, output_name in _PAIRS:
        if value.get(output_name) is None:
            continue
        inputs, outputs = value.get(input_name), value[output_name]
        if isinstance(outputs, str):
            inputs, outputs = [inputs], [outputs]
        inputs = [""] * len(outputs) if inputs is None else inputs
        if len(inputs) != len(outputs):
            raise RowError(f"{len(inputs)} of {input_name} but {len(outputs)} of {output_name}")
        return [StdioCase(_text(i), _text(o), tolerance) for i, o in zip(inputs, outputs, strict=True)]
    return []


def _text(value: Any) -> str:
    """A text, or one line for each element of a list."""
    if value is None:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(map(str, value)) + "\n"
    return str(value)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"input_output is not JSON ({error})") from error
