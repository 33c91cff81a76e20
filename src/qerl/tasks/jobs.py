"""What a reward worker does with one sample. Imported by every worker process: keep its imports light."""

from __future__ import annotations

from qerl.tasks.base import Outcome
from qerl.tasks.extract import extract_answer
from qerl.tasks.verify import check_gold, verify


def verify_job(gold: str, completion: str, think_opened: bool) -> Outcome:
    """Extract the final answer of a completion and compare it with a gold."""
    problem = check_gold(gold)
    if problem is not None:
        return Outcome(None, "unparsable_gold", f"gold: {problem}")
    answer = extract_answer(completion, think_opened=think_opened)
    if answer is None:
        return Outcome(0.0, "no_answer", "no answer found")
    verdict = verify(gold, answer)
    return Outcome(float(verdict.equal), "", verdict.reason)
