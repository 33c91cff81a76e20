"""CUDA graphs: bit for bit the eager steps, blind to nothing that changes in place, and no growth."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import save_tiny, tiny_tokenizer

from qerl.nn.loading import eos_token_ids, load_model
from qerl.nn.lora import prepare_lora_config
from qerl.nn.norm import aqn_norms
from qerl.rl.aqn import NoiseInjector
from qerl.rollout import runner
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.runner import DecoderRunner

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7], list(range(40, 75)), [9] * 20]
# 64 is the smallest head that the decode kernel takes.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def policy(folder: Path, family: str = "qwen3", weights: str = "nvfp4"):  # type: ignore[no-untyped-def]
    save_tiny(folder, family, **SHAPE)
    model = load_model(folder, weights=weights, dtype="bfloat16", device="cuda")
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, prepare_lora_config(config, model))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def engine_of(model, **limits: object) -> RolloutEngine:  # type: ignore[no-untyped-def]
    config = EngineConfig(**{"max_num_seqs": 80, "num_blocks": 1200, "max_model_len": 256, **limits})
    return RolloutEngine(DecoderRunner(model, 256), eos_token_ids(model, tiny_tokenizer().eos_token_id), config)


@torch.no_grad()
def distributions(model, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Log-probs [tokens, V] from which ``tokens`` were to be drawn behind ``prompt``: the forward of transformers."""
    logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float().cpu()
    return (logits / temperature).log_softmax(-1)


def flat(outputs: list[list[CompletionOutput]]) -> list[CompletionOutput]:
    return [sample for group in outputs for sample in group]


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "nf4", "mxfp4"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=20, max_tokens=120, seed=1),
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
        SamplingParams(n=20, max_tokens=60, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
    ],
    ids=["plain", "greedy", "truncated"],
)
def test_graphs_change_no_bit(weights: str, sampling: SamplingParams, tmp_path: Path) -> None:
    model = policy(tmp_path, weights=weights)
    graphed, eager = engine_of(model), engine_of(model, cuda_graphs=False)
    prompts = PROMPTS * (20 // sampling.n)
    expected = eager.generate(prompts, sampling)
    assert eager.stats.graph_replays == 0
    for _ in range(3):
        assert graphed.generate(prompts, sampling) == expected
    assert graphed.stats.graph_captures == 0
    assert graphed.stats.graph_replays == graphed.stats.decode_steps > 50


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_rotation_inside_attention_changes_no_bit(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without head norms, whose sums run in another order."""
    model = policy(tmp_path, "llama")
    sampling = SamplingParams(n=20, max_tokens=60, seed=1)
    one, two = engine_of(model, kv_dtype=kv_dtype), engine_of(model, kv_dtype=kv_dtype)
    for _ in range(2):
        found = one.generate(PROMPTS, sampling)
    monkeypatch.setattr(runner, "serves_rotary_decode", lambda *tensors: False)
    for _ in range(2):
        assert two.generate(PROMPTS, sampling) == found


def test_noise_and_optimizer_steps_reach_captured_graphs(tmp_path: Path) -> None:
    model = policy(tmp_path)
    graphed, eager = engine_of(model), engine_of(model, cuda_graphs=False)
    sampling = SamplingParams(n=3, max_tokens=40, ignore_eos=True)
    for _ in range(2):
        clean = graphed.generate(PROMPTS, sampling)
    injector = NoiseInjector(aqn_norms(model), seed=3)
    injector.fill(0.05, update=1)
    noisy = graphed.generate(PROMPTS, sampling)
    assert noisy != clean
    assert noisy == eager.generate(PROMPTS, sampling)
    injector.clear()
    assert graphed.generate(PROMPTS, sampling) == clean
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02)
    graphed.runner.sync()
    eager.runner.sync()
    stepped = graphed.generate(PROMPTS, sampling)
    assert stepped != clean
    assert stepped == eager.generate(PROMPTS, sampling)
    assert graphed.stats.graph_captures == 0
    with model.disable_adapter():
        assert graphed.generate(PROMPTS, sampling) == eager.generate(PROMPTS, sampling)


def test_rows_do_not_see_the_padding_of_their_batch(tmp_path: Path) -> None:
    model = policy(tmp_path)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    # Five rows in a bucket of 8, and the same five where the bucket is exact.
    padded, exact = engine_of(model), engine_of(model, max_num_seqs=5)
    prompts = [*PROMPTS, [1, 2, 3]]
    for _ in range(3):
        ours, theirs = flat(padded.generate(prompts, sampling)), flat(exact.generate(prompts, sampling))
        for a, b in zip(ours, theirs, strict=True):
            same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), 40)
            assert same > 4, "other batch sizes may round differently, not compute something else"
            assert a.logprobs[:same] == pytest.approx(b.logprobs[:same], abs=0.05)
    assert not torch.isnan(padded.kv.k).any()


def test_preemption_and_queueing_under_graphs(tmp_path: Path) -> None:
    model = policy(tmp_path)
    prompts = [[i % 200 + 1] * (3 + i % 30) for i in range(60)]
    sampling = SamplingParams(n=2, max_tokens=50, seed=2)
    tight = {"num_blocks": 60, "max_num_seqs": 24}
    graphed, eager = engine_of(model, **tight), engine_of(model, cuda_graphs=False, **tight)
    assert graphed.generate(prompts, sampling) == eager.generate(prompts, sampling)
    assert graphed.stats.preemptions > 0 and graphed.stats.graph_replays > 0


def test_no_memory_growth_over_two_hundred_steps(tmp_path: Path) -> None:
    model = policy(tmp_path)
    engine = engine_of(model)
    sampling = SamplingParams(n=20, max_tokens=200, ignore_eos=True)
    for _ in range(2):
        engine.generate(PROMPTS, sampling)
    torch.cuda.synchronize()
    held, address = torch.cuda.memory_reserved(), engine.kv.k.data_ptr()
    for _ in range(3):
        engine.generate(PROMPTS, sampling)
        assert engine.stats.decode_steps == 199
    assert torch.cuda.memory_reserved() <= held
    assert engine.kv.k.data_ptr() == address


def test_session_rows_are_graphed_and_equal_generate(tmp_path: Path) -> None:
    model = policy(tmp_path)
    engine = engine_of(model)
    sampling = SamplingParams(max_tokens=40, seed=7)
    tokens: dict[int, list[int]] = {}
    with engine.open_session() as session:
        ids = [session.add(prompt, sampling) for prompt in PROMPTS]
        while session.has_unfinished:
            for output in session.step():
                tokens.setdefault(output.request_id, []).append(output.token_id)
    assert engine.stats.graph_replays > 0
    # generate keys prompt 0 of step 0 as a session keys every request.
    assert tokens[ids[0]][:4] == engine.generate(PROMPTS[:1], sampling)[0][0].token_ids[:4]


def test_rows_that_draw_differently_share_a_captured_forward(tmp_path: Path) -> None:
    model = policy(tmp_path)
    ways = [
        SamplingParams(max_tokens=40, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=40, n=3, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.7, top_k=20, ignore_eos=True),
    ]

    def run(engine: RolloutEngine) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        with engine.open_session() as session:
            for prompt, way in zip(PROMPTS, ways, strict=True):
                session.add(prompt, way)
            while session.has_unfinished:
                for output in session.step():
                    key = (output.request_id, output.sample_index)
                    found.setdefault(key, []).extend((output.token_id, output.logprob))
        return found

    graphed, eager = engine_of(model), engine_of(model, cuda_graphs=False)
    expected = run(eager)
    for _ in range(2):
        assert run(graphed) == expected
    assert graphed.stats.graph_replays == graphed.stats.decode_steps > 30


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=2, max_tokens=60, seed=3),
        SamplingParams(max_tokens=60, temperature=0.0),
        SamplingParams(n=2, max_tokens=40, temperature=0.8, top_p=0.9),
    ],
    ids=["plain", "greedy", "truncated"],
)
def test_drafts_under_graphs(sampling: SamplingParams, tmp_path: Path) -> None:
    model = policy(tmp_path, weights="bf16")
    drafts = {"speculative_tokens": 4, "speculative_history": 100_000}
    graphed, eager = engine_of(model, **drafts), engine_of(model, cuda_graphs=False, **drafts)
    for _ in range(4):
        found = graphed.generate(PROMPTS, sampling)
        assert found == eager.generate(PROMPTS, sampling), "graphs change no bit of a step with drafts"
        # Where a step has other rows, a number near the middle rounds the other way, and a draw may fall to the next
        # token: what must hold of every sample is that it was drawn from the model's distribution.
        for prompt, samples in zip(PROMPTS, found, strict=True):
            for sample in samples:
                exact = distributions(model, prompt, sample.token_ids, sampling.temperature or 1.0)
                drawn = exact.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
                off = (torch.tensor(sample.temperature_logprobs) - drawn).abs()
                assert off.mean() < 0.03 and off.max() < 0.3
                if sampling.temperature == 0:
                    assert (exact.max(1).values - drawn).max() < 0.1
    # The last call drafts from what the calls before it drew.
    stats = graphed.stats
    assert stats.acceptance > 0.3 and stats.accepted_tokens > 20
    assert stats.graph_replays > 0
    assert not torch.isnan(graphed.kv.k).any()
