"""Rewards of a completion's length in TRL's convention (see :mod:`qerl.tasks.rewards`), to be added to another reward.

DAPO's overlong filtering, which leaves truncated completions out of the loss, is no reward: it is TRL's
``mask_truncated_completions=True``. Use it instead of the soft punishment, or beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from qerl.tasks.rewards import Completion, RewardFunction


class SoftOverlongPunishment:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), of the number of generated tokens.

    0 up to ``max_tokens - cache_tokens`` tokens, from there linearly down to -1 at ``max_tokens``, -1 beyond.

    Args:
        max_tokens: The limit, L_max of the equation; with TRL its ``max_completion_length``.
        cache_tokens: The length of the slope, L_cache (the paper: 4,096 of 20,480).
        name: ``__name__``, the name of TRL's metrics.

    Raises:
        ValueError: ``cache_tokens`` is not between 1 and ``max_tokens``.
    """

    def __init__(self, max_tokens: int, cache_tokens: int, *, name: str = "soft_overlong") -> None:
        if not 0 < cache_tokens <= max_tokens:
            raise ValueError(f"cache_tokens={cache_tokens} must lie between 1 and max_tokens={max_tokens}")
        self.max_tokens, self.cache_tokens = max_tokens, cache_tokens
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Rewards in [-1, 0]; the metric ``NAME/punished`` counts those below 0.

        Raises:
            ValueError: No ``completion_ids``.
        """
        free = self.max_tokens - self.cache_tokens
        excess = [max(0, length - free) for length in _lengths(completion_ids, self.__name__)]
        if log_metric is not None:
            log_metric(f"{self.__name__}/punished", float(sum(tokens > 0 for tokens in excess)))
        return [-min(1.0, tokens / self.cache_tokens) if tokens else 0.0 for tokens in excess]


class LengthPenalty:
    """The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3): of two right answers the shorter is better.

    Among the samples of one prompt, with the fewest and the most tokens l_min and l_max,
    lambda = 1/2 - (l - l_min) / (l_max - l_min). A right answer gets lambda, any other min(0, lambda): wrong answers
    gain nothing by being short. All get 0 where l_min = l_max.

    The samples of a prompt must come in one call. With several processes that means a batch for each that is a
    multiple of ``num_generations``.

    Args:
        correct: Says which answers are right: the ones it gives at least 1. A sample that it gives None gets None, and
            does not count for l_min and l_max.
        name: ``__name__``, the name of TRL's metrics.
    """

    def __init__(self, correct: RewardFunction, *, name: str = "length_penalty") -> None:
        self.correct = correct
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Rewards in [-1/2, 1/2]. Samples of one prompt share the column ``id``, or else the prompt.

        Raises:
            ValueError: No ``completion_ids``; and what ``correct`` raises.
        """
        lengths = _lengths(completion_ids, self.__name__)
        # its own metrics are those of the reward itself, which is called apart from this
        columns = {key: value for key, value in kwargs.items() if key != "log_metric"}
        scores = self.correct(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        keys = kwargs.get("id") or [json.dumps(prompt, sort_keys=True, default=str) for prompt in prompts]
        groups: dict[str, list[int]] = {}
        for key, length, score in zip(keys, lengths, scores, strict=True):
            if score is not None:
                groups.setdefault(key, []).append(length)
        return [
            None if score is None else _relative(length, groups[key], right=score >= 1)
            for key, length, score in zip(keys, lengths, scores, strict=True)
        ]


def _relative(length: int, group: Sequence[int], *, right: bool) -> float:
    shortest, longest = min(group), max(group)
    if shortest == longest:
        return 0.0
    value = 0.5 - (length - shortest) / (longest - shortest)
    return value if right else min(0.0, value)


def _lengths(completion_ids: Sequence[Sequence[int]] | None, name: str) -> list[int]:
    if completion_ids is None:
        raise ValueError(f"{name}: no completion_ids, whose lengths it counts; TRL passes them to every reward")
    return [len(ids) for ids in completion_ids]
