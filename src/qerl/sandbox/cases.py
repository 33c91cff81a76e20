"""The two kinds of test cases: what a program prints for an input, and assertions about what it defines."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qerl.sandbox.compare import outputs_match
from qerl.sandbox.core import Program


@dataclass(frozen=True, slots=True)
class Trial:
    """A program to run for one case, and what its output must be."""

    program: Program
    expected: str
    tolerance: float | None = None

    def accepts(self, stdout: str) -> bool:
        """Whether this output is right."""
        return outputs_match(self.expected, stdout, self.tolerance)


@dataclass(frozen=True, slots=True)
class StdioCase:
    """The whole program reads ``stdin`` and must print ``stdout``; compared by :func:`outputs_match`."""

    stdin: str
    stdout: str
    tolerance: float | None = None

    def trial(self, source: str) -> Trial:
        """What to run for the program ``source``. The expected output stays outside of the sandbox."""
        return Trial(Program(source, self.stdin), self.stdout, self.tolerance)


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Statements that must run to their end after the program: ``assert f(2) == 4``.

    Attributes:
        test: Run after the program, in its namespace (where ``__name__`` is not ``"__main__"``).
        setup: Run before it: imports, or the signature and helpers that a completion continues.
    """

    test: str
    setup: str = ""

    def trial(self, source: str) -> Trial:
        """What to run for the program ``source``: the harness, with a fresh token as the expected output."""
        token = secrets.token_hex(16)
        first = json.dumps({"setup": self.setup, "source": source})
        last = json.dumps({"test": self.test, "token": token})
        # ASCII throughout: characters are bytes
        return Trial(Program(_harness(), f"{len(first):08d}{first}{last}"), token)


Case = StdioCase | AssertCase


@lru_cache(maxsize=1)
def _harness() -> str:
    return Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
