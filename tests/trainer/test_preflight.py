"""What can be known before step 1 is an error (or a counted drop) before step 1."""

from collections.abc import Callable

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny_training import letter_reward, prompts_dataset

from qerl.nn.lora import AdapterError
from qerl.trainer.config import ConfigError, QeRLConfig
from qerl.trainer.trainer import QeRLTrainer

MakeTrainer = Callable[..., QeRLTrainer]


def long_dataset() -> Dataset:
    texts = ["short", "x" * 200, "also short", "y" * 90]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])


def test_overlong_prompts_are_dropped_by_tokens_and_counted(
    trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 20."""
    made = trainer(dataset=long_dataset(), max_prompt_length=64)
    assert len(made.train_dataset) == 2
    assert (
        "2 of 4 prompts are longer than max_prompt_length=64 tokens (longest 219, first at row 1): dropped"
        in caplog.text
    )


def test_overlong_prompts_can_be_refused(trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigError, match=r"2 of 4 prompts .* Raise max_prompt_length"):
        trainer(dataset=long_dataset(), max_prompt_length=64, overlong_prompts="error")
    with pytest.raises(ConfigError, match="4 of 4 prompts"):
        trainer(dataset=long_dataset(), max_prompt_length=10)


def test_first_prompt_is_shown_as_the_model_sees_it_with_one_bos(
    trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Cases 21 and 35."""
    caplog.set_level("INFO", logger="qerl")
    trainer()
    assert "<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\n" in caplog.text
    assert "memory before step 1:" in caplog.text


def test_string_prompts_of_a_chat_model_are_warned_about(
    trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 35: string prompts never get the chat template."""
    data = Dataset.from_list([{"prompt": f"say {i}"} for i in range(4)])
    trainer(dataset=data, reward_funcs=lambda prompts, completions, **kw: [0.0] * len(prompts))
    assert "the model's chat template is NOT applied" in caplog.text


def test_sequences_longer_than_the_model(trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="tokens, but the model has 512 positions"):
        trainer(max_completion_length=600)


def test_adapter_options_are_checked_before_loading_data(trainer: MakeTrainer) -> None:
    with pytest.raises(AdapterError, match="use_dora"):
        trainer(extra={"peft_config": LoraConfig(use_dora=True, target_modules="all-linear")})


def test_a_users_own_lora_config_is_used(trainer: MakeTrainer) -> None:
    made = trainer(extra={"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")})
    trained = [name for name, p in made.model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all("q_proj" in name for name in trained)


def test_rewards_keep_their_names(trainer: MakeTrainer) -> None:
    assert trainer(reward_funcs=[letter_reward]).reward_func_names == ["letter_reward"]


def test_prompts_of_the_dataset_are_left_alone(trainer: MakeTrainer) -> None:
    data = prompts_dataset(3)
    made = trainer(dataset=data)
    assert made.train_dataset["prompt"] == data["prompt"]


def test_skipped_noise_stages_are_warned_of_once_the_model_is_there(
    trainer: MakeTrainer, config: Callable[..., QeRLConfig], caplog: pytest.LogCaptureFixture
) -> None:
    words = "max_steps=2 is less than num_stages=3"
    config(max_steps=2, num_stages=3)
    trainer(max_steps=2, num_stages=3, aqn_schedule="none")
    assert words not in caplog.text
    trainer(max_steps=2, num_stages=3)
    assert caplog.text.count(words) == 1
