"""The E2B client: through its real SDK, where that is installed, against a stand-in on the loopback device."""

import base64
import json
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from qerl.sandbox.core import Limits, Program, SandboxError, SandboxUnavailable, Status
from qerl.sandbox.e2b import E2B


class StandIn(ThreadingHTTPServer):
    """E2B's control plane and one machine: makes machines, takes files, and says of a command what it was told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.machine_status = 201
        self.command_status = 200
        self.result = (0, b"", b"")
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.commands: list[str] = []
        self.killed: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunked()
        path = self.path.partition("?")[0]
        if path.endswith("/sandboxes"):
            self.server.created.append(json.loads(body))
            machine = {
                "sandboxID": "m1",
                "templateID": "base",
                "clientID": "c",
                "envdVersion": "0.5.0",
                "alias": "base",
            }
            status = self.server.machine_status
            self._answer(status, machine if status == 201 else {"code": status, "message": "no capacity"})
        elif path == "/files":
            self.server.files[self._file_name()] = body
            self._answer(200, [{"name": "x", "type": "file", "path": "/tmp/run/x"}])
        elif path == "/process.Process/Start":
            self.server.commands.append(json.loads(body[5:])["process"]["args"][-1])
            self._stream()
        else:
            self._answer(404, {"code": 404, "message": self.path})

    def do_DELETE(self) -> None:
        self.server.killed.append(self.path.rpartition("/")[2])
        self._answer(204, None)

    def do_GET(self) -> None:
        self._answer(204, None)

    def _chunked(self) -> bytes:
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return data

    def _file_name(self) -> str:
        return parse_qs(urlsplit(self.path).query)["path"][0]

    def _stream(self) -> None:
        if self.server.command_status != 200:
            self._answer(self.server.command_status, {"code": "unavailable", "message": "machine lost"})
            return
        code, stdout, stderr = self.server.result
        events = [{"start": {"pid": 7}}]
        for name, data in (("stdout", stdout), ("stderr", stderr)):
            events.append({"data": {name: base64.b64encode(data).decode()}})
        events.append({"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}})
        frames = [json.dumps({"event": event}).encode() for event in events]
        body = b"".join(struct.pack(">BI", 0, len(frame)) + frame for frame in frames)
        self._send(200, "application/connect+json", body + struct.pack(">BI", 2, 2) + b"{}")

    def _answer(self, status: int, body: object) -> None:
        self._send(status, "application/json", b"" if body is None else json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server(monkeypatch) -> Iterator[StandIn]:
    pytest.importorskip("e2b", reason="the SDK of E2B is not installed")
    with StandIn() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("E2B_API_URL", url)
        monkeypatch.setenv("E2B_SANDBOX_URL", url)
        monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
        monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_run(server):
    server.result = (0, "4é\n".encode(), b"note")
    execution = E2B(Limits(wall_s=3, cpu_s=2)).run(Program("print(4)", "in"))
    assert (execution.status, execution.exit_code) == (Status.OK, 0)
    assert (execution.stdout, execution.stderr) == ("4é\n", "note")
    assert (server.created[0]["timeout"], server.created[0]["allow_internet_access"]) == (63, False)
    assert b"print(4)" in server.files["/tmp/run/main.py"]
    assert b"in" in server.files["/tmp/run/stdin"]
    assert "timeout -s KILL 3 prlimit --cpu=2:3 " in server.commands[0]
    assert server.killed == ["m1"]


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "status"),
    [
        (1, b"", b"SyntaxError: invalid syntax\n", Status.COMPILE_ERROR),
        (1, b"", b"Traceback (most recent call last):\nKeyError: 1\n", Status.RUNTIME_ERROR),
        (1, b"", b"Traceback (most recent call last):\nMemoryError\n", Status.MEMORY),
        (152, b"", b"", Status.TIMEOUT),
        (137, b"", b"", Status.RUNTIME_ERROR),
        (0, b"x" * 11, b"", Status.OUTPUT_LIMIT),
    ],
)
def test_how_runs_end(server, code, stdout, stderr, status):
    server.result = (code, stdout, stderr)
    assert E2B(Limits(output_bytes=10)).run(Program("x")).status is status
    assert server.killed == ["m1"]


def test_killed_at_the_deadline(server):
    server.result = (137, b"", b"")
    # every run takes longer than this
    assert E2B(Limits(wall_s=1e-6)).run(Program("x")).status is Status.TIMEOUT


class TestFailuresAreNotScores:
    def test_no_machine(self, server):
        server.machine_status = 400
        with pytest.raises(SandboxError, match=r"E2B gave no machine.*no capacity"):
            E2B().run(Program("x"))

    def test_a_machine_that_fails_is_given_back(self, server):
        server.command_status = 500
        with pytest.raises(SandboxError, match="E2B did not run the program"):
            E2B().run(Program("x"))
        assert server.killed == ["m1"]


def test_without_the_sdk(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxUnavailable, match="pip install e2b"):
        E2B().run(Program("x"))
