"""From raw rows to checked examples: golds chosen, empty ones refused, unusable ones excluded and counted."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

from qerl.tasks.base import Example, Excluded, LoadReport
from qerl.tasks.extract import last_boxed
from qerl.tasks.sources import Columns

logger = logging.getLogger(__name__)

_SHOWN = 10


def gold_of(answer: Any, solution: Any) -> str:
    """The gold answer of a row: ``answer``, or else what ``solution`` marks as its answer; "" if neither.

    A text with ``#### x`` (GSM8K) or ``\\boxed{x}`` (MATH) stands for x. A number becomes its decimal text.
    A solution without such a mark is a derivation, not an answer, unless it is a single short line.
    """
    text = _text(answer)
    if text:
        return _marked(text) or text
    text = _text(solution)
    return _marked(text) or (text if "\n" not in text and len(text) <= 100 else "")


def build_examples(
    rows: list[dict[str, Any]],
    columns: Columns,
    *,
    where: str,
    id_prefix: str,
    check_gold: Callable[[str], str | None],
) -> tuple[list[Example], tuple[Excluded, ...]]:
    """Examples of the rows, and the rows left out because ``check_gold`` gave a reason against the gold.

    Rows are counted from 1. Excluded rows are logged as one warning.

    Raises:
        ValueError: Empty golds or questions (with row numbers), missing columns, or no usable row at all.
    """
    question_column, answer_column, solution_column = columns.resolve(rows, where)
    examples: list[Example] = []
    empty: list[int] = []
    excluded: list[Excluded] = []
    used = {question_column, answer_column, "id"}
    for number, row in enumerate(rows, start=1):
        question = _question_text(row.get(question_column))
        gold = gold_of(row.get(answer_column), row.get(solution_column))
        if not gold or not question:
            empty.append(number)
            continue
        example_id = str(row.get("id") or f"{id_prefix}-{number:06d}")
        reason = check_gold(gold)
        if reason is not None:
            excluded.append(Excluded(example_id, reason))
            continue
        metadata = {key: value for key, value in row.items() if key not in used}
        examples.append(Example(example_id, question, gold, metadata))
    if empty:
        shown = ", ".join(map(str, empty[:_SHOWN])) + (", ..." if len(empty) > _SHOWN else "")
        raise ValueError(
            f"{where}: {len(empty)} of {len(rows)} rows have an empty question or gold answer (rows {shown}); "
            "fill them or drop them from the file"
        )
    if excluded:
        shown = "; ".join(f"{name}: {reason}" for name, reason in excluded[:_SHOWN])
        logger.warning(
            "%s: %d of %d rows left out, their gold answers cannot be checked (%s%s)",
            where, len(excluded), len(rows), shown, "; ..." if len(excluded) > _SHOWN else "",
        )  # fmt: skip
    if not examples:
        raise ValueError(f"{where}: none of the {len(rows)} rows has a gold answer that can be checked")
    return examples, tuple(excluded)


def question_key(question: str) -> str:
    """A question in lower case without white space; punctuation stays, it tells 1.5 from 15."""
    return re.sub(r"\s+", "", question.casefold())


def drop_duplicates(examples: Iterable[Example]) -> tuple[list[Example], tuple[str, ...]]:
    """The examples with each question once (the first stays), and the ids of the others."""
    seen: set[str] = set()
    kept: list[Example] = []
    dropped: list[str] = []
    for example in examples:
        key = question_key(example.question)
        if key in seen:
            dropped.append(example.id)
        else:
            seen.add(key)
            kept.append(example)
    return kept, tuple(dropped)


def overlap(train: Iterable[Example], test: Iterable[Example]) -> tuple[str, ...]:
    """Ids of the training examples whose question is among the test questions (case and white space aside).

    For the two sides of one task, loading has done this already; use it where training and evaluation are two tasks.
    """
    asked = {question_key(example.question) for example in test}
    return tuple(example.id for example in train if question_key(example.question) in asked)


def separate(
    train: list[Example], test: list[Example], excluded: tuple[Excluded, ...], where: str
) -> tuple[list[Example], list[Example], LoadReport]:
    """Drop repeated training questions and those that are in the test set; the test set stays as it is."""
    kept, duplicates = drop_duplicates(train)
    shared = overlap(kept, test)
    dropped = set(shared)
    kept = [example for example in kept if example.id not in dropped]
    if duplicates or shared:
        logger.warning(
            "%s: dropped %d repeated training questions and %d that are in the test set",
            where, len(duplicates), len(shared),
        )  # fmt: skip
    return kept, test, LoadReport(excluded=excluded, duplicates=duplicates, overlap=shared)


def hold_out(
    where: str, train: list[Example], test: list[Example], size: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Move ``size`` random examples of train (0: none) to an empty test side; the same ones for the same seed.

    Raises:
        ValueError: There are test examples already, or not more than ``size`` training examples.
    """
    if size == 0:
        return train, test
    if test:
        raise ValueError(f"{where}: test_size={size} but there are {len(test)} test rows already; drop one of them")
    if not 0 < size < len(train):
        raise ValueError(f"{where}: test_size={size} must lie between 1 and {len(train) - 1} (rows - 1)")
    chosen = set(random.Random(seed).sample(range(len(train)), size))
    return [e for i, e in enumerate(train) if i not in chosen], [e for i, e in enumerate(train) if i in chosen]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _question_text(value: Any) -> str:
    """The question of a plain column, or the last user message of a column of chat messages."""
    if isinstance(value, list):
        users = [m["content"] for m in value if isinstance(m, dict) and m.get("role") == "user"]
        value = users[-1] if users else ""
    return _text(value)


def _marked(text: str) -> str:
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().replace(",", "")
    boxed = last_boxed(text)
    return boxed.strip() if boxed is not None else ""
