"""Reward workers: processes with a deadline for every sample.

Verifying an answer can hang (one pathological formula keeps a computer algebra system busy for minutes) and rewards
are called from any thread, where signal-based timeouts do not work. So the work runs in child processes: one that is
stuck past the deadline of its sample is killed and replaced, that sample is reported as a timeout, and every other
sample gets the result it would have had.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from qerl.tasks.base import Outcome
from qerl.tasks.jobs import verify_job

Job = tuple[Callable[..., Any], tuple[Any, ...]]

_START_LIMIT_S = 120.0
_CHUNK = 32
_START = "import sys; from qerl.tasks.worker import main; main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))"
_MEMORY_BYTES = 4 << 30
# errors that an input can cause by its size alone: the sample's fault, not a bug in a reward function
_EXHAUSTION = ("MemoryError", "RecursionError")


class RewardError(RuntimeError):
    """A reward function failed on a sample; the message has the sample's id and the worker's traceback."""


@dataclass(frozen=True, slots=True)
class Failure:
    """In place of a result: the sample ran out of time or memory.

    Attributes:
        kind: "timeout" (killed at its deadline) or "exhausted" (out of memory or stack, or its process died).
        detail: In a few words.
    """

    kind: str
    detail: str


@dataclass(slots=True)
class PoolStats:
    """Totals since the pool was made."""

    samples: int = 0
    timeouts: int = 0
    exhausted: int = 0
    replaced_workers: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    since: float = field(default_factory=time.monotonic)
    pending: deque[int] = field(default_factory=deque)

    def end(self) -> None:
        """Close the socket, kill and reap the process."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class RewardPool:
    """Worker processes for rewards. Usable from any thread (calls take turns) and as a context manager.

    Args:
        workers: Number of processes; default: one for each CPU this process may use.
        deadline_s: Seconds one sample may take, more than 0. The start of a worker does not count.
        memory_bytes: Address space limit of a worker; 0 for none.

    Raises:
        ValueError: ``workers`` < 1 or ``deadline_s`` <= 0.
    """

    def __init__(
        self, workers: int | None = None, *, deadline_s: float = 5.0, memory_bytes: int = _MEMORY_BYTES
    ) -> None:
        count = len(os.sched_getaffinity(0)) if workers is None else workers
        if count < 1 or deadline_s <= 0:
            raise ValueError(f"workers={count} must be >= 1 and deadline_s={deadline_s} > 0")
        self.deadline_s = deadline_s
        self.stats = PoolStats()
        self._count = count
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._workers: list[_Worker] = []
        # no leaked processes, however the owner goes away
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End and reap all workers. Later calls of :meth:`run` raise ``RuntimeError``."""
        with self._lock:
            self._closed = True
            _end_all(self._workers)
            self._finalizer.detach()

    def verify(self, golds: Sequence[str], completions: Sequence[str], *, think_opened: bool = False) -> list[Outcome]:
        """Compare the final answer of each completion with its gold; the same result as in this process.

        A sample that ran out of time or memory scores 0 with the counter "timeout" or "exhausted".
        """
        jobs = [(verify_job, (g, c, think_opened)) for g, c in zip(golds, completions, strict=True)]
        return self.outcomes(jobs)

    def outcomes(self, jobs: Sequence[Job], ids: Sequence[str] | None = None) -> list[Outcome]:
        """:meth:`run` for functions that return an ``Outcome``; a failure becomes a score of 0, counted."""
        return [
            Outcome(0.0, result.kind, result.detail) if isinstance(result, Failure) else result
            for result in self.run(jobs, ids)
        ]

    def run(self, jobs: Sequence[Job], ids: Sequence[str] | None = None) -> list[Any]:
        """The result of every (function, arguments), in order, or a :class:`Failure`.

        Args:
            jobs: Functions that a fresh process can import (not from ``__main__``), with picklable arguments.
            ids: Names of the samples for error messages; default: their position.

        Raises:
            RewardError: A function raised, on the first such sample; the pool stays usable.
            RuntimeError: The pool is closed, or workers cannot be started.
            ValueError: A function that lives in ``__main__``.
        """
        for function, _ in jobs:
            if function.__module__ == "__main__":
                raise ValueError(f"{function.__qualname__} is defined in the main script, which workers do not "
                                 "import; move it into a module")  # fmt: skip
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            call = _Call(jobs, ids)
            try:
                self._serve(call)
            except BaseException:
                # whatever is still under way belongs to a call that is over
                _end_all(self._workers)
                raise
            self.stats.samples += len(jobs)
            return call.results

    def _serve(self, call: _Call) -> None:
        while call.open:
            wanted = min(self._count, -(-len(call.queue) // _CHUNK) + sum(bool(w.pending) for w in self._workers))
            while len(self._workers) < wanted:
                self._workers.append(_start(self.deadline_s, self._memory_bytes))
            for worker in self._workers:
                if worker.ready and not worker.pending and call.queue:
                    self._assign(worker, call)
            timeout = min((self._limit(w) - time.monotonic() for w in self._workers if self._busy(w)), default=0)
            ready = wait([w.connection for w in self._workers if self._busy(w)], max(timeout, 0))
            for worker in list(self._workers):
                if worker.connection in ready:
                    self._receive(worker, call)
                elif self._busy(worker) and time.monotonic() > self._limit(worker):
                    self._expire(worker, call)

    @staticmethod
    def _busy(worker: _Worker) -> bool:
        return bool(worker.pending) or not worker.ready

    def _limit(self, worker: _Worker) -> float:
        return worker.since + (self.deadline_s if worker.ready else _START_LIMIT_S)

    def _assign(self, worker: _Worker, call: _Call) -> None:
        size = max(1, min(_CHUNK, -(-len(call.queue) // (2 * self._count))))
        batch = [call.queue.popleft() for _ in range(min(size, len(call.queue)))]
        worker.pending.extend(batch)
        worker.since = time.monotonic()
        try:
            worker.connection.send([(index, *call.jobs[index]) for index in batch])
        except (BrokenPipeError, ConnectionResetError):
            # the worker died idle: nothing of this batch was started
            worker.pending.clear()
            call.queue.extendleft(reversed(batch))
            self._replace(worker)

    def _receive(self, worker: _Worker, call: _Call) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            if not worker.ready:
                code = worker.process.wait()
                raise RuntimeError(f"a reward worker ended with status {code} before it was ready") from None
            self._drop(worker, call, Failure("exhausted", "the worker process died"))
            return
        worker.since = time.monotonic()
        if message == "ready":
            worker.ready = True
            return
        index, status, value = message
        worker.pending.remove(index)
        if status == "error":
            kind, text, trace = value
            if kind not in _EXHAUSTION:
                raise RewardError(f"{call.name(index)} failed on {kind}: {text}\n{trace}")
            self.stats.exhausted += 1
            value = Failure("exhausted", kind)
        call.finish(index, value)

    def _expire(self, worker: _Worker, call: _Call) -> None:
        if not worker.ready:
            raise RuntimeError(f"a reward worker was not ready after {_START_LIMIT_S:.0f} s")
        self._drop(worker, call, Failure("timeout", f"killed after {self.deadline_s:g} s"))

    def _drop(self, worker: _Worker, call: _Call, failure: Failure) -> None:
        """The first pending sample of a worker failed; the others go back to the queue."""
        index = worker.pending.popleft()
        call.queue.extendleft(reversed(worker.pending))
        call.finish(index, failure)
        self.stats.timeouts += failure.kind == "timeout"
        self.stats.exhausted += failure.kind == "exhausted"
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.end()
        self._workers.remove(worker)
        self.stats.replaced_workers += 1


class _Call:
    """The state of one :meth:`RewardPool.run`."""

    def __init__(self, jobs: Sequence[Job], ids: Sequence[str] | None) -> None:
        self.jobs = jobs
        self.ids = ids
        self.queue = deque(range(len(jobs)))
        self.results: list[Any] = [None] * len(jobs)
        self.open = len(jobs)

    def finish(self, index: int, value: Any) -> None:
        self.results[index] = value
        self.open -= 1

    def name(self, index: int) -> str:
        function = getattr(self.jobs[index][0], "__qualname__", repr(self.jobs[index][0]))
        return f"{function}, sample {index if self.ids is None else self.ids[index]!r},"


def _start(deadline_s: float, memory_bytes: int) -> _Worker:
    ours, theirs = socket.socketpair()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    # workers are many and small: no thread pools, no GPU
    environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(2 * deadline_s + 1), str(memory_bytes)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return _Worker(process, Connection(ours.detach()))


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
