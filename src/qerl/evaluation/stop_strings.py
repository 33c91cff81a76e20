"""Stop strings for an engine that knows stop tokens only."""

from typing import Any


class StopTokens:
    """Finds the tokens at which generation may end because their own text holds a stop string.

    Ending there loses nothing: the text is cut at the stop string anyway. A stop string that only several tokens
    together spell is cut from the finished text, so it costs time, never a different result.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._found: dict[str, tuple[int, ...]] = {}

    def containing(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        """Ids of the tokens whose text, special tokens included, contains any of ``stops``; sorted."""
        if not self._texts:
            self._texts = self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))])
        for stop in stops:
            if stop and stop not in self._found:
                self._found[stop] = tuple(token for token, text in enumerate(self._texts) if stop in text)
        return tuple(sorted({token for stop in stops if stop for token in self._found[stop]}))
