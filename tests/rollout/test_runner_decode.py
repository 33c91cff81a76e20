"""Decode runs over real models: static buffers and look-ahead with adapters and noise, here without graphs."""

from pathlib import Path

import pytest
import torch
from hash_runner import GraphedEngine
from test_runner import PROMPTS, largest_difference, policy
from tiny_models import save_tiny, tiny_tokenizer

from qerl.kernels.paged_attention.rotary import rotary_decode
from qerl.nn.loading import eos_token_ids, load_model
from qerl.nn.norm import aqn_norms
from qerl.rl.aqn import NoiseInjector
from qerl.rollout import runner
from qerl.rollout.build import make_engine
from qerl.rollout.core import SamplingParams
from qerl.rollout.engine import EngineConfig
from qerl.rollout.runner import DecoderRunner


def graphed_engine(model, **drafts: int) -> GraphedEngine:  # type: ignore[no-untyped-def]
    """Steps are replayed with the tensors that they first ran with, as a graph would."""
    eos = eos_token_ids(model, tiny_tokenizer().eos_token_id)
    return GraphedEngine(DecoderRunner(model, 64), eos, EngineConfig(max_num_seqs=16, num_blocks=80, **drafts))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_replayed_decode_gives_the_trainers_logprobs(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints[family])
    engine = graphed_engine(model)
    sampling = SamplingParams(n=3, max_tokens=30, temperature=0.7, seed=1)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, sampling)
        assert largest_difference(model, outputs, 0.7) < 1e-5
    assert engine.stats.graph_replays > 20
    plain = make_engine(model, tiny_tokenizer(), max_model_len=64).generate(PROMPTS, sampling)
    assert [s.token_ids for g in outputs for s in g] == [s.token_ids for g in plain for s in g]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("temperature, n", [(0.0, 1), (1.0, 2)])
def test_drafts_change_no_token_and_get_the_trainers_logprobs(
    family: str, temperature: float, n: int, tiny_checkpoints: dict[str, Path]
) -> None:
    model = policy(tiny_checkpoints[family])
    sampling = SamplingParams(n=n, max_tokens=30, temperature=temperature, seed=1)
    plain = make_engine(model, tiny_tokenizer(), max_model_len=64).generate(PROMPTS, sampling)
    engine = graphed_engine(model, speculative_tokens=4, speculative_history=10_000)
    for _ in range(3):
        outputs = engine.generate(PROMPTS, sampling)
        assert [s.token_ids for g in outputs for s in g] == [s.token_ids for g in plain for s in g]
        assert largest_difference(model, outputs, 1.0) < 1e-5
    assert engine.stats.accepted_tokens > 30 and engine.stats.acceptance > 0.5
    assert engine.stats.graph_replays > 0


@pytest.fixture
def one_launch_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The engine decodes as on a Hopper GPU, through ``rotary_decode`` (on the CPU its two references); its rows."""
    rows: list[int] = []

    def recording(qkv: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(len(qkv))
        return rotary_decode(qkv, *rest)

    monkeypatch.setattr(runner, "serves_rotary_decode", lambda *tensors: True)
    monkeypatch.setattr(runner, "rotary_decode", recording)
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotation_inside_attention_gives_the_trainers_logprobs(
    family: str, tiny_checkpoints: dict[str, Path], one_launch_rows: list[int]
) -> None:
    model = policy(tiny_checkpoints[family])
    engine = graphed_engine(model)
    sampling = SamplingParams(n=3, max_tokens=30, temperature=0.7, seed=1)
    outputs = engine.generate(PROMPTS, sampling)
    assert largest_difference(model, outputs, 0.7) < 1e-5
    layers = engine.runner.num_layers
    assert len(one_launch_rows) == layers * engine.stats.decode_steps


def test_steps_with_drafts_rotate_before_attention(
    tiny_checkpoints: dict[str, Path], one_launch_rows: list[int]
) -> None:
    """A draft attends to rows of its own launch."""
    model = policy(tiny_checkpoints["qwen3"])
    sampling = SamplingParams(n=2, max_tokens=30, seed=1)
    engine = graphed_engine(model, speculative_tokens=4, speculative_history=10_000)
    for _ in range(3):
        one_launch_rows.clear()
        outputs = engine.generate(PROMPTS, sampling)
        assert largest_difference(model, outputs, 1.0) < 1e-5
    assert engine.stats.accepted_tokens > 30
    assert len(one_launch_rows) < engine.runner.num_layers * engine.stats.decode_steps
    plain = make_engine(model, tiny_tokenizer(), max_model_len=64).generate(PROMPTS, sampling)
    assert [s.token_ids for g in outputs for s in g] == [s.token_ids for g in plain for s in g]


def test_noise_and_optimizer_steps_reach_replayed_steps_without_a_capture(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["qwen3"])
    engine = graphed_engine(model)
    sampling = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        clean = engine.generate(PROMPTS, sampling)
    assert largest_difference(model, clean, 1.0) < 1e-5
    injector = NoiseInjector(aqn_norms(model), seed=3)
    injector.fill(0.05, update=1)
    noisy = engine.generate(PROMPTS, sampling)
    assert largest_difference(model, noisy, 1.0) < 1e-5
    assert engine.stats.graph_captures == 0
    injector.clear()
    assert largest_difference(model, noisy, 1.0) > 1e-3
    assert engine.generate(PROMPTS, sampling) == clean
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02)
    assert engine.generate(PROMPTS, sampling) == clean, "an optimizer step acts only through sync"
    engine.runner.sync()
    stepped = engine.generate(PROMPTS, sampling)
    assert stepped != clean
    assert largest_difference(model, stepped, 1.0) < 1e-5
    assert engine.stats.graph_captures == 0
    assert engine.stats.lora_sync_ms == engine.runner.sync_ms > 0


def test_disabling_an_adapter_and_moved_tensors_void_the_capture(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["llama"])
    engine = graphed_engine(model)
    sampling = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        engine.generate(PROMPTS, sampling)
    key = engine.runner.capture_key()
    assert key == engine.runner.capture_key()
    with model.disable_adapter():
        assert engine.runner.capture_key() != key
        base = engine.generate(PROMPTS, sampling)
        assert engine.stats.graph_captures == 1
        assert largest_difference(model, base, 1.0) < 1e-5
    norm = engine.runner.layers[1].input_norm
    norm.noise = norm.noise.clone()
    assert engine.runner.capture_key() != key


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10_000.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_table_is_what_the_module_gives(rope: dict[str, object], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", rope_parameters=rope)
    model = load_model(folder, dtype="float32", device="cpu")
    runner = DecoderRunner(model)
    assert runner.max_position == 512
    for positions in (torch.tensor([0, 511, 3, 3, 200]), torch.arange(512).flip(0), torch.tensor([7])):
        hidden = torch.zeros(1, len(positions), 64)
        expected = model.model.rotary_emb(hidden, positions[None])
        for ours, theirs in zip(runner.rope[positions].chunk(2, dim=-1), expected, strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            assert torch.equal(ours.repeat(1, 2), theirs[0])


def test_float8_cache_halves_the_memory_and_stays_close(tiny_checkpoints: dict[str, Path]) -> None:
    model = policy(tiny_checkpoints["llama"])
    engines = [
        make_engine(model, tiny_tokenizer(), max_model_len=64, memory_bytes=1 << 20, kv_dtype=kind)
        for kind in ("auto", "fp8")
    ]
    outputs = [engine.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True)) for engine in engines]
    assert engines[1].stats.num_blocks >= 4 * engines[0].stats.num_blocks, "compute is fp32 here"
    # 4 significant bits: far from the 1e-5 of a cache in the compute dtype, and far from unrelated.
    assert 1e-4 < largest_difference(model, outputs[1], 1.0) < 0.5
