"""Rows of question and answer from local files and from the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
QUESTION_COLUMNS = ("question", "problem", "prompt", "input")
ANSWER_COLUMNS = ("answer", "final_answer", "target", "gold")
SOLUTION_COLUMNS = ("solution", "generated_solution")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Where a data set is on the hub. ``config`` is the name of its configuration, if it has several."""

    id: str
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names; None stands for the usual names, looked up in the rows."""

    question: str | None = None
    answer: str | None = None
    solution: str | None = None

    def resolve(self, rows: list[dict[str, Any]], where: str) -> tuple[str, str | None, str | None]:
        """The names of (question, answer, solution) in ``rows``; at least one of the last two is not None.

        Raises:
            ValueError: A named column is missing, or no usual name is present.
        """
        present: dict[str, None] = {}
        for row in rows:
            present.update(dict.fromkeys(row))

        def find(wanted: str | None, usual: tuple[str, ...], option: str) -> str | None:
            if wanted is not None and wanted not in present:
                raise ValueError(f"{where}: no column {wanted!r} ({option}=); the columns are {sorted(present)}")
            return wanted or next((name for name in usual if name in present), None)

        question = find(self.question, QUESTION_COLUMNS, "question")
        answer = find(self.answer, ANSWER_COLUMNS, "answer")
        solution = find(self.solution, SOLUTION_COLUMNS, "solution")
        if question is None or (answer is None and solution is None):
            missing = "question" if question is None else "answer"
            raise ValueError(f"{where}: no {missing} column among {sorted(present)}; name it with {missing}=COLUMN")
        return question, answer, solution


class Rows(NamedTuple):
    """Raw rows of one side of a task.

    Attributes:
        where: The file or the split, for messages.
        id_prefix: Of the ids of rows that have none.
    """

    rows: list[dict[str, Any]]
    columns: Columns
    where: str
    id_prefix: str


def read_file(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl, .json (a list of objects) or .parquet file.

    Raises:
        ValueError: Not a file, another suffix, a line that is not a JSON object, or no rows.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        rows = parquet.read_table(path).to_pylist()
    elif path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: a .json file must hold one list of objects")
    elif path.suffix == ".jsonl":
        rows = _read_jsonl(path)
    else:
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; known are {', '.join(FILE_SUFFIXES)}")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                # The error's own text counts lines within this line.
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__} where an object was expected")
            rows.append(row)
    return rows


def hub_splits(source: HubDataset) -> list[str]:
    """Names of the splits of a hub data set (asks the hub, or its local cache).

    Raises:
        ValueError: The hub cannot be reached, or has no such data set.
    """
    from datasets import get_dataset_split_names

    with _hub_errors(source):
        return list(get_dataset_split_names(source.id, source.config))


def read_hub(source: HubDataset, split: str) -> list[dict[str, Any]]:
    """Rows of one split of a hub data set.

    Raises:
        ValueError: The hub cannot be reached, or has no such data set.
    """
    from datasets import load_dataset

    with _hub_errors(source):
        return load_dataset(source.id, source.config, split=split).to_list()


@contextmanager
def _hub_errors(source: HubDataset) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the data set {source.id} cannot be read from the hub ({error}); give a local file instead, or for a "
            "named task the folder of its files (data_dir, or the environment variable QERL_DATA)"
        ) from error
