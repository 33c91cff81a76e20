"""The folder of a training run: who writes what, and how to read it back.

::

    <run>/config.yaml       the configuration as given, with defaults; a recipe for `qerl train --config`
    <run>/environment.json  machine and package versions (qerl.evaluation.environment)
    <run>/metrics.jsonl     one JSON object per optimizer step: "step", "time" (Unix seconds) and METRICS
    <run>/samples.jsonl     logged completions: "step", "prompt", "completion", "reward", "answer" and more
    <run>/eval-before/      evaluation before step 1 (settings.json, samples.jsonl, result.json)
    <run>/eval-after/       evaluation after the last step, on the same problems
    <run>/summary.json      "before", "after": {"accuracy", "low", "high", "n"}; "steps";
                            "seconds": {"install", "quantize", "train", "eval"};
                            optional: "notes": [text], "title", "model", "task"

Other files (checkpoints, logs of other tools) may lie beside these and are never touched. Lines are appended
and flushed one by one, so a killed run loses at most the line being written. A resumed run first drops the
lines of the steps that will be made again.
"""

import logging
import numbers
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qerl.evaluation.result import RESULT_FILE, EvalResult
from qerl.evaluation.storage import as_number, dump_line, read_json, read_lines, write_json, write_text

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
ENVIRONMENT_FILE = "environment.json"
BEFORE_DIR = "eval-before"
AFTER_DIR = "eval-after"

METRICS: Mapping[str, str] = {
    "reward": "mean reward of the step's completions",
    "reward_std": "standard deviation of the rewards (mean over groups)",
    "frac_reward_zero_std": "share of groups whose rewards are all equal: no signal",
    "length": "mean completion length, tokens",
    "clipped_ratio": "share of completions stopped by the token limit",
    "entropy": "mean policy entropy per token, nats",
    "kl": "KL to the reference policy, nats; null where beta is 0",
    "sigma": "AQN noise scale of the step; 0 when off",
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate",
    "mismatch_mean": "mean |engine - trainer log-prob| per token, same noise on both sides, nats",
    "mismatch_max": "largest |engine - trainer log-prob|, nats",
    "is_ratio_mean": "mean importance ratio trainer / engine",
    "ess": "effective sample size of the importance weights, share of the tokens",
    "tokens_per_s": "generated tokens per second of generation",
    "memory_gb": "peak memory, GB (CUDA: allocated; CPU: resident)",
    "time_generate": "seconds of generation",
    "time_score": "seconds of scoring",
    "time_train": "seconds of forward, backward and optimizer",
}


class RunExistsError(FileExistsError):
    """The folder already holds a run that a new one would mix with."""


class NotARunError(FileNotFoundError):
    """The folder is no run; says what is missing."""


class RunWriter:
    """Writes the files of one run. One writer per run (rank 0).

    ``RunWriter(run_dir)`` starts a run; ``RunWriter(run_dir, resume_step=k)`` continues one after optimizer
    step ``k`` and drops the logged lines of later steps (a run killed between two checkpoints has some).

    Raises:
        RunExistsError: a new run in a folder whose ``metrics.jsonl`` has steps.
        NotARunError: resuming where there is no ``metrics.jsonl`` although ``resume_step`` is above 0.
        ValueError: a damaged log line; names file and line.
    """

    def __init__(self, run_dir: str | Path, *, resume_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = self.run_dir / METRICS_FILE
        self._samples = self.run_dir / SAMPLES_FILE
        self.last_step = 0
        if resume_step is None:
            self._start()
        else:
            self._resume(resume_step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration to ``config.yaml``, atomically.

        Raises:
            ValueError: a value that is no plain YAML (numbers, text, booleans, lists, mappings).
        """
        try:
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        except yaml.representer.RepresenterError as error:
            raise ValueError(f"the configuration holds a value that YAML cannot: {error.args[-1]!r}") from error
        write_text(self.run_dir / CONFIG_FILE, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write what :func:`qerl.evaluation.environment.describe_environment` returned."""
        write_json(self.run_dir / ENVIRONMENT_FILE, environment)

    def write_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Append the figures of optimizer step ``step`` (1-based): the names of METRICS, and any others.

        Raises:
            ValueError: a step that is not after the last one, or a value that is no number and not None.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} after step {self.last_step}: steps must increase (resume with resume_step)")
        row: dict[str, Any] = {"step": int(step), "time": time.time()}
        for name, value in metrics.items():
            if name in row:
                raise ValueError(f"{name!r} is written by the log itself; leave it out of the metrics")
            row[name] = _plain_number(name, value)
        _append(self._metrics, [row])
        self.last_step = step

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append completions of ``step``: each has prompt, completion, reward, answer and may have more.

        Raises:
            ValueError: a sample lacks one of the four.
        """
        rows = []
        for sample in samples:
            missing = [name for name in ("prompt", "completion", "reward", "answer") if name not in sample]
            if missing:
                raise ValueError(f"a sample of step {step} lacks {', '.join(missing)}")
            reward = _plain_number("reward", sample["reward"])
            rows.append({"step": int(step), **sample, "reward": reward})
        _append(self._samples, rows)

    def update_summary(self, **fields: Any) -> None:
        """:func:`update_summary` of this run."""
        update_summary(self.run_dir, **fields)

    def _start(self) -> None:
        if self._metrics.is_file() and self._metrics.stat().st_size > 0:
            raise RunExistsError(
                f"{self.run_dir} already holds a run ({METRICS_FILE} has steps). Resume it, choose another "
                "output folder, or delete this one"
            )
        self._samples.unlink(missing_ok=True)

    def _resume(self, resume_step: int) -> None:
        if resume_step < 0:
            raise ValueError(f"resume_step = {resume_step}: the step to continue after is 0 or more")
        if not self._metrics.is_file() and resume_step > 0:
            raise NotARunError(f"{self.run_dir} cannot be resumed at step {resume_step}: {METRICS_FILE} is missing")
        for path in (self._metrics, self._samples):
            if not path.is_file():
                continue
            rows = read_lines(path)
            kept = [row for row in rows if _step(path, row) <= resume_step]
            if len(kept) < len(rows):
                logger.info("%s: dropped %d lines after step %d", path, len(rows) - len(kept), resume_step)
            # Rewritten even if nothing was dropped: a half-written last line must not be continued.
            write_text(path, "".join(dump_line(row) for row in kept))
        self.last_step = resume_step


def update_summary(run_dir: str | Path, **fields: Any) -> None:
    """Merge ``fields`` into the run's ``summary.json``, atomically; ``seconds`` is merged key by key."""
    path = Path(run_dir) / SUMMARY_FILE
    summary = read_json(path) if path.is_file() else {}
    if "seconds" in fields:
        fields["seconds"] = {**summary.get("seconds", {}), **fields["seconds"]}
    write_json(path, {**summary, **fields})


def has_updates(run_dir: str | Path) -> bool:
    """Whether a run was finished in the folder or has logged a step (not: only evaluated before step 1)."""
    metrics, summary = Path(run_dir) / METRICS_FILE, Path(run_dir) / SUMMARY_FILE
    logged = metrics.is_file() and metrics.stat().st_size > 0
    return logged or "steps" in _read_optional_json(summary)


def clear_failed_start(run_dir: str | Path) -> None:
    """Remove the summary and the evaluation of a run that ended before its first update, which a new one replaces.

    Raises:
        RunExistsError: the run has updates.
    """
    path = Path(run_dir)
    if has_updates(path):
        raise RunExistsError(f"{path} already holds a run with updates; choose another output folder")
    (path / SUMMARY_FILE).unlink(missing_ok=True)
    if (path / BEFORE_DIR / RESULT_FILE).is_file():
        shutil.rmtree(path / BEFORE_DIR)


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read from its folder. Missing parts are ``None`` or empty; ``metrics`` is ordered by step."""

    run_dir: Path
    metrics: tuple[dict[str, Any], ...]
    samples: tuple[dict[str, Any], ...]
    config_text: str | None
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    before: EvalResult | None
    after: EvalResult | None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it is a number (NaN and infinity included)."""
        pairs = [(int(row["step"]), as_number(row.get(name))) for row in self.metrics]
        known = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in known], [value for _, value in known]


def read_run(run_dir: str | Path) -> Run:
    """Read a run folder. Stray files are ignored; a half-written last line is dropped with a note in the log.

    Raises:
        NotARunError: the folder does not exist or holds neither metrics nor a summary.
        ValueError: a damaged file; names it.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise NotARunError(f"{path} is not a folder; give the output folder of a training run")
    if not (path / METRICS_FILE).is_file() and not (path / SUMMARY_FILE).is_file():
        raise NotARunError(f"{path} is no run: {METRICS_FILE} and {SUMMARY_FILE} are both missing")
    metrics = _read_optional_lines(path / METRICS_FILE)
    # A later line of the same step wins: it was written by a later attempt.
    by_step = {_step(path / METRICS_FILE, row): row for row in metrics}
    config = path / CONFIG_FILE
    return Run(
        run_dir=path,
        metrics=tuple(by_step[step] for step in sorted(by_step)),
        samples=tuple(_read_optional_lines(path / SAMPLES_FILE)),
        config_text=config.read_text(encoding="utf-8") if config.is_file() else None,
        summary=_read_optional_json(path / SUMMARY_FILE),
        environment=_read_optional_json(path / ENVIRONMENT_FILE),
        before=_read_result(path / BEFORE_DIR),
        after=_read_result(path / AFTER_DIR),
    )


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(dump_line(row))
            file.flush()


def _plain_number(name: str, value: Any) -> float | int | None:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    raise ValueError(f"metric {name!r} is a {type(value).__name__}, not a number; pass float(...) or None")


def _step(path: Path, row: Mapping[str, Any]) -> int:
    step = row.get("step")
    if not isinstance(step, int):
        raise ValueError(f"{path}: a line has step = {step!r}, not a whole number; remove the line")
    return step


def _read_optional_lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.is_file() else []


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_result(directory: Path) -> EvalResult | None:
    return EvalResult.load(directory) if (directory / RESULT_FILE).is_file() else None
