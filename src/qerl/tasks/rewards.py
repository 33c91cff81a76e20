"""Reward functions in TRL's convention, usable alone.

``fn(prompts, completions, completion_ids=None, answer=None, **columns) -> list[float | None]``, one value a completion,
where ``completions`` are strings or lists of chat messages and ``columns`` are the other columns of the data set,
repeated like the prompts. None leaves a sample out of its group. A ``log_metric`` callable among the keyword
arguments is given the counters as ``log_metric(name, value)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qerl.tasks.base import Outcome, Task
from qerl.tasks.extract import extract
from qerl.tasks.jobs import verify_job
from qerl.tasks.verify import check_gold
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
        log_metric = kwargs.get("log_metric")
        if log_metric is not None:
            for counter in _COUNTERS:
                log_metric(f"{self.__name__}/{counter}", float(sum(o.counter == counter for o in outcomes)))
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
        if style not in _KINDS:
            raise ValueError(f"style={style!r}; known are {', '.join(_KINDS)}")
        self.style = style
        self.weight = weight
        self.think_opened = think_opened
        self.__name__ = name

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Completion], **kwargs: Any
    ) -> list[float | None]:
        """Rewards of the completions."""
        return [self.weight * self._follows(completion_text(completion)) for completion in completions]

    def _follows(self, text: str) -> bool:
        found = extract(text, think_opened=self.think_opened)
        if found is None or found.kind != _KINDS[self.style] or found.text.strip(" .").lower() in _FILLER:
            return False
        if check_gold(found.text) is not None:
            return False
        if self.style == "think_answer_tags":
            thinking = text.partition("</think>")[0].replace("<think>", "")
            return "</think>" in text and any(char.isalnum() for char in thinking)
        return True


_COUNTERS = ("timeout", "exhausted", "no_answer", "unparsable_gold")
_KINDS = {"boxed": "boxed", "answer_tags": "answer tag", "think_answer_tags": "answer tag"}
_FILLER = frozenset({"answer", "answer here", "your answer", "final answer", "x", "number", "the number", "result"})
