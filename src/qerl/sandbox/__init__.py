"""Run programs that nobody trusts: a local sandbox, remote executors behind the same interface, and a judge.

Standard library only; nothing here imports another package of this project.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "AssertCase": "qerl.sandbox.cases",
    "Bubblewrap": "qerl.sandbox.bubblewrap",
    "E2B": "qerl.sandbox.e2b",
    "Execution": "qerl.sandbox.core",
    "Executor": "qerl.sandbox.core",
    "Judgement": "qerl.sandbox.judge",
    "Limits": "qerl.sandbox.core",
    "Piston": "qerl.sandbox.piston",
    "Program": "qerl.sandbox.core",
    "SandboxError": "qerl.sandbox.core",
    "SandboxUnavailable": "qerl.sandbox.core",
    "Status": "qerl.sandbox.core",
    "StdioCase": "qerl.sandbox.cases",
    "Verdict": "qerl.sandbox.judge",
    "executor_of": "qerl.sandbox.executors",
    "judge": "qerl.sandbox.judge",
    "judge_all": "qerl.sandbox.judge",
    "outputs_match": "qerl.sandbox.compare",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qerl.sandbox' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
