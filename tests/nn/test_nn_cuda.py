"""The CUDA path of the frozen linears and of the packed attention against fp32 references."""

import pytest
import torch
from transformers import LlamaConfig

from qerl.formats.base import get_format
from qerl.formats.mxfp4_as_nvfp4 import as_nvfp4
from qerl.kernels.quant_matmul import tiles_supported
from qerl.nn.attention import _packed_attention, _padded_attention
from qerl.nn.group import WeightGroup
from qerl.nn.head import chunked_logprobs
from qerl.nn.linear import QuantLinear
from qerl.nn.packing import pack_batch
from qerl.nn.quant_head import QuantHead

pytestmark = pytest.mark.gpu


def rms_ratio(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 300])
@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxfp4"])
def test_forward_and_gradient_round_once(format: str, rows: int) -> None:
    weights = [torch.randn(n, 192, dtype=torch.bfloat16) for n in (96, 32)]
    packed = get_format(format).quantize(weights)
    held = as_nvfp4(packed) if format == "mxfp4" else packed
    group = WeightGroup(held[0].format, (96, 32), 192, torch.bfloat16, "cuda")
    for i, p in enumerate(held):
        group.load_segment(i, p)
    for i, p in enumerate(packed):
        linear = QuantLinear(group, i, torch.randn(p.shape[0], device="cuda", dtype=torch.bfloat16))
        dense = get_format(format).dequantize(p, torch.float32).cuda()
        x = torch.randn(rows, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = linear(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        # One rounding to bf16 has an RMS error of about 0.0017.
        assert rms_ratio(y, x.detach().float() @ dense.T + linear.bias.float()) < 2.5e-3
        assert rms_ratio(x.grad, grad.float() @ dense) < 2.5e-3
        assert group.cache_bytes == 0
    x = torch.randn(rows, 192, device="cuda", dtype=torch.bfloat16)
    members = torch.cat([QuantLinear(group, i)(x) for i in range(2)], dim=1)
    assert rms_ratio(group.matmul(x), members) < 2.5e-3


@pytest.mark.parametrize("vocab", [272, 259], ids=["tiles", "rows"])
@pytest.mark.parametrize("rows", [1, 8, 70, 2100])
def test_a_packed_head_gives_fp32_logits(vocab: int, rows: int) -> None:
    (packed,) = get_format("nvfp4").quantize([torch.randn(vocab, 192) * 0.1])
    group = WeightGroup("nvfp4", (vocab,), 192)
    group.load_segment(0, packed)
    head = QuantHead(group).to("cuda")
    assert group.layout == ("tiles" if vocab % 16 == 0 and tiles_supported(group.packed.device) else "rows")
    dense = get_format("nvfp4").dequantize(packed).double().cuda()
    hidden = torch.randn(rows, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    logits = head(hidden)
    expected = hidden.detach().double() @ dense.t()
    assert logits.dtype == torch.float32 and rms_ratio(logits, expected) < 1e-5
    grad = torch.randn(rows, vocab, device="cuda").bfloat16().float()
    logits.backward(grad)
    assert hidden.grad.dtype == torch.bfloat16 and rms_ratio(hidden.grad, grad.double() @ dense) < 2.5e-3
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    found, _ = chunked_logprobs(hidden, group, labels)
    assert (found - torch.log_softmax(expected, -1).gather(1, labels[:, None])[:, 0]).abs().max() < 1e-4


def test_packed_attention_with_shared_prefixes() -> None:
    config = LlamaConfig(hidden_size=384, num_attention_heads=6, num_key_value_heads=2, head_dim=64)
    ids = torch.randint(0, 50, (6, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[:, 35:] = 0
    mask[2, 20:] = 0
    ids[:3, :16] = ids[0, :16]
    batch = pack_batch(ids, mask, 24)
    tokens = batch.input_ids.numel()
    shapes = [(tokens, heads, 64) for heads in (config.num_attention_heads, 2, 2)]
    inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    grad = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    results = []
    for attend, dtype in ((_packed_attention, torch.bfloat16), (_padded_attention, torch.float32)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out = attend(*leaves, batch.sequences, 64**-0.5, None)
        out.backward(grad.to(dtype))
        results.append([out, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert rms_ratio(found, expected) < 1e-2
