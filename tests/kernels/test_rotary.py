"""Head norm, rotary embedding and KV write: reference on the CPU, kernel on a GPU."""

import pytest
import torch
from kernel_cases import rms_ratio
from rotary_cases import SHAPES, make_rotary

from qerl.kernels.rotary import reference, rotary_kv_write


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
def test_reference_against_complex_numbers(with_norm: bool) -> None:
    """A pair (x_i, x_{i + D/2}) is a complex number, turned by its angle."""
    case = make_rotary(11, 6, 2, 16, torch.float32, with_norm)
    before = case.qkv.double().view(11, 10, 16)
    q, k, v = rotary_kv_write(*case.inputs)
    if with_norm:
        normed = before / (before.square().mean(-1, keepdim=True) + case.eps).sqrt()
        before = torch.cat([normed[:, :6] * case.q_norm, normed[:, 6:8] * case.k_norm, before[:, 8:]], 1)
    turned = torch.complex(before[..., :8], before[..., 8:]) * torch.complex(
        *(half.double() for half in case.rope[case.positions][:, None].chunk(2, -1))
    )
    expected = torch.cat([turned.real, turned.imag], -1)
    assert rms_ratio(q, expected[:, :6]) < 1e-6 and rms_ratio(k, expected[:, 6:8]) < 1e-6
    assert torch.equal(v.double(), before[:, 8:])
    assert q.data_ptr() == case.qkv.data_ptr()
    assert torch.equal(case.k_cache.flatten(0, 1)[case.slots], k)
    assert torch.equal(case.v_cache.flatten(0, 1)[case.slots], v)


def test_misuse_is_named() -> None:
    case = make_rotary(4, 6, 2, 16, torch.float32, True)
    qkv, rope, positions, k_cache, v_cache, slots, q_norm, _, _ = case.inputs
    with pytest.raises(ValueError, match="159 columns of qkv"):
        rotary_kv_write(qkv[:, 1:].contiguous(), rope, positions, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="or float8_e4m3fn"):
        rotary_kv_write(qkv.bfloat16(), rope, positions, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"rope must be float32 \[P, 16\]"):
        rotary_kv_write(qkv, rope[:, :8], positions, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="slot_mapping must be int64"):
        rotary_kv_write(qkv, rope, positions, k_cache, v_cache, slots.int())
    with pytest.raises(ValueError, match="given together"):
        rotary_kv_write(qkv, rope, positions, k_cache, v_cache, slots, q_norm)
    with pytest.raises(ValueError, match=r"k_norm must be contiguous, got strides \(2,\)"):
        rotary_kv_write(qkv, rope, positions, k_cache, v_cache, slots, q_norm, torch.rand(16, 2)[:, 0])
    with pytest.raises(ValueError, match="caches must be contiguous"):
        rotary_kv_write(qkv, rope, positions, k_cache.transpose(0, 1).contiguous().transpose(0, 1), v_cache, slots)


def test_op_is_well_formed() -> None:
    case = make_rotary(4, 6, 2, 16, torch.float32, True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qerl.rotary_kv_write, case.inputs, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["same", "fp8"])
@pytest.mark.parametrize("tokens", [1, 19, 700])
@pytest.mark.parametrize("name", SHAPES)
def test_gpu_bytes_are_those_of_the_reference(
    name: str, tokens: int, cache_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    expected = make_rotary(tokens, *SHAPES[name], dtype, False, cache_dtype)
    case = expected.to("cuda")
    rotary_kv_write(*case.inputs)
    reference.rotary_kv_write(*expected.inputs)
    assert torch.equal(case.qkv.cpu(), expected.qkv)
    for cache, wanted in ((case.k_cache, expected.k_cache), (case.v_cache, expected.v_cache)):
        assert torch.equal(cache.view(torch.uint8).cpu(), wanted.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_gpu_normed_heads(name: str) -> None:
    expected = make_rotary(33, *SHAPES[name], torch.bfloat16, True)
    case = expected.to("cuda")
    rotary_kv_write(*case.inputs)
    reference.rotary_kv_write(*expected.inputs)
    assert rms_ratio(case.qkv.cpu(), expected.qkv) < 2e-4
    _, k, _ = reference.split_heads(case.qkv, *case.k_cache.shape[2:])
    assert torch.equal(case.k_cache.flatten(0, 1)[case.slots], k)
