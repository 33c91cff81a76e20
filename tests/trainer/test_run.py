"""Whole runs from a task file: evaluate, train, evaluate, summary, report; killed and resumed; stopped by SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qerl.evaluation.run_log import RunExistsError, read_run
from qerl.trainer.config import ConfigError
from qerl.trainer.parsing import build_configs
from qerl.trainer.run import Run


@pytest.fixture
def values(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> dict:
    task = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(20)]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(tiny_checkpoints["qwen2"]),
        "weights": "nvfp4",
        "task": str(task),
        "task_options": {"test_size": 4, "prompt": "plain"},
        "reward_workers": 0,
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_prompt_length": 64,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "num_stages": 3,
        "sigma_start": 0.05,
        "sigma_end": 0.01,
        "save_strategy": "steps",
        "save_steps": 2,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 3,
    }


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_behind(values: dict, tmp_path: Path) -> None:
    lines: list[str] = []
    Run(
        *build_configs({**values, "reward_workers": 1, "rewards": ["correctness", "format", "soft_overlong"]}),
        lines.append,
    ).execute()
    run = read_run(tmp_path / "run")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert [row["sigma"] for row in run.metrics] == pytest.approx([0.0, 0.05, 0.01, 0.01])
    for name in ("reward", "length", "entropy", "mismatch_mean", "ess", "tokens_per_s", "memory_gb", "time_train"):
        assert all(row[name] is not None for row in run.metrics), name
    assert run.before is not None and run.after is not None and run.before.problems == 4
    assert run.summary["steps"] == 4 and set(run.summary["seconds"]) == {"train", "eval"}
    assert run.samples and run.samples[0]["answer"] is not None
    assert "task: " in run.config_text and "sigma_start: 0.05" in run.config_text
    assert sum(line.startswith("step ") for line in lines) == 4
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 28
    assert not (tmp_path / "run" / "README.md").exists(), "TRL's model card says that a local base model is None"
    assert f"base_model: {values['model']}" in (tmp_path / "run" / "adapter" / "README.md").read_text()


SCRIPT = """
import json, os, signal, sys
from qerl.trainer.parsing import build_configs
from qerl.trainer import run as run_module
values, kill_at, action = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Killer(run_module.StopOnSignal):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == kill_at and action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == kill_at and action == "term":
            os.kill(os.getpid(), signal.SIGTERM)

run_module.StopOnSignal = Killer
run_module.Run(*build_configs(values), print).execute()
"""


def start(values: dict, kill_at: int, action: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(values), str(kill_at), action],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_kill_9_and_resume_gives_the_same_next_steps(values: dict, tmp_path: Path) -> None:
    """Cases 31 and 32: sample ids continue, losses agree to 1e-6, nothing is repeated or skipped."""
    whole = {**values, "output_dir": str(tmp_path / "whole")}
    Run(*build_configs(whole), lambda line: None).execute()
    killed = start(values, kill_at=3, action="kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    folder = tmp_path / "run"
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    (folder / "checkpoint-notes.txt").write_text("a stray file")  # case 33
    (folder / "checkpoint-old").mkdir()
    with pytest.raises(RunExistsError, match="already holds a run; add --resume_from_checkpoint true"):
        Run(*build_configs(values))
    Run(*build_configs({**values, "resume_from_checkpoint": "true"}), lambda line: None).execute()
    resumed, expected = metrics(folder), metrics(tmp_path / "whole")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    for mine, theirs in zip(resumed, expected, strict=True):
        for name in ("loss", "reward", "entropy", "length", "sigma", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), (mine["step"], name)
    samples = [
        [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("run", "whole")
    ]
    for mine, theirs in zip(*samples, strict=True):
        assert (mine["step"], mine["prompt"], mine["completion"]) == (
            theirs["step"],
            theirs["prompt"],
            theirs["completion"],
        )
    a, b = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("run", "whole"))
    assert all((a[name] - b[name]).abs().max() < 1e-6 for name in a)


def test_resume_exactly_at_the_end_of_an_epoch_trains_on(values: dict, tmp_path: Path) -> None:
    """Case 31: the checkpoint falls on an epoch boundary (8 problems, 2 a step: 4 steps an epoch)."""
    epochs = {**values, "max_steps": -1, "num_train_epochs": 1, "save_steps": 4, "train_limit": 8}
    epochs |= {"evaluate_before": False, "evaluate_after": False}
    Run(*build_configs(epochs), lambda line: None).execute()
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    more = {**epochs, "num_train_epochs": 2, "resume_from_checkpoint": "true"}
    summary = Run(*build_configs(more), lambda line: None).execute()
    assert summary["steps"] == 8
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, 9))


def test_sigterm_writes_a_checkpoint_and_ends(values: dict, tmp_path: Path) -> None:
    started = time.perf_counter()
    result = start({**values, "save_steps": 4}, kill_at=1, action="term")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "stopped by SIGTERM after step 2; checkpoint written to" in result.stdout
    assert (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").is_file()
    assert time.perf_counter() - started < 200


def test_nothing_to_resume_from_is_said(values: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint-N folder"):
        Run(*build_configs({**values, "resume_from_checkpoint": "true"}))
    with pytest.raises(ConfigError, match=r"trainer_state.json is missing"):
        Run(*build_configs({**values, "resume_from_checkpoint": str(tmp_path)}))


def test_training_problems_in_the_evaluation_task_are_reported(
    values: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = tmp_path / "eval.jsonl"
    task.write_text('{"question": "3 + 1 =", "answer": "4"}\n')
    options = {"task_options": {"prompt": "plain"}, "eval_task": str(task), "eval_task_options": {"split": "test"}}
    Run(*build_configs({**values, **options}))
    assert "1 training problems are also in the evaluation task" in caplog.text


def test_missing_model_and_empty_task_are_named(values: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model is not set"):
        Run(*build_configs({**values, "model": ""}))
    with pytest.raises(ConfigError, match="has no training problems"):
        Run(*build_configs({**values, "task_options": {"split": "test"}}))


def test_a_file_without_held_out_problems_trains_and_says_so(values: dict, tmp_path: Path) -> None:
    lines: list[str] = []
    options = {**values, "task_options": {"prompt": "plain"}, "max_steps": 1, "save_strategy": "no"}
    summary = Run(*build_configs(options), lines.append).execute()
    assert "before" not in summary and "after" not in summary and summary["steps"] == 1
    assert sum("has no held-out problems" in line for line in lines) == 1
