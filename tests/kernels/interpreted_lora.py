"""The LoRA kernels in Triton's interpreter (started by test_interpreter.py)."""

import pytest
import torch
from kernel_cases import rms_ratio, rounded_once
from lora_cases import GROUPS, make_lora

from qerl.kernels.arrival import arrival_counters
from qerl.kernels.lora import launch

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("splits", [1, 2, 32], ids=["whole", "two", "many"])
@pytest.mark.parametrize("rows, k", [(1, 16), (17, 1000), (3, 4200)])
def test_shrink(rows: int, k: int, splits: int, dtype: torch.dtype) -> None:
    case = make_lora("qkv-r32", rows, k, dtype)
    u = launch.lora_shrink(case.x, case.a, splits)
    expected = case.x.double() @ case.a.double().t()
    assert rms_ratio(u, expected) <= rounded_once(expected, dtype)
    assert not arrival_counters(6, u.device).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("name", GROUPS)
def test_expand(name: str, rows: int, dtype: torch.dtype) -> None:
    case = make_lora(name, rows, 16, dtype)
    u = torch.randn(rows, case.a.shape[0]).to(dtype)
    for active in ((True,) * len(case.b.segments), (False, *(True,) * (len(case.b.segments) - 1))):
        y = case.y.clone()
        launch.lora_expand(y, u, case.b.buffer, case.b.row_map(active), case.b.max_rank, case.b.aligned)
        expected = case.exact_update(u, active)
        assert rms_ratio(y, expected) <= rounded_once(expected, dtype)
        changed = (case.exact_update(torch.ones_like(u), active) != case.y.double()).any(0)
        assert torch.equal(y[:, ~changed], case.y[:, ~changed])


def test_splits_follow_from_shapes() -> None:
    assert launch.num_splits(1, 96, 3584, 132) == 16
    assert launch.num_splits(8, 32, 18944, 132) == 32
    assert launch.num_splits(256, 64, 3584, 132) == 8
    assert launch.num_splits(1, 8, 100, 132) == 1
    assert launch.num_splits(0, 8, 100, 132) == 1
