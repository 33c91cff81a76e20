"""What every executor of untrusted programs shares: the program, its limits, and how a run ended."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol

_MIB = 1 << 20
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


class SandboxError(RuntimeError):
    """The machinery failed, not the program: no verdict on the program can be drawn from this run."""


class SandboxUnavailable(SandboxError):
    """No sandbox can be had on this machine; the message says what is missing and how to get it."""


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. A remote executor passes on what its service knows, see there.

    Attributes:
        wall_s: Seconds by the clock, start of the interpreter included.
        cpu_s: CPU seconds of each process (whole seconds).
        memory_bytes: Address space of each process; all of them together may use ``processes`` times as much.
        processes: Processes and threads at one time, at least 2 (a rootless sandbox counts its own init).
        file_bytes: Size of one written file.
        tmp_bytes: Size of the private /tmp, the only place that can be written.
        output_bytes: Bytes that standard output and standard error may have, each.
        open_files: File descriptors of each process.

    Raises:
        ValueError: A limit that is not positive, or ``processes`` < 2.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 * _MIB
    processes: int = 8
    file_bytes: int = 16 * _MIB
    tmp_bytes: int = 64 * _MIB
    output_bytes: int = 4 * _MIB
    open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 or (field.name != "wall_s" and value != int(value)):
                kind = "number" if field.name == "wall_s" else "whole number"
                raise ValueError(f"{field.name}={value!r} must be a {kind} > 0")
        if self.processes < 2:
            raise ValueError(f"processes={self.processes} must be at least 2: a sandbox has an init process of its own")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program and what it reads from standard input."""

    source: str
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program ended.

    Attributes:
        status: See :class:`Status`.
        exit_code: The exit status, ``-N`` after signal N, None where the executor ended it or does not say.
        stdout: Standard output decoded as UTF-8 (bytes that are not are replaced), up to the limit.
        stderr: The end of standard error.
        wall_s: Seconds from start to end.
    """

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float


class Executor(Protocol):
    """Runs Python programs that nobody trusts. Usable from several threads, and picklable."""

    name: str
    limits: Limits

    def run(self, program: Program) -> Execution:
        """Run a program to its end or to a limit.

        Raises:
            SandboxError: The executor failed; a failure of the program is never raised.
        """


def classify(exit_code: int, stderr: str) -> Status:
    """The status of a CPython program that ended by itself.

    Of the uncaught exception only its last line and the missing traceback header are looked at: a file that cannot
    be compiled is reported without one. A program can forge either, and gains nothing: all but OK is a failure.
    """
    if exit_code == 0:
        return Status.OK
    lines = stderr.rstrip().splitlines()
    name = lines[-1].partition(":")[0].strip() if lines else ""
    if name in _SYNTAX_ERRORS and "Traceback (most recent call last)" not in stderr:
        return Status.COMPILE_ERROR
    if name.rpartition(".")[2].lstrip("_").endswith("MemoryError"):
        return Status.MEMORY
    return Status.RUNTIME_ERROR
