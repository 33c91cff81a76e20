"""The Piston client against a stand-in on the loopback device."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from qerl.sandbox.cases import StdioCase
from qerl.sandbox.core import Limits, Program, SandboxError, Status
from qerl.sandbox.judge import judge
from qerl.sandbox.piston import Piston

DONE = {"stdout": "4\n", "stderr": "", "code": 0, "signal": None, "output": "4\n"}


class StandIn(ThreadingHTTPServer):
    """Answers POST requests from a list, the last answer again and again; keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.requests: list[tuple[str, dict, dict]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, status: int, body: object) -> None:
        self.answers.append((status, body if isinstance(body, bytes) else json.dumps(body).encode()))

    def run_ends(self, **changes: object) -> None:
        self.answer(200, {"run": DONE | changes, "language": "python", "version": "3.12.0"})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, dict(self.headers)))
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client(server: StandIn, **options: object) -> Piston:
    return Piston(server.url, backoff_s=0.01, **options)


def test_the_request(server):
    server.run_ends()
    piston = client(server, limits=Limits(wall_s=2.5, cpu_s=2, memory_bytes=1 << 28), headers=(("Authorization", "t"),))
    execution = piston.run(Program("print(4)", "in"))
    assert (execution.status, execution.stdout, execution.exit_code) == (Status.OK, "4\n", 0)
    path, body, headers = server.requests[0]
    assert (path, headers["Authorization"]) == ("/api/v2/execute", "t")
    assert body == {
        "language": "python", "version": "*", "files": [{"name": "main.py", "content": "print(4)"}], "stdin": "in",
        "run_timeout": 2500, "run_cpu_time": 2000, "run_memory_limit": 1 << 28,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "status"),
    [
        ({"code": 1, "stderr": "SyntaxError: invalid syntax\n"}, Status.COMPILE_ERROR),
        ({"code": 1, "stderr": "Traceback (most recent call last):\nMemoryError\n"}, Status.MEMORY),
        ({"code": 1, "stderr": "Traceback (most recent call last):\nKeyError: 1\n"}, Status.RUNTIME_ERROR),
        ({"code": None, "signal": "SIGKILL", "status": "TO"}, Status.TIMEOUT),
        ({"code": None, "signal": "SIGKILL", "status": "OL"}, Status.OUTPUT_LIMIT),
        ({"code": None, "signal": "SIGSEGV", "status": "SG"}, Status.RUNTIME_ERROR),
        ({"code": None, "signal": "SIGKILL", "wall_time": 10_000}, Status.TIMEOUT),
        ({"code": None, "signal": "SIGKILL"}, Status.RUNTIME_ERROR),
    ],
)
def test_how_runs_end(server, run, status):
    server.run_ends(**run)
    assert client(server).run(Program("x")).status is status


def test_judged_like_the_local_sandbox(server):
    server.run_ends()
    server.run_ends(stdout="5\n")
    judgement = judge(client(server), "x", [StdioCase("2", "4"), StdioCase("3", "6")])
    assert [result.verdict for result in judgement.results] == ["passed", "wrong_answer"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(server, status):
    server.answer(status, {"message": "busy"})
    server.run_ends()
    assert client(server).run(Program("x")).status is Status.OK
    assert len(server.requests) == 2


class TestFailuresAreNotScores:
    def test_a_server_that_stays_busy(self, server):
        server.answer(429, {"message": "Requests limited"})
        with pytest.raises(SandboxError, match=r"3 attempts.*429.*Requests limited"):
            client(server, attempts=3).run(Program("x"))
        assert len(server.requests) == 3

    def test_a_refused_request(self, server):
        server.answer(400, {"message": "run_timeout cannot exceed the configured limit of 3000"})
        with pytest.raises(SandboxError, match=r"1 attempts.*configured limit of 3000"):
            client(server).run(Program("x"))

    @pytest.mark.parametrize("body", [b"<html>", {"message": "hm"}, [], {"run": {"stdout": ""}}])
    def test_another_answer(self, server, body):
        server.answer(200, body)
        with pytest.raises(SandboxError, match=r"without a result|not answer with JSON"):
            client(server).run(Program("x"))

    def test_an_internal_error(self, server):
        server.run_ends(status="XX", code=None, signal=None, message="isolate failed")
        with pytest.raises(SandboxError, match="isolate failed"):
            client(server).run(Program("x"))

    def test_nobody_there(self, server):
        piston = Piston("http://127.0.0.1:9", attempts=2, backoff_s=0.01)
        with pytest.raises(SandboxError, match="2 attempts"):
            piston.run(Program("x"))


def test_options():
    with pytest.raises(ValueError, match="http"):
        Piston("localhost:2000")
    with pytest.raises(ValueError, match="attempts=0"):
        Piston("http://localhost:2000", attempts=0)
