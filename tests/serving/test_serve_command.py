"""``qerl serve``: what it refuses before a model is loaded, and what it starts."""

import socket
import sys
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner

from qerl.cli.main import app
from qerl.serving.ports import PortError, bound_sockets, listen

runner = CliRunner()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


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
    addresses = []

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        addresses.extend(sock.getsockname()[:2] for sock in sockets)
        assert all(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for sock in sockets)

    monkeypatch.setattr("uvicorn.Server.run", run)
    port = free_port()
    result = runner.invoke(
        app, ["serve", str(tiny_checkpoints["llama"]), "--port", str(port), "--device", "cpu", *arguments]
    )
    assert result.exit_code == 0, result.output
    expected = "127.0.0.1" if arguments[1] == "localhost" else arguments[1]
    assert (expected, port) in addresses


def test_a_taken_port_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was found last, after the line that says where the model is served."""
    loaded = []
    monkeypatch.setattr("qerl.serving.run.build_engine", lambda model, **options: loaded.append(model))
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level("INFO"):
        port = other.getsockname()[1]
        result = runner.invoke(app, ["serve", "model", "--port", str(port)])
    assert result.exit_code == 2
    assert f"error: port {port} is in use; choose another with --port" in result.output
    assert not loaded and "serving" not in caplog.text


def test_a_port_taken_while_the_model_loads_is_named_before_anything_is_served() -> None:
    with bound_sockets("127.0.0.1", free_port()) as sockets:
        address = sockets[0].getsockname()
        with socket.create_server(address), pytest.raises(PortError, match=f"port {address[1]} is in use"):
            listen(sockets)


def test_clients_are_refused_until_the_server_listens_and_its_port_is_free_after_it() -> None:
    port = free_port()
    for _ in range(2):
        with bound_sockets("localhost", port) as sockets:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            listen(sockets)
            socket.create_connection(("127.0.0.1", port), timeout=5).close()


@pytest.mark.parametrize(
    ("host", "message"),
    [("192.0.2.1", "cannot listen at 192.0.2.1, port 8000"), ("no host", "--host no host has no address")],
)
def test_a_host_that_is_not_here_is_named(host: str, message: str) -> None:
    result = runner.invoke(app, ["serve", "model", "--host", host, "--api-key", "k", "--port", "8000"])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_model_without_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.serving.run.build_engine", lambda model, **options: (object(), None, None))
    result = runner.invoke(app, ["serve", "gemma", "--port", str(free_port())])
    assert result.exit_code == 2 and "cannot be served" in result.output
