"""The trainer on a tiny model: it learns, agrees with the engine, leaves no noise behind, runs every TRL loss."""

import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny_models import save_tiny
from tiny_training import Logs, letter_reward, prompts_dataset
from transformers import AutoTokenizer

from qerl.nn.norm import aqn_norms
from qerl.rollout.core import CompletionOutput
from qerl.trainer.bridge import group_rows
from qerl.trainer.config import QeRLConfig
from qerl.trainer.parity import ParityError, effective_sample_size
from qerl.trainer.timed_reward import RewardCallError
from qerl.trainer.trainer import CollapsedSamplingError, NonFiniteLossError, QeRLTrainer, RewardValueError

MakeTrainer = Callable[..., QeRLTrainer]


def run(make: MakeTrainer, **kwargs: object) -> tuple[object, Logs]:
    logs = Logs()
    trainer = make(extra={"callbacks": [logs], **kwargs.pop("extra", {})}, **kwargs)
    trainer.train()
    return trainer, logs


def test_engine_and_trainer_agree_at_every_step_with_and_without_noise(trainer: MakeTrainer) -> None:
    _, logs = run(trainer, max_steps=4)
    assert logs.values("aqn/sigma") == pytest.approx([0.0, 0.05, 0.01, 0.01])
    assert logs.worst("parity/max") < 1e-4
    # The shift that the noise causes on purpose is orders of magnitude larger, and is logged apart.
    shift = logs.values("sampling/sampling_logp_difference/mean")
    assert shift[0] < 1e-5
    assert min(shift[1:]) > 1e-3
    assert all(0 < ess <= 1 for ess in logs.values("sampling/ess"))


@pytest.mark.parametrize("backend", ["engine", "transformers"])
def test_a_packed_head_trains_and_agrees_with_what_samples(trainer: MakeTrainer, backend: str, tmp_path: Path) -> None:
    made, logs = run(trainer, max_steps=3, head="nvfp4", rollout_backend=backend, save_strategy="steps", save_steps=3)
    policy = made.accelerator.unwrap_model(made.model)
    assert policy.get_base_model().qerl_head == "nvfp4"
    assert logs.worst("parity/max") < 1e-4
    assert min(logs.values("grad_norm")) > 0 and all(map(math.isfinite, logs.values("loss")))
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)


def test_drafts_change_no_completion_of_a_run(trainer: MakeTrainer) -> None:
    options = {"max_steps": 3, "num_train_epochs": 3}
    _, plain = run(trainer, **options)
    made, drafting = run(trainer, speculative_tokens=3, speculative_max_batch=64, speculative_history=10_000, **options)
    config = made.engine.config
    assert (config.speculative_tokens, config.speculative_max_batch, config.speculative_history) == (3, 64, 10_000)
    assert 0 < made.engine.history.num_tokens <= 10_000
    assert made.engine.stats.drafted_tokens > 0
    assert drafting.worst("parity/max") < 1e-4
    assert drafting.values("loss") == pytest.approx(plain.values("loss"), abs=1e-4)
    assert drafting.values("completions/mean_length") == plain.values("completions/mean_length")
    assert drafting.values("reward") == pytest.approx(plain.values("reward"))


def test_without_noise_the_first_ratio_is_one_at_any_temperature(trainer: MakeTrainer) -> None:
    """Case 18: log-probs that are not temperature-scaled give a first ratio of about 2."""
    for temperature in (0.6, 1.0, 1.5):
        _, logs = run(trainer, max_steps=1, temperature=temperature, aqn_schedule="none")
        assert logs.values("sampling/importance_sampling_ratio/min")[0] == pytest.approx(1, abs=1e-4)
        assert logs.values("sampling/importance_sampling_ratio/max")[0] == pytest.approx(1, abs=1e-4)
        assert logs.values("sampling/ess")[0] == pytest.approx(1, abs=1e-6)


def test_training_moves_only_lora_and_the_noise_leaves_nothing(trainer: MakeTrainer) -> None:
    made = trainer(max_steps=3)
    policy = made.accelerator.unwrap_model(made.model)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    made.train()
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    assert all(not norm.noise.any() for norm in aqn_norms(policy).values())
    assert made.bridge.norms_touched == 4


def test_the_reward_goes_up(trainer: MakeTrainer) -> None:
    _, logs = run(trainer, max_steps=25, learning_rate=2e-2, per_device_train_batch_size=32, num_generations=8)
    rewards = logs.values("reward")
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


def test_the_seed_governs_the_adapters_initialization(trainer: MakeTrainer) -> None:
    """Whatever random numbers were drawn before."""
    first = []
    for seed in (5, 5, 6):
        torch.rand(3)
        made = trainer(seed=seed)
        first.append(next(p.detach().clone() for n, p in made.model.named_parameters() if "lora_A" in n))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_same_seed_same_run_another_seed_another(trainer: MakeTrainer) -> None:
    runs = [run(trainer, max_steps=2, seed=seed)[1].values("loss") for seed in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_all_losses_of_trl(loss_type: str, trainer: MakeTrainer) -> None:
    level = "sequence" if loss_type == "luspo" else "token"
    _, logs = run(trainer, max_steps=1, loss_type=loss_type, importance_sampling_level=level)
    assert all(math.isfinite(v) for v in logs.values("loss"))
    assert logs.values("grad_norm")[0] > 0


@pytest.mark.parametrize("weights", ["bf16", "nf4", "mxfp4"])
def test_other_weights_are_the_same_trainer(weights: str, trainer: MakeTrainer) -> None:
    _, logs = run(trainer, weights=weights, max_steps=1)
    assert logs.values("parity/max")[0] < 1e-4


def test_kl_to_the_reference_policy_starts_at_zero(trainer: MakeTrainer) -> None:
    _, logs = run(trainer, max_steps=2, beta=0.1)
    assert logs.values("kl")[0] == pytest.approx(0, abs=1e-7)
    assert logs.values("kl")[1] > 1e-6


def test_scope_both_trains_under_the_sample_it_was_drawn_with(trainer: MakeTrainer) -> None:
    """Then the old policy is the noisy one, and the importance ratio is 1."""
    made, logs = run(trainer, max_steps=1, aqn_scope="both", aqn_schedule="constant")
    assert logs.values("sampling/importance_sampling_ratio/max")[0] == pytest.approx(1, abs=1e-4)
    assert logs.values("sampling/importance_sampling_ratio/min")[0] == pytest.approx(1, abs=1e-4)
    assert made.noise.active_sigma == 0.0  # the policy is clean once training is over


def test_evaluation_and_checkpoints_are_free_of_noise(trainer: MakeTrainer, tmp_path: Path) -> None:
    seen = []

    def spy(prompts, completions, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        seen.append((made.model.training, made.noise.active_sigma))
        return letter_reward(prompts, completions)

    made = trainer(
        reward_funcs=spy,
        try_rewards=False,
        aqn_schedule="constant",
        aqn_scope="both",
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        save_strategy="steps",
        save_steps=1,
        extra={"eval_dataset": prompts_dataset(2)},
    )
    made.train()
    assert {sigma for training, sigma in seen if training} == {0.05}
    assert {sigma for training, sigma in seen if not training} == {0.0}
    stored = load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    assert all("lora_" in name for name in stored)
    policy = made.accelerator.unwrap_model(made.model)
    assert not [name for name in policy.state_dict() if "noise" in name]


def test_tool_calls_go_through_the_engine(config: Callable[..., QeRLConfig], tmp_path: Path) -> None:
    """One tool call: TRL reads the stand-in's maximum length and samples a second turn from it."""

    def shout(text: str) -> str:
        """
        Make text loud.

        Args:
            text: What to shout.

        Returns:
            The text in capitals.
        """
        return text.upper()

    folder = save_tiny(tmp_path / "model", "qwen2", max_position_embeddings=4096)
    template = files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.chat_template = template
    settings = config(max_steps=1, max_prompt_length=3000, max_completion_length=300)
    data = prompts_dataset()
    made = QeRLTrainer(str(folder), letter_reward, settings, data, processing_class=tokenizer, tools=[shout])
    call = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>'
    call_ids = tokenizer(call)["input_ids"]
    calls = []
    real = made.engine.generate

    def scripted(prompts, sampling, **kwargs):  # type: ignore[no-untyped-def]
        calls.append((prompts, kwargs["prompt_ids"]))
        if len(calls) > 1:
            return real(prompts, sampling, **kwargs)
        outputs = real(prompts, sampling, **kwargs)
        zeros = [0.0] * len(call_ids)
        outputs[0][0] = CompletionOutput(0, 0, call_ids, zeros, zeros, "stop")
        return outputs

    made.engine.generate = scripted
    made.args.parity_tokens = 0
    made.train()
    assert len(calls) == 2
    assert "HI" in tokenizer.decode(calls[1][0][0])
    assert min(calls[1][1]) > max(calls[0][1])  # the second turn draws from its own random streams


def test_masking_every_truncated_completion_is_a_zero_loss_and_a_counted_step(trainer: MakeTrainer) -> None:
    """Case 16: every completion truncated, truncated completions masked."""
    made, logs = run(trainer, max_steps=2, mask_truncated_completions=True, max_completion_length=1)
    assert logs.values("completions/clipped_ratio")[0] > 0.9
    if logs.values("completions/clipped_ratio")[0] == 1.0:
        assert logs.values("loss")[0] == 0.0
    assert made.state.global_step == 2
    assert all(math.isfinite(v) for v in logs.values("loss"))


def test_none_rewards_are_left_out_of_the_group(trainer: MakeTrainer) -> None:
    """Case 17: rewards [1, None, 0, None] in one group: mean and std over two, advantage 0 for the others."""
    made = trainer(reward_funcs=lambda prompts, completions, **kw: [1.0, None, 0.0, None] * (len(prompts) // 4))
    rows = [prompts_dataset(2)[i // 4] for i in range(8)]
    made.state.max_steps = 2
    made.model.train()
    output = made._generate_and_score_completions(rows)
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert output["advantages"][:4].tolist() == pytest.approx([expected, 0, -expected, 0], rel=1e-4)


def test_equal_rewards_have_exactly_zero_advantage_and_near_equal_ones_stay_bounded(trainer: MakeTrainer) -> None:
    """Case 14: eight times 0.1 (a sum that is not exact in binary); seven times 0.35 and one 0."""
    for rewards in ([0.1] * 8, [0.35] * 7 + [0.0]):
        made = trainer(
            reward_funcs=lambda prompts, completions, r=rewards, **kw: r, num_generations=8, scale_rewards="group"
        )
        made.state.max_steps = 2
        made.model.train()
        output = made._generate_and_score_completions([prompts_dataset(1)[0]] * 8)
        advantages = output["advantages"]
        if rewards[-1]:
            assert torch.equal(advantages, torch.zeros(8))
        else:
            assert advantages.abs().max() < 8**0.5


def test_secondary_eos_is_finished_not_truncated(trainer: MakeTrainer) -> None:
    """Case 19: a completion that ends with another EOS id of the model."""
    made = trainer(max_steps=1)
    second = made.processing_class.pad_token_id
    assert second in made.engine.eos_token_ids and second != made.processing_class.eos_token_id
    real = made.engine.generate

    def ending(prompts, sampling, **kwargs):  # type: ignore[no-untyped-def]
        outputs = real(prompts, sampling, **kwargs)
        for group in outputs:
            for sample in group:
                sample.token_ids[-1] = second
        return outputs

    made.engine.generate = ending
    made.args.parity_tokens = 0
    logs = Logs()
    made.add_callback(logs)
    made.train()
    assert logs.values("completions/clipped_ratio") == [0.0]


def test_a_reward_that_raises_stops_the_run_with_its_name(trainer: MakeTrainer) -> None:
    def broken(prompts, completions, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
        raise KeyError("no such column")

    with pytest.raises(RewardCallError, match="reward function 'broken' raised KeyError: 'no such column'") as caught:
        trainer(reward_funcs=[letter_reward, broken]).train()
    assert isinstance(caught.value.__cause__, KeyError)
    assert 'raise KeyError("no such column")' in caught.value.details and "qerl" not in caught.value.details


def test_a_stale_engine_is_caught_by_the_probe(trainer: MakeTrainer) -> None:
    """Case 22: an adapter that never reaches the engine."""
    made = trainer(max_steps=3, parity_stop=1e-4, aqn_schedule="none")
    made.engine.runner.sync = lambda: None
    with pytest.raises(ParityError, match="they run different policies"):
        made.train()


def test_too_much_noise_stops_with_advice(trainer: MakeTrainer) -> None:
    with pytest.raises(CollapsedSamplingError, match="Lower sigma_start"):
        run(trainer, max_steps=5, aqn_schedule="constant", sigma_start=3.0, min_ess=0.9, min_ess_patience=2)


def test_nan_loss_stops_with_a_dump(trainer: MakeTrainer, tmp_path: Path) -> None:
    made = trainer()
    real = made._compute_loss
    made._compute_loss = lambda model, inputs: real(model, inputs) * float("nan")
    with pytest.raises(NonFiniteLossError, match=r"loss is nan at step 1; the batch is in .*nonfinite-step1.safeten"):
        made.train()
    dump = load_file(tmp_path / "run" / "nonfinite-step1.safetensors")
    assert {"prompt_ids", "completion_ids", "advantages", "old_per_token_logps"} <= set(dump)


def test_infinite_rewards_are_refused_by_name(trainer: MakeTrainer) -> None:
    made = trainer(reward_funcs=lambda prompts, completions, **kw: [float("inf")] + [0.0] * (len(prompts) - 1))
    with pytest.raises(RewardValueError, match=r"'<lambda>' returned inf for row 0 \(and 0 more"):
        made.train()


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(torch.ones(5)) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 20)


def test_groups_are_runs_of_equal_neighbours() -> None:
    a, b = [1, 2], [3]
    assert group_rows([a, a, b, a]) == [(0, 2), (2, 1), (3, 1)]
    assert group_rows([]) == []


def test_a_batch_without_ids_of_its_own_is_a_dataset(trainer: MakeTrainer) -> None:
    """String prompts work too (completion mode); the chat template is not applied, and that is said."""
    data = Dataset.from_list([{"prompt": f"say {i}"} for i in range(4)])
    made = trainer(
        reward_funcs=lambda prompts, completions, **kw: [float(len(c)) for c in completions], dataset=data, max_steps=1
    )
    made.train()
    assert made.state.global_step == 1


def test_micro_batches_hold_whole_groups_and_give_the_same_gradient(trainer: MakeTrainer) -> None:
    """DAPO's loss does not depend on how the generated batch is split; prompts are then run once per group."""
    losses, distinct = [], []
    for size, accumulation in ((16, 1), (4, 4)):
        made = trainer(
            max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, aqn_schedule="none"
        )
        logs = Logs()
        made.add_callback(logs)
        real = made._compute_loss

        def counting(model, inputs, real=real):  # type: ignore[no-untyped-def]
            distinct.append(len({tuple(row) for row in inputs["prompt_ids"].tolist()}))
            return real(model, inputs)

        made._compute_loss = counting
        made.train()
        losses.append(logs.values("grad_norm")[0])
    assert distinct == [4, 1, 1, 1, 1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
