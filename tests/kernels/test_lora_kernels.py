"""The LoRA update of a fused group: reference on the CPU, kernels on a GPU."""

import pytest
import torch
from kernel_cases import rms_ratio, rounded_once
from lora_cases import GROUPS, make_lora

from qerl.kernels.lora import lora_expand, lora_shrink


@pytest.mark.parametrize("name", GROUPS)
def test_reference_against_fp64(name: str) -> None:
    case = make_lora(name, 7, 48, torch.float32)
    every = (True,) * len(case.b.segments)
    u = lora_shrink(case.x, case.a)
    assert rms_ratio(u, case.x.double() @ case.a.double().t()) < 1e-6
    expected = case.exact_update(u, every)
    lora_expand(case.y, u, case.b, every)
    assert rms_ratio(case.y, expected) < 1e-6


def test_views_and_buffer_are_one_memory() -> None:
    b = make_lora("uneven", 1, 16, torch.float32).b
    assert [tuple(view.shape) for view in b.views] == [(65, 3), (1, 17), (200, 8)]
    assert torch.equal(torch.cat([view.flatten() for view in b.views]), b.buffer)
    assert all(view.is_contiguous() and view.untyped_storage().data_ptr() == b.buffer.data_ptr() for view in b.views)
    assert not b.aligned and make_lora("qkv-r32", 1, 16, torch.float32).b.aligned


def test_misuse_is_named() -> None:
    case = make_lora("qkv-r32", 2, 16, torch.float32)
    every, u = (True,) * 3, torch.zeros(2, 96)
    with pytest.raises(ValueError, match=r"got \[2, 8\] and \[96, 16\]"):
        lora_shrink(case.x[:, :8], case.a)
    with pytest.raises(ValueError, match="must share bf16"):
        lora_shrink(case.x.bfloat16(), case.a)
    with pytest.raises(ValueError, match=r"u \[T, 96 or more\]"):
        lora_expand(case.y, u[:, :95], case.b, every)
    with pytest.raises(ValueError, match="share dtype and device"):
        lora_expand(case.y.bfloat16(), u, case.b, every)
    with pytest.raises(ValueError, match="of 3 members"):
        lora_expand(case.y, u, case.b, every[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows, k", [(1, 16), (8, 3584), (17, 1000), (256, 4200), (300, 512)])
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_against_fp64(name: str, rows: int, k: int, dtype: torch.dtype) -> None:
    case = make_lora(name, rows, k, dtype, "cuda")
    every = (True,) * len(case.b.segments)
    u = lora_shrink(case.x, case.a)
    expected = case.x.double() @ case.a.double().t()
    assert rms_ratio(u, expected) <= rounded_once(expected, dtype)
    assert torch.equal(u, lora_shrink(case.x, case.a))
    expected = case.exact_update(u, every)
    lora_expand(case.y, u, case.b, every)
    assert rms_ratio(case.y, expected) <= rounded_once(expected, dtype)


@pytest.mark.gpu
def test_gpu_graph_follows_new_inputs_and_factors() -> None:
    case = make_lora("qkv-r32", 8, 3584, torch.bfloat16, "cuda")
    every = (True,) * 3
    y, x = torch.zeros_like(case.y), torch.zeros_like(case.x)
    lora_expand(y, lora_shrink(x, case.a), case.b, every)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_expand(y, lora_shrink(x, case.a), case.b, every)
    x.copy_(case.x)
    y.copy_(case.y)
    case.b.buffer.mul_(2)
    graph.replay()
    lora_expand(case.y, lora_shrink(case.x, case.a), case.b, every)
    assert torch.equal(y, case.y)
