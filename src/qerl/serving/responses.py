"""The JSON of responses, whole and in pieces, for completions and for chat."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from qerl.serving.choices import Piece, TokenLogprob
from qerl.serving.detokenize import REPLACEMENT

Json = dict[str, Any]


class Format(Protocol):
    """How one endpoint writes its responses."""

    def opening(self, num_choices: int) -> list[Json]:
        """Pieces before any text."""
        ...

    def piece(self, piece: Piece) -> Json:
        """One streamed piece."""
        ...

    def whole(self, pieces: Sequence[Piece], usage: Json) -> Json:
        """The response as one object; ``pieces`` has one for each choice, in order."""
        ...

    def usage(self, usage: Json) -> Json:
        """The streamed piece that only counts tokens."""
        ...


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Token counts of a response."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def join(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    logprobs = [entry for piece in pieces for entry in piece.logprobs]
    return Piece(pieces[-1].index, "".join(piece.text for piece in pieces), logprobs, pieces[-1].finish_reason)


class _Endpoint:
    """What both formats share."""

    prefix = kind = chunk_kind = ""

    def __init__(self, model: str, logprobs: bool) -> None:
        self.logprobs = logprobs
        self._header = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def usage(self, usage: Json) -> Json:
        """The streamed piece that only counts tokens."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._header, "object": self.chunk_kind, "choices": choices}

    def _whole(self, choices: list[Json], usage: Json) -> Json:
        return {**self._header, "object": self.kind, "choices": choices, "usage": usage}


class CompletionFormat(_Endpoint):
    """``/v1/completions``."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def opening(self, num_choices: int) -> list[Json]:
        """Nothing."""
        return []

    def piece(self, piece: Piece) -> Json:
        """One streamed piece."""
        return self._chunk([self._choice(piece)])

    def whole(self, pieces: Sequence[Piece], usage: Json) -> Json:
        """The response as one object."""
        return self._whole([self._choice(piece) for piece in pieces], usage)

    def _choice(self, piece: Piece) -> Json:
        logprobs = _completion_logprobs(piece.logprobs) if self.logprobs else None
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


class ChatFormat(_Endpoint):
    """``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int) -> list[Json]:
        """The role, for every choice."""
        return [
            self._chunk([self._with_delta(Piece(index, ""), {"role": "assistant", "content": ""})])
            for index in range(num_choices)
        ]

    def piece(self, piece: Piece) -> Json:
        """One streamed piece."""
        return self._chunk([self._with_delta(piece, {"content": piece.text} if piece.text else {})])

    def whole(self, pieces: Sequence[Piece], usage: Json) -> Json:
        """The response as one object."""
        choices = [
            self._choice(piece) | {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
            for piece in pieces
        ]
        return self._whole(choices, usage)

    def _with_delta(self, piece: Piece, delta: Json) -> Json:
        return self._choice(piece) | {"delta": delta}

    def _choice(self, piece: Piece) -> Json:
        logprobs = {"content": [_chat_logprob(entry) for entry in piece.logprobs]} if self.logprobs else None
        return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}


def _completion_logprobs(entries: Sequence[TokenLogprob]) -> Json:
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": None,
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_logprob(entry: TokenLogprob) -> Json:
    # The bytes of a part of a character are not known from its text.
    known = REPLACEMENT not in entry.token
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.token.encode()) if known else None,
        "top_logprobs": [],
    }
