"""From a checked request to its pieces: submits it, follows it, and drops it when nobody listens any more."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from qerl.rollout.core import RequestTooLongError
from qerl.rollout.session import StepOutput
from qerl.serving.choices import Choice, Piece
from qerl.serving.errors import ApiError
from qerl.serving.requests import GenerationRequest
from qerl.serving.worker import EngineStoppedError, EngineWorker, Event, Submission


class Generation:
    """The choices of one request, prompt by prompt: ``n`` for each.

    Args:
        worker: of the engine.
        tokenizer: Hugging Face tokenizer.
        request: what to generate.
    """

    def __init__(self, worker: EngineWorker, tokenizer: Any, request: GenerationRequest) -> None:
        self.request = request
        self._worker = worker
        self._n = request.sampling.n * request.copies
        self.choices = [
            Choice(number * self._n + sample, tokenizer, prompt, request.stops)
            for number, prompt in enumerate(request.prompts)
            for sample in range(self._n)
        ]

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """The new pieces of each step, until every choice is finished.

        However it ends (also when the consumer goes away), the engine drops what is left of the request.

        Raises:
            ApiError: the request does not fit the engine, or the engine failed.
        """
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        submissions: list[Submission] = []
        try:
            for number, prompt in enumerate(self.request.prompts):
                # The sink runs in this event loop, after this coroutine has given way.
                sink = partial(_pass_on, events, number)
                submissions.append(self._submit(list(prompt), sink))
            while not all(choice.finished for choice in self.choices):
                number, event = await events.get()
                if isinstance(event, Exception):
                    raise _api_error(event) from event
                pieces = [choice.push(output) for output in event for choice in self._of_sample(number, output)]
                if all(choice.finished for choice in self._of_prompt(number)):
                    self._worker.abort(submissions[number])
                if any(pieces):
                    yield [piece for piece in pieces if piece is not None]
        finally:
            for submission in submissions:
                self._worker.abort(submission)

    def _submit(self, prompt: list[int], sink: Callable[[Event], None]) -> Submission:
        try:
            return self._worker.submit(prompt, self.request.sampling, sink)
        except EngineStoppedError as error:
            raise _api_error(error) from error

    def _of_sample(self, number: int, output: StepOutput) -> list[Choice]:
        first = number * self._n + output.sample_index * self.request.copies
        return self.choices[first : first + self.request.copies]

    def _of_prompt(self, number: int) -> list[Choice]:
        return self.choices[number * self._n : (number + 1) * self._n]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.request.prompts))

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far, end tokens included; those of equal choices count for each."""
        return sum(choice.num_tokens for choice in self.choices)


def _pass_on(events: "asyncio.Queue[tuple[int, Event]]", number: int, event: Event) -> None:
    events.put_nowait((number, event))


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, RequestTooLongError):
        return ApiError(str(error), code="context_length_exceeded")
    if isinstance(error, EngineStoppedError):
        return ApiError(str(error), status=503, kind="server_error")
    return ApiError(f"generation failed: {error}", status=500, kind="server_error")
