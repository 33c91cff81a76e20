"""Run a program on its test cases, and many programs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from qerl.sandbox.cases import Case
from qerl.sandbox.core import Executor, Status


class Verdict(StrEnum):
    """What became of one case."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The verdict on one case, the last line of standard error, and the seconds it took."""

    verdict: Verdict
    detail: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """The results of one program, in the order of its cases."""

    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> int:
        """How many cases passed."""
        return sum(result.verdict is Verdict.PASSED for result in self.results)

    @property
    def fraction(self) -> float:
        """The share of cases that passed; a skipped case has not."""
        return self.passed / len(self.results)

    @property
    def failure(self) -> CaseResult | None:
        """The first case that did not pass, None if all did."""
        return next((result for result in self.results if result.verdict is not Verdict.PASSED), None)

    def reason(self) -> str:
        """In a few words: "3 of 4 cases passed; case 2: timeout"."""
        text = f"{self.passed} of {len(self.results)} cases passed"
        if self.failure is None:
            return text
        text += f"; case {self.results.index(self.failure) + 1}: {self.failure.verdict}"
        return f"{text} ({self.failure.detail})" if self.failure.detail else text


_DETAIL = 200
_SKIPPED = CaseResult(Verdict.SKIPPED, "", 0.0)


def judge(
    executor: Executor, source: str, cases: Sequence[Case], *, stop_at_failure: bool = False, max_timeouts: int = 1
) -> Judgement:
    """Run a program on its cases, one after the other, each in a sandbox of its own.

    Cases are skipped after a compile error (the same for all), after ``max_timeouts`` timeouts, and after any failure
    with ``stop_at_failure``; a skipped case has not passed.

    Raises:
        ValueError: No cases, or ``max_timeouts`` < 1.
        SandboxError: The executor failed.
    """
    if not cases or max_timeouts < 1:
        raise ValueError(f"{len(cases)} cases and max_timeouts={max_timeouts}; both must be at least 1")
    results: list[CaseResult] = []
    timeouts = 0
    for case in cases:
        results.append(_run(executor, source, case))
        verdict = results[-1].verdict
        timeouts += verdict is Verdict.TIMEOUT
        failed = verdict is not Verdict.PASSED
        if verdict is Verdict.COMPILE_ERROR or timeouts >= max_timeouts or (failed and stop_at_failure):
            break
    results += [_SKIPPED] * (len(cases) - len(results))
    return Judgement(tuple(results))


def judge_all(
    executor: Executor,
    submissions: Sequence[tuple[str, Sequence[Case]]],
    *,
    workers: int | None = None,
    stop_at_failure: bool = False,
    max_timeouts: int = 1,
) -> list[Judgement]:
    """:func:`judge` every (source, cases), ``workers`` programs at a time, results in the order of the submissions.

    Args:
        workers: Threads, each with one sandbox at a time; default: one for each CPU this process may use.

    Raises:
        ValueError: ``workers`` < 1, or as :func:`judge`.
        SandboxError: The executor failed on a submission; those not yet started are dropped.
    """
    count = len(os.sched_getaffinity(0)) if workers is None else workers
    if count < 1:
        raise ValueError(f"workers={count} must be at least 1")
    with ThreadPoolExecutor(count, thread_name_prefix="judge") as pool:
        futures = [
            pool.submit(judge, executor, source, cases, stop_at_failure=stop_at_failure, max_timeouts=max_timeouts)
            for source, cases in submissions
        ]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(executor: Executor, source: str, case: Case) -> CaseResult:
    trial = case.trial(source)
    execution = executor.run(trial.program)
    last_line = execution.stderr.rstrip().rpartition("\n")[2][:_DETAIL]
    if execution.status is not Status.OK:
        return CaseResult(Verdict(execution.status.value), last_line, execution.wall_s)
    accepted = trial.accepts(execution.stdout)
    verdict = Verdict.PASSED if accepted else Verdict.WRONG_ANSWER
    return CaseResult(verdict, "" if accepted else last_line, execution.wall_s)
