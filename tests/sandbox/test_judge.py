"""Verdicts, scores, skipped cases, order; and programs that try to pass tests without solving them."""

import json
import threading

import pytest
from scripted import Scripted, ended

from qerl.sandbox.cases import AssertCase, StdioCase
from qerl.sandbox.core import Program, SandboxError, Status
from qerl.sandbox.judge import Verdict, judge, judge_all

DOUBLE = "print(2 * int(input()))"
CASES = [StdioCase(f"{i}\n", f"{2 * i}\n") for i in range(4)]
SQUARE = [AssertCase("assert square(3) == 9"), AssertCase("assert square(-2) == 4")]


def verdicts(judgement) -> list[str]:
    return [str(result.verdict) for result in judgement.results]


class TestPrograms:
    def test_right_and_wrong(self, sandbox):
        assert verdicts(judge(sandbox, DOUBLE, CASES)) == ["passed"] * 4
        judgement = judge(sandbox, "print(int(input()) ** 2)", CASES)
        assert verdicts(judgement) == ["passed", "wrong_answer", "passed", "wrong_answer"]
        assert (judgement.fraction, judgement.passed) == (0.5, 2)
        assert judgement.reason() == "2 of 4 cases passed; case 2: wrong_answer"

    def test_errors(self, sandbox):
        assert verdicts(judge(sandbox, "print((", CASES)) == ["compile_error", "skipped", "skipped", "skipped"]
        failed = judge(sandbox, "print(1 // int(input()))", CASES[:2])
        assert verdicts(failed) == ["runtime_error", "wrong_answer"]
        assert failed.failure.detail == "ZeroDivisionError: integer division or modulo by zero"
        assert verdicts(judge(sandbox, "raise SystemExit(3)", CASES[:1])) == ["runtime_error"]
        assert verdicts(judge(sandbox, "import os; os.abort()", CASES[:1])) == ["runtime_error"]

    def test_large_input_and_output(self, sandbox):
        text = "x" * 79 + "\n"
        case = StdioCase(text * 10_000, text * 10_000)
        assert verdicts(judge(sandbox, "import sys; sys.stdout.write(sys.stdin.read())", [case])) == ["passed"]
        # a program that does not read its input is no error of ours
        assert verdicts(judge(sandbox, "print(1)", [StdioCase(text * 100_000, "1")])) == ["passed"]

    def test_text_that_is_not_ascii(self, sandbox):
        assert verdicts(judge(sandbox, "print(input()[::-1])", [StdioCase("é→\n", "→é")])) == ["passed"]
        assert verdicts(judge(sandbox, "print('\ud800')", [StdioCase("", "?")])) == ["passed"]


class TestAssertions:
    def test_right_and_wrong(self, sandbox):
        assert verdicts(judge(sandbox, "def square(x): return x * x", SQUARE)) == ["passed", "passed"]
        assert verdicts(judge(sandbox, "def square(x): return 9", SQUARE)) == ["passed", "wrong_answer"]

    def test_errors(self, sandbox):
        assert verdicts(judge(sandbox, "def square(x) return x", SQUARE)) == ["compile_error", "skipped"]
        assert verdicts(judge(sandbox, "def cube(x): return x", SQUARE)) == ["runtime_error", "runtime_error"]
        assert verdicts(judge(sandbox, "raise AssertionError", SQUARE[:1])) == ["runtime_error"]

    def test_setup_runs_first_and_the_main_block_does_not(self, sandbox):
        case = AssertCase("assert f(4) == 2", "from math import sqrt")
        source = "def f(x): return sqrt(x)\nif __name__ == '__main__': raise SystemExit"
        assert verdicts(judge(sandbox, source, [case])) == ["passed"]

    def test_a_candidate_with_dataclasses_and_future_imports(self, sandbox):
        source = (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass P:\n    x: int\ndef square(x): return P(x).x ** 2"
        )
        assert verdicts(judge(sandbox, source, SQUARE)) == ["passed", "passed"]

    @pytest.mark.parametrize(
        "source",
        [
            "import sys; sys.exit(0)",
            "import os; os._exit(0)",
            "def square(x): raise SystemExit",
            "import os\ndef square(x): os._exit(0)",
            "import os\nos.execv('/usr/bin/true', ['true'])",
            "import atexit, os\natexit.register(os._exit, 0)",
            "print('0' * 32)",
            "import sys; print(sys.stdin.read())",
            "import sys\ndef square(x): print(sys.stdin.read()); sys.exit(0)",
            "import os\nif os.fork(): os._exit(0)",
        ],
    )
    def test_leaving_early_does_not_pass(self, sandbox, source):
        assert Verdict.PASSED not in [result.verdict for result in judge(sandbox, source, SQUARE[:1]).results]

    def test_the_test_is_not_on_standard_input(self, sandbox):
        source = "import sys\nseen = sys.stdin.read()\ndef square(x): return seen"
        assert verdicts(judge(sandbox, source, [AssertCase("assert square(3) == ''")])) == ["passed"]

    def test_the_token_is_new_for_every_run(self):
        tokens = {json.loads(trial.program.stdin.partition("}")[2])["token"] for trial in
                  (SQUARE[0].trial("") for _ in range(3))}  # fmt: skip
        assert len(tokens) == 3


class TestSkipping:
    def test_after_the_first_timeout(self):
        executor = Scripted(lambda program: ended(Status.TIMEOUT))
        assert verdicts(judge(executor, "", CASES)) == ["timeout", "skipped", "skipped", "skipped"]
        assert verdicts(judge(executor, "", CASES, max_timeouts=3)) == ["timeout"] * 3 + ["skipped"]
        assert len(executor.programs) == 4

    def test_after_the_first_failure_if_asked(self):
        executor = Scripted(lambda program: ended(stdout="0"))
        assert verdicts(judge(executor, "", CASES, stop_at_failure=True)) == [
            "passed",
            "wrong_answer",
            "skipped",
            "skipped",
        ]

    def test_nothing_to_run(self):
        with pytest.raises(ValueError, match="0 cases"):
            judge(Scripted(lambda program: ended()), "", [])


class TestMany:
    def test_results_keep_their_order(self):
        gate = threading.Barrier(2, timeout=5)

        def answer(program: Program):
            # passes only if two programs run at the same time
            gate.wait()
            return ended(stdout=program.source)

        submissions = [(str(i), [StdioCase("", str(i % 3))]) for i in range(6)]
        results = judge_all(Scripted(answer), submissions, workers=2)
        assert [result.passed for result in results] == [1, 1, 1, 0, 0, 0]

    def test_a_failure_of_the_executor_is_raised(self):
        def answer(program: Program):
            raise SandboxError("broken")

        executor = Scripted(answer)
        with pytest.raises(SandboxError, match="broken"):
            judge_all(executor, [("", CASES)] * 50, workers=1)
        assert len(executor.programs) < 50

    def test_workers(self):
        assert judge_all(Scripted(lambda program: ended()), [], workers=1) == []
        with pytest.raises(ValueError, match="workers=0"):
            judge_all(Scripted(lambda program: ended()), [], workers=0)
