"""Mistakes in a user's reward function: found before step 1 where possible, named, and no folder is lost to them."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from tiny_training import letter_reward
from typer.testing import CliRunner

from qerl.cli.main import app
from qerl.evaluation.run_log import RunExistsError, clear_failed_start, update_summary
from qerl.tasks.rewards import CorrectnessReward
from qerl.trainer.parsing import build_configs
from qerl.trainer.reward_arguments import RewardArgumentError, check_reward_arguments
from qerl.trainer.reward_trial import TRIAL_COMPLETION
from qerl.trainer.run import resume_checkpoint
from qerl.trainer.timed_reward import RewardCallError, TimedReward
from qerl.trainer.trainer import QeRLTrainer

COLUMNS = ("prompt", "answer", "level")


def takes_gold(completions, gold, **kwargs):  # type: ignore[no-untyped-def]
    return [0.0] * len(completions)


def takes_prompt(completions, prompt, **kwargs):  # type: ignore[no-untyped-def]
    return [0.0] * len(completions)


def takes_by_position(completions, /, **kwargs):  # type: ignore[no-untyped-def]
    return [0.0] * len(completions)


def takes_two(prompts, completions):  # type: ignore[no-untyped-def]
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            takes_gold,
            r"'takes_gold' takes gold, which nothing passes: .*\(columns of the data: answer, level\)",
        ),
        (takes_prompt, "'takes_prompt' takes prompt, which nothing passes"),
        (takes_by_position, "'takes_by_position' takes completions, which nothing passes"),
        (takes_two, "'takes_two' does not take completion_ids, .*, answer, level: add ..kwargs"),
    ],
)
def test_parameters_that_nobody_passes(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(RewardArgumentError, match=words):
        check_reward_arguments([letter_reward, TimedReward(function)], COLUMNS)


def test_parameters_that_are_passed_or_have_a_default() -> None:
    class Scorer:
        def __call__(self, completions, *, level, scale=1.0, **kwargs):  # type: ignore[no-untyped-def]
            return [scale] * len(completions)

    def takes_all(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level):  # type: ignore[no-untyped-def]
        return [0.0] * len(completions)

    check_reward_arguments([Scorer(), takes_all, torch.nn.Linear(1, 1), "a/model"], COLUMNS)
    with pytest.raises(RewardArgumentError, match="'Scorer' takes level"):
        check_reward_arguments([Scorer()], ("prompt",))


def test_the_trainer_checks_them_before_it_loads_a_model(config: Callable[..., Any], trainer: Any) -> None:
    with pytest.raises(RewardArgumentError, match="'takes_gold' takes gold"):
        trainer(reward_funcs=takes_gold)
    with pytest.raises(RewardArgumentError, match="columns of the data: none"):
        QeRLTrainer("no/such/model", takes_gold, config(), Dataset.from_list([{"prompt": "a"}]))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (1.0, "returned 1.0; return a list"),
        (None, "returned None; return a list"),
        ([1.0, "good"], "returned 'good' for row 1; return a number"),
        ([[1.0], 2.0], r"returned \[1.0\] for row 0"),
        (torch.tensor(1.0), r"returned tensor\(1.\); return a list"),
        (torch.zeros(2, 2), r"returned tensor\(\[0., 0.\]\) for row 0"),
        (np.zeros((2, 2)), r"returned array\(\[0., 0.\]\) for row 0"),
        ([1.0, 10**400], "returned 1000.* for row 1; return a number"),
    ],
)
def test_returned_values_are_checked(returned: Any, words: str) -> None:
    def mine(**kwargs):  # type: ignore[no-untyped-def]
        return returned

    with pytest.raises(RewardCallError, match=f"reward function 'mine' {words}"):
        TimedReward(mine)(completions=["a", "b"])


@pytest.mark.parametrize("returned", [[1, None], (0.5, True), torch.ones(2), (x for x in (1.0, 2.0))])
def test_what_trl_takes_is_left_alone(returned: Any) -> None:
    assert len(TimedReward(lambda **kwargs: returned)(completions=["a", "b"])) == 2


RAISING = """
calls = []

def reward(completions, **kwargs):
    return [1 / 0 for c in completions]

def later(completions, **kwargs):
    calls.append(completions)
    return [0.0 if len(calls) == 1 else 1 / 0 for c in completions]
"""


@pytest.fixture
def recipe(tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One update on a task file with an evaluation before it, and a reward function that raises when it is tried."""
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "raising_reward.py").write_text(RAISING)
    values = {
        "model": str(tiny_checkpoints["qwen2"]),
        "task": str(tmp_path / "sums.jsonl"),
        "task_options": {"prompt": "plain", "test_size": 2},
        "reward_funcs": [f"{tmp_path}/raising_reward.py:reward"],
        "reward_workers": 0,
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_prompt_length": 64,
        "max_steps": 1,
        "lora_r": 4,
        "aqn_schedule": "none",
        "save_strategy": "no",
        "report_to": "none",
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "r.yaml"


def test_a_raising_reward_is_one_error_before_anything_is_evaluated(recipe: Path, tmp_path: Path) -> None:
    failed = CliRunner().invoke(app, ["train", "--config", str(recipe)])
    assert failed.exit_code == 2, failed.output
    lines = failed.stderr.splitlines()
    start = lines.index("error: reward function 'reward' raised ZeroDivisionError: division by zero")
    assert 'raising_reward.py", line 5, in reward' in lines[start + 1]
    assert not any("trl" in line or "Traceback" in line for line in lines[start:])
    assert not list((tmp_path / "run").iterdir())


def test_after_a_reward_that_raises_later_the_folder_can_be_used_again(recipe: Path, tmp_path: Path) -> None:
    runner, run = CliRunner(), tmp_path / "run"
    failed = runner.invoke(
        app, ["train", "--config", str(recipe), "--reward_funcs", f"[{tmp_path}/raising_reward.py:later]"]
    )
    assert failed.exit_code == 2 and "reward function 'later' raised ZeroDivisionError" in failed.stderr
    assert "before" in json.loads((run / "summary.json").read_text())
    again = ["train", "--config", str(recipe), "--reward_funcs", "[]", "--rewards", "[format]"]
    fixed = runner.invoke(app, [*again, "--evaluate_before", "false"])
    assert fixed.exit_code == 0, fixed.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 1 and "before" not in summary, "nothing is left of the failed start"
    assert not (run / "eval-before").exists()
    third = runner.invoke(app, again)
    assert third.exit_code == 2 and "already holds a run without a checkpoint" in third.stderr


class Noted:
    """A reward that notes its calls and draws from every generator."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, completions, log_extra, log_metric, **columns):  # type: ignore[no-untyped-def]
        self.calls.append({"completions": completions, **columns})
        log_extra("seen", [1] * len(completions))
        log_metric("calls", len(self.calls))
        draws = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return [draws] * len(completions)


def test_a_trial_is_one_group_of_the_first_row_and_counts_for_nothing(trainer: Any) -> None:
    rewards = [Noted(), CorrectnessReward(task=None, pool=None)]
    torch.manual_seed(0)
    made = trainer(reward_funcs=rewards)
    assert not rewards[0].calls, "a function may refer to the trainer, which is not there yet"
    for _ in range(2):
        made.try_rewards()
    (call,) = rewards[0].calls
    assert call["completions"] == [[{"role": "assistant", "content": TRIAL_COMPLETION}]] * 4
    assert call["prompts"] == [[{"role": "user", "content": "say 0"}]] * 4 and call["answer"] == ["0"] * 4
    ids = call["completion_ids"]
    assert len(ids) == 4 and made.processing_class.decode(ids[0]) == TRIAL_COMPLETION
    assert call["trainer_state"] is made.state and made.state.global_step == 0
    assert made.take_reward_seconds() == 0 and made.last_answers == []
    assert not made._pending_extra_logs and not made._pending_metrics
    off = trainer(reward_funcs=rewards, try_rewards=False)
    off.try_rewards()
    assert len(rewards[0].calls) == 1
    # What the run draws does not depend on the trial: the trial gave its random numbers back.
    states = []
    for use in (True, False):
        trainer(reward_funcs=Noted(), try_rewards=use).try_rewards()
        states.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert states[0] == states[1] and off.args.try_rewards is False


def test_every_reward_is_tried_async_ones_on_the_loop_of_later_calls(trainer: Any) -> None:
    loops = []

    async def judged(completions, **kwargs):  # type: ignore[no-untyped-def]
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def broken(completions, **kwargs):  # type: ignore[no-untyped-def]
        raise KeyError("score")

    async def short(completions, **kwargs):  # type: ignore[no-untyped-def]
        return [1.0]

    made = trainer(reward_funcs=[letter_reward, judged], max_steps=1)
    made.try_rewards()
    assert loops == [made.async_loop]
    made.train()
    assert set(loops) == {made.async_loop} and len(loops) == 2, "tried once, and the one update"
    with pytest.raises(RewardCallError, match="'broken' raised KeyError: 'score'") as caught:
        trainer(reward_funcs=[letter_reward, broken]).train()
    assert isinstance(caught.value.__cause__, KeyError) and "in broken" in caught.value.details
    with pytest.raises(RewardCallError, match="'short' returned 1 rewards for 4 completions"):
        trainer(reward_funcs=[short]).train()


def test_a_reward_that_shortens_what_others_read_is_named(trainer: Any) -> None:
    def clears(completions, completion_ids, **kwargs):  # type: ignore[no-untyped-def]
        completion_ids.clear()
        return [0.0] * len(completions)

    def pops(completions, **kwargs):  # type: ignore[no-untyped-def]
        completions.pop()
        return [0.0] * len(completions)

    with pytest.raises(RewardCallError, match="'clears' changed the length of completion_ids"):
        trainer(reward_funcs=clears).try_rewards()
    with pytest.raises(RewardCallError, match="'pops' returned 3 rewards for 4 completions"):
        trainer(reward_funcs=pops).try_rewards()


def test_every_sample_of_a_trial_has_objects_of_its_own(trainer: Any) -> None:
    """As in training: a reward that changes what it is given would otherwise fail in the trial only."""
    seen = []

    def pops(prompts, completions, completion_ids, steps, **kwargs):  # type: ignore[no-untyped-def]
        seen.extend(zip((c.pop()["content"] for c in completions), (p.pop() for p in prompts), strict=True))
        return [float(ids.pop() + s.pop()) for ids, s in zip(completion_ids, steps, strict=True)]

    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "steps": [i, i + 1]} for i in range(12)]
    trainer(reward_funcs=pops, dataset=Dataset.from_list(rows)).try_rewards()
    assert [text for text, _ in seen] == [TRIAL_COMPLETION] * 4


def test_a_trial_that_streaming_data_leaves_out_is_logged(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = Noted()
    made = trainer(reward_funcs=reward)
    made.train_dataset = made.train_dataset.to_iterable_dataset()
    with caplog.at_level("WARNING", "qerl"):
        for _ in range(2):
            made.try_rewards()
    assert not reward.calls
    (line,) = [record.getMessage() for record in caplog.records if "streaming" in record.getMessage()]
    assert "the reward functions (Noted) are not tried" in line


def test_plain_text_prompts_are_tried_with_texts(trainer: Any) -> None:
    reward = Noted()
    trainer(reward_funcs=reward, dataset=Dataset.from_list([{"prompt": f"say {i}"} for i in range(12)])).try_rewards()
    assert reward.calls[0]["completions"] == [TRIAL_COMPLETION] * 4 and reward.calls[0]["prompts"] == ["say 0"] * 4


def test_a_folder_with_updates_is_never_cleared(tmp_path: Path) -> None:
    update_summary(tmp_path, before={"accuracy": 0.5})
    _, args = build_configs({"output_dir": str(tmp_path)})
    assert resume_checkpoint(args) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunExistsError, match="with updates"):
        clear_failed_start(tmp_path)
    with pytest.raises(RunExistsError, match="already holds a run without a checkpoint"):
        resume_checkpoint(args)
    assert (tmp_path / "summary.json").is_file()
