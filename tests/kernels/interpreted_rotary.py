"""The rotary kernel in Triton's interpreter (started by test_interpreter.py)."""

import pytest
import torch
from kernel_cases import rms_ratio
from rotary_cases import SHAPES, make_rotary

from qerl.kernels.rotary import launch, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["same", "fp8"])
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_those_of_the_reference(name: str, cache_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    case = make_rotary(6, *SHAPES[name], dtype, False, cache_dtype)
    expected = case.to("cpu")
    launch.rotary_kv_write(*case.inputs)
    reference.rotary_kv_write(*expected.inputs)
    assert torch.equal(case.qkv, expected.qkv)
    for cache, wanted in ((case.k_cache, expected.k_cache), (case.v_cache, expected.v_cache)):
        # Bytes, so that untouched NaN counts as equal.
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
def test_normed_heads(name: str, dtype: torch.dtype) -> None:
    case = make_rotary(5, *SHAPES[name], dtype, True)
    expected = case.to("cpu")
    launch.rotary_kv_write(*case.inputs)
    reference.rotary_kv_write(*expected.inputs)
    # The sum over a head has another order: in bf16 a number near the middle of two may fall to the other.
    bound = 1e-6 if dtype == torch.float32 else 2e-4
    assert rms_ratio(case.qkv, expected.qkv) < bound
    slots = case.slots
    stored = case.k_cache.flatten(0, 1)[slots]
    assert torch.equal(stored, reference.split_heads(case.qkv, *case.k_cache.shape[2:])[1])
    assert case.k_cache.isnan().sum() == case.k_cache.numel() - stored.numel()


def test_tokens_with_negative_slots_are_not_stored() -> None:
    case = make_rotary(6, *SHAPES["gqa3-d64"], torch.bfloat16, False)
    case.slots[[1, 4]] = -1
    expected = case.to("cpu")
    launch.rotary_kv_write(*case.inputs)
    reference.rotary_kv_write(*expected.inputs)
    assert torch.equal(case.qkv, expected.qkv)
    assert (~case.k_cache.isnan()).sum() == 4 * 3 * 64
    for cache, wanted in ((case.k_cache, expected.k_cache), (case.v_cache, expected.v_cache)):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_float8_bytes_of_every_bf16() -> None:
    """All finite bf16 numbers, as the values of 16 tokens."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = numbers[numbers.isfinite()]
    tokens, dim = 16, len(finite) // 16
    every = finite.view(tokens, dim)
    qkv = torch.zeros(tokens, 3 * dim, dtype=torch.bfloat16)
    qkv[:, 2 * dim :] = every
    rope, positions = torch.ones(1, dim), torch.zeros(tokens, dtype=torch.int64)
    k_cache, v_cache = torch.zeros(2, tokens, 1, 1, dim).to(torch.float8_e4m3fn)
    launch.rotary_kv_write(qkv, rope, positions, k_cache, v_cache, torch.arange(tokens), None, None, 0.0)
    expected = every.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(v_cache.view(torch.uint8).view(tokens, dim), expected.view(torch.uint8))
