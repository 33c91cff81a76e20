"""An executor that runs nothing: it answers as told. For tests of what stands around an executor."""

from collections.abc import Callable

from qerl.sandbox.core import Execution, Limits, Program, Status


def ended(status: Status = Status.OK, stdout: str = "", stderr: str = "") -> Execution:
    """An execution that took no time."""
    return Execution(status, 0 if status is Status.OK else 1, stdout, stderr, 0.0)


class Scripted:
    """Answers each program by ``answer``; keeps the programs it was given."""

    name = "scripted"

    def __init__(self, answer: Callable[[Program], Execution]) -> None:
        self.limits = Limits()
        self.answer = answer
        self.programs: list[Program] = []

    def run(self, program: Program) -> Execution:
        """The scripted answer."""
        self.programs.append(program)
        return self.answer(program)
