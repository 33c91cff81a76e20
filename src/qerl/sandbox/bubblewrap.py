"""The local sandbox: bubblewrap's namespaces, resource limits and a system call filter around one interpreter.

A program sees a read-only root with the system's libraries and its interpreter, a private /tmp of limited size, its
own processes and a loopback device of its own. It has no network, none of our environment, no inherited descriptor,
no capability and no way to get one. When its first process ends, or at the deadline, all of its processes are killed.

Two ways in, the same view inside:

- started by an ordinary user: a user namespace; the process limit counts within it (Linux 5.14 or newer),
- started by root (uid 0 outside of any user namespace): no user namespace, since root's processes are never counted
  and the inside would be root to every file outside. The program runs under a user id that nothing else has.

What is not limited: the sum over processes (``processes`` x ``memory_bytes`` is the bound), the number of empty
files in /tmp (bounded by CPU time alone), and timing side channels.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from qerl.sandbox.core import Execution, Limits, Program, SandboxError, SandboxUnavailable, Status, classify
from qerl.sandbox.interpreter import FLAGS, SYSTEM_FOLDERS, Interpreter, interpreter
from qerl.sandbox.seccomp import filter_bytes
from qerl.sandbox.streams import End, exchange

logger = logging.getLogger(__name__)

INSTALL_HINT = (
    "install bubblewrap 0.8 or newer (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap) and "
    "allow user namespaces: Ubuntu 24.04 needs sysctl kernel.apparmor_restrict_unprivileged_userns=0 or a profile for "
    "bwrap, a container --security-opt seccomp=unconfined --security-opt systempaths=unconfined; "
    "or use a remote executor (Piston, E2B)"
)
_PACKAGES = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux", "timeout": "coreutils"}
_MAIN = "/main.py"
# all that the program, and bubblewrap itself (whose own environment is in /proc/1/environ), get to see
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1",
    # numerical libraries would start a thread for each core and meet the process limit
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    # the C library would reserve 64 MiB of address space for each thread
    "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
_STACK_BYTES = 16 << 20
_STDERR_TAIL = 4000
_END_LIMIT_S = 5.0
# bwrap binds the inside to its parent only at the end of its set-up: a program whose parent (the training) was killed
# within those milliseconds ends by itself, this long after its deadline
_ORPHAN_S = 2.0
# ids nobody has, one for each run at a time: a process counts 256 of its own
_FIRST_UID = 1 << 30
_SLOTS = 256
_slots = count()
_PROBE = "import threading; t = threading.Thread(target=print, args=(6 * 7,)); t.start(); t.join()"


@dataclass(frozen=True)
class Bubblewrap:
    """Runs Python programs in a bubblewrap sandbox on this machine.

    Args:
        limits: Of each run.
        site_packages: Programs may import the packages of this environment; by default the standard library only.
    """

    limits: Limits = field(default_factory=Limits)
    site_packages: bool = False
    name: str = field(default="bubblewrap", init=False)

    def check(self) -> None:
        """Run a trivial program in the sandbox, the first time it is asked in this process.

        Raises:
            SandboxUnavailable: It does not work on this machine; with the reason and what to install.
        """
        problem = _problem(self.site_packages)
        if problem is not None:
            raise SandboxUnavailable(f"programs cannot be run in a sandbox here: {problem}. To mend it, {INSTALL_HINT}")

    def run(self, program: Program) -> Execution:
        """Run a program to its end or to a limit.

        Raises:
            SandboxUnavailable: See :meth:`check`.
            SandboxError: Bubblewrap failed.
        """
        self.check()
        return self._run(program)

    def _run(self, program: Program) -> Execution:
        with ExitStack() as stack:
            rules = _memory_file(stack, filter_bytes())
            source_read, source = _pipe(stack)
            report, report_write = _pipe(stack)
            uid = _FIRST_UID + os.getpid() * _SLOTS + next(_slots) % _SLOTS if _is_real_root() else None
            start = time.monotonic()
            process = subprocess.Popen(
                self._command(source_read.fileno(), rules, report_write.fileno(), uid),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(source_read.fileno(), rules, report_write.fileno()),
                start_new_session=True,
            )
            # on every way out, an exception in this thread included, nothing of the program lives on
            stack.callback(_end, process)
            source_read.close()
            report_write.close()
            if uid is not None:
                # /dev/stdin can only be opened by the owner of the pipe; bwrap waits for the program meanwhile
                for stream in (process.stdin, process.stdout, process.stderr):
                    os.fchown(stream.fileno(), uid, uid)
            _write(program.source.encode("utf-8", "replace"), source)
            deadline = start + self.limits.wall_s
            stdin = program.stdin.encode("utf-8", "replace")
            streams = exchange(process, stdin, deadline, self.limits.output_bytes)
            if streams.end is End.CLOSED:
                _reap(process)
            else:
                _end(process)
            wall_s = time.monotonic() - start
            os.set_blocking(report.fileno(), False)
            exit_code = _exit_code(report.read() or b"")
        stdout = streams.stdout.decode("utf-8", "replace")
        stderr = streams.stderr.decode("utf-8", "replace")
        if streams.end is not End.CLOSED:
            status = Status.TIMEOUT if streams.end is End.DEADLINE else Status.OUTPUT_LIMIT
            return Execution(status, None, stdout, stderr[-_STDERR_TAIL:], wall_s)
        if exit_code is None:
            raise SandboxError(f"bubblewrap ended with status {process.returncode}: {stderr.strip() or 'no message'}")
        status = Status.TIMEOUT if exit_code == -signal.SIGXCPU else classify(exit_code, stderr)
        return Execution(status, exit_code, stdout, stderr[-_STDERR_TAIL:], wall_s)

    def _command(self, source: int, rules: int, report: int, uid: int | None) -> list[str]:
        """The command line: descriptors of the program, the filter and the report; the user id under root."""
        python = interpreter(self.site_packages)
        command = [_tool("bwrap"), *_NAMESPACES, *(_USER_NAMESPACE if uid is None else _ROOT_CAPABILITIES)]
        command += ["--json-status-fd", str(report), "--seccomp", str(rules)]
        command += _file_system(python, source, self.limits.tmp_bytes)
        command.append("--")
        if uid is not None:
            command += [_tool("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
        command += [_tool("timeout"), "--foreground", "--signal=KILL", f"{self.limits.wall_s + _ORPHAN_S:g}"]
        return [*command, _tool("prlimit"), *_resource_limits(self.limits), python.executable, *FLAGS, _MAIN]


_NAMESPACES = (
    "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
    "--hostname", "sandbox", "--new-session", "--die-with-parent",
)  # fmt: skip
_USER_NAMESPACE = ("--unshare-user", "--uid", "65534", "--gid", "65534")
# enough for setpriv to leave root for good
_ROOT_CAPABILITIES = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")


def _file_system(python: Interpreter, source: int, tmp_bytes: int) -> Iterator[str]:
    for folder in SYSTEM_FOLDERS:
        path = Path(folder)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), folder)
        elif path.is_dir():
            yield from ("--ro-bind", folder, folder)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    yield from ("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp")
    # after /tmp, where an environment may be; their parent folders first, since bwrap would copy modes that keep our
    # user id out (root's home is 0700)
    for parent in sorted({str(parent) for mount in python.mounts for parent in PurePosixPath(mount).parents} - {"/"}):
        yield from ("--dir", parent)
    for mount in python.mounts:
        yield from ("--ro-bind", mount, mount)
    for folder in python.hidden:
        yield from ("--tmpfs", folder, "--remount-ro", folder)
    yield from ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--perms", "0444", "--ro-bind-data", str(source), _MAIN)
    yield from ("--remount-ro", "/", "--chdir", "/tmp")


def _resource_limits(limits: Limits) -> tuple[str, ...]:
    return (
        # the second of grace turns the soft limit into SIGXCPU, which tells it from other kills
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        f"--as={limits.memory_bytes}",
        f"--stack={min(_STACK_BYTES, limits.memory_bytes)}",
        # one more for the process that watches the deadline inside
        f"--nproc={limits.processes + 1}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.open_files}",
        "--core=0",
        "--memlock=0",
        "--msgqueue=0",
    )


@lru_cache(maxsize=1)
def _is_real_root() -> bool:
    """User 0 outside of any user namespace."""
    if os.geteuid() != 0:
        return False
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", "4294967295"]


@lru_cache(maxsize=len(_PACKAGES))
def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxUnavailable(f"{name} is not installed (package {_PACKAGES[name]})")
    return path


@lru_cache(maxsize=2)
def _problem(site_packages: bool) -> str | None:
    """Why no program can be run in the sandbox, None if one can."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, this is {sys.platform}"
    try:
        result = Bubblewrap(site_packages=site_packages)._run(Program(_PROBE))
    except (SandboxError, OSError) as error:
        return str(error)
    if result.status is Status.OK and result.stdout == "42\n":
        return None
    return f"a trivial program ended with {result.status}: {(result.stderr or result.stdout).strip()}"


def _memory_file(stack: ExitStack, data: bytes) -> int:
    """A descriptor to read ``data`` from, closed with the stack."""
    descriptor = os.memfd_create("sandbox")
    stack.callback(os.close, descriptor)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """The reading and the writing end of a pipe, closed with the stack."""
    reading, writing = os.pipe()
    return stack.enter_context(os.fdopen(reading, "rb")), stack.enter_context(os.fdopen(writing, "wb", 0))


def _write(data: bytes, pipe: BinaryIO) -> None:
    """Write all of it and close."""
    view = memoryview(data)
    try:
        while view:
            view = view[pipe.write(view) :]
    except BrokenPipeError:
        logger.debug("bwrap ended before it had read the program; its status says why")
    pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill bwrap and with it (parent death signal, then the process namespace) all that runs inside; reap it."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"bubblewrap, process {process.pid}, has not ended {_END_LIMIT_S:g} s later") from error


def _exit_code(report: bytes) -> int | None:
    """The exit status in bubblewrap's report (one JSON object a line), None if the program was never started."""
    for line in report.splitlines():
        code = json.loads(line).get("exit-code")
        if code is not None:
            return 128 - code if 128 < code < 128 + signal.NSIG else code
    return None
