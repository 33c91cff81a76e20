"""A sandbox for the tests, or skip; with ``QERL_REQUIRE_SANDBOX=1`` a missing one is a failure.

So that a machine without a sandbox cannot pass for one where the sandbox holds: with the variable set, tests that need
it fail instead of being skipped, and the session fails if none of them ran and passed.
"""

import os
from collections.abc import Generator

import pytest

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.core import Limits, SandboxUnavailable

REQUIRED = os.environ.get("QERL_REQUIRE_SANDBOX") == "1"
_passed = 0


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    """The local sandbox with limits that make escapes fail fast."""
    executor = Bubblewrap(Limits(wall_s=8.0, cpu_s=4, memory_bytes=256 << 20, tmp_bytes=8 << 20, file_bytes=4 << 20))
    try:
        executor.check()
    except SandboxUnavailable as error:
        if REQUIRED:
            pytest.fail(f"QERL_REQUIRE_SANDBOX=1, but {error}")
        pytest.skip(str(error))
    return executor


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo, None]:
    """Count the sandbox tests that passed."""
    outcome = yield
    report = outcome.get_result()
    global _passed
    _passed += report.when == "call" and report.passed and "sandbox" in getattr(item, "fixturenames", ())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that had to test the sandbox and did not."""
    if REQUIRED and _passed == 0 and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why such a session failed."""
    if REQUIRED and _passed == 0:
        terminalreporter.write_line("QERL_REQUIRE_SANDBOX=1, but no sandbox test ran and passed", red=True)
