"""A whole run: task, rewards, evaluation before, training, evaluation after, summary."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from qerl.evaluation.folders import newest_checkpoint
from qerl.evaluation.result import EvalResult
from qerl.evaluation.run_log import (
    AFTER_DIR,
    BEFORE_DIR,
    RunExistsError,
    clear_failed_start,
    has_updates,
    update_summary,
)
from qerl.evaluation.runner import evaluate
from qerl.tasks.base import Task, to_dataset
from qerl.tasks.examples import overlap
from qerl.tasks.length import LengthPenalty, SoftOverlongPunishment
from qerl.tasks.registry import load_task
from qerl.tasks.rewards import CorrectnessReward, FormatReward
from qerl.tasks.workers import RewardPool
from qerl.trainer.config import ConfigError, QeRLConfig
from qerl.trainer.reward_source import load_reward_functions
from qerl.trainer.run_config import RunConfig
from qerl.trainer.run_logger import RunLogger
from qerl.trainer.trainer import QeRLTrainer

logger = logging.getLogger(__name__)


class StopOnSignal(TrainerCallback):
    """SIGTERM finishes the step, writes a checkpoint and ends the run (Slurm, spot machines)."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGTERM inside the block (main thread only)."""
        previous = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _receive(self, signum: int, frame: Any) -> None:
        self.received = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop once the signal came, at the next boundary between two generations."""
        at_boundary = state.global_step % args.updates_per_generation == 0
        if self.received and at_boundary:
            control.should_save = True
            control.should_training_stop = True


def make_rewards(run: RunConfig, args: QeRLConfig, task: Task, pool: RewardPool | None) -> list[Any]:
    """The built-in reward functions of the run, in TRL's convention."""
    limit = args.max_completion_length
    made = {
        "correctness": lambda: CorrectnessReward(task, pool),
        "format": lambda: FormatReward(
            "answer_tags" if task.name.startswith("reasoning_gym:") else "boxed",
            think_opened=task.think_opened,
        ),
        "soft_overlong": lambda: SoftOverlongPunishment(limit, run.overlong_cache_tokens or max(1, limit // 5)),
        "length_penalty": lambda: LengthPenalty(CorrectnessReward(task, pool)),
    }
    return [made[name]() for name in run.rewards]


def resume_checkpoint(args: QeRLConfig) -> str | None:
    """The checkpoint to resume from: a path, the newest one of the output folder, or None.

    Raises:
        RunExistsError: the folder holds a run with updates and nothing was said about resuming.
        ConfigError: resuming was asked for and there is no checkpoint.
    """
    wanted = args.resume_from_checkpoint
    folder = Path(args.output_dir)
    newest = newest_checkpoint(folder)
    if isinstance(wanted, str) and wanted.lower() not in ("true", "false"):
        if not (Path(wanted) / "trainer_state.json").is_file():
            raise ConfigError(f"resume_from_checkpoint={wanted!r} is no checkpoint (trainer_state.json is missing)")
        return wanted
    if wanted and str(wanted).lower() == "true":
        if newest is None:
            raise ConfigError(
                f"resume_from_checkpoint: {folder} holds no complete checkpoint-N folder to resume from; choose "
                "another output_dir to start anew"
            )
        return str(newest)
    if newest is not None:
        raise RunExistsError(
            f"{folder} already holds a run; add --resume_from_checkpoint true to continue it, or choose another "
            "output_dir"
        )
    if has_updates(folder):
        raise RunExistsError(f"{folder} already holds a run without a checkpoint; choose another output_dir")
    return None


class Run:
    """One run in a folder; construct, then :meth:`execute`.

    Args:
        run: model, task, rewards, evaluation.
        args: trainer arguments; ``args.output_dir`` is the run folder.
        show: called with lines for people (live line, evaluation results).
    """

    def __init__(self, run: RunConfig, args: QeRLConfig, show: Callable[[str], None] = logger.info) -> None:
        if not run.model:
            raise ConfigError("model is not set: give the local folder of a 16-bit or packed checkpoint")
        self.run, self.args, self.show = run, args, show
        self.checkpoint = resume_checkpoint(args)
        self.reward_functions = load_reward_functions(run.reward_funcs)
        self.task = load_task(run.task, **run.task_options)
        self.eval_task = self.task
        if run.eval_task is not None:
            self.eval_task = load_task(run.eval_task, **run.eval_task_options)
        examples = self.task.train[: run.train_limit]
        if not examples:
            missing = self.task.report.missing_files
            where = f" (the data folder has no {', '.join(missing)})" if missing else ""
            raise ConfigError(
                f"task {run.task} has no training problems{where}; choose another, or set task_options.split"
            )
        if run.eval_task is not None and (shared := overlap(examples, self.eval_task.test)):
            logger.warning(
                "%d training problems are also in the evaluation task (first: %s): its accuracy is not held out",
                len(shared), shared[0],
            )  # fmt: skip
        self.evaluates = {BEFORE_DIR: run.evaluate_before, AFTER_DIR: run.evaluate_after}
        if any(self.evaluates.values()) and not self.eval_task.test:
            self.show(
                f"note: {self.eval_task.name} has no held-out problems, so nothing is evaluated before and after; hold "
                "some out with task_options: {test_size: 64}, or name an eval_task"
            )
            self.evaluates = dict.fromkeys(self.evaluates, False)
        self.seconds = {"train": 0.0, "eval": 0.0}
        self.dataset = to_dataset(examples, self.task)

    def execute(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; returns what ``summary.json`` holds."""
        run = self.run
        workers = run.reward_workers
        pool = RewardPool(workers, deadline_s=run.reward_deadline) if workers else nullcontext()
        with pool as rewards_pool:
            trainer = QeRLTrainer(
                run.model,
                [*make_rewards(run, self.args, self.task, rewards_pool), *self.reward_functions],
                self.args,
                self.dataset,
                eval_max_new_tokens=run.eval_max_new_tokens,
            )
            return self._execute(trainer, rewards_pool)

    def _execute(self, trainer: QeRLTrainer, pool: RewardPool | None) -> dict[str, Any]:
        run, stop = self.run, StopOnSignal()
        trainer.try_rewards()  # before the evaluation, which may take long
        trainer.add_callback(RunLogger(trainer, self.show, run_values=asdict(run)))
        trainer.add_callback(stop)
        for noisy in (PrinterCallback, ProgressCallback):  # the live line replaces them
            trainer.remove_callback(noisy)
        if self.checkpoint is None and trainer.accelerator.is_main_process:
            clear_failed_start(self.args.output_dir)
        summary: dict[str, Any] = {"model": run.model, "task": run.task}
        if self.evaluates[BEFORE_DIR] and self.checkpoint is None:
            summary["before"] = self._evaluate(trainer, BEFORE_DIR, pool)
            self._note(trainer, before=summary["before"])
        start = time.perf_counter()
        with stop.installed():
            trainer.train(resume_from_checkpoint=self.checkpoint)
        self.seconds["train"] = time.perf_counter() - start
        step = trainer.state.global_step
        if stop.received and step < trainer.state.max_steps:
            self.show(f"stopped by SIGTERM after step {step}; checkpoint written to {self.args.output_dir}")
        else:
            trainer.save_model(str(Path(self.args.output_dir) / "adapter"))
            if self.evaluates[AFTER_DIR]:
                summary["after"] = self._evaluate(trainer, AFTER_DIR, pool)
        summary |= {"steps": step, "seconds": self.seconds}
        self._note(trainer, **summary)
        return summary

    def _note(self, trainer: QeRLTrainer, **fields: Any) -> None:
        """Merge ``fields`` into the run's summary (first rank only)."""
        if trainer.accelerator.is_main_process:
            update_summary(self.args.output_dir, **fields)

    def _evaluate(self, trainer: QeRLTrainer, folder: str, pool: RewardPool | None) -> dict[str, Any] | None:
        """Greedy evaluation through the engine of the first rank, under the clean policy; the others wait."""
        result = None
        if trainer.accelerator.is_main_process:
            with trainer.noise.suspended() if trainer.noise is not None else nullcontext():
                result = self._evaluate_here(trainer, folder, pool)
        trainer.accelerator.wait_for_everyone()
        return result

    def _evaluate_here(self, trainer: QeRLTrainer, folder: str, pool: RewardPool | None) -> dict[str, Any]:
        start = time.perf_counter()
        trainer.model.eval()
        trainer.bridge.sync_weights()
        result: EvalResult = evaluate(
            trainer.engine,
            trainer.processing_class,
            self.eval_task,
            max_new_tokens=self.run.eval_max_new_tokens or self.args.max_completion_length,
            limit=self.run.eval_limit,
            pool=pool,
            output_dir=Path(self.args.output_dir) / folder,
            resume=False,
            model=self.run.model,
            weights=getattr(trainer.accelerator.unwrap_model(trainer.model), "qerl_weights", None),
            head=None if self.args.head == "auto" else self.args.head,
            template_options=self.args.chat_template_kwargs,
        )
        trainer.model.train()
        self.seconds["eval"] += time.perf_counter() - start
        summary = result.summary()
        self.show(
            f"{folder}: accuracy {summary['accuracy']:.3f} [{summary['low']:.3f}, {summary['high']:.3f}] on "
            f"{summary['n']} problems"
        )
        return summary
