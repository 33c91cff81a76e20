"""qerl: reinforcement learning for reasoning LLMs with frozen 4-bit weights.

Public names are imported on first use, so that ``import qerl`` (and the command line) stay light.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "QeRLConfig": "qerl.trainer.config",
    "QeRLTrainer": "qerl.trainer.trainer",
    "RolloutEngine": "qerl.rollout.engine",
    "SamplingParams": "qerl.rollout.core",
    "evaluate": "qerl.evaluation.runner",
    "load_task": "qerl.tasks.registry",
    "quantize": "qerl.formats.quantizer",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qerl' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
