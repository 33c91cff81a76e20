"""Programming tasks: completions are programs, scored by running them on test cases in a sandbox.

The program in a completion is its last closed fenced block marked ``python`` (also ``py``, ``python3``), or else its
last closed block without a mark. A block that is never closed is none, text outside of blocks is none, and thinking
does not count (as in :mod:`qerl.tasks.extract`).

Files of two kinds: programs with input and output, and assertions about functions; :mod:`qerl.sandbox.rows` has the
columns.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.cases import AssertCase, Case
from qerl.sandbox.core import Executor
from qerl.sandbox.judge import Judgement, Verdict, judge, judge_all
from qerl.sandbox.rows import QUESTION_COLUMNS, RowError, cases_of, question_of
from qerl.tasks.base import Example, LoadReport, Outcome, Score, Task
from qerl.tasks.examples import separate
from qerl.tasks.extract import strip_thinking
from qerl.tasks.prompts import PromptTemplate, prompt_template
from qerl.tasks.rewards import Completion, completion_text
from qerl.tasks.sources import read_file

logger = logging.getLogger(__name__)

SCORINGS = ("all", "fraction")
STDIO_PROMPT = (
    "{question}\n\nWrite a Python program that reads from standard input and writes to standard output. "
    "Put the final program in one ```python block."
)
ASSERT_PROMPT = "{question}\n\nWrite the complete Python code, imports included, in one ```python block."
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_PYTHON = ("python", "py", "python3")
_SHOWN = 10
# what the counters of qerl.tasks.base.Outcome have a name for
_COUNTERS = {Verdict.TIMEOUT: "timeout", Verdict.MEMORY: "exhausted"}


def extract_code(completion: str, *, think_opened: bool = False) -> str | None:
    """The program in a completion, None where there is none. The order is in the module's text."""
    text = strip_thinking(completion, think_opened=think_opened)
    if text is None:
        return None
    blocks = [(mark, code) for mark, code in _blocks(text) if code.strip()]
    for accepted in (_PYTHON, ("",)):
        codes = [code for mark, code in blocks if mark.lower() in accepted]
        if codes:
            return codes[-1]
    return None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Mark and content of the closed fenced blocks; content loses the indentation of its opening fence."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        fence = _FENCE.fullmatch(line)
        if opened is None:
            if fence is not None:
                opened, lines = fence, []
        elif fence is not None and not fence[3] and fence[2].startswith(opened[2]):
            blocks.append((opened[3], "\n".join(lines) + "\n"))
            opened = None
        else:
            indent = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(len(opened[1]), indent) :])
    return blocks


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the results of a program's cases become its score.

    Attributes:
        rule: "all": 1 if every case passes, else 0, and the first failure ends it. "fraction": the share of passed
            cases.
        max_timeouts: With "fraction", after so many timeouts the other cases count as failed without being run.

    Raises:
        ValueError: An unknown rule, or ``max_timeouts`` < 1.
    """

    rule: str = "all"
    max_timeouts: int = 1

    def __post_init__(self) -> None:
        if self.rule not in SCORINGS:
            raise ValueError(f"scoring rule {self.rule!r}; known are {', '.join(SCORINGS)}")
        if self.max_timeouts < 1:
            raise ValueError(f"max_timeouts={self.max_timeouts} must be at least 1")

    def options(self) -> dict[str, Any]:
        """Arguments for :func:`qerl.sandbox.judge.judge`."""
        return {"stop_at_failure": self.rule == "all", "max_timeouts": self.max_timeouts}

    def score(self, judgement: Judgement) -> float:
        """The score in [0, 1]."""
        return judgement.fraction if self.rule == "fraction" else float(judgement.failure is None)


def code_job(
    executor: Executor, scoring: Scoring, cases: Sequence[Case], completion: str, think_opened: bool
) -> Outcome:
    """Extract the program of one completion, run it on its cases and score it; for ``RewardPool``."""
    code = extract_code(completion, think_opened=think_opened)
    if code is None:
        return Outcome(0.0, "no_answer", "no program found")
    judgement = judge(executor, code, cases, **scoring.options())
    failure = judgement.failure
    counter = _COUNTERS.get(failure.verdict, "") if failure is not None else ""
    return Outcome(scoring.score(judgement), counter, judgement.reason())


class CodeTask(Task):
    """Programs scored on test cases. ``Example.answer`` is empty: the cases decide.

    Args:
        cases: The cases of each example, by its id.
        executor: Runs the programs; default: the local sandbox.
        scoring: See :class:`Scoring`.

    Raises:
        ValueError: An example without cases, or ids that occur twice.
    """

    def __init__(
        self,
        name: str,
        train: list[Example],
        test: list[Example],
        template: PromptTemplate,
        cases: Mapping[str, tuple[Case, ...]],
        *,
        executor: Executor | None = None,
        scoring: Scoring | None = None,
        report: LoadReport | None = None,
        think_opened: bool = False,
    ) -> None:
        super().__init__(name, train, test, template, report=report, think_opened=think_opened)
        missing = [example.id for example in (*train, *test) if not cases.get(example.id)]
        if missing:
            raise ValueError(f"task {name}: {len(missing)} examples have no test cases ({', '.join(missing[:_SHOWN])})")
        self.cases = dict(cases)
        self.executor = Bubblewrap() if executor is None else executor
        self.scoring = scoring or Scoring()

    def score(self, example: Example, completion: str) -> Score:
        """Run the program of one completion. ``Score.answer`` is the program.

        Raises:
            SandboxError: The executor cannot run programs at all (SandboxUnavailable) or failed.
        """
        code = extract_code(completion, think_opened=self.think_opened)
        if code is None:
            return Score(0.0, None, "no program found")
        judgement = judge(self.executor, code, self.cases[example.id], **self.scoring.options())
        return Score(self.scoring.score(judgement), code, judgement.reason())

    def job(self, example: Example, completion: str) -> tuple[Callable[..., Outcome], tuple[Any, ...]]:
        """:func:`code_job`; the pool's deadline must leave time for all cases of a sample."""
        return code_job, (self.executor, self.scoring, self.cases[example.id], completion, self.think_opened)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Scored completions, in the order given.

    Attributes:
        scores: In [0, 1].
        judgements: None where a completion has no program.
    """

    scores: tuple[float, ...]
    judgements: tuple[Judgement | None, ...]

    def counts(self) -> dict[str, int]:
        """How many completions ended each way, by their first failed case: a key of ``Verdict``, or "no_code"."""
        counts = Counter(
            "no_code" if judgement is None else str(judgement.failure.verdict if judgement.failure else Verdict.PASSED)
            for judgement in self.judgements
        )
        return {key: counts[key] for key in ("no_code", *(str(v) for v in Verdict if v is not Verdict.SKIPPED))}

    def passed_cases(self) -> float:
        """The mean share of passed cases; no program counts as 0."""
        shares = [0.0 if judgement is None else judgement.fraction for judgement in self.judgements]
        return sum(shares) / len(shares) if shares else 0.0


class CodeReward:
    """The score of a :class:`CodeTask` as a reward in TRL's convention, programs run side by side.

    Args:
        task: Its examples are named by the column ``id`` of the data set.
        workers: Programs at a time; default: one for each CPU this process may use.
        name: ``__name__``, the name of TRL's metrics.

    Attributes:
        last: The result of the last call, None before the first.
    """

    def __init__(self, task: CodeTask, *, workers: int | None = None, name: str = "code") -> None:
        self.task = task
        self.workers = workers
        self.last: BatchResult | None = None
        self.__name__ = name

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **kwargs: Any) -> list[float | None]:
        """Rewards of the completions; metrics ``NAME/no_code``, ``/passed``, ``/timeout``, ... and ``/passed_cases``.

        Raises:
            ValueError: No column ``id``.
            SandboxError: The executor cannot run programs at all (SandboxUnavailable) or failed.
        """
        ids = kwargs.get("id")
        if ids is None:
            raise ValueError(f"{self.__name__}: no 'id' column to find the cases by; qerl.tasks.to_dataset makes one")
        self.last = self._judge(ids, [completion_text(completion) for completion in completions])
        log_metric = kwargs.get("log_metric")
        if log_metric is not None:
            for key, count in self.last.counts().items():
                log_metric(f"{self.__name__}/{key}", float(count))
            log_metric(f"{self.__name__}/passed_cases", self.last.passed_cases())
        return list(self.last.scores)

    def _judge(self, ids: Sequence[str], texts: Sequence[str]) -> BatchResult:
        task = self.task
        codes = [extract_code(text, think_opened=task.think_opened) for text in texts]
        submissions = [
            (code, task.cases[task.example(i).id]) for i, code in zip(ids, codes, strict=True) if code is not None
        ]
        judged = iter(judge_all(task.executor, submissions, workers=self.workers, **task.scoring.options()))
        judgements = tuple(None if code is None else next(judged) for code in codes)
        scores = tuple(0.0 if judgement is None else task.scoring.score(judgement) for judgement in judgements)
        return BatchResult(scores, judgements)


def code_task_from_file(
    path: str | Path,
    *,
    split: str = "train",
    question: str | None = None,
    prompt: str | None = None,
    system: str | None = None,
    think_opened: bool = False,
    show_tests: int = 1,
    max_cases: int | None = None,
    tolerance: float | None = None,
    scoring: str = "all",
    max_timeouts: int = 1,
    executor: Executor | None = None,
) -> CodeTask:
    """A task of a .jsonl, .json or .parquet file of one kind of rows; :mod:`qerl.sandbox.rows` has the columns.

    Rows of which no cases can be made are left out, logged, and named in ``report.unparsable``; repeated questions
    are dropped from the train side as for every task.

    Args:
        split: The side the rows are on, "train" or "test".
        question: Column of the task's text; default: the first usual one.
        prompt: A text with ``{question}``; default: one that asks for a ```python block.
        show_tests: How many assertions of ``test_list`` are shown in the question.
        max_cases: Use only the first cases of each row.
        tolerance: For numbers in outputs, where a row has none of its own; None compares exactly.
        scoring, max_timeouts: See :class:`Scoring`.

    Raises:
        ValueError: No such file, an unknown option, no usable row, or both kinds of rows in one file.
    """
    path = Path(path).expanduser()
    if split not in ("train", "test"):
        raise ValueError(f"{path}: split={split!r}; a file is either the 'train' or the 'test' side")
    if max_cases is not None and max_cases < 1:
        raise ValueError(f"{path}: max_cases={max_cases} must be at least 1")
    cases: dict[str, tuple[Case, ...]] = {}
    examples: list[Example] = []
    excluded: list[tuple[str, str]] = []
    rows = read_file(path)
    for number, row in enumerate(rows, start=1):
        example_id = str(row.get("id") or row.get("task_id") or f"{path.stem}-{number:06d}")
        try:
            text = question_of(row, question, show_tests)
            cases[example_id] = cases_of(row, tolerance=tolerance, max_cases=max_cases)
        except RowError as error:
            excluded.append((example_id, str(error)))
            continue
        examples.append(Example(example_id, text, "", _metadata(row, question)))
    _report_excluded(path, excluded, len(rows))
    template = prompt_template(prompt or _default_prompt(path, cases), system)
    train, test = (examples, []) if split == "train" else ([], examples)
    train, test, report = separate(train, test, tuple(name for name, _ in excluded), str(path))
    return CodeTask(
        f"code:{path}", train, test, template, cases,
        executor=executor, scoring=Scoring(scoring, max_timeouts), report=report, think_opened=think_opened,
    )  # fmt: skip


# the cases themselves can be megabytes, and a gold program must not reach a prompt or a stored record
_NOT_METADATA = frozenset({
    "id", "task_id", *QUESTION_COLUMNS, "test_list", "challenge_test_list", "test_setup_code", "test_imports", "test",
    "tests", "test_cases", "official_tests", "public_tests", "private_tests", "generated_tests", "input_output",
    "inputs", "outputs", "input", "output", "examples", "code", "canonical_solution", "solution", "solutions",
})  # fmt: skip


def _metadata(row: Mapping[str, Any], question: str | None) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in _NOT_METADATA and key != question}


def _report_excluded(path: Path, excluded: list[tuple[str, str]], total: int) -> None:
    if not excluded:
        return
    shown = "; ".join(f"{name}: {reason}" for name, reason in excluded[:_SHOWN])
    if len(excluded) == total:
        raise ValueError(f"{path}: no test cases can be made of any of its {total} rows ({shown}); "
                         "qerl.sandbox.rows has the columns")  # fmt: skip
    logger.warning("%s: %d of %d rows left out (%s)", path, len(excluded), total, shown)


def _default_prompt(path: Path, cases: Mapping[str, tuple[Case, ...]]) -> str:
    kinds = {isinstance(case, AssertCase) for group in cases.values() for case in group}
    if len(kinds) > 1:
        raise ValueError(f"{path} has rows with input and output and rows with assertions; one prompt cannot ask for "
                         "both: split the file, or give a prompt")  # fmt: skip
    return ASSERT_PROMPT if kinds.pop() else STDIO_PROMPT
