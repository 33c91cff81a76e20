"""Reward functions named in a recipe: found, called as TRL calls them, and helpful where they are not there."""

import json
import sys
from pathlib import Path

import pytest

from qerl.trainer.parsing import build_configs
from qerl.trainer.reward_source import RewardSourceError, load_reward_functions
from qerl.trainer.run import Run
from qerl.trainer.run_config import RunConfig

SOURCE = '''
from reward_neighbour import SCALE

class Scorer:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)

scorer = Scorer()

def short(prompts, completions, answer, **kwargs):
    """Shorter is better; the gold is a column of the task."""
    assert len(answer) == len(completions)
    return [SCALE / (1 + len(c[0]["content"])) for c in completions]

def narrow(prompts, completions):
    return [0.0] * len(completions)

LIMIT = 3
'''


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rewards that imports its neighbour; the interpreter's state is put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "own" / "reward_neighbour.py").write_text("SCALE = 2.0\n")
    yield tmp_path / "own" / "my_rewards.py"
    for name in set(sys.modules) - before:
        if name in ("my_rewards", "reward_neighbour", "qerl_reward_json"):
            del sys.modules[name]


def test_from_a_file_and_from_a_module(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (from_file,) = load_reward_functions([f"{rewards}:short"])
    assert from_file(prompts=[], completions=[[{"content": "abc"}]], answer=["1"]) == [0.5]
    monkeypatch.chdir(rewards.parent)
    from_module, scorer = load_reward_functions(["my_rewards:short", "./my_rewards.py:scorer"])
    assert from_module is from_file, "one module, however it is named"
    assert scorer(completions=[1, 2]) == [1.0, 1.0]


def test_a_file_never_takes_the_place_of_a_module(rewards: Path) -> None:
    (rewards.parent / "json.py").write_text("def reward(completions, **kwargs): return [0.0]\n")
    (function,) = load_reward_functions([f"{rewards.parent / 'json.py'}:reward"])
    assert function.__module__ == "qerl_reward_json"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{file}:shrot", "has no 'shrot'; did you mean 'short'"),
        ("{file}:zzz", "has no 'zzz'; it has Scorer, narrow, scorer, short"),
        ("{file}", "is not module:function or path/to/file.py:function"),
        ("{file}:", "is not module:function"),
        ("{folder}/absent.py:short", "no file .*absent.py .relative paths start at"),
        ("no_such_module:f", "no module 'no_such_module' here"),
        ("qerl.nothing:f", "no module 'qerl.nothing' here"),
        ("{file}:narrow", r"takes completions, prompts; it must take completions .* and \*\*kwargs"),
        ("{file}:Scorer", "is a class; name an instance of it"),
        ("{file}:LIMIT", "is of type int, not a function"),
    ],
)
def test_what_is_not_there_is_said(spec: str, message: str, rewards: Path) -> None:
    with pytest.raises(RewardSourceError, match=message):
        load_reward_functions([spec.format(file=rewards, folder=rewards.parent)])


def test_mistakes_in_the_users_code_are_shown_as_they_are(rewards: Path) -> None:
    broken = rewards.parent / "broken_rewards.py"
    broken.write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_reward_functions([f"{broken}:f"])
    assert "broken_rewards" not in sys.modules


def test_config_of_rewards() -> None:
    assert RunConfig().rewards == ["correctness"]
    only = RunConfig(reward_funcs="mine.py:f")
    assert (only.rewards, only.reward_funcs) == ([], ["mine.py:f"])
    assert RunConfig(rewards=["format"], reward_funcs=["mine.py:f"]).rewards == ["format"]
    with pytest.raises(ValueError, match="own functions go to reward_funcs"):
        RunConfig(rewards=["mine.py:f"])
    with pytest.raises(ValueError, match="choose from correctness"):
        RunConfig(rewards=[])


def test_a_run_with_own_functions(rewards: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    task = tmp_path / "sums.jsonl"
    task.write_text("".join(json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(8)))
    values = {
        "model": str(tiny_checkpoints["qwen2"]),
        "task": str(task),
        "task_options": {"prompt": "plain"},
        "rewards": ["format"],
        "reward_funcs": [f"{rewards}:short", f"{rewards}:scorer"],
        "reward_weights": [0.0, 1.0, 0.5],
        "reward_workers": 0,
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_prompt_length": 64,
        "max_steps": 1,
        "lora_r": 4,
        "aqn_schedule": "none",
        "save_strategy": "no",
        "report_to": "none",
        "evaluate_before": False,
        "evaluate_after": False,
    }
    Run(*build_configs(values), lambda line: None).execute()
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["rewards/Scorer/mean"] == 1.0
    assert row["reward"] == pytest.approx(row["rewards/short/mean"] + 0.5)
    with pytest.raises(RewardSourceError, match="did you mean 'short'"):
        Run(*build_configs({**values, "output_dir": str(tmp_path / "b"), "reward_funcs": f"{rewards}:shorts"}))
