"""The engine's forward against the trainer's, for every family, with adapters and noise."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_tokenizer

from qerl.kernels.silu_mul import silu_mul
from qerl.nn.group import WeightGroup
from qerl.nn.head import install_scoring_head
from qerl.nn.loading import load_model
from qerl.nn.lora import LoraQuantLinear, lora_layers, prepare_lora_config
from qerl.nn.norm import aqn_norms
from qerl.rl.aqn import NoiseInjector
from qerl.rollout.build import build_engine, load_adapter, make_engine
from qerl.rollout.core import SamplingParams
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.lora import AdapterMismatchError
from qerl.rollout.runner import DecoderRunner, UnsupportedArchitectureError
from qerl.rollout.transformers_backend import TransformersEngine
from qerl.trainer.logprobs import packed_logprobs

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


def policy(  # type: ignore[no-untyped-def]
    folder: Path, weights: str = "nvfp4", rank: int = 4, alpha: int = 8, seed: int = 0, head: str = "auto"
):
    model = load_model(folder, weights=weights, head=head, dtype="float32", device="cpu")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, prepare_lora_config(config, model))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return model.eval()


def largest_difference(model, outputs, temperature: float) -> float:  # type: ignore[no-untyped-def]
    """max |engine log-prob - log-prob of the Hugging Face forward| over all sampled tokens; NaN if one is."""
    differences = []
    for prompt, samples in zip(PROMPTS, outputs, strict=True):
        for sample in samples:
            ids = torch.tensor([prompt + sample.token_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            differences.append(expected - torch.tensor(sample.logprobs))
    return float(torch.cat(differences).abs().max())


def engine_for(model) -> RolloutEngine:  # type: ignore[no-untyped-def]
    engine = make_engine(model, tiny_tokenizer(), max_model_len=64, backend="engine")
    assert isinstance(engine, RolloutEngine)
    return engine


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "nf4", "mxfp4"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logprobs_of_the_engine_are_those_of_the_trainer(
    family: str, weights: str, tiny_checkpoints: dict[str, Path]
) -> None:
    model = policy(tiny_checkpoints[family], weights)
    outputs = engine_for(model).generate(PROMPTS, SamplingParams(n=3, max_tokens=12, temperature=0.7, seed=1))
    assert sum(len(s.token_ids) for group in outputs for s in group) > 60
    assert largest_difference(model, outputs, 0.7) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_packed_head_is_the_same_for_engine_trainer_and_transformers(
    family: str, tiny_checkpoints: dict[str, Path]
) -> None:
    model = policy(tiny_checkpoints[family], head="nvfp4")
    causal = model.get_base_model()
    engine = engine_for(model)
    assert engine.runner.head is causal.lm_head.group and engine.runner.vocab_size == causal.config.vocab_size
    outputs = engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=12, temperature=0.7, seed=1))
    assert largest_difference(model, outputs, 0.7) < 1e-5
    install_scoring_head(causal, 0.7)
    for prompt, (sample, *_) in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt + sample.token_ids])
        mask = torch.ones_like(ids)
        scored, _ = packed_logprobs(model, ids, mask, len(sample.token_ids))
        assert (scored[0] - torch.tensor(sample.logprobs)).abs().max() < 1e-5
    # The 16-bit head draws from another distribution: the agreement above is not an accident of a small error.
    other = policy(tiny_checkpoints[family])
    assert largest_difference(other, outputs, 0.7) > 1e-2


def test_ranks_of_a_group_are_filled_up_alike(tiny_checkpoints: dict[str, Path], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Ranks 5, 8 and 12 in one group kept the engine, and not the trainer, from adding LoRA before it rounds."""
    model = load_model(tiny_checkpoints["qwen2"], weights="nvfp4", dtype="float32", device="cpu")
    ranks = {"q_proj": 5, "k_proj": 8, "v_proj": 12}
    config = LoraConfig(r=4, rank_pattern=ranks, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, prepare_lora_config(config, model)).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    empty = torch.empty
    monkeypatch.setattr("qerl.kernels.lora.packed.torch.empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    engine = engine_for(model)
    for group in engine.runner.shadows.groups:
        assert all(segment.rank % 8 == 0 and segment.rank_start % 8 == 0 for segment in group.b.segments)
        assert group.a.shape[0] == sum(segment.rank for segment in group.b.segments)
    qkv = engine.runner.shadows.groups[0]
    assert [(s.rank_start, s.rank) for s in qkv.b.segments] == [(0, 8), (8, 8), (16, 16)]
    assert not qkv.a[5:8].any() and not qkv.b.views[0][:, 5:].any() and not qkv.b.views[2][:, 12:].any()
    outputs = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=12, seed=1))
    assert largest_difference(model, outputs, 1.0) < 1e-5


@pytest.mark.parametrize("rank", [1, 16, 64, 256])
def test_adapter_scaling_at_any_rank(rank: int, tiny_checkpoints: dict[str, Path]) -> None:
    """Case 23: rank 64 with alpha 128 and others."""
    model = policy(tiny_checkpoints["qwen2"], rank=rank, alpha=2 * rank)
    outputs = engine_for(model).generate(PROMPTS, SamplingParams(n=2, max_tokens=8))
    assert largest_difference(model, outputs, 1.0) < 2e-5


def test_an_optimizer_step_reaches_the_engine_only_through_sync(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["llama"])
    engine = engine_for(model)
    addresses = [(g.a.data_ptr(), g.b.buffer.data_ptr()) for g in engine.runner.shadows.groups]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02)
    stale = engine.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert largest_difference(model, stale, 1.0) > 1e-3
    engine.runner.sync()
    fresh = engine.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert largest_difference(model, fresh, 1.0) < 1e-5
    after = [(g.a.data_ptr(), g.b.buffer.data_ptr()) for g in engine.runner.shadows.groups]
    assert addresses == after


def test_noise_acts_on_both_sides_alike_and_leaves_nothing(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["qwen3"])
    engine = engine_for(model)
    greedy = SamplingParams(max_tokens=8, temperature=0)
    clean = engine.generate(PROMPTS, greedy)
    injector = NoiseInjector(aqn_norms(model), seed=3)
    injector.fill(0.05, update=1)
    noisy = engine.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert largest_difference(model, noisy, 1.0) < 1e-5
    injector.clear()
    assert largest_difference(model, noisy, 1.0) > 1e-3
    again = engine.generate(PROMPTS, greedy)
    assert [s.logprobs for g in again for s in g] == [s.logprobs for g in clean for s in g]


@pytest.mark.parametrize("disabled", [False, True], ids=["lora", "lora-off"])
def test_silu_mul_is_asked_of_the_group(
    disabled: bool, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call where no LoRA comes after the product, with the result of the product and `silu_mul`."""
    model = policy(tiny_checkpoints["qwen2"])
    runner = DecoderRunner(model)
    layer, calls = runner.layers[0].gate_up, []
    fused = WeightGroup.silu_matmul
    monkeypatch.setattr(WeightGroup, "silu_matmul", lambda self, *rest: calls.append(self) or fused(self, *rest))
    x = torch.randn(3, layer.group.in_features)
    for member in layer.lora.members:
        member.enable_adapters(not disabled)
    with torch.no_grad():
        assert torch.equal(layer.silu_mul(x), silu_mul(layer(x)))
    assert calls == ([layer.group] if disabled else [])
    plain = DecoderRunner(load_model(tiny_checkpoints["qwen2"], weights="nvfp4", dtype="float32", device="cpu"))
    calls.clear()
    with torch.no_grad():
        for layer in plain.layers:
            assert torch.equal(layer.gate_up.silu_mul(x), silu_mul(layer.gate_up(x)))
    assert calls == [layer.gate_up.group for layer in plain.layers]


def test_no_weight_is_copied(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["llama"], rank=8)
    runner = DecoderRunner(model)
    layer = model.get_base_model().model.layers[0]
    assert runner.layers[0].qkv.group.packed is layer.self_attn.q_proj.base_layer.group.packed
    assert runner.layers[0].input_norm is layer.input_layernorm
    assert runner.embedding.weight is model.get_base_model().model.embed_tokens.weight
    masters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert runner.shadows.bytes == 4 * masters  # fp32 compute: the shadows are the only copy


def test_an_adapter_layer_that_no_group_serves_is_an_error(tiny_checkpoints: dict[str, Path]) -> None:
    """Case 22: one adapter matrix never reaches the engine."""
    model = policy(tiny_checkpoints["llama"])
    stray = next(iter(lora_layers(model).values())).base_layer
    config = LoraConfig(r=2, lora_alpha=2)
    model.get_base_model().model.add_module("stray", LoraQuantLinear(stray, "default", config, r=2, lora_alpha=2))
    with pytest.raises(AdapterMismatchError, match=r"1 adapter layers would not reach the engine: .*stray"):
        DecoderRunner(model)


def test_a_run_folder_given_for_its_adapter_is_told_where_that_is(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = policy(tiny_checkpoints["llama"])
    model.save_pretrained(tmp_path / "adapter")
    base = load_model(tiny_checkpoints["llama"], weights="nvfp4", dtype="float32", device="cpu")
    with pytest.raises(
        AdapterMismatchError, match=rf"holds no PEFT adapter .*; that of this run is .*{tmp_path.name}/adapter"
    ):
        load_adapter(base, tmp_path)
    assert load_adapter(base, tmp_path / "adapter").peft_config


def test_adapter_of_another_model_is_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    policy(tiny_checkpoints["llama"]).save_pretrained(tmp_path / "adapter")
    engine, _, model = build_engine(
        tiny_checkpoints["llama"], adapter=tmp_path / "adapter", weights="nvfp4", device="cpu"
    )
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=4))
    assert largest_difference(model, outputs, 1.0) < 1e-5
    from tiny_models import save_tiny

    other = save_tiny(tmp_path / "deeper", "llama", num_hidden_layers=3)
    with pytest.raises(
        AdapterMismatchError, match="0 of its 28 tensors match nothing and 14 of the model's are missing"
    ):
        load_adapter(load_model(other, dtype="float32", device="cpu"), tmp_path / "adapter")
    with pytest.raises(AdapterMismatchError, match="no PEFT adapter"):
        load_adapter(load_model(other, dtype="float32", device="cpu"), tmp_path)


def test_other_architectures_fall_back_with_a_message(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = policy(tiny_checkpoints["llama"])
    model.get_base_model().config.model_type = "olmo3"
    with pytest.raises(UnsupportedArchitectureError, match="'olmo3' is not in llama"):
        make_engine(model, tiny_tokenizer(), max_model_len=64, backend="engine")
    engine = make_engine(model, tiny_tokenizer(), max_model_len=64)
    assert isinstance(engine, TransformersEngine)
    assert "fall back to transformers" in caplog.text


@pytest.mark.parametrize("backend", ["auto", "engine", "transformers"])
def test_impossible_limits_are_refused_whatever_runs(backend: str, tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["llama"])
    with pytest.raises(ValueError, match="speculative_tokens must be at most 64, got 100"):
        make_engine(model, tiny_tokenizer(), max_model_len=64, backend=backend, speculative_tokens=100)


def test_transformers_backend_has_the_same_contract(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["qwen2"])
    tokenizer = tiny_tokenizer()
    ours = make_engine(model, tokenizer, max_model_len=64)
    theirs = make_engine(model, tokenizer, max_model_len=64, backend="transformers")
    greedy = SamplingParams(max_tokens=10, temperature=0)
    for a, b in zip(ours.generate(PROMPTS, greedy), theirs.generate(PROMPTS, greedy), strict=True):
        assert a[0].token_ids == b[0].token_ids
        assert a[0].finish_reason == b[0].finish_reason
        assert torch.allclose(torch.tensor(a[0].logprobs), torch.tensor(b[0].logprobs), atol=1e-5)
    sampling = SamplingParams(n=3, max_tokens=10, temperature=0.7, seed=5)
    outputs = theirs.generate(PROMPTS, sampling, step=4)
    assert [len(g) for g in outputs] == [3, 3, 3]
    assert largest_difference(model, outputs, 0.7) < 1e-5
    assert outputs == theirs.generate(PROMPTS, sampling, step=4)
    assert outputs != theirs.generate(PROMPTS, sampling, step=5)


def test_too_long_for_the_model_is_refused_up_front(tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="600 tokens, but the model has 512 positions"):
        make_engine(policy(tiny_checkpoints["llama"]), tiny_tokenizer(), max_model_len=600)


def test_the_last_layer_multiplies_only_rows_whose_logits_are_wanted(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in parts of four tokens: some steps end no prompt, and want none."""
    model = policy(tiny_checkpoints["llama"])
    engine = RolloutEngine(DecoderRunner(model, 64), (), EngineConfig(max_model_len=64, max_batch_tokens=4))
    rows: dict[int, list[int]] = {}
    for index, layer in enumerate(engine.runner.layers):
        down = layer.down
        rows[index] = []

        def count(x: torch.Tensor, down=down, index=index) -> torch.Tensor:  # type: ignore[no-untyped-def]
            rows[index].append(len(x))
            return down(x)

        monkeypatch.setattr(layer, "down", count)
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    last = engine.runner.num_layers - 1
    assert sum(rows[0]) == sum(map(len, PROMPTS)) + 3 * len(PROMPTS)
    assert sum(rows[last]) == 4 * len(PROMPTS) and 0 in rows[last]
    assert largest_difference(model, outputs, 1.0) < 1e-5
