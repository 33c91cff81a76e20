"""What a reward function takes against what it will be given: checked before a model is loaded."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from qerl.trainer.timed_reward import CheckedReward

# What TRL passes beside the columns of the data set.
_TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_PASSED = ("prompt", "completion", "completion_ids")


class RewardArgumentError(ValueError):
    """A reward function that takes what it will not be given, or is given what it does not take."""


def check_reward_arguments(rewards: Sequence[Any], columns: Sequence[str], *, environments: bool = False) -> None:
    """Every parameter without a default is one of TRL's or a column; without ``**kwargs``, all that is passed is taken.

    Args:
        rewards: reward functions; models are skipped.
        columns: of the training data.
        environments: whether TRL passes ``environments`` too.

    Raises:
        RewardArgumentError: naming the function, the parameters and the columns.
    """
    own = [name for name in columns if name not in _NOT_PASSED]
    passed = [*_TRL_ARGUMENTS, *(["environments"] if environments else []), *own]
    where = f"it is called with {', '.join(passed)} (columns of the data: {', '.join(own) or 'none'})"
    for reward in rewards:
        if isinstance(reward, nn.Module) or not callable(reward):
            continue
        function = reward.function if isinstance(reward, CheckedReward) else reward
        name = getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters.values()
        taken = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        missing = [n for n in needed if n not in passed or n not in taken]  # all is passed by name
        if missing:
            raise RewardArgumentError(
                f"reward function {name!r} takes {', '.join(missing)}, which nothing passes: {where}"
            )
        left = [n for n in passed if n not in taken]
        if left and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise RewardArgumentError(
                f"reward function {name!r} does not take {', '.join(left)}: add **kwargs to its parameters; {where}"
            )
