"""Whose fault an exception is, and what the user sees of it."""

from pathlib import Path

import pytest
import typer

from qerl.cli.errors import user_errors, user_message
from qerl.evaluation.metrics import pass_at_k
from qerl.evaluation.run_log import NotARunError, read_run


def caught(action) -> BaseException:
    with pytest.raises(Exception) as info:
        action()
    return info.value


class ElsewhereError(ValueError):
    """A named error of a module that is not qerl's."""


def raise_elsewhere() -> None:
    raise ElsewhereError("not ours")


def test_errors_stated_by_qerl_are_the_users() -> None:
    assert "8 were made" in (user_message(caught(lambda: pass_at_k(8, 1, 64))) or "")
    assert "is not a folder" in (user_message(caught(lambda: read_run("/nowhere"))) or "")
    # a named error keeps its meaning wherever it is raised
    assert user_message(NotARunError("missing")) == "missing"


def test_errors_of_others_are_defects() -> None:
    for action in (
        raise_elsewhere,
        lambda: int("x"),
        lambda: {}["key"],
        lambda: __import__("no_such_module"),
        lambda: __import__("qerl.formats.no_such_module"),
        # raised inside numpy, called from qerl
        lambda: __import__("qerl.evaluation.metrics", fromlist=["x"]).bootstrap_interval(["a"]),
    ):
        assert user_message(caught(action)) is None


def test_broken_import_inside_qerl_is_a_defect() -> None:
    namespace = {"__name__": "qerl.broken"}
    code = compile("from qerl.evaluation.metrics import no_such_name", "broken.py", "exec")
    assert user_message(caught(lambda: exec(code, namespace))) is None


def test_stated_import_error_is_the_users() -> None:
    namespace = {"__name__": "qerl.stated"}
    code = compile("raise ImportError('install the extra')", "stated.py", "exec")
    assert user_message(caught(lambda: exec(code, namespace))) == "install the extra"


def test_statement_inside_with_and_finally_still_counts(tmp_path: Path) -> None:
    body = """
import contextlib
def act():
    try:
        with contextlib.nullcontext():
            try:
                int("x")
            except ValueError as error:
                raise ValueError("stated") from error
    finally:
        len("cleanup")
"""
    namespace = {"__name__": "qerl.stated"}
    exec(compile(body, "stated.py", "exec"), namespace)
    assert user_message(caught(namespace["act"])) == "stated"


def test_missing_optional_package_names_its_extra() -> None:
    error = ModuleNotFoundError("No module named 'gguf.reader'", name="gguf.reader")
    assert user_message(error) == "the optional package gguf.reader is not installed; pip install 'qerl[gguf]'"


def test_paths_are_named(tmp_path: Path) -> None:
    error = caught(lambda: (tmp_path / "absent").read_text())
    assert user_message(error) == f"No such file or directory: {tmp_path / 'absent'}"


def test_one_line_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as info, user_errors():
        raise NotARunError("first line\n  second line")
    assert info.value.exit_code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: first line second line\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QERL_DEBUG", "1")
    with pytest.raises(NotARunError), user_errors():
        raise NotARunError("x")


def test_unexpected_errors_propagate() -> None:
    with pytest.raises(ElsewhereError), user_errors():
        raise_elsewhere()
    with pytest.raises(ZeroDivisionError), user_errors():
        1 / 0  # noqa: B018
