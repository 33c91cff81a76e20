"""Tasks whose completions are scored by comparing the extracted answer with the gold answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qerl.tasks.base import Example, Outcome, Score, Task
from qerl.tasks.extract import extract_answer
from qerl.tasks.jobs import verify_job
from qerl.tasks.verify import check_gold, verify

__all__ = ["AnswerTask", "check_gold"]


class AnswerTask(Task):
    """Question and answer: a completion is right when its final answer equals the gold."""

    def score(self, example: Example, completion: str) -> Score:
        """1 if the extracted answer equals the gold, else 0 (see :mod:`qerl.tasks.verify`)."""
        answer = extract_answer(completion, think_opened=self.think_opened)
        if answer is None:
            return Score(0.0, None, "no answer found")
        verdict = verify(example.answer, answer, extracted=True)
        return Score(float(verdict.equal), answer, verdict.reason)

    def job(self, example: Example, completion: str) -> tuple[Callable[..., Outcome], tuple[Any, ...]]:
        """The comparison as a job for a worker process."""
        return verify_job, (example.answer, completion, self.think_opened)
