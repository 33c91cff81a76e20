"""Reward functions as the trainer calls them: under their own name, with their seconds counted."""

import inspect
import time
from collections.abc import Callable
from typing import Any

from torch import nn


class TimedReward:
    """A reward function that keeps its name, counts its seconds and remembers the golds it saw.

    Args:
        function: TRL's convention, ``fn(prompts, completions, **columns) -> list[float | None]``.
    """

    def __init__(self, function: Callable[..., list[float | None]]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.seconds = 0.0
        self.answers: list[Any] = []

    def __call__(self, **kwargs: Any) -> list[float | None]:
        start = time.perf_counter()
        self.answers = list(kwargs.get("answer") or [])
        rewards = self.function(**kwargs)
        self.seconds += time.perf_counter() - start
        return rewards

    def take_seconds(self) -> float:
        """Seconds since the last call (resets)."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def timed(reward_funcs: Any) -> list[Any]:
    """The rewards as a list, plain functions wrapped in :class:`TimedReward` (models and coroutines are left alone)."""
    rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    return [TimedReward(reward) if _is_plain_function(reward) else reward for reward in rewards]


def _is_plain_function(reward: Any) -> bool:
    """A function that is called with TRL's keyword arguments and returns at once (no model, no coroutine)."""
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    return callable(reward) and not isinstance(reward, nn.Module) and not is_async
