"""Feed a child process and read it, under a deadline and a limit on what it may print."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from dataclasses import dataclass
from enum import Enum

_CHUNK = 1 << 16


class End(Enum):
    """Why :func:`exchange` returned."""

    CLOSED = "closed"
    DEADLINE = "deadline"
    OUTPUT = "output"


@dataclass(slots=True)
class Exchange:
    """What came out, and why reading stopped."""

    stdout: bytearray
    stderr: bytearray
    end: End


def exchange(process: subprocess.Popen[bytes], stdin: bytes, deadline: float, limit: int) -> Exchange:
    """Write ``stdin`` and read both outputs until they are closed, the deadline, or ``limit`` bytes of one of them.

    The process is not ended here. Its three pipes are closed on return.

    Args:
        process: Started with pipes for standard input, output and error.
        deadline: By ``time.monotonic``.
        limit: Bytes of one output; at most this many are kept.
    """
    result = Exchange(bytearray(), bytearray(), End.CLOSED)
    sinks = {process.stdout: result.stdout, process.stderr: result.stderr}
    pending = memoryview(stdin)
    with selectors.DefaultSelector() as selector, process.stdin, process.stdout, process.stderr:
        for stream in sinks:
            selector.register(stream, selectors.EVENT_READ)
        if pending:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while any(stream in selector.get_map() for stream in sinks):
            left = deadline - time.monotonic()
            if left <= 0:
                result.end = End.DEADLINE
                break
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    pending = _feed(process.stdin.fileno(), pending)
                    if not pending:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                sink = sinks[key.fileobj]
                sink += data
                if len(sink) > limit:
                    del sink[limit:]
                    result.end = End.OUTPUT
                    return result
    return result


def _feed(descriptor: int, pending: memoryview) -> memoryview:
    """Write some; what is left to write, nothing once the reader is gone."""
    try:
        return pending[os.write(descriptor, pending[:_CHUNK]) :]
    except BrokenPipeError:
        return pending[:0]
