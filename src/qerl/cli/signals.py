"""SIGTERM as an exception, so that a command which is stopped takes its temporary files along."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` (code 143) inside the block when SIGTERM comes, as Ctrl-C raises `KeyboardInterrupt`.

    Main thread only; the previous handler is back after the block.
    """
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
