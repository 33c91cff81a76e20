"""qerl: reinforcement learning for reasoning LLMs with frozen 4-bit weights.

Public names are imported on first use, so that ``import qerl`` (and the command line) stay light.
"""

import os
from importlib import import_module
from typing import Any

# OpenMP threads spin while they wait; beside any other busy process that slows torch on the CPU up to 16 times. Read
# when torch loads, so it must be set before; a value of the user's own is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
