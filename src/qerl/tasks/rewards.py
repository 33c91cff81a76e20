"""Reward functions in TRL's convention, usable alone.

``fn(prompts, completions, completion_ids=None, answer=None, **columns) -> list[float | None]``, one value a completion,
where ``completions`` are strings or lists of chat messages and ``columns`` are the other columns of the data set,
repeated like the prompts. None leaves a sample out of its group. A ``log_metric`` callable among the keyword
arguments is given the counters as ``log_metric(name, value)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qerl.tasks.base import Outcome, Task
from qerl.tasks.exact import exact_number
from qerl.tasks.extract import last_boxed, last_number, strip_thinking, tagged_answer
from qerl.tasks.jobs import reward_job, verify_job
from qerl.tasks.questions import without_questions
from qerl.tasks.workers import RewardPool

Completion = str | Sequence[dict[str, Any]]


class RewardFunction(Protocol):
    """What TRL calls. ``__name__`` is the name of its metrics."""

    __name__: str

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Completion], **kwargs: Any
    ) -> list[float | None]: ...


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the contents of its assistant messages.

    Raises:
        TypeError: Neither a string nor a list of messages with string contents.
    """
    if isinstance(completion, str):
        return completion
    parts = [m.get("content") or "" for m in completion if m.get("role", "assistant") == "assistant"]
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(f"message contents must be strings, got {[type(p).__name__ for p in parts]}")
    return "\n".join(parts)


class CorrectnessReward:
    """1 for a right final answer, 0 for a wrong one or none, None for a gold that cannot be compared with.

    With a ``task`` whose examples are named by the column ``id``, the task scores (partial credit included); without
    one the column ``answer`` holds the golds. With a ``pool`` the work runs in its processes under its deadline: a
    sample that runs out of it scores 0 and is counted as a timeout.

    Args:
        task: Scores by ``task.score``.
        pool: Worker processes; None compares in the calling thread, without a deadline.
        think_opened: The chat template opens ``<think>``; taken from the task where there is one.
        name: ``__name__``, the name of TRL's metrics.
    """

    def __init__(
        self,
        task: Task | None = None,
        pool: RewardPool | None = None,
        *,
        think_opened: bool = False,
        name: str = "correctness",
    ) -> None:
        self.task = task
        self.pool = pool
        self.think_opened = task.think_opened if task is not None else think_opened
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        answer: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Rewards of the completions; counters ``NAME/timeout``, ``/exhausted``, ``/no_answer``, ``/unparsable_gold``.

        Raises:
            ValueError: No gold answers: neither an ``answer`` column nor a task with an ``id`` column.
        """
        texts = [completion_text(completion) for completion in completions]
        ids = kwargs.get("id")
        jobs = self._jobs(texts, answer, ids)
        if self.pool is None:
            outcomes = [function(*arguments) for function, arguments in jobs]
        else:
            outcomes = self.pool.outcomes(jobs, ids)
        _log(kwargs.get("log_metric"), self.__name__, outcomes, _COUNTERS)
        return [outcome.score for outcome in outcomes]

    def _jobs(
        self, texts: list[str], answers: Sequence[str] | None, ids: Sequence[str] | None
    ) -> list[tuple[Callable[..., Outcome], tuple[Any, ...]]]:
        if self.task is not None and ids is not None:
            return [self.task.job(self.task.example(i), text) for i, text in zip(ids, texts, strict=True)]
        if answers is None:
            raise ValueError(f"{self.__name__}: no gold answers; give the data set an 'answer' column "
                             "(or a task and an 'id' column: qerl.tasks.to_dataset makes both)")  # fmt: skip
        return [(verify_job, (gold, text, self.think_opened)) for gold, text in zip(answers, texts, strict=True)]


class FormatReward:
    """``weight`` for a completion that marks its answer as asked, 0 otherwise.

    Pays only beside a real attempt: the marked part must hold an answer that can be compared, the thinking (where
    tags are used) must not be empty, and an answer of filler ("...", "answer here") earns nothing.

    Args:
        style: "boxed" (``\\boxed{}``), "answer_tags" (``<answer>``), or "think_answer_tags" (a closed, non-empty
            ``<think>`` and then ``<answer>``).
    """

    def __init__(
        self, style: str = "boxed", *, weight: float = 1.0, think_opened: bool = False, name: str = "format"
    ) -> None:
        if style not in _FORMATS:
            raise ValueError(f"style={style!r}; known are {', '.join(_FORMATS)}")
        self.style = style
        self.weight = weight
        self.think_opened = think_opened
        self.__name__ = name

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **kwargs: Any) -> list[float | None]:
        """Rewards of the completions."""
        return [self.weight * self._follows(completion_text(completion)) for completion in completions]

    def _follows(self, text: str) -> bool:
        answered = strip_thinking(text, think_opened=self.think_opened)
        if answered is None:
            return False
        marked = last_boxed(answered) if self.style == "boxed" else tagged_answer(answered)
        if marked is None or not _is_attempt(marked):
            return False
        if self.style == "think_answer_tags":
            thinking, closed, _ = text.partition("</think>")
            return bool(closed) and any(char.isalnum() for char in thinking.replace("<think>", ""))
        return True


class LastNumberReward:
    """1 if the last number of a completion is the gold number, for models that cannot follow a format yet.

    Golds come from ``task`` and the column ``id``, or from the column ``answer``; a gold that is no number gives None.
    """

    def __init__(self, task: Task | None = None, *, think_opened: bool = False, name: str = "last_number") -> None:
        self.task = task
        self.think_opened = task.think_opened if task is not None else think_opened
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        answer: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Rewards of the completions. Raises ``ValueError`` without golds."""
        if self.task is not None and kwargs.get("id") is not None:
            answer = [self.task.example(example_id).answer for example_id in kwargs["id"]]
        if answer is None:
            raise ValueError(f"{self.__name__}: no gold answers: neither an 'answer' nor (with a task) an 'id' column")
        return [
            self._score(gold, completion_text(completion)) for gold, completion in zip(answer, completions, strict=True)
        ]

    def _score(self, gold: str, text: str) -> float | None:
        target = exact_number(gold)
        if target is None:
            return None
        rest = strip_thinking(text, think_opened=self.think_opened)
        found = None if rest is None else last_number(without_questions(rest))
        return float(found is not None and exact_number(found) == target)


class PooledReward:
    """A user's reward function run one sample at a time in the processes of a pool, under its deadline.

    A sample that runs out of time or memory gets 0 and is counted; an exception of the function is raised again as
    ``RewardError`` with the sample's id. The function must be importable: not defined in the main script.
    """

    def __init__(self, function: RewardFunction, pool: RewardPool) -> None:
        if getattr(function, "__module__", None) == "__main__":
            raise ValueError(
                f"{function.__name__} is defined in the main script, which worker processes do not import; "
                "move it into a module"
            )
        self.function = function
        self.pool = pool
        self.__name__ = function.__name__

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **kwargs: Any) -> list[float | None]:
        """Rewards of the completions; ``log_metric`` and other callables among ``kwargs`` are not passed on."""
        count = len(completions)
        columns = {k: v for k, v in kwargs.items() if isinstance(v, Sequence) and len(v) == count}
        jobs = [
            (reward_job, (self.function, prompts[i], completions[i], {k: v[i] for k, v in columns.items()}))
            for i in range(count)
        ]
        outcomes = self.pool.outcomes(jobs, columns.get("id"))
        _log(kwargs.get("log_metric"), self.__name__, outcomes, ("timeout", "exhausted"))
        return [outcome.score for outcome in outcomes]


def _log(
    log_metric: Callable[[str, float], None] | None,
    name: str,
    outcomes: Sequence[Outcome],
    counters: tuple[str, ...],
) -> None:
    if log_metric is not None:
        for counter in counters:
            log_metric(f"{name}/{counter}", float(sum(o.counter == counter for o in outcomes)))


def _is_attempt(text: str) -> bool:
    """Whether a marked answer is more than filler: a letter or digit in it, its braces balanced."""
    plain = re.sub(r"\\(?:boxed|fbox|text)(?![a-zA-Z])", "", text)
    return (
        any(char.isalnum() for char in plain)
        and text.count("{") == text.count("}")
        and plain.strip(" .{}$\\").lower() not in _FILLER
    )


_COUNTERS = ("timeout", "exhausted", "no_answer", "unparsable_gold")
_FORMATS = ("boxed", "answer_tags", "think_answer_tags")
_FILLER = frozenset({"answer", "answer here", "your answer", "final answer", "x", "number", "the number", "result"})
