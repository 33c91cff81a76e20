"""The main loop of a reward worker process: jobs in, results out, over one inherited socket.

Started as ``python -c``, not by multiprocessing's spawn, so that the user's main script (and with it torch) is not
imported again. Import nothing heavy here.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection


def main(descriptor: int, limit_s: float, memory_bytes: int) -> None:
    """Serve until the socket closes.

    A message in is a list of (index, function, arguments); for each one message goes out:
    (index, "ok", result) or (index, "error", (type name, text, traceback)). First of all "ready" is sent.
    """
    # ctrl-C goes to the whole process group; the parent decides when workers end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    connection = Connection(descriptor)
    connection.send("ready")
    while True:
        try:
            jobs = connection.recv()
        except EOFError:
            return
        for index, function, arguments in jobs:
            # the kernel's default action ends a stuck process even if its parent was killed and nobody watches
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            reply = _run(index, function, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                connection.send(reply)
            except BrokenPipeError:
                os._exit(0)


def _run(index: int, function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[int, str, object]:
    try:
        return index, "ok", function(*arguments)
    except Exception as error:  # noqa: BLE001 - a process boundary: the parent raises it again
        return index, "error", (type(error).__name__, str(error), traceback.format_exc())
