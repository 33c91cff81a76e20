"""What a program gets in the local sandbox, and what a machine without one gets told."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.sandbox import bubblewrap, seccomp
from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.core import Program, SandboxUnavailable, Status


@pytest.fixture
def fresh_probe():
    """Forget what was found out about this machine, before and after."""
    caches = (bubblewrap._problem, bubblewrap._tool, seccomp.filter_bytes)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class TestPrograms:
    def test_standard_library_and_interpreter(self, sandbox):
        source = "import sys, json, decimal, sqlite3, numbers\nprint(sys.version_info[:2], sys.argv, __name__)"
        assert sandbox.run(Program(source)).stdout == f"{sys.version_info[:2]} ['/main.py'] __main__\n"

    def test_installed_packages_only_if_asked(self, sandbox):
        program = Program("import pytest; print('found')")
        without = sandbox.run(program)
        assert without.status is Status.RUNTIME_ERROR
        assert "ModuleNotFoundError" in without.stderr
        assert Bubblewrap(site_packages=True).run(program).stdout == "found\n"

    def test_runs_repeat(self, sandbox):
        program = Program("print({str(i) for i in range(100)}, hash('x'))")
        assert len({sandbox.run(program).stdout for _ in range(3)}) == 1

    def test_usual_ways_to_read_input(self, sandbox):
        for source in ("print(input())", "import sys; print(sys.stdin.buffer.read().decode(), end='')",
                       "print(open(0).read(), end='')", "print(open('/dev/stdin').read(), end='')"):  # fmt: skip
            assert sandbox.run(Program(source, "a b\n")).stdout == "a b\n"

    def test_deep_recursion_in_a_thread_with_a_large_stack(self, sandbox):
        source = (
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
            "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
            "t = threading.Thread(target=lambda: print(f(50000))); t.start(); t.join()"
        )
        assert sandbox.run(Program(source)).stdout == "50000\n"

    def test_an_executor_can_be_sent_to_another_process(self, sandbox):
        assert pickle.loads(pickle.dumps(sandbox)) == sandbox


class TestRefusal:
    @pytest.mark.parametrize(("tool", "package"), [("bwrap", "bubblewrap"), ("prlimit", "util-linux")])
    def test_a_missing_tool(self, fresh_probe, monkeypatch, tool, package):
        which = bubblewrap.shutil.which
        monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None if name == tool else which(name) or "/none")
        with pytest.raises(
            SandboxUnavailable, match=rf"{tool} is not installed \(package {package}\).*apt-get install"
        ):
            Bubblewrap().run(Program("print(1)"))

    def test_a_bubblewrap_that_may_not_make_namespaces(self, fresh_probe, monkeypatch, tmp_path):
        refusing = tmp_path / "bwrap"
        refusing.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(SandboxUnavailable, match=r"uid map: Permission denied.*kernel.apparmor_restrict"):
            Bubblewrap().run(Program("print(1)"))

    def test_another_architecture(self, fresh_probe, monkeypatch):
        monkeypatch.setattr(seccomp.platform, "machine", lambda: "sparc64")
        with pytest.raises(SandboxUnavailable, match="architecture 'sparc64'"):
            Bubblewrap().run(Program("print(1)"))

    def test_another_system(self, fresh_probe, monkeypatch):
        monkeypatch.setattr(bubblewrap.sys, "platform", "darwin")
        with pytest.raises(SandboxUnavailable, match="needs Linux, this is darwin"):
            Bubblewrap().run(Program("print(1)"))

    def test_the_probe_runs_once(self, sandbox, monkeypatch):
        Bubblewrap().check()
        calls = []
        monkeypatch.setattr(Bubblewrap, "_run", lambda self, program: calls.append(program))
        for _ in range(3):
            Bubblewrap().check()
        assert calls == []


class TestRequirement:
    """The switch that keeps a green run without a sandbox from happening."""

    @staticmethod
    def run(tmp_path: Path, *arguments: str, required: bool) -> subprocess.CompletedProcess[str]:
        here = Path(__file__).parent
        (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
        (tmp_path / "test_one.py").write_text("def test_one(sandbox): pass\ndef test_two(): pass\n")
        environment = dict(os.environ, PATH=str(tmp_path), QERL_REQUIRE_SANDBOX=str(int(required)))
        environment["PYTHONPATH"] = str(here.parents[1] / "src")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            *arguments,
        ]
        return subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60)

    def test_a_missing_sandbox_is_skipped_or_fails(self, tmp_path):
        skipped = self.run(tmp_path, required=False)
        assert (skipped.returncode, "1 passed, 1 skipped" in skipped.stdout) == (0, True)
        failed = self.run(tmp_path, required=True)
        assert (failed.returncode, "bwrap is not installed" in failed.stdout) == (1, True)

    def test_a_session_that_left_the_sandbox_out_fails(self, tmp_path):
        left_out = self.run(tmp_path, "-k", "two", required=True)
        assert "1 passed" in left_out.stdout
        assert "no sandbox test ran and passed" in left_out.stdout
        assert left_out.returncode == 1
