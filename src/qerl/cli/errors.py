"""From an exception to one line for the user, or to a traceback when the fault is ours.

A mistake of the user is an error that qerl raised on purpose: a ``ValueError``, ``NotImplementedError`` or
``ImportError`` whose ``raise`` stands in qerl's own code (a named subclass may come from anywhere), a path
that is missing or taken, or a missing optional package. Everything else is a defect and keeps its traceback.
"""

import dis
import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

# Import name -> extra that installs it.
OPTIONAL_PACKAGES = {"gguf": "gguf", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}

_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_STATED_ERRORS = (ValueError, NotImplementedError, ImportError)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a user's mistake into one line on stderr and exit code 2; also usable as a decorator.

    With ``QERL_DEBUG=1`` in the environment nothing is caught. Unexpected exceptions propagate.
    """
    try:
        yield
    except (*_PATH_ERRORS, *_STATED_ERRORS) as error:
        message = user_message(error)
        if message is None or os.environ.get("QERL_DEBUG") == "1":
            raise
        typer.echo(f"error: {message}", err=True)
        if details := getattr(error, "details", ""):  # where in the user's own code
            typer.echo(details.rstrip(), err=True)
        raise typer.Exit(2) from error


def user_message(error: BaseException) -> str | None:
    """The line to show for ``error``, or ``None`` when it is no mistake of the user."""
    if isinstance(error, ModuleNotFoundError):
        extra = OPTIONAL_PACKAGES.get((error.name or "").partition(".")[0])
        if extra is not None:
            return f"the optional package {error.name} is not installed; pip install 'qerl[{extra}]'"
    if isinstance(error, _PATH_ERRORS):
        return _path_message(error)
    if isinstance(error, UnicodeDecodeError):
        return f"a file or the input is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start})"
    if isinstance(error, _STATED_ERRORS) and (_defined_here(error) or _raised_here(error)):
        return " ".join(str(error).split())
    return None


def _path_message(error: OSError) -> str:
    if error.filename is not None and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split())


def _defined_here(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "qerl"


def _raised_here(error: BaseException) -> bool:
    """Whether a ``raise`` statement in qerl made the error.

    Not what C code raised when qerl called it (``int("x")``, numpy, a failing import): such a message was not
    written for users, so that is a defect of ours.
    """
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] == "qerl"
    return ours and dis.opname[frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
