"""Which engines are accepted: right ones at every depth in bf16, wrong ones at none."""

import pytest
import torch
from transformers import Qwen2Config

from qerl.benchmarking.agreement import check_agreement, fp32_layers
from qerl.benchmarking.geometry import geometry_of
from qerl.benchmarking.rollout import make_engine, random_prompts
from qerl.benchmarking.subject import Subject
from qerl.benchmarking.timing import CheckFailedError
from qerl.nn import random_weights
from qerl.nn.fp32_copy import fp32_copy
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.runner import DecoderRunner

HIDDEN, VOCAB = 64, 512


def subject_of(layers: int, *, seed: int = 0, rank: int = 0, kv_dtype: str = "auto") -> Subject:
    """bf16 on the CPU, with activations and logits that spread as those of random weights of width 5,120 do."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 5 * HIDDEN, "num_hidden_layers": layers, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=False)
    model = random_weights.random_model(config, weights="nvfp4", dtype=torch.bfloat16, device="cpu", seed=seed)
    geometry = geometry_of(model.config, "deep")
    if rank:
        model = random_weights.add_random_adapter(model, rank)
    return Subject("deep", "nvfp4", rank, model, DecoderRunner(model), geometry, kv_dtype, seed)


def sampled(subject: Subject) -> tuple[list[int], CompletionOutput]:
    (prompt,) = random_prompts(1, 32, VOCAB)
    engine = make_engine(subject, 1, 96)
    ((output,),) = engine.generate([prompt], SamplingParams(max_tokens=48, ignore_eos=True))
    return prompt, output


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "STD", 0.02 * (5120 / HIDDEN) ** 0.5)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_right_engine_is_accepted_at_every_depth(kv_dtype: str) -> None:
    rows = []
    for layers in (4, 64):
        subject = subject_of(layers, kv_dtype=kv_dtype)
        rows.append(check_agreement(subject, *sampled(subject)))
    assert rows[1]["transformers_fp32"] > 0.08, "rounding alone, at this depth"
    assert rows[1]["engine_fp32"] > 2 * rows[0]["engine_fp32"]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layers", [4, 64])
def test_a_wrong_engine_is_refused_at_every_depth(layers: int, kv_dtype: str) -> None:
    wrong = sampled(subject_of(layers, seed=1, kv_dtype=kv_dtype))
    with pytest.raises(CheckFailedError, match=r"off an fp32 forward by [1-9]"):
        check_agreement(subject_of(layers, kv_dtype=kv_dtype), *wrong)


def test_a_small_error_is_refused_in_a_shallow_model() -> None:
    subject = subject_of(4)
    prompt, output = sampled(subject)
    output.logprobs = [value + 0.15 for value in output.logprobs]
    with pytest.raises(CheckFailedError, match=r"off an fp32 forward by 0\.1"):
        check_agreement(subject, prompt, output)
    output.logprobs[0] = float("nan")
    with pytest.raises(CheckFailedError, match="by nan"):
        check_agreement(subject, prompt, output)


@pytest.mark.parametrize("rank", [0, 4])
def test_fp32_layers_compute_as_a_copy_of_the_whole_model_does(rank: int) -> None:
    subject = subject_of(3, rank=rank)
    causal = subject.model.get_base_model() if rank else subject.model
    layers, kept = causal.base_model.layers, list(causal.base_model.layers)
    ids = torch.tensor(random_prompts(2, 20, VOCAB))
    with torch.no_grad():
        rounded = causal.base_model(ids, use_cache=False).last_hidden_state.float()
        with fp32_layers(layers):
            found = causal.base_model(ids, use_cache=False).last_hidden_state
        exact = fp32_copy(causal).base_model(ids, use_cache=False).last_hidden_state
    # Only the last norm rounds: to bf16, by half a step at most.
    assert found.dtype == torch.bfloat16
    assert float(((found.float() - exact).abs() / exact.abs().clamp(min=1e-2)).max()) < 2**-7
    assert float((rounded - exact).norm()) > 2 * float((found.float() - exact).norm())
    assert list(layers) == kept, "put back"
