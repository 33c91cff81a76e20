"""Completions of earlier calls by prompt, within a bound: what drafts are taken from when a prompt comes again.

Token ids only. No log-prob, no key or value is kept, so a changed policy is never sampled from them: they are guesses
that the policy of the day accepts or rejects.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np


class CompletionHistory:
    """Holds at most ``max_tokens`` tokens (4 bytes each), prompts included; 0 keeps nothing.

    Where there are more, the prompt that was met longest ago loses its oldest completion first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._completions: OrderedDict[bytes, deque[np.ndarray]] = OrderedDict()

    def add(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Keep one completion of ``prompt``."""
        if self.max_tokens == 0 or not completion:
            return
        key = _key(prompt)
        if key not in self._completions:
            self._completions[key] = deque()
            self.num_tokens += len(prompt)
        self._completions.move_to_end(key)
        self._completions[key].append(np.asarray(completion, dtype=np.int32))
        self.num_tokens += len(completion)
        while self.num_tokens > self.max_tokens:
            self._forget_one()

    def of(self, prompt: Sequence[int], max_tokens: int) -> list[list[int]]:
        """The latest completions of ``prompt`` that have at most ``max_tokens`` tokens together, oldest first."""
        found: list[list[int]] = []
        for completion in reversed(self._completions.get(_key(prompt), ())):
            max_tokens -= len(completion)
            if max_tokens < 0:
                break
            found.append(completion.tolist())
        return found[::-1]

    def clear(self) -> None:
        """Forget everything."""
        self._completions.clear()
        self.num_tokens = 0

    def _forget_one(self) -> None:
        key, completions = next(iter(self._completions.items()))
        self.num_tokens -= len(completions.popleft())
        if not completions:
            del self._completions[key]
            self.num_tokens -= len(key) // np.dtype(np.int32).itemsize


def _key(prompt: Sequence[int]) -> bytes:
    return np.asarray(prompt, dtype=np.int32).tobytes()
