"""``save_total_limit``: old checkpoints go, the last and the best stay, and what stays can be resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_training import Logs, letter_reward, prompts_dataset

from qerl.nn.linear import QuantLinear
from qerl.trainer.run import newest_checkpoint
from qerl.trainer.trainer import QeRLTrainer

MakeTrainer = Callable[..., QeRLTrainer]


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def test_old_checkpoints_are_removed_and_the_newest_resumes(trainer: MakeTrainer, tmp_path: Path) -> None:
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    whole, logs = trainer(**options), Logs()
    whole.add_callback(logs)
    whole.train()
    assert kept(tmp_path / "run") == [4, 5]
    # as if killed after the fourth update
    resumed, later = trainer(**options), Logs()
    resumed.add_callback(later)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert later.values("loss") == pytest.approx(logs.values("loss")[4:], abs=1e-6)
    assert later.values("reward") == pytest.approx(logs.values("reward")[4:], abs=1e-6)
    assert kept(tmp_path / "run") == [4, 5]
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-5"


@pytest.mark.parametrize(("limit", "expected"), [(2, [2, 4]), (1, [2])])
def test_the_best_checkpoint_is_kept(limit: int, expected: list[int], trainer: MakeTrainer, tmp_path: Path) -> None:
    """transformers' promise with load_best_model_at_end: the best and the last, or the best alone in the end."""
    evaluations = []

    def scripted(prompts, completions, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        if made.model.training:
            return letter_reward(prompts, completions)
        evaluations.append(made.state.global_step)
        return [1.0 if made.state.global_step == 2 else 0.0] * len(prompts)

    made = trainer(
        reward_funcs=scripted,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=limit,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        extra={"eval_dataset": prompts_dataset(2)},
    )
    made.train()
    assert sorted(set(evaluations)) == [1, 2, 3, 4]
    assert made.state.best_global_step == 2
    assert kept(tmp_path / "run") == expected
    # the adapter of step 2 is back in the model, and the engine serves it at the next call
    stored = load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    policy = made.accelerator.unwrap_model(made.model).state_dict()
    for name, tensor in stored.items():
        prefix, _, last = name.rpartition(".")
        assert policy[f"{prefix}.default.{last}"].equal(tensor), name


def test_a_checkpoint_holds_the_adapter_and_asks_for_no_other_weight(
    trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state dict of a model on a Hopper GPU is a second copy of its weights."""
    made = trainer(max_steps=1)
    expected = {
        name.replace(".default", ""): p.detach() for name, p in made.model.named_parameters() if "lora_" in name
    }
    monkeypatch.setattr(QuantLinear, "_save_to_state_dict", lambda *args: pytest.fail("packed weights were asked for"))
    made.save_model(str(tmp_path / "saved"))
    stored = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert expected and stored.keys() == expected.keys()
    assert all(stored[name].equal(expected[name]) for name in stored)
