"""The reward pool: deadlines, threads, errors, replacement and clean ends."""

import math
import operator
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from qerl.tasks.verify import verify
from qerl.tasks.workers import Failure, RewardError, RewardPool

# math-verify works on this for minutes
PATHOLOGICAL = r"\sum_{k=1}^{9999} \binom{9999}{k} k^{9999}"


@pytest.fixture(scope="module")
def pool():
    with RewardPool(2, deadline_s=20) as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_same_result_as_in_this_process(pool):
    golds = ["18", r"\frac12", "5", r"\int_0^1 x\,dx"]
    answers = ["18.0", "0.5", "6", "1/2"]
    outcomes = pool.verify(golds, answers)
    assert [o.score for o in outcomes] == [float(verify(g, a).equal) for g, a in zip(golds, answers, strict=True)]
    assert [o.score for o in outcomes] == [1.0, 1.0, 0.0, 1.0]


def test_same_result_from_any_thread(pool):
    golds = ["18", r"\sum_{k=1}^{10} k", "3"] * 5
    answers = ["18", "55", "4"] * 5
    expected = pool.verify(golds, answers)
    results = [None] * 4

    def call(index):
        results[index] = pool.verify(golds, answers)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
    assert [o.score for o in expected[:3]] == [1.0, 1.0, 0.0]


def test_verify_without_a_pool_works_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(verify(r"\sum_{k=1}^{10} k", "55")))
    thread.start()
    thread.join()
    assert results[0].equal


def test_a_stuck_sample_is_killed_and_counted_and_others_are_not_affected():
    with RewardPool(2, deadline_s=1.5) as pool:
        golds = ["18", r"\sum_{k=1}^{n} k", "18", "18"]
        answers = ["18", PATHOLOGICAL, "19", "18"]
        started = time.monotonic()
        outcomes = pool.verify(golds, answers)
        assert time.monotonic() - started < 15
        assert [o.score for o in outcomes] == [1.0, 0.0, 0.0, 1.0]
        assert [o.counter for o in outcomes] == ["", "timeout", "", ""]
        assert pool.stats.timeouts == 1
        assert pool.stats.replaced_workers == 1
        assert pool.verify(["18"], ["18"])[0].score == 1.0


def test_a_worker_stuck_in_c_code_is_killed():
    with RewardPool(1, deadline_s=0.5) as pool:
        # one bytecode that holds the interpreter's lock for minutes
        results = pool.run([(operator.pow, (7, 10**8)), (operator.add, (1, 2))])
    assert isinstance(results[0], Failure) and results[0].kind == "timeout"
    assert results[1] == 3


def test_a_dead_worker_is_replaced():
    with RewardPool(1, deadline_s=5) as pool:
        results = pool.run([(operator.add, (1, 2)), (os._exit, (3,)), (operator.add, (3, 4))])
        assert results[0] == 3 and results[2] == 7
        assert results[1] == Failure("exhausted", "the worker process died")
        assert pool.stats.replaced_workers == 1


def test_an_exception_names_the_sample_and_the_pool_stays_usable(pool):
    with pytest.raises(RewardError, match=r"sqrt, sample 'row-2', failed on ValueError: (.|\n)*Traceback"):
        pool.run([(math.sqrt, (4,)), (math.sqrt, (-1,))], ids=["row-1", "row-2"])
    assert pool.run([(math.sqrt, (9,))]) == [3.0]


def test_memory_limit():
    with RewardPool(1, deadline_s=10, memory_bytes=1 << 30) as pool:
        results = pool.run([(bytearray, (2 << 30,)), (operator.add, (1, 2))])
    assert results == [Failure("exhausted", "MemoryError"), 3]


def test_close_ends_all_processes():
    pool = RewardPool(2)
    pids = set(pool.run([(os.getpid, ())] * 64))
    assert pids and all(map(alive, pids))
    pool.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.run([(os.getpid, ())])
    pool.close()


def test_no_process_is_left_when_the_owner_forgets_to_close_or_is_killed():
    program = textwrap.dedent("""
        import os, signal, sys, time
        from qerl.tasks.workers import RewardPool
        pool = RewardPool(1, deadline_s=0.5)
        print(pool.run([(os.getpid, ())])[0], flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    for how in ("forgotten", "killed"):
        result = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, timeout=60)
        pid = int(result.stdout)
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(pid), how


def test_workers_import_no_torch_and_not_the_main_script(pool):
    modules = pool.run([(eval, ("sorted(__import__('sys').modules)",))])[0]
    assert not {"torch", "transformers", "datasets", "pytest"} & set(modules)


def test_throughput(pool):
    count = 2000
    text = "We add the numbers one by one and get the total. " * 10 + r"So the answer is \boxed{%d}."
    golds = [str(i) for i in range(count)]
    pool.verify(golds[:64], [text % 0] * 64)
    started = time.monotonic()
    outcomes = pool.verify(golds, [text % i for i in range(count)])
    rate = count / (time.monotonic() - started) * 60
    assert all(o.score == 1.0 for o in outcomes)
    assert rate > 10_000, f"{rate:.0f} answers a minute"


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"deadline_s": 0}])
def test_wrong_arguments(arguments):
    with pytest.raises(ValueError, match="workers="):
        RewardPool(**arguments)
