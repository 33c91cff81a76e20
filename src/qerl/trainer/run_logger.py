"""Callback that writes the run folder (metrics, samples, config) and prints the live line of every step."""

import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qerl.evaluation.environment import describe_environment
from qerl.evaluation.live_line import format_step
from qerl.evaluation.run_log import RunWriter

if TYPE_CHECKING:
    from qerl.trainer.trainer import QeRLTrainer

logger = logging.getLogger(__name__)

_SAMPLES_PER_STEP = 4
_KEPT_PREFIXES = ("rewards/", "reward_pool/", "completions/", "dynamic_sampling/")

# TRL's name -> the run folder's.
_RENAMED = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "clipped_ratio",
    "entropy": "entropy",
    "kl": "kl",
    "aqn/sigma": "sigma",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "parity/mean": "mismatch_mean",
    "parity/max": "mismatch_max",
    "sampling/importance_sampling_ratio/mean": "is_ratio_mean",
    "sampling/ess": "ess",
    "sampling/kl": "sampling_kl",
    "sampling/sampling_logp_difference/mean": "sampling_shift",
}


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory in GB: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * (1 if sys.platform == "darwin" else 1024) / 1e9


class RunLogger(TrainerCallback):
    """Writes ``metrics.jsonl`` and ``samples.jsonl``, warns when a run learns nothing, prints a line a step.

    Args:
        trainer: the trainer it belongs to (timings and completions are read from it).
        show: called with the live line; default: the log.
        run_values: further fields for ``config.yaml`` (model, task, ...).
    """

    def __init__(
        self,
        trainer: "QeRLTrainer",
        show: Callable[[str], None] = logger.info,
        run_values: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_values = dict(run_values or {})
        self.trainer = trainer
        self.show = show
        self.writer: RunWriter | None = None
        self._step_start = 0.0
        self._seconds = 0.0
        self._train_start = 0.0
        self._first_step = 0
        self._flat_rewards = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the run folder; a resumed run continues its log after the checkpoint's step."""
        self._first_step = state.global_step
        self._train_start = self._step_start = time.perf_counter()
        if not state.is_world_process_zero:
            return
        resume = state.global_step if state.global_step > 0 else None
        self.writer = RunWriter(args.output_dir, resume_step=resume)
        self.writer.write_config({**self.run_values, **args.given_values()})
        self.writer.write_environment(describe_environment())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start of an update's clock (data loading and generation happen inside)."""
        self._step_start = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the update's seconds (evaluations and checkpoints come later and do not count)."""
        self._seconds += time.perf_counter() - self._step_start

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the step's figures and show them."""
        if self.writer is None or logs is None or "loss" not in logs or state.global_step <= self.writer.last_step:
            return
        metrics = self._metrics(logs)
        self.writer.write_step(state.global_step, metrics)
        if "reward" in logs:  # not every update follows a rollout of its own
            self.writer.write_samples(state.global_step, self._samples())
        done = state.global_step - self._first_step
        elapsed = time.perf_counter() - self._train_start
        left = (state.max_steps - state.global_step) * elapsed / max(done, 1)
        self.show(format_step(state.global_step, state.max_steps, metrics, left))
        self._warn_if_flat(metrics)

    def _metrics(self, logs: dict[str, Any]) -> dict[str, float | None]:
        metrics = {ours: logs.get(theirs) for theirs, ours in _RENAMED.items()}
        metrics["sigma"] = metrics["sigma"] or 0.0
        metrics |= {k: v for k, v in logs.items() if k.startswith(_KEPT_PREFIXES)}
        generate, tokens = self.trainer.bridge.take_timings()
        score = self.trainer.take_reward_seconds()
        whole, self._seconds = self._seconds, 0.0
        metrics |= {
            "time_generate": generate,
            "time_score": score,
            "time_train": max(0.0, whole - generate - score),
            "tokens_per_s": tokens / generate if generate > 0 else None,
            "memory_gb": peak_memory_gb(self.trainer.accelerator.device),
        }
        return metrics

    def _samples(self) -> list[dict[str, Any]]:
        logs = self.trainer._logs
        count = min(_SAMPLES_PER_STEP, len(logs["prompt"]))
        answers = self.trainer.last_answers
        rows = []
        for i in range(count):
            rewards = [values[i] for values in logs["rewards"].values()]
            rows.append(
                {
                    "prompt": _as_text(logs["prompt"][i]),
                    "completion": _as_text(logs["completion"][i]),
                    "reward": sum(r for r in rewards if r is not None and r == r),
                    "answer": answers[i] if i < len(answers) else None,
                    "advantage": logs["advantages"][i],
                }
            )
        return rows

    def _warn_if_flat(self, metrics: dict[str, float | None]) -> None:
        """A reward that never varies, or completions that are all cut off, teach nothing."""
        flat = metrics.get("frac_reward_zero_std") == 1.0
        self._flat_rewards = self._flat_rewards + 1 if flat else 0
        if self._flat_rewards == 5:
            self.show(
                "warning: for 5 steps every group had equal rewards, so nothing was learned. Look at samples.jsonl: is "
                "the task too hard or too easy, the answer format unknown to the model, or the chat template missing?"
            )
        if metrics.get("clipped_ratio") == 1.0:
            self.show("warning: every completion was cut off at max_completion_length; raise it or check the EOS ids")


def _as_text(messages: Any) -> str:
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)
