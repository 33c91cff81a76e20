"""reasoning-gym tasks: disjoint questions, configuration, and scores of extracted answers."""

import pytest

from qerl.tasks.registry import load_task
from qerl.tasks.rewards import CorrectnessReward, LastNumberReward
from qerl.tasks.workers import RewardPool

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_train_and_test_are_disjoint_and_stable():
    task = load_task("reasoning_gym:chain_sum", size=120, test_size=60, seed=3, **SMALL)
    train, test = ({e.question for e in side} for side in (task.train, task.test))
    assert len(train) == 120 and len(test) == 60 and not train & test
    again = load_task("reasoning_gym:chain_sum", size=10, test_size=60, seed=3, **SMALL)
    assert [e.question for e in again.test] == [e.question for e in task.test]
    other = load_task("reasoning_gym:chain_sum", size=120, test_size=60, seed=4, **SMALL)
    assert [e.question for e in other.train] != [e.question for e in task.train]


def test_too_few_questions_and_wrong_configuration():
    with pytest.raises(ValueError, match=r"\d+ distinct train questions in 20000 draws, 1000 wanted"):
        load_task("reasoning_gym:chain_sum", size=1000, test_size=10, **SMALL)
    with pytest.raises(ValueError, match="did you mean 'min_terms'"):
        load_task("reasoning_gym:chain_sum", min_term=2)
    with pytest.raises(ValueError, match="refused"):
        load_task("reasoning_gym:chain_sum", min_terms=5, max_terms=2)
    with pytest.raises(ValueError, match="size=-1"):
        load_task("reasoning_gym:chain_sum", size=-1)


@pytest.mark.parametrize(
    ("completion", "correct"),
    [("{}", 1.0), ("The answer is {}.", 1.0), ("2 + 3 = {}", 1.0), ("<answer>{}</answer>", 1.0), ("1{}", 0.0),
     ("{}1", 0.0), ("<answer></answer>", 0.0), ("", 0.0), ("{} or 77777", 0.0)],
)  # fmt: skip
def test_numeric_golds_are_exact(completion, correct):
    task = load_task("reasoning_gym:chain_sum", size=4, test_size=0, prompt="number", **SMALL)
    assert task.messages(task.train[0])[0]["content"].endswith("Answer with the number only.")
    for example in task.train:
        assert task.score(example, completion.replace("{}", example.answer)).correct == correct


def test_own_scorer_gets_the_extracted_answer():
    task = load_task("reasoning_gym:spell_backward", size=2, test_size=0)
    example = task.train[0]
    assert task.score(example, f"So it is <answer>{example.answer}</answer>").correct == 1.0
    assert task.score(example, "<answer>zzz</answer>").correct < 0.5
    task = load_task("reasoning_gym:countdown", size=1, test_size=0)
    example = task.train[0]
    assert task.score(example, f"<answer>{example.answer}</answer>").correct == 1.0


def test_rewards_by_id_in_process_and_in_the_pool():
    task = load_task("reasoning_gym:chain_sum", size=3, test_size=0, **SMALL)
    ids = [e.id for e in task.train]
    completions = [task.train[0].answer, "none", f"It is {task.train[2].answer}"]
    with RewardPool(1, deadline_s=30) as pool:
        for reward in (CorrectnessReward(task), CorrectnessReward(task, pool), LastNumberReward(task)):
            assert reward([None] * 3, completions, id=ids, answer=["0"] * 3) == [1.0, 0.0, 1.0]
