"""Programs that use more than they may."""

import signal
import threading

import pytest
from attempts import attempt

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.core import Limits, Program, Status


class TestResources:
    def test_memory_bomb(self, sandbox):
        assert attempt(sandbox, "x = bytearray(1 << 30)").status is Status.MEMORY
        assert attempt(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))").status is Status.MEMORY

    def test_infinite_loop_meets_the_cpu_limit(self, sandbox):
        limited = Bubblewrap(Limits(cpu_s=1, wall_s=8))
        execution = limited.run(Program("import signal\nwhile True: pass"))
        assert (execution.status, execution.exit_code) == (Status.TIMEOUT, -signal.SIGXCPU)

    def test_sleeping_meets_the_deadline(self, sandbox):
        execution = Bubblewrap(Limits(wall_s=1.0)).run(Program("import time; time.sleep(60)"))
        assert (execution.status, execution.exit_code) == (Status.TIMEOUT, None)
        assert 1.0 <= execution.wall_s < 2.0

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_huge_output(self, sandbox, stream):
        limited = Bubblewrap(Limits(output_bytes=100_000, wall_s=8))
        execution = limited.run(Program(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"))
        assert execution.status is Status.OUTPUT_LIMIT
        assert len(execution.stdout) == (100_000 if stream == "stdout" else 0)
        assert execution.wall_s < 4

    def test_closing_the_output_does_not_end_the_deadline(self, sandbox):
        source = "import os, time\nos.close(1); os.close(2); time.sleep(60)"
        assert Bubblewrap(Limits(wall_s=1.0)).run(Program(source)).status is Status.TIMEOUT

    def test_open_files(self, sandbox):
        source = (
            "files = []\ntry:\n    while True: files.append(open('/dev/null'))\n"
            "except OSError as error: print(error.errno, len(files))"
        )
        number, count = attempt(sandbox, source).stdout.split()
        assert (int(number), int(count) < 64) == (24, True)

    def test_limits_cannot_be_raised(self, sandbox):
        source = (
            "import resource\n"
            "for name in ('AS', 'NPROC', 'FSIZE', 'NOFILE', 'CPU'):\n"
            "    limit = getattr(resource, 'RLIMIT_' + name)\n"
            "    try:\n        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
            "        print('raised', name)\n    except ValueError: print('refused')\n"
        )
        assert attempt(sandbox, source).stdout == "refused\n" * 5

    def test_memory_outside_of_the_address_space_limit(self, sandbox):
        source = (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())\ntried(os.memfd_create, 'x')"
        )
        assert attempt(sandbox, source).stdout == "-1 1\nrefused PermissionError\n"


def test_runs_side_by_side_do_not_count_each_other(sandbox):
    # each takes all of the processes that it may have
    source = (
        "import threading, time\nts = [threading.Thread(target=time.sleep, args=(0.5,)) for _ in range(5)]\n"
        "for t in ts: t.start()\nfor t in ts: t.join()\nprint('all')"
    )
    outputs: list[str] = []
    threads = [threading.Thread(target=lambda: outputs.append(sandbox.run(Program(source)).stdout)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == ["all\n"] * 4
