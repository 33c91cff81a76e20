"""From the raw rows of a programming data set to examples and their test cases."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from qerl.sandbox.cases import AssertCase, Case
from qerl.sandbox.rows import QUESTION_COLUMNS, RowError, cases_of, question_of
from qerl.tasks.base import Example, Excluded
from qerl.tasks.sources import Rows

logger = logging.getLogger(__name__)

STDIO_PROMPT = (
    "{question}\n\nWrite a Python program that reads from standard input and writes to standard output. "
    "Put the final program in one ```python block."
)
ASSERT_PROMPT = "{question}\n\nWrite the complete Python code, imports included, in one ```python block."
_SHOWN = 10
# the cases themselves can be megabytes, and a gold program must not reach a prompt or a stored record
_NOT_METADATA = frozenset({
    "id", "task_id", *QUESTION_COLUMNS, "input_format", "output_format", "note", "test_list", "challenge_test_list",
    "test_setup_code", "test_imports", "test", "tests", "test_cases", "official_tests", "public_tests",
    "private_tests", "generated_tests", "input_output", "inputs", "outputs", "input", "output", "examples", "code",
    "canonical_solution", "solution", "solutions", "editorial", "verification_info", "gold_standard_solution",
})  # fmt: skip


class CodeExamples(NamedTuple):
    """Examples with the cases of each, by id, and the rows that have none."""

    examples: list[Example]
    cases: dict[str, tuple[Case, ...]]
    excluded: tuple[Excluded, ...]


def code_examples(
    source: Rows, *, question: str | None, show_tests: int, tolerance: float | None, max_cases: int | None
) -> CodeExamples:
    """Examples of the rows; the arguments are those of :func:`qerl.tasks.code.code_task`.

    Rows of which no cases can be made are left out, and logged as one warning.

    Raises:
        ValueError: No usable row.
    """
    cases: dict[str, tuple[Case, ...]] = {}
    examples: list[Example] = []
    excluded: list[Excluded] = []
    for number, row in enumerate(source.rows, start=1):
        example_id = str(row.get("id") or row.get("task_id") or f"{source.id_prefix}-{number:06d}")
        try:
            text = question_of(row, question, show_tests)
            cases[example_id] = cases_of(row, tolerance=tolerance, max_cases=max_cases)
        except RowError as error:
            excluded.append(Excluded(example_id, str(error)))
            continue
        metadata = {key: value for key, value in row.items() if key not in _NOT_METADATA and key != question}
        examples.append(Example(example_id, text, "", metadata))
    _report_excluded(source, excluded)
    return CodeExamples(examples, cases, tuple(excluded))


def default_prompt(name: str, cases: Mapping[str, tuple[Case, ...]]) -> str:
    """The prompt that asks for what the cases test.

    Raises:
        ValueError: Cases of both kinds.
    """
    kinds = {isinstance(case, AssertCase) for group in cases.values() for case in group}
    if len(kinds) > 1:
        raise ValueError(f"{name} has rows with input and output and rows with assertions; one prompt cannot ask for "
                         "both: split the file, or give a prompt")  # fmt: skip
    return ASSERT_PROMPT if kinds.pop() else STDIO_PROMPT


def _report_excluded(source: Rows, excluded: list[Excluded]) -> None:
    if not excluded:
        return
    total = len(source.rows)
    shown = "; ".join(f"{name}: {reason}" for name, reason in excluded[:_SHOWN])
    if len(excluded) == total:
        raise ValueError(f"{source.where}: no test cases can be made of any of its {total} rows ({shown}); "
                         "qerl.sandbox.rows has the columns")  # fmt: skip
    logger.warning("%s: %d of %d rows left out (%s)", source.where, len(excluded), total, shown)
