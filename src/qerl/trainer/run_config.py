"""RunConfig: what a whole run needs beside the trainer's arguments (model, task, rewards, evaluation).

Plain dataclass without torch, so that ``qerl train --help`` answers at once.
"""

from dataclasses import dataclass, field
from typing import Any

REWARDS = ("correctness", "format", "soft_overlong", "length_penalty")


def _help(text: str) -> dict[str, Any]:
    return {"help": text}


@dataclass
class RunConfig:
    """One run: quantized (or 16-bit) model, task, rewards, evaluation before and after.

    Raises:
        ValueError: an unknown reward name, or a length of ``reward_weights`` that does not fit.
    """

    model: str = field(default="", metadata=_help("Local folder of the model: 16-bit or packed checkpoint."))
    task: str = field(
        default="gsm8k",
        metadata=_help("gsm8k, math, dapo17k, ..., reasoning_gym:NAME, a .jsonl/.parquet file, or a hub data set."),
    )
    task_options: dict[str, Any] = field(
        default_factory=dict,
        metadata=_help("Options of the task (data_dir, prompt, size, column names, ...)."),
    )
    eval_task: str | None = field(
        default=None, metadata=_help("Task to evaluate on; default: the test side of `task`.")
    )
    eval_task_options: dict[str, Any] = field(default_factory=dict, metadata=_help("Options of `eval_task`."))
    rewards: list[str] | None = field(
        default=None,
        metadata=_help(
            f"Any of: {', '.join(REWARDS)}; weighted by reward_weights. Default: correctness, or none where "
            "reward_funcs are given."
        ),
    )
    reward_funcs: list[str] = field(
        default_factory=list,
        metadata=_help(
            "Own functions after `rewards`: module:function or path/to/file.py:function, called as TRL calls them."
        ),
    )
    overlong_cache_tokens: int | None = field(
        default=None,
        metadata=_help("Slope of soft_overlong, tokens; default: a fifth of max_completion_length (as DAPO)."),
    )
    reward_workers: int = field(default=2, metadata=_help("Processes that score answers (0: in the trainer)."))
    reward_deadline: float = field(default=5.0, metadata=_help("Seconds an answer may take to score."))
    train_limit: int | None = field(default=None, metadata=_help("Use only the first N training problems."))
    evaluate_before: bool = field(default=True, metadata=_help("Evaluate before step 1."))
    evaluate_after: bool = field(default=True, metadata=_help("Evaluate after the last step."))
    eval_limit: int | None = field(default=None, metadata=_help("Problems per evaluation; default: all."))
    eval_max_new_tokens: int | None = field(
        default=None, metadata=_help("Token limit in evaluations; default: max_completion_length.")
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]
        if self.rewards is None:
            self.rewards = [] if self.reward_funcs else ["correctness"]
        unknown = [name for name in self.rewards if name not in REWARDS]
        if unknown or not (self.rewards or self.reward_funcs):
            raise ValueError(
                f"rewards={self.rewards}: choose from {', '.join(REWARDS)}; own functions go to "
                "reward_funcs: [path/to/file.py:function]"
            )
        if self.reward_workers < 0:
            raise ValueError(f"reward_workers={self.reward_workers} must be 0 or more")
        if self.reward_deadline <= 0:
            raise ValueError(f"reward_deadline={self.reward_deadline} must be positive (seconds)")
