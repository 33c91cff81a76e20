"""Test cases from the rows of programming data sets.

Which columns make the cases (the first that the row has decides; see :func:`cases_of`):

1. ``test_list``: one assertion a case, after ``test_setup_code`` or ``test_imports`` (MBPP),
2. ``test`` and ``entry_point``: one case, the prompt run before the program and ``check(entry_point)`` after the test
   (HumanEval),
3. ``tests``, ``test_cases``, ``official_tests``, ``public_tests``, ``private_tests``, all of them: lists of
   ``{"input", "output"}`` or of assertions, an object of two lists, the JSON text of either, or one text of
   assertions,
4. ``input_output``: an object, or its JSON text, with ``inputs`` and ``outputs`` (APPS, TACO),
5. ``inputs`` and ``outputs``, or ``input`` and ``output``: texts or lists of texts,
6. ``examples``: as 3 (the samples of a statement are a weak test, so they come last).

A number in the column ``tolerance`` makes the comparison of outputs approximate. Rows that comparing outputs cannot
judge are refused: interactive problems, programs that read files, and problems with several right outputs (a checker
program comes with them; Codeforces).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qerl.sandbox.cases import AssertCase, Case, StdioCase

QUESTION_COLUMNS = ("question", "problem", "prompt", "description", "text")
_TEST_COLUMNS = ("tests", "test_cases", "official_tests", "public_tests", "private_tests")
_PAIRS = (("inputs", "outputs"), ("input", "output"))
_STDIO = (None, "", "stdin_stdout", "stdin", "stdio")
# Codeforces: parts of a statement beside its description, with their headings
_STATEMENT_PARTS = (("input_format", "Input"), ("output_format", "Output"), ("examples", "Examples"), ("note", "Note"))


class RowError(ValueError):
    """No test cases can be made of a row; the message says why."""


def question_of(row: Mapping[str, Any], column: str | None = None, show_tests: int = 0) -> str:
    """The text of the task: of ``column``, or of the first of the usual columns that is not empty.

    A statement in parts (``input_format``, ``output_format``, ``examples``, ``note``) is put together.

    Args:
        show_tests: With ``test_list``, how many of its assertions are shown: they alone name the function wanted.

    Raises:
        RowError: No such text.
    """
    names = QUESTION_COLUMNS if column is None else (column,)
    text = next((row[name].strip() for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
    if text is None:
        raise RowError(f"no text in {' or '.join(names)}")
    if column is None and isinstance(row.get("input_format"), str):
        text = "\n\n".join([text, *_statement_parts(row)])
    shown = list(row.get("test_list") or ())[:show_tests]
    return text if not shown else f"{text}\n\nThe code must pass:\n" + "\n".join(shown)


def _statement_parts(row: Mapping[str, Any]) -> list[str]:
    parts = []
    for name, heading in _STATEMENT_PARTS:
        value = row.get(name)
        if value and not isinstance(value, str):
            value = "\n\n".join(f"Input:\n{_text(e.get('input'))}\nOutput:\n{_text(e.get('output'))}" for e in value)
        if value:
            parts.append(f"{heading}\n\n{value.strip()}")
    return parts


def cases_of(
    row: Mapping[str, Any], *, tolerance: float | None = None, max_cases: int | None = None
) -> tuple[Case, ...]:
    """The cases of a row, in its order, at most ``max_cases``.

    Args:
        tolerance: Where the row has none of its own.

    Raises:
        RowError: No cases, lists of unequal length, or a kind of row that is not known or cannot be judged by its
            outputs.
    """
    _refuse_unjudgeable(row)
    if row.get("tolerance") is not None:
        tolerance = float(row["tolerance"])
    cases = _find(row, tolerance)
    if not cases:
        raise RowError("no test cases")
    return tuple(cases[:max_cases])


def _refuse_unjudgeable(row: Mapping[str, Any]) -> None:
    if row.get("interaction_format"):
        raise RowError("interactive: the program talks with a judge (interaction_format)")
    if row.get("generated_checker"):
        raise RowError("several outputs are right, which takes a checker program (generated_checker)")
    if row.get("input_mode") not in _STDIO:
        raise RowError(f"input_mode={row['input_mode']!r}; only standard input and output")


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
        return _paired(_decoded(value, "input_output") if isinstance(value, str) else value, tolerance)
    return _paired(row, tolerance) or _listed(row.get("examples"), row, tolerance)


def _listed(value: Any, row: Mapping[str, Any], tolerance: float | None) -> list[Case]:
    if not value:
        return []
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        value = _decoded(value, "test cases")
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
    kind = value.get("type") or value.get("testtype")
    if kind not in _STDIO:
        raise RowError(f"cases of type {kind!r}; only programs with input and output, or assertions")
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


def _decoded(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"{name}: not JSON ({error})") from error
