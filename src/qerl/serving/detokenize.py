"""Text of tokens that arrive one by one, without broken characters and with the spaces between words.

A token may end inside a UTF-8 character, and some tokenizers (SentencePiece) drop the space before a token that comes
first. So a token is never decoded alone: the text is what decoding gains when the token is appended to those before it.
Text that ends in the replacement character is held back, since the next token may complete the character.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"
# A character of UTF-8 has at most 4 bytes, hence as many tokens at most: older broken text stays broken.
_MAX_PENDING = 4
# Tokens of the prompt that the first new one is decoded after.
_CONTEXT_TOKENS = 6


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        """Text of ``token_ids``."""
        ...


class Detokenizer:
    """Text of one sample as it grows.

    Args:
        tokenizer: Hugging Face tokenizer.
        prompt: token ids that the sample continues; the text of its end is not repeated.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        context = list(prompt[-_CONTEXT_TOKENS:])
        if self._decode(context).endswith(REPLACEMENT):
            context = []
        # ids[:read] are the context of the pending ids[read:].
        self._ids = context
        self._read = len(context)
        # Characters of the pending text that were given out.
        self._sent = 0

    def push(self, token_id: int) -> str:
        """Append a token; the text that is certain by now and was not given out yet (may be empty)."""
        self._ids.append(token_id)
        given = ""
        while len(self._ids) - self._read > _MAX_PENDING:
            given += self._settle_oldest()
        pending = self._pending()
        if not pending.endswith(REPLACEMENT):
            return given + self._give_all(pending)
        certain = pending.rstrip(REPLACEMENT)
        given += certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        return given

    def flush(self) -> str:
        """The rest, at the end of the sample: a character that was never completed is a replacement character."""
        return self._give_all(self._pending())

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _pending(self) -> str:
        """What the pending tokens add to their context."""
        before = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(before) :]

    def _give_all(self, pending: str) -> str:
        text = pending[self._sent :]
        # What was pending becomes the context and older tokens are forgotten, unless it has no text to be a context.
        if pending:
            self._ids = self._ids[self._read :]
        self._read, self._sent = len(self._ids), 0
        return text

    def _settle_oldest(self) -> str:
        """Give out the fewest oldest pending tokens that share no character with those behind them."""
        whole = self._pending()
        before = self._decode(self._ids[: self._read])
        for end in range(self._read + 1, len(self._ids)):
            first = self._decode(self._ids[:end])[len(before) :]
            rest = self._decode(self._ids[end:])
            # Byte fallback breaks a whole run of bytes for one wrong byte: what is whole without it counts.
            if first + rest == whole or REPLACEMENT not in rest:
                break
        else:
            return self._give_all(whole)
        text = first[self._sent :]
        left_over = max(0, self._sent - len(first))
        # No context, for the same reason.
        self._ids = self._ids[end:]
        self._read, self._sent = 0, left_over
        return text
