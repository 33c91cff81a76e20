"""Programming tasks: completions are programs, scored by running them on test cases in a sandbox.

The program in a completion is its last closed fenced block marked ``python`` (also ``py``, ``python3``), or else its
last closed block without a mark. A block that is never closed is none, text outside of blocks is none, and thinking
does not count (as in :mod:`qerl.tasks.extract`).

Files of two kinds: programs with input and output, and assertions about functions; :mod:`qerl.sandbox.rows` has the
columns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.cases import Case
from qerl.sandbox.core import Executor
from qerl.sandbox.executors import executor_of
from qerl.sandbox.judge import Judgement, Verdict, judge, judge_all
from qerl.tasks.base import Example, Excluded, LoadReport, Outcome, Score, Task
from qerl.tasks.code_rows import code_examples, default_prompt
from qerl.tasks.examples import hold_out, separate
from qerl.tasks.extract import strip_thinking
from qerl.tasks.prompts import PromptTemplate, prompt_template
from qerl.tasks.rewards import Completion, completion_text
from qerl.tasks.sources import Columns, Rows, read_file

SCORINGS = ("all", "fraction")
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

    def extract(self, completion: str) -> str | None:
        """The program in a completion, None where there is none."""
        return extract_code(completion, think_opened=self.think_opened)

    def score(self, example: Example, completion: str) -> Score:
        """Run the program of one completion. ``Score.answer`` is the program.

        Raises:
            SandboxError: The executor cannot run programs at all (SandboxUnavailable) or failed.
        """
        code = self.extract(completion)
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
        codes = [task.extract(text) for text in texts]
        submissions = [
            (code, task.cases[task.example(i).id]) for i, code in zip(ids, codes, strict=True) if code is not None
        ]
        judged = iter(judge_all(task.executor, submissions, workers=self.workers, **task.scoring.options()))
        judgements = tuple(None if code is None else next(judged) for code in codes)
        scores = tuple(0.0 if judgement is None else task.scoring.score(judgement) for judgement in judgements)
        return BatchResult(scores, judgements)


def code_task(
    name: str,
    sides: Mapping[str, Rows],
    *,
    question: str | None = None,
    prompt: str | None = None,
    system: str | None = None,
    think_opened: bool = False,
    show_tests: int = 1,
    max_cases: int | None = None,
    tolerance: float | None = None,
    scoring: str = "all",
    max_timeouts: int = 1,
    executor: Executor | str | None = None,
    test_size: int = 0,
    seed: int = 0,
) -> CodeTask:
    """A task of the raw rows of its sides ("train", "test"), all of one kind; :mod:`qerl.sandbox.rows` has the columns.

    Rows of which no cases can be made are left out, logged, and named in ``report.excluded``; repeated questions are
    dropped from the train side as for every task.

    Args:
        question: Column of the task's text; default: the first usual one.
        prompt: A text with ``{question}``; default: one that asks for a ```python block.
        show_tests: How many assertions of ``test_list`` are shown in the question.
        max_cases: Use only the first cases of each row.
        tolerance: For numbers in outputs, where a row has none of its own; None compares exactly.
        scoring, max_timeouts: See :class:`Scoring`.
        executor: An executor or its name (:func:`qerl.sandbox.executors.executor_of`); default: the local sandbox.
        test_size, seed: As many random rows of train become the test side.

    Raises:
        ValueError: An impossible option, no usable row, or both kinds of rows.
    """
    if max_cases is not None and max_cases < 1:
        raise ValueError(f"{name}: max_cases={max_cases} must be at least 1")
    built: dict[str, list[Example]] = {"train": [], "test": []}
    cases: dict[str, tuple[Case, ...]] = {}
    excluded: tuple[Excluded, ...] = ()
    for side, source in sides.items():
        built[side], found, left_out = code_examples(
            source, question=question, show_tests=show_tests, tolerance=tolerance, max_cases=max_cases
        )
        cases |= found
        excluded += left_out
    template = prompt_template(prompt or default_prompt(name, cases), system)
    train, test = hold_out(name, built["train"], built["test"], test_size, seed)
    train, test, report = separate(train, test, excluded, name)
    return CodeTask(
        name, train, test, template, cases, scoring=Scoring(scoring, max_timeouts), report=report,
        executor=executor_of(executor) if isinstance(executor, str) else executor, think_opened=think_opened,
    )  # fmt: skip


def code_task_from_file(path: str | Path, *, split: str = "train", **options: Any) -> CodeTask:
    """:func:`code_task` of a .jsonl, .json or .parquet file, whose rows are the side ``split``, "train" or "test".

    Raises:
        ValueError: No such file, another split, and what :func:`code_task` raises.
    """
    path = Path(path).expanduser()
    if split not in ("train", "test"):
        raise ValueError(f"{path}: split={split!r}; a file is either the 'train' or the 'test' side")
    return code_task(f"code:{path}", {split: Rows(read_file(path), Columns(), str(path), path.stem)}, **options)
