"""One choice of a response as it grows: its text, its log-probs, and when it is over."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qerl.rollout.session import StepOutput
from qerl.serving.detokenize import Detokenizer
from qerl.serving.stops import StopFilter


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with its log-prob under the distribution it was drawn from."""

    token: str
    logprob: float
    offset: int


@dataclass(slots=True)
class Piece:
    """What is new of a choice. ``finish_reason`` is set on its last piece."""

    index: int
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class Choice:
    """Turns the tokens of one sample into pieces.

    Args:
        index: of the choice in the response.
        tokenizer: Hugging Face tokenizer.
        prompt: token ids that the sample continues.
        stops: stop strings; they and what follows are not given out.
    """

    def __init__(self, index: int, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, prompt)
        self._stops = StopFilter(stops)
        self._chars = 0
        self._waiting: list[TokenLogprob] = []

    def push(self, output: StepOutput) -> Piece | None:
        """The next token; None while there is nothing to give out. Tokens behind the end are ignored."""
        if self.finished:
            return None
        self.num_tokens += 1
        ends_with_token = output.finish_reason == "stop"
        new = self._text.push(output.token_id)
        if output.finish_reason is not None:
            new += self._text.flush()
        if not ends_with_token:  # an end token is no part of the text
            token = self._tokenizer.decode([output.token_id], skip_special_tokens=False)
            self._waiting.append(TokenLogprob(token, output.logprob, self._chars))
        self._chars += len(new)
        given = self._stops.push(new)
        reason = "stop" if self._stops.stopped else output.finish_reason
        if reason is not None:
            given += self._stops.flush()
            self.finished = True
        if not given and reason is None:
            return None
        logprobs, self._waiting = self._waiting, []
        return Piece(self.index, given, logprobs, reason)
