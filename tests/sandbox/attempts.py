"""Run a hostile program, and look for what it left behind."""

import time
from collections.abc import Callable
from pathlib import Path

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.core import Execution, Program, Status


def attempt(sandbox: Bubblewrap, source: str) -> Execution:
    """Run a program in which ``tried(f)`` prints the result of f, or the class of its OSError."""
    prelude = (
        "import os, socket, sys, time\n"
        "def tried(function, *arguments):\n"
        "    try:\n"
        "        print('got', function(*arguments), flush=True)\n"
        "    except OSError as error:\n"
        "        print('refused', type(error).__name__, flush=True)\n"
    )
    return sandbox.run(Program(prelude + source))


def refused(execution: Execution, count: int = 1) -> bool:
    """Whether every one of ``count`` tries ended in an OSError."""
    lines = execution.stdout.splitlines()
    return execution.status is Status.OK and len(lines) == count and all(l.startswith("refused") for l in lines)


def processes_with(mark: str) -> list[str]:
    """Ids of the processes of this machine that have the mark as their last argument."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command.endswith(f"\0{mark}\0".encode()):
                found.append(entry.name)
    return found


def marked(source: str, mark: str) -> Program:
    """The program, with a mark in the command line of its processes that ``processes_with`` finds."""
    return Program(f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {source!r}, {mark!r}])")


def wait_for(condition: Callable[[], object], limit_s: float = 3.0) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
