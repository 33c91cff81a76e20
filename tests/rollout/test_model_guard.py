"""A model that changes after its engine was built: refused by name, or followed; never a stale policy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_tokenizer
from torch import nn

from qerl.nn.head import install_scoring_head
from qerl.nn.loading import load_model
from qerl.nn.lora import prepare_lora_config
from qerl.rollout.build import make_engine
from qerl.rollout.core import SamplingParams
from qerl.rollout.lora import AdapterMismatchError
from qerl.rollout.model_guard import StaleEngineError

PROMPT = [[5, 6, 7]]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture
def base(tiny_checkpoints: dict[str, Path]) -> nn.Module:
    model = load_model(tiny_checkpoints["qwen2"], weights="nvfp4", dtype="float32", device="cpu")
    install_scoring_head(model, 1.0)
    return model


def lora(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def randomize(model: nn.Module, adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if f"lora_B.{adapter}" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.fixture
def wrapped(base: nn.Module) -> PeftModel:
    """Adapters "default" and "other" of rank 4, "wide" of rank 8; the first is active."""
    model = get_peft_model(base, prepare_lora_config(lora(4), base))
    model.add_adapter("other", prepare_lora_config(lora(4), base))
    model.add_adapter("wide", prepare_lora_config(lora(8), base))
    for seed, name in enumerate(("default", "other", "wide")):
        randomize(model, name, seed)
    model.set_adapter("default")
    return model.eval()


def greedy(engine: object) -> tuple[list[int], list[float]]:
    ((output,),) = engine.generate(PROMPT, SAMPLING)
    return output.token_ids, output.logprobs


def resize(model: nn.Module) -> None:
    model.resize_token_embeddings(300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to(torch.bfloat16), r"was float32 .* and is bfloat16"),
        (lambda m: m.half(), r"was float32 .* and is float16"),
        (lambda m: m.double(), r"was float32 .* and is float64"),
        (lambda m: m.to("meta"), r"on cpu and is .* on meta"),
        (resize, r"\[300, 64\]"),
        (lambda m: get_peft_model(m, prepare_lora_config(lora(2), m)), r"lora_A.*was not there and is float32"),
    ],
    ids=["bfloat16", "half", "double", "device", "resized", "adapter"],
)
def test_a_changed_model_is_refused(change: Callable, message: str, base: nn.Module) -> None:
    engine = make_engine(base, tiny_tokenizer(), max_model_len=64)
    greedy(engine)
    change(base)
    with pytest.raises(StaleEngineError, match=message) as error:
        engine.generate(PROMPT, SAMPLING)
    assert "then build the engine" in str(error.value)


def test_masters_cast_to_the_compute_dtype_are_noticed(tiny_checkpoints: dict[str, Path]) -> None:
    """The engine itself would not mind, but bf16 masters lose small updates and a bf16 noise slot rounds the noise."""
    base = load_model(tiny_checkpoints["qwen2"], weights="nvfp4", dtype="bfloat16", device="cpu")
    model = get_peft_model(base, prepare_lora_config(lora(4), base)).eval()
    engine = make_engine(model, tiny_tokenizer(), max_model_len=64)
    greedy(engine)
    model.to(torch.bfloat16)
    with pytest.raises(StaleEngineError, match=r"was float32 .* and is bfloat16"):
        greedy(engine)


def test_a_new_engine_over_the_changed_model_works(base: nn.Module) -> None:
    make_engine(base, tiny_tokenizer(), max_model_len=64)
    base.to(torch.bfloat16)
    assert len(greedy(make_engine(base, tiny_tokenizer(), max_model_len=64))[0]) > 0


def test_a_switched_adapter_is_followed(wrapped: PeftModel) -> None:
    """Without a sync in between the shadows were those of the adapter before, and nothing said so."""
    engine = make_engine(wrapped, tiny_tokenizer(), max_model_len=64)
    first = greedy(engine)
    wrapped.set_adapter("other")
    second = greedy(engine)
    assert second != first
    assert second == greedy(make_engine(wrapped, tiny_tokenizer(), max_model_len=64))
    wrapped.set_adapter("default")
    assert greedy(engine) == first


def test_a_session_is_guarded_as_it_opens(wrapped: PeftModel) -> None:
    engine = make_engine(wrapped, tiny_tokenizer(), max_model_len=64)
    first = greedy(engine)
    wrapped.set_adapter("other")
    with engine.open_session() as session:
        session.add(PROMPT[0], SAMPLING)
        outputs = []
        while session.has_unfinished:
            outputs += session.step()
    second = greedy(make_engine(wrapped, tiny_tokenizer(), max_model_len=64))
    assert [output.token_id for output in outputs] == second[0]
    assert [output.logprob for output in outputs] == pytest.approx(second[1], abs=1e-5)
    assert second != first
    wrapped.to(torch.bfloat16)
    with pytest.raises(StaleEngineError, match=r"was float32 .* and is bfloat16"):
        engine.open_session()


def test_a_refused_call_leaves_the_adapter_of_the_open_session(wrapped: PeftModel) -> None:
    engine = make_engine(wrapped, tiny_tokenizer(), max_model_len=64)
    first = greedy(engine)
    with engine.open_session() as session:
        session.add(PROMPT[0], SAMPLING)
        outputs = session.step()
        wrapped.set_adapter("other")
        with pytest.raises(RuntimeError, match="a session is open"):
            greedy(engine)
        while session.has_unfinished:
            outputs += session.step()
    assert [output.token_id for output in outputs] == first[0]
    assert [output.logprob for output in outputs] == pytest.approx(first[1], abs=1e-5)


def test_an_adapter_of_another_rank_needs_a_new_engine(wrapped: PeftModel) -> None:
    engine = make_engine(wrapped, tiny_tokenizer(), max_model_len=64)
    first = greedy(engine)
    wrapped.set_adapter("wide")
    for _ in range(2):  # not only at the first call
        with pytest.raises(AdapterMismatchError, match="rank 8, the engine was built for 4: build a new engine"):
            engine.generate(PROMPT, SAMPLING)
    wrapped.set_adapter("default")
    assert greedy(engine) == first


def test_a_deleted_adapter_is_refused(wrapped: PeftModel) -> None:
    engine = make_engine(wrapped, tiny_tokenizer(), max_model_len=64)
    wrapped.delete_adapter("wide")
    with pytest.raises(StaleEngineError, match=r"wide.* and is not there"):
        engine.generate(PROMPT, SAMPLING)
