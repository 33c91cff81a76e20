"""What a reward worker does with one sample. Imported by every worker process: keep its imports light."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
    verdict = verify(gold, answer, extracted=True)
    return Outcome(float(verdict.equal), "", verdict.reason)


def reward_job(function: Callable[..., Any], prompt: Any, completion: Any, columns: dict[str, Any]) -> Outcome:
    """A user's reward function on one sample.

    Raises:
        ValueError: It returned something else than one finite number (or None) for one completion.
    """
    values = function(prompts=[prompt], completions=[completion], **{k: [v] for k, v in columns.items()})
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise ValueError(f"a reward function must return one value a completion, got {values!r} for one")
    value = values[0]
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"a reward must be a finite number or None, got {value!r}")
    return Outcome(None if value is None else float(value), "", "user function")
