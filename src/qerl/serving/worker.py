"""The engine thread: takes requests from the event loop, runs one session, hands tokens back.

The event loop never waits for the device and the engine never waits for a client. Commands go in through one queue;
tokens come out by ``call_soon_threadsafe``, once a step for all requests together.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qerl.rollout.core import NonFiniteLogitsError, SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.session import EngineSession, StepOutput

logger = logging.getLogger(__name__)

# Tokens of a step, or the error that ended the request.
Event = list[StepOutput] | Exception


class EngineStoppedError(RuntimeError):
    """The engine failed or was shut down; it serves nothing any more."""


@dataclass(eq=False, slots=True)
class Submission:
    """A request on its way through the engine; ``sink`` is called with its events in the event loop."""

    prompt: list[int]
    sampling: SamplingParams
    sink: Callable[[Event], None]
    request_id: int | None = None


class EngineWorker:
    """Runs a session of ``engine`` in a thread of its own from ``start`` to ``stop``.

    Args:
        engine: used by nobody else meanwhile.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[tuple[str, Submission | None]] = queue.SimpleQueue()
        self._open: dict[int, Submission] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; tokens are handed to ``loop``."""
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="qerl-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; open requests get an error."""
        if self._thread is not None:
            self._commands.put(("stop", None))
            self._thread.join()

    @property
    def failure(self) -> Exception | None:
        """Why the engine serves no longer; None while it does."""
        return self._failure

    @property
    def open_requests(self) -> int:
        """Requests that the engine has not finished."""
        return len(self._open)

    def submit(self, prompt: list[int], sampling: SamplingParams, sink: Callable[[Event], None]) -> Submission:
        """Queue a request (from the event loop).

        Raises:
            EngineStoppedError: the engine serves no longer.
        """
        if self._failure is not None:
            raise EngineStoppedError(f"the engine stopped: {self._failure}")
        submission = Submission(prompt, sampling, sink)
        self._commands.put(("add", submission))
        if self._failure is not None:  # it failed meanwhile and may not have seen the command
            sink(self._failure)
        return submission

    def abort(self, submission: Submission) -> None:
        """Drop a request and free its blocks before the next step. Must be called for every one, finished or not."""
        self._commands.put(("abort", submission))

    def _run(self) -> None:
        try:
            while self._failure is None:
                with self.engine.open_session() as session:
                    self._serve(session)
        except Exception as error:  # a process boundary: whatever broke, every client must hear of it
            logger.exception("the engine failed")
            self._fail(error)

    def _serve(self, session: EngineSession) -> None:
        """Serve until stopped, or until a step fails in a way after which a new session works."""
        while self._failure is None:
            if not self._obey(session):
                self._fail(EngineStoppedError("the server is shutting down"))
                return
            if not session.has_unfinished:
                continue
            try:
                outputs = session.step()
            except NonFiniteLogitsError as error:
                logger.error("a step failed, open requests are dropped: %s", error)
                self._end_all(error)
                return
            self._hand_out(outputs)

    def _obey(self, session: EngineSession) -> bool:
        """Carry out the waiting commands; without work, wait for one. False to stop."""
        block = not session.has_unfinished
        while True:
            try:
                name, submission = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if name == "stop":
                return False
            if name == "add":
                self._add(session, submission)
            # Ids start anew with every session, so an id alone does not tell whose request it is.
            elif self._open.get(submission.request_id) is submission:
                session.abort(submission.request_id)
                del self._open[submission.request_id]

    def _add(self, session: EngineSession, submission: Submission) -> None:
        try:
            submission.request_id = session.add(submission.prompt, submission.sampling)
        except ValueError as error:
            self._tell([(submission, error)])
            return
        self._open[submission.request_id] = submission

    def _hand_out(self, outputs: Sequence[StepOutput]) -> None:
        by_request: dict[int, list[StepOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        events = [(self._open[request], part) for request, part in by_request.items() if request in self._open]
        self._tell(events)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._end_all(error)
        while not self._commands.empty():
            name, submission = self._commands.get()
            if name == "add":
                self._tell([(submission, error)])

    def _end_all(self, error: Exception) -> None:
        self._tell([(submission, error) for submission in self._open.values()])
        self._open.clear()

    def _tell(self, events: list[tuple[Submission, Event]]) -> None:
        if not events:
            return

        def deliver() -> None:
            for submission, event in events:
                submission.sink(event)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            logger.info("the event loop is closed; %d requests were not told", len(events))
