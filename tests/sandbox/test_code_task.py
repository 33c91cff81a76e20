"""Programming tasks and the local sandbox together."""

import json

import pytest

from qerl.tasks.code import CodeReward, code_task_from_file
from qerl.tasks.rewards import CorrectnessReward
from qerl.tasks.workers import RewardPool

HUMAN_EVAL = {
    "task_id": "T/0",
    "prompt": 'from typing import List\n\n\ndef top(xs: List[int]) -> int:\n    """The largest."""\n',
    "entry_point": "top",
    "test": "def check(candidate):\n    assert candidate([1, 3, 2]) == 3\n    assert candidate([-1]) == -1\n",
}


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.fixture
def task(sandbox, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"id": "sum", "question": "Add.", "input": ["1 2", "3 4"], "output": ["3", "7"]}))
    return code_task_from_file(path, executor=sandbox, scoring="fraction")


def test_rewards_of_real_programs(task):
    programs = [
        "print(sum(map(int, input().split())))",
        "print(3)",
        "print(",
        "while True: pass",
        "x = bytearray(1 << 40)",
    ]
    reward = CodeReward(task, workers=2)
    ids = ["sum"] * len(programs)
    assert reward([None] * 5, [fenced(program) for program in programs], id=ids) == [1.0, 0.5, 0.0, 0.0, 0.0]
    failures = [judgement.failure and str(judgement.failure.verdict) for judgement in reward.last.judgements]
    assert failures == [None, "wrong_answer", "compile_error", "timeout", "memory"]


def test_in_the_reward_pool(task):
    with RewardPool(1, deadline_s=30) as pool:
        reward = CorrectnessReward(task, pool)
        completions = [fenced("print(sum(map(int, input().split())))"), "none"]
        assert reward([None] * 2, completions, id=["sum", "sum"]) == [1.0, 0.0]


def test_a_human_eval_row(sandbox, tmp_path):
    path = tmp_path / "human_eval.jsonl"
    path.write_text(json.dumps(HUMAN_EVAL))
    task = code_task_from_file(path, executor=sandbox)
    right = "def top(xs: List[int]) -> int:\n    return max(xs)"
    assert task.score(task.train[0], fenced(right)).correct == 1.0
    assert task.score(task.train[0], fenced("def top(xs): return 3")).correct == 0.0
    # the unfinished function of the prompt is no solution
    assert task.score(task.train[0], fenced("pass")).correct == 0.0
