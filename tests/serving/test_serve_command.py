"""``qerl serve``: what it refuses before a model is loaded, and what it starts."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli.main import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    monkeypatch.delenv("QERL_API_KEY", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_the_network_needs_a_key(host: str) -> None:
    result = runner.invoke(app, ["serve", "missing", "--host", host])
    assert result.exit_code == 2
    assert "--api-key" in result.output and host in result.output


def test_an_empty_key_is_none() -> None:
    result = runner.invoke(app, ["serve", "missing", "--host", "0.0.0.0", "--api-key", " "])
    assert result.exit_code == 2 and "the API key is empty" in result.output


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch, tiny_checkpoints: dict) -> None:
    monkeypatch.delitem(sys.modules, "qerl.serving.app", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    result = runner.invoke(app, ["serve", str(tiny_checkpoints["llama"])])
    assert result.exit_code == 2
    assert package in result.output and "qerl[serve]" in result.output


@pytest.mark.parametrize(
    "arguments", [["--host", "localhost"], ["--host", "::1"], ["--host", "0.0.0.0", "--api-key", "k"]]
)
def test_what_is_started(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tiny_checkpoints: dict[str, Path]
) -> None:
    started = {}
    monkeypatch.setattr("uvicorn.run", lambda app, **options: started.update(app=app, **options))
    result = runner.invoke(
        app, ["serve", str(tiny_checkpoints["llama"]), "--port", "8123", "--device", "cpu", *arguments]
    )
    assert result.exit_code == 0, result.output
    assert started["port"] == 8123 and started["host"] == arguments[1]


def test_a_model_without_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.serving.run.build_engine", lambda model, **options: (object(), None, None))
    result = runner.invoke(app, ["serve", "gemma"])
    assert result.exit_code == 2 and "cannot be served" in result.output
