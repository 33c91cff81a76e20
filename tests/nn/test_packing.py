"""Packed forward with shared prompts against the padded Hugging Face forward: values, gradients, layout by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from qerl.nn.attention import PACKED_ATTENTION, varlen_serves
from qerl.nn.packing import pack_batch

C = 7


@pytest.mark.parametrize("device, dtype, head_dim, served", [
    ("cuda", torch.bfloat16, 64, True), ("cuda", torch.float16, 80, True), ("cuda", torch.bfloat16, 256, True),
    ("cuda", torch.bfloat16, 20, False), ("cuda", torch.bfloat16, 264, False), ("cuda", torch.float32, 64, False),
    ("cpu", torch.bfloat16, 64, False),
])  # fmt: skip
def test_which_queries_stay_unpadded(device: str, dtype: torch.dtype, head_dim: int, served: bool) -> None:
    with FakeTensorMode():
        assert varlen_serves(torch.empty(3, 4, head_dim, device=device, dtype=dtype)) == served


def tiny_model(sliding_window: int | None = None) -> torch.nn.Module:
    geometry = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    if sliding_window is None:
        return LlamaForCausalLM(LlamaConfig(**geometry))
    return MistralForCausalLM(MistralConfig(**geometry, sliding_window=sliding_window))


def batch(prompts: list[list[int]], lengths: list[int], prompt_len: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of left-padded prompts and right-padded random completions; padding holds a poisonous id."""
    ids = torch.full((len(prompts), prompt_len + C), 49)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, prompt_len - len(prompt) : prompt_len] = torch.tensor(prompt)
        ids[row, prompt_len : prompt_len + length] = torch.randint(0, 48, (length,))
        mask[row, prompt_len - len(prompt) : prompt_len + length] = 1
    return ids, mask


def padded_logprobs(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    logprobs = torch.log_softmax(logits[:, -C - 1 : -1], -1).gather(2, ids[:, -C:, None])[..., 0]
    return logprobs * mask[:, -C:]


def packed_logprobs(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack_batch(ids, mask, C)
    logits = model(
        packed.input_ids[None],
        position_ids=packed.position_ids[None],
        packed_sequences=packed.sequences,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
    ).logits[0]
    scored = packed.labels >= 0
    labels = packed.labels[scored, None]
    return packed.unpack(torch.log_softmax(logits[scored], -1).gather(1, labels)[:, 0])


BATCHES = {
    "one group": ([[1, 2, 3]] * 4, [7, 1, 3, 5]),
    "two groups interleaved": ([[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]], [2, 7, 4, 1]),
    "no sharing": ([[1], [2, 3], [4, 5, 6, 7, 8, 9]], [3, 3, 3]),
    "prompt of one token": ([[5]] * 3, [1, 2, 7]),
    "masked row": ([[1, 2, 3]] * 3, [4, 0, 2]),
    "prompt that begins another": ([[1, 2], [1, 2, 3], [1, 2]], [3, 2, 6]),
}


@pytest.mark.parametrize("window", [None, 3], ids=["full", "sliding window 3"])
@pytest.mark.parametrize("name", BATCHES)
def test_values_and_gradients_equal_the_padded_forward(name: str, window: int | None) -> None:
    model = tiny_model(window)
    ids, mask = batch(*BATCHES[name])
    weights = torch.randn(ids.shape[0], C)
    results = {}
    for kind, forward in (("padded", padded_logprobs), ("packed", packed_logprobs)):
        model.zero_grad()
        logprobs = forward(model, ids, mask)
        (logprobs * weights).sum().backward()
        results[kind] = (logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(results["packed"][0], results["padded"][0], rtol=0, atol=2e-6)
    for parameter, expected in results["padded"][1].items():
        found = results["packed"][1][parameter]
        error = (found - expected).norm() / expected.norm()
        assert error < 1e-5, f"{parameter}: {error}"


def test_layout_by_hand() -> None:
    ids, mask = batch([[1, 2, 3], [9, 8], [1, 2, 3]], [2, 1, 3])
    completions = ids[:, -C:]
    packed = pack_batch(ids, mask, C)
    # distinct prompts in sorted order, left padding first: [9, 8] then [1, 2, 3]; each without its last token
    expected = [9, 1, 2, 3, completions[0, 0], 8, 3, completions[2, 0], completions[2, 1]]
    assert packed.input_ids.tolist() == [int(t) for t in expected]
    assert packed.position_ids.tolist() == [0, 0, 1, 2, 3, 1, 2, 3, 4]
    labels = [-100, -100, -100, *completions[0, :2], completions[1, 0], *completions[2, :3]]
    assert packed.labels.tolist() == [int(t) for t in labels]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 1, 3, 5, 6, 9]
    assert packed.sequences.cu_seqlens_k.tolist() == [0, 1, 3, 7, 9, 14]
    assert packed.sequences.kv_rows.tolist() == [0, 1, 2, 1, 2, 3, 4, 0, 5, 1, 2, 6, 7, 8]


def test_a_group_of_eight_runs_its_prompt_once() -> None:
    prompt = list(range(1, 7))
    ids, mask = batch([prompt] * 8, [C] * 8)
    assert pack_batch(ids, mask, C).input_ids.numel() == 5 + 8 * 7
    assert int(mask.sum()) == 8 * 13


def test_empty_batches_are_refused() -> None:
    ids, mask = batch([[1, 2], [3]], [0, 0])
    with pytest.raises(ValueError, match="no completion token"):
        pack_batch(ids, mask, C)
    mask[:, :6] = 0
    with pytest.raises(ValueError, match="prompt of at least one token"):
        pack_batch(ids, mask, C)
