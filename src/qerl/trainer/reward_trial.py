"""A call of the user's reward functions before anything is generated: a mistake costs seconds, not an evaluation.

They get one group (as many completions as in training, since some compare within it) of the first training row, with
one made-up completion. Nothing of it is counted, logged or drawn from the run's random numbers.
"""

import asyncio
import copy
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset

from qerl.trainer.timed_reward import AsyncReward, RewardCallError, TimedReward

if TYPE_CHECKING:
    from qerl.trainer.trainer import QeRLTrainer

logger = logging.getLogger(__name__)

TRIAL_COMPLETION = "A completion that was made up to try the reward functions. The answer is 0."


def try_rewards(trainer: "QeRLTrainer") -> None:
    """Call every function of ``trainer`` that is not qerl's own once; what it returns is checked and dropped.

    Nothing is done with streaming data, whose first row would be taken; the log says so.

    Args:
        trainer: without environments (which only a rollout makes).

    Raises:
        RewardCallError: naming the function, its own exception as the cause.
    """
    rewards = [reward for reward in trainer.reward_funcs if _is_the_users(reward)]
    if not rewards:
        return
    if not isinstance(trainer.train_dataset, Dataset):
        names = ", ".join(reward.__name__ for reward in rewards)
        logger.warning("streaming data: the reward functions (%s) are not tried before the first rollout", names)
        return
    for reward in rewards:
        logger.info(
            "trying reward function %r on a made-up completion (try_rewards: false skips this)", reward.__name__
        )
        arguments, kept = _arguments(trainer), _arguments(trainer)
        with _unchanged_random_numbers():
            if isinstance(reward, TimedReward):
                reward.trial(**arguments)
            else:
                # On the loop of the later calls: what the function keeps (a session, a lock) belongs to its loop.
                asyncio.run_coroutine_threadsafe(reward(**arguments), trainer.async_loop).result()
        changed = [
            name for name in arguments if isinstance(kept[name], list) and len(arguments[name]) != len(kept[name])
        ]
        if changed:
            raise RewardCallError(
                f"reward function {reward.__name__!r} changed the length of {', '.join(changed)}, which others read "
                "after it: work on a copy"
            )


def _is_the_users(reward: Any) -> bool:
    if not isinstance(reward, (TimedReward, AsyncReward)):
        return False
    module = getattr(reward.function, "__module__", None) or ""
    return module.partition(".")[0] != "qerl"


def _arguments(trainer: "QeRLTrainer") -> dict[str, Any]:
    """What TRL passes, for one group of the first row; a function may change the objects of one sample alone."""
    row, size = trainer.train_dataset[0], trainer.num_generations
    completion: Any = TRIAL_COMPLETION
    if not isinstance(row["prompt"], str):
        completion = [{"role": "assistant", "content": TRIAL_COMPLETION}]
    token_ids = trainer.processing_class(text=TRIAL_COMPLETION, add_special_tokens=False)["input_ids"]
    of_group = {"prompts": row["prompt"], "completions": completion, "completion_ids": token_ids}
    of_group |= {name: row[name] for name in row if name not in ("prompt", "completion", "completion_ids")}
    return {
        **{name: [copy.deepcopy(value) for _ in range(size)] for name, value in of_group.items()},
        "trainer_state": trainer.state,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


@contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    """Put the states of Python's, numpy's and torch's generators back."""
    python, numbers, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(tensors)
