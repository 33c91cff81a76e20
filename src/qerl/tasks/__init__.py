"""Data sets, prompts, answer extraction, verification and rewards. Nothing here imports torch."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "CorrectnessReward": "qerl.tasks.rewards",
    "Example": "qerl.tasks.base",
    "Excluded": "qerl.tasks.base",
    "FormatReward": "qerl.tasks.rewards",
    "LastNumberReward": "qerl.tasks.rewards",
    "LengthPenalty": "qerl.tasks.length",
    "PooledReward": "qerl.tasks.rewards",
    "RewardPool": "qerl.tasks.workers",
    "Score": "qerl.tasks.base",
    "SoftOverlongPunishment": "qerl.tasks.length",
    "Task": "qerl.tasks.base",
    "extract_answer": "qerl.tasks.extract",
    "load_task": "qerl.tasks.registry",
    "overlap": "qerl.tasks.examples",
    "to_dataset": "qerl.tasks.base",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qerl.tasks' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
