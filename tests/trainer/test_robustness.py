"""Defects found by a hostile review, each with the right behaviour."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_models import save_tiny, tiny_tokenizer
from tiny_training import Logs, letter_reward, prompts_dataset

from qerl.nn.head import install_scoring_head
from qerl.nn.loading import load_model
from qerl.nn.lora import AdapterError, prepare_lora_config
from qerl.rollout.build import load_adapter, make_engine
from qerl.rollout.core import RequestTooLongError, SamplingParams
from qerl.rollout.model_guard import StaleEngineError
from qerl.trainer.config import ConfigError, QeRLConfig
from qerl.trainer.parity import probe_parity
from qerl.trainer.timed_reward import RewardCallError
from qerl.trainer.trainer import QeRLTrainer

MakeTrainer = Callable[..., QeRLTrainer]


def spying(trainer: QeRLTrainer) -> list:
    """Record (step, prompts, completions) of every training rollout."""
    seen, real = [], trainer.bridge.generate

    def generate(prompts, images, num_generations, profiler):  # type: ignore[no-untyped-def]
        result = real(prompts, images, num_generations, profiler)
        if trainer.model.training:
            seen.append((trainer.state.global_step, copy.deepcopy(prompts), copy.deepcopy(result[1])))
        return result

    trainer.bridge.generate = generate
    return seen


@pytest.mark.parametrize("checkpoint", [2, 3])
def test_resume_in_a_later_epoch_draws_the_prompts_it_would_have_drawn(
    checkpoint: int, trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Case 32, beyond the first epoch (4 prompts, 2 an update): inside the second epoch, and exactly at its start."""
    options = {"dataset": prompts_dataset(4), "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(**options)
    expected = spying(whole)
    whole.train()
    resumed = trainer(**options)
    found = spying(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{checkpoint}"))
    assert found == [row for row in expected if row[0] >= checkpoint]


def test_evaluation_never_changes_what_training_draws(trainer: MakeTrainer) -> None:
    runs = []
    for evaluation in ({}, {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}):
        extra = {"eval_dataset": prompts_dataset(2)} if evaluation else None
        made = trainer(max_steps=3, extra=extra, **evaluation)
        seen = spying(made)
        made.train()
        runs.append(seen)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("generation", "accumulation", "boundary"), [(3, 2, 3), (2, 3, 2), (5, 3, 5), (4, 2, 2), (2, 4, 1)]
)
def test_save_boundary(generation: int, accumulation: int, boundary: int, config: Callable[..., QeRLConfig]) -> None:
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": generation}
    sizes["gradient_accumulation_steps"] = accumulation
    assert config(**sizes, save_strategy="steps", save_steps=boundary).updates_per_generation == boundary
    if boundary > 1:
        for bad in ({"save_steps": 1}, {"save_steps": 0.1}, {"save_strategy": "epoch"}):
            with pytest.raises(ConfigError, match=f"multiple of {boundary}"):
                config(**sizes, **{"save_strategy": "steps", "save_steps": boundary, **bad})


def test_a_failing_run_leaves_a_clean_policy(trainer: MakeTrainer) -> None:
    def failing(prompts, completions, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        raise RuntimeError("reward server is down")

    made = trainer(reward_funcs=failing, aqn_schedule="constant", aqn_scope="both", try_rewards=False)
    with pytest.raises(RewardCallError, match="reward server"):
        made.train()
    assert made.noise.active_sigma == 0.0


def test_a_changed_adapter_reaches_the_engine_without_an_update(trainer: MakeTrainer) -> None:
    """Training twice, or evaluating after the adapter was replaced: global_step alone does not tell."""
    made = trainer(max_steps=1, aqn_schedule="none", parity_stop=1e-3)
    logs = Logs()
    made.add_callback(logs)
    made.train()
    made.train()
    assert logs.worst("parity/max") < 1e-4


def test_trained_biases_are_refused(trainer: MakeTrainer) -> None:
    """The engine holds the frozen biases."""
    with pytest.raises(AdapterError, match="bias='all'"):
        trainer(extra={"peft_config": LoraConfig(r=2, bias="all", target_modules="all-linear", task_type="CAUSAL_LM")})


def test_async_rewards_and_tuples(trainer: MakeTrainer) -> None:
    async def reward(prompts, completions, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        return letter_reward(prompts, completions)

    made = trainer(reward_funcs=(reward, letter_reward), max_steps=1)
    logs = Logs()
    made.add_callback(logs)
    made.train()
    assert logs.values("rewards/reward/mean") == logs.values("rewards/letter_reward/mean")


def test_every_eos_source_counts_in_trl_too(tmp_path: Path, config: Callable[..., QeRLConfig]) -> None:
    """Case 19: an id that only config.json names."""
    folder = save_tiny(tmp_path / "model", "qwen2", eos_token_id=65)
    made = QeRLTrainer(str(folder), letter_reward, config(), prompts_dataset())
    assert set(made.eos_token_ids) == set(made.engine.eos_token_ids) >= {65, tiny_tokenizer().eos_token_id}


def test_transformers_backend_ignores_the_models_sampling_defaults(trainer: MakeTrainer) -> None:
    made = trainer(rollout_backend="transformers", max_steps=1, aqn_schedule="none", max_completion_length=32)
    policy = made.accelerator.unwrap_model(made.model)
    for owner in (policy, policy.get_base_model()):
        owner.generation_config.repetition_penalty = 1.8
        owner.generation_config.no_repeat_ngram_size = 1
    outputs = made.engine.generate([[5, 6, 7]], SamplingParams(n=4, max_tokens=64, ignore_eos=True, seed=1))
    assert any(len(set(o.token_ids)) < len(o.token_ids) for o in outputs[0])
    assert policy.generation_config.repetition_penalty == 1.8
    logs = Logs()
    made.add_callback(logs)
    made.train()
    assert logs.values("parity/max")[0] < 1e-4


def test_updates_without_a_rollout_of_their_own_are_logged(trainer: MakeTrainer, tmp_path: Path) -> None:
    from qerl.trainer.run_logger import RunLogger

    made = trainer(max_steps=4, num_iterations=2)
    made.add_callback(RunLogger(made, lambda line: None))
    made.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["loss"] is not None and row["time_train"] > 0 for row in rows)
    assert [row["reward"] is not None for row in rows] == [True, False, True, False]


def test_equal_rewards_beside_none_rewards_have_zero_advantage(trainer: MakeTrainer) -> None:
    made = trainer(
        reward_funcs=[lambda prompts, completions, **kw: [0.1] * 8, lambda prompts, completions, **kw: [None] * 8],
        num_generations=8,
    )
    made.state.max_steps = 2
    made.model.train()
    output = made._generate_and_score_completions([prompts_dataset(1)[0]] * 8)
    assert torch.equal(output["advantages"], torch.zeros(8))


def test_named_errors_before_step_1(
    trainer: MakeTrainer, config: Callable[..., QeRLConfig], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestTooLongError, match="raise kv_cache_gb"):
        trainer(kv_cache_gb=1e-9)
    with pytest.raises(ConfigError, match="data set is empty"):
        trainer(dataset=prompts_dataset(1).select([]))
    with pytest.raises(ConfigError, match="no column 'prompt'; it has question"):
        trainer(dataset=Dataset.from_list([{"question": "x"}]))
    with pytest.raises(ConfigError, match="num_generations must be a number"):
        config(num_generations=None)
    with pytest.raises(ConfigError, match="cast_lm_head_to_fp32 is not needed"):
        config(cast_lm_head_to_fp32=True)
    long = Dataset.from_list([{"prompt": [{"role": "user", "content": "x" * 80}]}])
    with pytest.raises(ConfigError, match=r"longest evaluation prompt has \d+ tokens, over max_prompt_length=64"):
        trainer(extra={"eval_dataset": {"long": long}})
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither a pad nor an EOS token"):
        trainer(extra={"processing_class": tokenizer})
    trained = trainer(max_steps=1)
    trained.save_model(str(tmp_path / "adapter"))
    base = load_model(tiny_checkpoints["qwen2"], weights="nvfp4", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="is_trainable=True"):
        QeRLTrainer(load_adapter(base, tmp_path / "adapter"), letter_reward, config(), prompts_dataset())


def test_a_trainable_adapter_goes_on_training(
    trainer: MakeTrainer, config: Callable[..., QeRLConfig], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    trainer(max_steps=1).save_model(str(tmp_path / "adapter"))
    base = load_model(tiny_checkpoints["qwen2"], weights="nvfp4", dtype="float32", device="cpu")
    model = load_adapter(base, tmp_path / "adapter", is_trainable=True)
    made = QeRLTrainer(model, letter_reward, config(max_steps=1), prompts_dataset())
    logs = Logs()
    made.add_callback(logs)
    made.train()
    assert logs.values("grad_norm")[0] > 0 and logs.values("parity/max")[0] < 1e-4


def test_evaluation_prompts_may_be_longer_than_training_prompts(trainer: MakeTrainer) -> None:
    longer = Dataset.from_list([{"prompt": [{"role": "user", "content": "x" * 20}]}])
    made = trainer(max_steps=1, extra={"eval_dataset": longer}, per_device_eval_batch_size=4)
    assert "eval_reward" in made.evaluate()
    assert made.engine.max_model_len == 64 + 8


def test_copies_of_a_model_run_their_own_weights(tiny_checkpoints: dict[str, Path]) -> None:
    model = load_model(tiny_checkpoints["llama"], dtype="float32", device="cpu")
    install_scoring_head(model, 1.0)
    twin = copy.deepcopy(model)
    twin.lm_head.weight.data.zero_()
    ids = torch.arange(12)[None]
    assert not twin(ids).logits.any()
    assert model(ids).logits.any()


def test_a_disabled_adapter_is_disabled_in_the_engine(tiny_checkpoints: dict[str, Path]) -> None:
    base = load_model(tiny_checkpoints["llama"], weights="nvfp4", dtype="float32", device="cpu")
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, prepare_lora_config(config, base)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    install_scoring_head(model.get_base_model(), 1.0)
    engine = make_engine(model, tiny_tokenizer(), max_model_len=64)
    with model.disable_adapter():
        outputs = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=16))
        assert probe_parity(model, [[5, 6, 7]], outputs[0], 16, 0).max < 1e-4
    assert probe_parity(model, [[5, 6, 7]], outputs[0], 16, 0).max > 1e-2


def test_a_model_cast_after_the_trainer_was_built_is_refused_by_name(trainer: MakeTrainer) -> None:
    """It was a bare dtype error from inside a matmul."""
    made = trainer(max_steps=1)
    made.model.half()
    with pytest.raises(StaleEngineError, match=r"changed after its engine was built: .* was float32 .* and is float16"):
        made.train()
