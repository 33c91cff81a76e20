"""A tiny trainer: random 2-layer model, byte tokenizer, a reward that counts one letter."""

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from tiny_training import letter_reward, prompts_dataset

from qerl.trainer.config import QeRLConfig
from qerl.trainer.trainer import QeRLTrainer


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., QeRLConfig]:
    """QeRLConfig of two prompts x four samples, fp32 on the CPU."""

    def make(**overrides: object) -> QeRLConfig:
        values = {
            "output_dir": str(tmp_path / "run"),
            "weights": "nvfp4",
            "use_cpu": True,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_prompt_length": 64,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "lora_r": 4,
            "lora_alpha": 8,
            "sigma_start": 0.05,
            "sigma_end": 0.01,
            "num_stages": 3,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 5,
            **overrides,
        }
        return QeRLConfig(**values)

    return make


@pytest.fixture
def trainer(config: Callable[..., QeRLConfig], tiny_checkpoints: dict[str, Path]) -> Callable[..., QeRLTrainer]:
    """Make a trainer; keyword arguments of the config, ``reward_funcs``, ``dataset``, ``extra`` for the trainer."""

    def make(
        reward_funcs: object = letter_reward,
        dataset: Dataset | None = None,
        family: str = "qwen2",
        extra: dict | None = None,
        **overrides: object,
    ) -> QeRLTrainer:
        return QeRLTrainer(
            str(tiny_checkpoints[family]),
            reward_funcs,
            config(**overrides),
            dataset if dataset is not None else prompts_dataset(),
            **(extra or {}),
        )

    return make
