"""Reward functions as the trainer calls them: under their own name, with their seconds counted, mistakes named."""

import inspect
import time
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import nn


class RewardCallError(ValueError):
    """A reward function that raised, or that did not return a reward for each completion.

    ``details`` are the lines of the function's own traceback (empty where it returned); the exception is the cause.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class _Named:
    """Turns what a user's function raises into `RewardCallError` with its name; qerl's own errors pass as they are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or type(error).__module__.partition(".")[0] == "qerl":
            return
        frames = traceback.extract_tb(trace)[1:]  # without the call here
        raise RewardCallError(
            f"reward function {self.name!r} raised {type(error).__name__}: {error}",
            "".join(traceback.format_list(frames)),
        ) from error


class CheckedReward:
    """A reward function under its own name, whose mistakes are named.

    Args:
        function: TRL's convention, ``fn(prompts, completions, **columns) -> list[float | None]``; plain or async.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def _checked(self, rewards: Any, expected: int) -> list[float | None]:
        if isinstance(rewards, (str, bytes, dict)) or not isinstance(rewards, Iterable) or _length(rewards) is None:
            raise RewardCallError(
                f"reward function {self.__name__!r} returned {rewards!r:.80}; return a list with one number (or None) "
                "for each completion"
            )
        if len(rewards) != expected:
            raise RewardCallError(
                f"reward function {self.__name__!r} returned {len(rewards)} rewards for {expected} completions; return "
                "one number (or None) for each"
            )
        return [self._number(row, reward) for row, reward in enumerate(rewards)]

    def _number(self, row: int, reward: Any) -> float | None:
        """What a float can hold; NaN and infinities are judged after the rollout."""
        if reward is None:
            return None
        try:
            if not isinstance(reward, str):
                return float(reward)
            cause: Exception | None = None
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last is torch's word for a row
            cause = error
        raise RewardCallError(
            f"reward function {self.__name__!r} returned {reward!r:.80} for row {row}; return a number, or None to "
            "leave a sample out"
        ) from cause


def _length(rewards: Any) -> int | None:
    """None where there is none: also of tensors and arrays without dimensions, which only pretend to have one."""
    try:
        return len(rewards)
    except TypeError:
        return None


class TimedReward(CheckedReward):
    """A plain function that also counts its seconds and remembers the golds it saw.

    Raises:
        RewardCallError: when called, for whatever the function raises (errors that a reward of qerl's states are left
            as they are), and for a return value that is not a number or None for each completion.
    """

    def __init__(self, function: Callable[..., list[float | None]]) -> None:
        super().__init__(function)
        self.seconds = 0.0
        self.answers: list[Any] = []

    def __call__(self, **kwargs: Any) -> list[float | None]:
        start = time.perf_counter()
        self.answers = list(kwargs.get("answer") or [])
        rewards = self.trial(**kwargs)
        self.seconds += time.perf_counter() - start
        return rewards

    def trial(self, **kwargs: Any) -> list[float | None]:
        """The same call, not counted."""
        expected = len(kwargs["completions"])  # before the call, which could change the list
        with _Named(self.__name__):
            rewards = self.function(**kwargs)
            if inspect.isgenerator(rewards):
                rewards = list(rewards)
        return self._checked(rewards, expected)

    def take_seconds(self) -> float:
        """Seconds since the last call (resets)."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class AsyncReward(CheckedReward):
    """A coroutine function; TRL awaits those of a batch together.

    Raises:
        RewardCallError: when awaited, as :class:`TimedReward`.
    """

    async def __call__(self, **kwargs: Any) -> list[float | None]:
        expected = len(kwargs["completions"])
        with _Named(self.__name__):
            rewards = await self.function(**kwargs)
        return self._checked(rewards, expected)


def timed(reward_funcs: Any) -> list[Any]:
    """The rewards as a list, functions wrapped in :class:`TimedReward` or :class:`AsyncReward` (models are left)."""
    rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    return [_wrapped(reward) for reward in rewards]


def _wrapped(reward: Any) -> Any:
    if not callable(reward) or isinstance(reward, (nn.Module, CheckedReward)):
        return reward
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    return AsyncReward(reward) if is_async else TimedReward(reward)
