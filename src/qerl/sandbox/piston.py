"""Run programs on a Piston server (github.com/engineer-man/piston, API v2): one HTTP request a run.

Of the limits the server is told the wall, CPU and memory ones and refuses what exceeds its own configuration; output,
file and process limits are that configuration's. Whether programs have a network is its matter too.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from qerl.sandbox.core import Execution, Limits, Program, SandboxError, Status, classify

_STDERR_TAIL = 4000
# the answer may wait for a free slot of the server
_QUEUE_S = 60.0
_RETRIED = frozenset({429, 500, 502, 503, 504})
_STATUSES = {"TO": Status.TIMEOUT, "OL": Status.OUTPUT_LIMIT, "EL": Status.OUTPUT_LIMIT}


@dataclass(frozen=True)
class Piston:
    """An executor that asks a Piston server.

    Args:
        url: Of the server, without the path: ``http://host:2000``.
        limits: Of each run.
        version: Of the server's Python, a version or ``*``.
        attempts: Requests a run when the server is busy (429), fails (5xx) or cannot be reached.
        backoff_s: Seconds before the second request; doubled before each further one.
        headers: Sent with each request (authorization).

    Raises:
        ValueError: ``url`` is not http(s), or ``attempts`` < 1.
    """

    url: str
    limits: Limits = field(default_factory=Limits)
    version: str = "*"
    attempts: int = 4
    backoff_s: float = 0.5
    headers: tuple[tuple[str, str], ...] = ()
    name: str = field(default="piston", init=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} must start with http:// or https://")
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} must be at least 1")

    def run(self, program: Program) -> Execution:
        """Run a program to its end or to a limit.

        Raises:
            SandboxError: The server refused the request (with its message), cannot be reached, or answered something
                else than a result.
        """
        wall_ms = int(self.limits.wall_s * 1000)
        body = {
            "language": "python",
            "version": self.version,
            # the server takes an empty file for a missing one
            "files": [{"name": "main.py", "content": program.source or "\n"}],
            "stdin": program.stdin,
            "run_timeout": wall_ms,
            "run_cpu_time": min(self.limits.cpu_s * 1000, wall_ms),
            "run_memory_limit": self.limits.memory_bytes,
        }
        start = time.monotonic()
        answer = self._post(json.dumps(body).encode("ascii"))
        run = answer.get("run") if isinstance(answer, dict) else None
        if not isinstance(run, dict) or not {"stdout", "stderr", "code", "signal"} <= run.keys():
            raise SandboxError(f"{self.url} answered without a result of a run: {str(answer)[:200]}")
        return self._execution(run, time.monotonic() - start)

    def _execution(self, run: dict[str, Any], wall_s: float) -> Execution:
        if run.get("status") == "XX":
            raise SandboxError(f"{self.url} failed internally: {run.get('message')}")
        code, stderr = run["code"], run["stderr"]
        if run.get("wall_time") is not None:
            wall_s = run["wall_time"] / 1000
        if run.get("status") in _STATUSES:
            status = _STATUSES[run["status"]]
        elif run["signal"] is not None:
            # servers before 3.1 have no status: they end a run at its deadline with this signal
            expired = run["signal"] == "SIGKILL" and wall_s >= self.limits.wall_s
            status = Status.TIMEOUT if expired else Status.RUNTIME_ERROR
        else:
            status = classify(code, stderr)
        return Execution(status, code, run["stdout"], stderr[-_STDERR_TAIL:], wall_s)

    def _post(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", **dict(self.headers)}
        request = urllib.request.Request(f"{self.url.rstrip('/')}/api/v2/execute", body, headers, method="POST")
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.limits.wall_s + _QUEUE_S) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {error.read(500).decode('utf-8', 'replace')}"
                if error.code not in _RETRIED:
                    break
            except OSError as error:
                problem = str(error)
            except ValueError as error:
                raise SandboxError(f"{self.url} did not answer with JSON: {error}") from error
        raise SandboxError(f"{self.url} did not run the program ({attempt + 1} attempts): {problem}")
