"""Programs that try to get out of the sandbox, or to leave something behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attempts import attempt, marked, processes_with, refused, wait_for

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.core import Limits, Program, Status


class TestNetwork:
    def test_a_listener_of_the_parent_is_out_of_reach(self, sandbox):
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.2)
            port = server.getsockname()[1]
            assert refused(attempt(sandbox, f"tried(socket.create_connection, ('127.0.0.1', {port}), 2)"))
            with pytest.raises(TimeoutError):
                server.accept()

    def test_an_abstract_unix_socket_of_the_parent_is_out_of_reach(self, sandbox):
        name = f"\0sandbox-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            assert refused(attempt(sandbox, f"tried(socket.socket(socket.AF_UNIX).connect, {name!r})"))

    def test_outside_addresses_and_names(self, sandbox):
        source = (
            "tried(socket.create_connection, ('192.0.2.1', 80), 2)\n"
            "tried(socket.getaddrinfo, 'example.org', 80)\n"
            "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "tried(u.sendto, b'x', ('192.0.2.1', 53))\n"
        )
        assert refused(attempt(sandbox, source), 3)

    def test_only_loopback_exists(self, sandbox):
        source = "print([line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]])"
        assert attempt(sandbox, source).stdout == "['lo']\n"

    @pytest.mark.parametrize("family", ["AF_VSOCK", "AF_NETLINK", "AF_PACKET", "AF_ALG"])
    def test_socket_families_that_namespaces_do_not_contain(self, sandbox, family):
        kind = "SOCK_RAW" if family in ("AF_NETLINK", "AF_PACKET") else "SOCK_STREAM"
        assert refused(attempt(sandbox, f"tried(socket.socket, socket.{family}, socket.{kind})"))


class TestFiles:
    def test_reading_outside(self, sandbox, tmp_path):
        secret = tmp_path / "secret"
        secret.write_text("secret")
        source = f"tried(open, {str(secret)!r})\ntried(open, '/etc/passwd')\ntried(os.listdir, '/home')\n"
        source += f"tried(open, {__file__!r})\ntried(open, '/proc/1/root{secret}')"
        assert refused(attempt(sandbox, source), 5)

    def test_writing_outside(self, sandbox, tmp_path):
        targets = [str(tmp_path / "x"), "/x", "/usr/x", "/main.py", "/dev/x", "/proc/sys/kernel/hostname", "/etc/x"]
        source = f"for path in {targets!r}: tried(open, path, 'w')"
        assert refused(attempt(sandbox, source), len(targets))
        assert list(tmp_path.iterdir()) == []

    def test_the_interpreter_cannot_be_changed(self, sandbox):
        source = "import json\ntried(open, json.__file__, 'a')\ntried(open, sys.executable, 'a')"
        assert refused(attempt(sandbox, source), 2)

    def test_symbolic_and_hard_links_out_of_tmp(self, sandbox, tmp_path):
        secret = tmp_path / "secret"
        secret.write_text("secret")
        source = (
            f"os.symlink({str(secret)!r}, '/tmp/link')\ntried(open, '/tmp/link')\ntried(open, '/tmp/link', 'w')\n"
            "os.symlink('../../..', '/tmp/up')\ntried(os.listdir, '/tmp/up/home')\n"
            "tried(os.link, '/main.py', '/tmp/hard')\n"
            "os.symlink('/usr/x', '/tmp/usr')\ntried(open, '/tmp/usr', 'w')"
        )
        assert refused(attempt(sandbox, source), 5)
        assert secret.read_text() == "secret"

    def test_tmp_is_private_and_new_every_time(self, sandbox):
        source = "print(os.listdir('/tmp'))\nopen('/tmp/left', 'w').write('x')"
        before = set(os.listdir("/tmp"))
        assert [attempt(sandbox, source).stdout for _ in range(2)] == ["[]\n", "[]\n"]
        assert "left" not in set(os.listdir("/tmp")) - before

    def test_no_descriptor_is_inherited(self, sandbox, tmp_path):
        with open(tmp_path / "open", "w") as file:
            os.set_inheritable(file.fileno(), True)
            source = "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])"
            # 3 is the listing itself
            assert attempt(sandbox, source).stdout == "[0, 1, 2]\n"

    def test_a_file_larger_than_the_limit(self, sandbox):
        execution = attempt(sandbox, "tried(open('/tmp/f', 'wb').write, bytes(5 << 20))")
        assert "refused OSError" in execution.stdout

    def test_filling_tmp(self, sandbox):
        source = (
            "total = 0\ntry:\n    for i in range(100):\n        with open(f'/tmp/{i}', 'wb', 0) as file:\n"
            "            for _ in range(3): total += file.write(bytes(1 << 20))\n"
            "except OSError as error:\n    print(error.errno, total)"
        )
        errno_, total = attempt(sandbox, source).stdout.split()
        assert (int(errno_), int(total) <= 8 << 20) == (28, True)


class TestProcesses:
    def test_other_processes_are_invisible(self, sandbox):
        source = "print([p for p in os.listdir('/proc') if p.isdigit()])"
        pids = attempt(sandbox, source).stdout
        # init, the watch over the deadline, the program
        assert pids == "['1', '2', '3']\n"

    def test_the_parent_cannot_be_signalled(self, sandbox):
        received = []
        old = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
        try:
            source = (
                f"import signal\nfor pid in ({os.getpid()}, {os.getppid()}, os.getppid()):\n"
                "    try: os.kill(pid, signal.SIGUSR1)\n    except OSError: pass\n"
                "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
                "try: os.kill(-1, signal.SIGUSR1)\nexcept OSError: pass\nprint('alive')"
            )
            execution = attempt(sandbox, source)
        finally:
            signal.signal(signal.SIGUSR1, old)
        assert (execution.stdout, received) == ("alive\n", [])

    def test_environment_of_the_parent_is_hidden(self, sandbox, monkeypatch):
        monkeypatch.setenv("SANDBOX_TEST_SECRET", "secret")
        source = (
            "import glob\nprint(sorted(os.environ))\n"
            "for path in glob.glob('/proc/*/environ'):\n"
            "    try: print('secret' in open(path, errors='replace').read())\n    except OSError: print(False)\n"
        )
        lines = attempt(sandbox, source).stdout.splitlines()
        names = {
            "HOME",
            "LANG",
            "MALLOC_ARENA_MAX",
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "PATH",
            "PWD",
            "PYTHONHASHSEED",
            "PYTHONUTF8",
        }
        assert set(eval(lines[0])) <= names
        assert len(lines) >= 3
        assert set(lines[1:]) == {"False"}

    def test_fork_bomb(self, sandbox):
        source = (
            "n = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(30)\n"
            "        n += 1\nexcept OSError as error:\n    print(n, type(error).__name__, flush=True)"
        )
        start = time.monotonic()
        execution = attempt(sandbox, source)
        count, error = execution.stdout.split()
        assert error == "BlockingIOError"
        assert int(count) < sandbox.limits.processes
        # the children sleep for 30 s, but end with the first process
        assert time.monotonic() - start < 5

    def test_exponential_fork_bomb_ends_at_the_deadline(self, sandbox):
        mark = f"bomb-{os.getpid()}"
        source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        execution = Bubblewrap(Limits(wall_s=1.5)).run(marked(source, mark))
        assert execution.status is Status.TIMEOUT
        assert execution.wall_s < 4
        assert wait_for(lambda: not processes_with(mark))

    def test_background_processes_end_with_the_program(self, sandbox):
        mark = f"left-behind-{os.getpid()}"
        source = (
            "import subprocess\n"
            f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'], start_new_session=True,"
            " stdin=-3, stdout=-3, stderr=-3)\nprint('started')"
        )
        assert attempt(sandbox, source).stdout == "started\n"
        assert wait_for(lambda: not processes_with(mark))

    def test_background_processes_end_at_the_deadline(self, sandbox):
        mark = f"left-late-{os.getpid()}"
        source = (
            "import subprocess, time, sys, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            f"child = [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}']\n"
            "subprocess.Popen(child, start_new_session=True)\n"
            "print('started', flush=True)\ntime.sleep(60)"
        )
        execution = Bubblewrap(Limits(wall_s=1.5)).run(Program(source))
        assert (execution.status, execution.stdout) == (Status.TIMEOUT, "started\n")
        assert wait_for(lambda: not processes_with(mark))

    @pytest.mark.parametrize("bound", [True, False])
    def test_nothing_is_left_when_the_parent_is_killed(self, sandbox, bound):
        """Bound to its parent a program ends at once; one that is not yet bound ends soon after its deadline."""
        mark = f"orphan-{bound}-{os.getpid()}"
        script = (
            "from qerl.sandbox import bubblewrap\nfrom qerl.sandbox.core import Limits, Program\n"
            "bubblewrap.Bubblewrap().check()\n"
            f"if not {bound}: bubblewrap._NAMESPACES = bubblewrap._NAMESPACES[:-1]\n"
            f"executor = bubblewrap.Bubblewrap(Limits(wall_s={60 if bound else 0.5}))\n"
            f"executor.run(Program({marked('import time; time.sleep(60)', mark).source!r}))"
        )
        parent = subprocess.Popen([sys.executable, "-c", script])
        try:
            assert wait_for(lambda: processes_with(mark), 10.0)
        finally:
            parent.kill()
            parent.wait()
        assert wait_for(lambda: not processes_with(mark), 1.0 if bound else 5.0)

    def test_nothing_is_left_when_the_thread_is_interrupted(self, sandbox, monkeypatch):
        mark = f"interrupted-{os.getpid()}"

        def interrupted(*_: object) -> None:
            assert wait_for(lambda: processes_with(mark))
            raise KeyboardInterrupt

        monkeypatch.setattr("qerl.sandbox.bubblewrap.exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sandbox.run(marked("import time; time.sleep(60)", mark))
        assert wait_for(lambda: not processes_with(mark))


class TestPrivileges:
    def test_no_capabilities_and_no_way_to_get_them(self, sandbox):
        source = (
            "fields = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
            "print([int(fields[k], 16) for k in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb')], *(fields[k].strip()"
            " for k in ('NoNewPrivs', 'Seccomp')), os.getuid() != 0)\n"
            "tried(os.setuid, 0)\n"
        )
        first, second = attempt(sandbox, source).stdout.splitlines()
        assert first == "[0, 0, 0, 0] 1 2 True"
        # in a user namespace the error is another: there is no user 0
        assert second.startswith("refused")

    @pytest.mark.parametrize(
        "call",
        [
            "unshare(0x10000000)", "unshare(0x00020000)", "mount(0, b'/tmp', b'tmpfs', 0, 0)", "ptrace(16, 1, 0, 0)",
            "chroot(b'/tmp')", "syscall(425, 1, 0)", "syscall(BPF, 0, 0, 0)",
        ],
    )  # fmt: skip
    def test_system_calls_of_the_kernel_attack_surface(self, sandbox, call):
        call = call.replace("BPF", "321" if os.uname().machine == "x86_64" else "280")
        source = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"
        assert attempt(sandbox, source).stdout == "-1 1\n"

    def test_clone_with_a_new_user_namespace(self, sandbox):
        number = 56 if os.uname().machine == "x86_64" else 220
        source = (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            f"print(libc.syscall({number}, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())"
        )
        assert attempt(sandbox, source).stdout == "-1 1\n"


def test_as_an_ordinary_user(sandbox):
    """Root drops to another user here; an ordinary user gets a user namespace: the same bounds."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0:
        pytest.skip("already an ordinary user")
    source_folder = Path(__file__).parents[2] / "src"
    script = (
        "from qerl.sandbox.bubblewrap import Bubblewrap\nfrom qerl.sandbox.core import Limits, Program\n"
        "b = Bubblewrap(Limits(wall_s=8))\n"
        "bomb = '''import os, time\\nn = 0\\ntry:\\n while True:\\n  n += 1\\n  os.fork() or time.sleep(30)\\n'''\n"
        "bomb += '''except OSError: print(n < 9, os.getuid(), flush=True)\\n'''\n"
        "print(b.run(Program(bomb)).stdout, end='')\n"
        "look = '''import os\\nprint(open('/proc/1/environ').read().count('SANDBOX_TEST'), os.listdir('/tmp'))\\n'''\n"
        "print(b.run(Program(look)).stdout, end='')\n"
        "print(b.run(Program('open(\\'/dev/x\\', \\'w\\')')).stderr.splitlines()[-1])\n"
    )
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B", "-c", script]
    environment = {"PYTHONPATH": str(source_folder), "PATH": "/usr/bin:/bin", "SANDBOX_TEST": "secret"}
    probe = subprocess.run([*command[:-1], "import sys, qerl; assert sys.version_info >= (3, 11)"], env=environment,
                           capture_output=True, cwd="/")  # fmt: skip
    if probe.returncode != 0:
        pytest.skip(f"no Python >= 3.11 at {python} that an ordinary user can import this package with")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=60)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "True 65534",
        "0 []",
        "OSError: [Errno 30] Read-only file system: '/dev/x'",
    ]
