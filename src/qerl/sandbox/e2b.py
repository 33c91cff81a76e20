"""Run programs on E2B (e2b.dev): a fresh remote machine without internet for each run, through its SDK.

The SDK (``pip install e2b``) is imported when a program is first run; it takes the key from the environment variable
``E2B_API_KEY``. Inside the machine the limits on CPU, memory, files, processes are set with ``prlimit``.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from qerl.sandbox.core import Execution, Limits, Program, SandboxError, SandboxUnavailable, Status, classify

logger = logging.getLogger(__name__)

_STDERR_TAIL = 4000
_MACHINE_GRACE_S = 60
_FOLDER = "/tmp/run"
# exit statuses of a shell for programs that were ended by SIGKILL and by SIGXCPU
_KILLED, _CPU_EXHAUSTED = 128 + 9, 128 + 24


@dataclass(frozen=True)
class E2B:
    """An executor that starts one E2B machine a run.

    Args:
        limits: Of each run.
        template: Of the machine; None for E2B's default. It needs python3 and prlimit (util-linux).
    """

    limits: Limits = field(default_factory=Limits)
    template: str | None = None
    name: str = field(default="e2b", init=False)

    def run(self, program: Program) -> Execution:
        """Run a program to its end or to a limit.

        Raises:
            SandboxUnavailable: The SDK is not installed.
            SandboxError: E2B failed: no key, no machine, no connection.
        """
        sdk = _sdk()
        failures = (sdk.SandboxException, sdk.AuthenticationException, sdk.ServiceBusyException, OSError)
        lifetime_s = int(self.limits.wall_s) + _MACHINE_GRACE_S
        try:
            machine = sdk.Sandbox.create(template=self.template, timeout=lifetime_s, allow_internet_access=False)
        except failures as error:
            raise SandboxError(f"E2B gave no machine: {error}") from error
        try:
            return self._run(machine, program)
        except failures as error:
            raise SandboxError(f"E2B did not run the program: {error}") from error
        finally:
            try:
                machine.kill()
            except failures as error:
                logger.warning("an E2B machine was not ended, it lives up to %d s longer: %s", lifetime_s, error)

    def _run(self, machine: Any, program: Program) -> Execution:
        limits = self.limits
        machine.files.write(f"{_FOLDER}/main.py", program.source.encode("utf-8", "replace"))
        machine.files.write(f"{_FOLDER}/stdin", program.stdin.encode("utf-8", "replace"))
        start = time.monotonic()
        # raised for every exit status but 0; a deadline of the SDK itself means that the machine is in trouble
        try:
            result = machine.commands.run(self._command(), timeout=limits.wall_s + _MACHINE_GRACE_S)
        except _sdk().CommandExitException as error:
            result = error
        wall_s = time.monotonic() - start
        code, stdout, stderr = result.exit_code, result.stdout, result.stderr
        if len(stdout) > limits.output_bytes:
            return Execution(Status.OUTPUT_LIMIT, None, stdout[: limits.output_bytes], stderr, wall_s)
        if code == _KILLED and wall_s >= limits.wall_s:
            return Execution(Status.TIMEOUT, None, stdout, stderr, wall_s)
        status = Status.TIMEOUT if code == _CPU_EXHAUSTED else classify(code, stderr)
        return Execution(status, code, stdout, stderr, wall_s)

    def _command(self) -> str:
        limits = self.limits
        program = (
            f"timeout -s KILL {limits.wall_s:g} "
            f"prlimit --cpu={limits.cpu_s}:{limits.cpu_s + 1} --as={limits.memory_bytes} --nproc={limits.processes} "
            f"--fsize={limits.file_bytes} --nofile={limits.open_files} --core=0 python3 -I main.py"
        )
        # one byte more than allowed shows that there was more, without carrying all of it over the network
        show = f"head -c {limits.output_bytes + 1} stdout; tail -c {_STDERR_TAIL} stderr >&2"
        return f"cd {_FOLDER}; {program} < stdin > stdout 2> stderr; code=$?; {show}; exit $code"


def _sdk() -> ModuleType:
    try:
        import e2b
    except ImportError as error:
        raise SandboxUnavailable("the E2B executor needs its SDK: pip install e2b") from error
    return e2b
