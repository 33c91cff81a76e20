"""Dynamic sampling: groups of equal rewards are replaced, rounds are capped, a resume continues the prompts."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from tiny_training import Logs, letter_reward, prompts_dataset

from qerl.trainer.config import ConfigError, QeRLConfig
from qerl.trainer.dynamic import PromptOrder
from qerl.trainer.trainer import QeRLTrainer

MakeTrainer = Callable[..., QeRLTrainer]


def byte_reward(prompts: list, completions: list, **kwargs: object) -> list[float]:
    """Differs between any two different completions, almost surely."""
    return [float(sum(completion[0]["content"].encode()) % 997) for completion in completions]


def odd_only(prompts: list, completions: list, **kwargs: object) -> list[float]:
    """Prompts with an even number pay 1 whatever is said: their groups teach nothing."""
    odd = [number(prompt) % 2 for prompt in prompts]
    return [r if o else 1.0 for o, r in zip(odd, byte_reward(prompts, completions), strict=True)]


def number(prompt: list) -> int:
    return int(re.search(r"\d+", prompt[0]["content"])[0])


def trained_batches(trainer: QeRLTrainer) -> list[dict]:
    """What TRL's scoring returns at every training rollout, with the prompts as text."""
    batches, real = [], trainer._generate_and_score_completions

    def spy(inputs):  # type: ignore[no-untyped-def]
        output = real(inputs)
        texts = trainer.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        batches.append({**output, "numbers": [int(re.search(r"say (\d+)", text)[1]) for text in texts]})
        return output

    trainer._generate_and_score_completions = spy
    return batches


def test_groups_of_equal_rewards_are_replaced(trainer: MakeTrainer) -> None:
    made = trainer(reward_funcs=odd_only, dynamic_sampling=True, max_steps=3)
    logs = Logs()
    made.add_callback(logs)
    batches = trained_batches(made)
    made.train()
    assert len(batches) == 3
    for batch in batches:
        assert len(batch["numbers"]) == 8
        assert all(n % 2 for n in batch["numbers"])
        assert len(set(batch["numbers"])) == 2, "two groups of distinct prompts"
        assert batch["advantages"].view(2, 4).abs().sum(dim=1).min() > 0
    assert logs.values("frac_reward_zero_std") == [0.0] * 3
    assert max(logs.values("dynamic_sampling/rounds")) > 1, "some round must have replaced a group"
    assert logs.values("dynamic_sampling/filled") == [0.0] * 3
    assert min(logs.values("dynamic_sampling/mixed_share")) == 0.5
    assert logs.worst("parity/max") < 1e-4
    # the policy's own reward, before anything was chosen, is the one to watch
    assert logs.values("dynamic_sampling/first_round_reward") != logs.values("reward")


def test_without_it_the_batch_is_what_was_sampled(trainer: MakeTrainer) -> None:
    made = trainer(reward_funcs=odd_only, max_steps=3)
    batches = trained_batches(made)
    made.train()
    assert any(n % 2 == 0 for batch in batches for n in batch["numbers"])


def test_nothing_changes_where_every_group_is_mixed(trainer: MakeTrainer) -> None:
    losses = []
    for dynamic in (False, True):
        made = trainer(reward_funcs=byte_reward, dynamic_sampling=dynamic, max_steps=2)
        logs = Logs()
        made.add_callback(logs)
        made.train()
        losses.append((logs.values("loss"), logs.values("grad_norm"), logs.values("reward")))
    assert losses[0] == losses[1]


def test_rounds_are_capped_and_the_batch_is_filled(trainer: MakeTrainer) -> None:
    made = trainer(
        reward_funcs=lambda prompts, completions, **kw: [1.0] * len(prompts),
        dynamic_sampling=True,
        max_dynamic_rounds=3,
        max_steps=1,
    )
    logs = Logs()
    made.add_callback(logs)
    batches = trained_batches(made)
    made.train()
    assert logs.values("dynamic_sampling/rounds") == [3.0]
    assert logs.values("dynamic_sampling/filled") == [2.0]
    assert not batches[0]["advantages"].any()


def test_a_small_data_set_ends_the_rounds(trainer: MakeTrainer) -> None:
    """Three prompts, two a batch: after the first round only one is left, which is no whole batch."""
    made = trainer(
        reward_funcs=lambda prompts, completions, **kw: [1.0] * len(prompts),
        dataset=prompts_dataset(3),
        dynamic_sampling=True,
        max_steps=1,
    )
    logs = Logs()
    made.add_callback(logs)
    made.train()
    assert logs.values("dynamic_sampling/rounds") == [1.0]


def test_resume_draws_what_it_would_have_drawn(trainer: MakeTrainer, tmp_path: Path) -> None:
    options = {"reward_funcs": odd_only, "dynamic_sampling": True, "max_steps": 4}
    options |= {"save_strategy": "steps", "save_steps": 1}
    whole = trainer(**options)
    expected, cursors = trained_batches(whole), []
    real = whole.dynamic.prepare
    whole.dynamic.prepare = lambda *args: (cursors.append(whole.dynamic.cursor), real(*args))[1]
    whole.train()
    assert cursors[2] > 0, "the cursor must have moved before the checkpoint for this test to mean anything"
    resumed = trainer(**options)
    found = trained_batches(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for got, wanted in zip(found, expected[2:], strict=True):
        assert got["numbers"] == wanted["numbers"]
        assert got["completion_ids"].tolist() == wanted["completion_ids"].tolist()
        assert got["advantages"].tolist() == pytest.approx(wanted["advantages"].tolist(), abs=1e-6)
    assert resumed.dynamic.cursor == whole.dynamic.cursor


def test_one_reward_may_decide(trainer: MakeTrainer) -> None:
    """DAPO's recipe filters by accuracy although the length punishment differs inside the group."""
    made = trainer(
        reward_funcs=[odd_only, byte_reward], dynamic_sampling=True, dynamic_sampling_reward="odd_only", max_steps=2
    )
    batches = trained_batches(made)
    made.train()
    assert all(n % 2 for batch in batches for n in batch["numbers"])


def test_columns_logged_by_rewards_follow_the_chosen_rows(trainer: MakeTrainer) -> None:
    def logging_reward(prompts, completions, log_extra, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        log_extra("number", [number(prompt) for prompt in prompts])
        return odd_only(prompts, completions)

    made = trainer(reward_funcs=logging_reward, dynamic_sampling=True, max_steps=1)
    rows: list[tuple] = []
    real = made._generate_and_score_completions

    def spy(inputs):  # type: ignore[no-untyped-def]
        output = real(inputs)
        rows.extend(zip(copy.deepcopy(list(made._logs["prompt"])), list(made._logs["extra"]["number"]), strict=True))
        return output

    made._generate_and_score_completions = spy
    made.train()
    assert len(rows) == 8
    assert all(number(prompt) == logged for prompt, logged in rows)


def test_a_generated_batch_may_serve_several_updates(trainer: MakeTrainer) -> None:
    """Two micro-batches an update, two updates a batch: sampled for once, and dealt out by whole groups."""
    made = trainer(
        reward_funcs=odd_only,
        dynamic_sampling=True,
        max_steps=4,
        num_iterations=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    logs = Logs()
    made.add_callback(logs)
    batches = trained_batches(made)
    made.train()
    assert len(batches) == 2
    assert all(n % 2 for batch in batches for n in batch["numbers"])
    assert len(logs.values("loss")) == 4
    assert logs.values("dynamic_sampling/filled") == [0.0, 0.0]


def test_evaluation_is_not_filtered(trainer: MakeTrainer) -> None:
    made = trainer(
        reward_funcs=lambda prompts, completions, **kw: [1.0] * len(prompts),
        dynamic_sampling=True,
        max_dynamic_rounds=2,
        max_steps=1,
        per_device_eval_batch_size=4,
        extra={"eval_dataset": prompts_dataset(2)},
    )
    assert made.evaluate()["eval_reward"] == 1.0


def test_what_it_refuses(trainer: MakeTrainer, config: Callable[..., QeRLConfig]) -> None:
    with pytest.raises(ConfigError, match="max_dynamic_rounds=1 samples nothing anew"):
        config(dynamic_sampling=True, max_dynamic_rounds=1)
    with pytest.raises(ConfigError, match="dynamic_sampling_reward='accuracy' is no reward of this run: letter_reward"):
        trainer(dynamic_sampling=True, dynamic_sampling_reward="accuracy")
    stream = Dataset.from_list(list(prompts_dataset(4))).to_iterable_dataset()
    with pytest.raises(ConfigError, match="dynamic_sampling does not work with a streaming data set"):
        trainer(dynamic_sampling=True, dataset=stream)


def test_the_prompt_order_visits_every_prompt_once_an_epoch() -> None:
    order = PromptOrder(10, seed=3)
    epochs = [[order[10 * epoch + i] for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [order[i] for i in (25, 3, 25)] == [epochs[2][5], epochs[0][3], epochs[2][5]]
    assert [PromptOrder(10, seed=4)[i] for i in range(10)] != epochs[0]


def test_letters_are_rewarded_as_ever(trainer: MakeTrainer) -> None:
    """With the shared reward of the other tests, where equal groups happen by chance."""
    made = trainer(reward_funcs=letter_reward, dynamic_sampling=True, max_steps=2)
    made.train()
    assert made.state.global_step == 2
