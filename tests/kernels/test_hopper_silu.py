"""SiLU-mul in the epilogue of gate and up on a Hopper GPU, against the product followed by `silu_mul`."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import make_group, make_u_inside, rms_ratio
from test_tiles import in_tiles

from qerl.kernels.quant_matmul import (
    PACKED_ROWS,
    GroupWeight,
    LoraUpdate,
    hopper,
    quant_matmul,
    quant_silu_matmul,
    tiles_supported,
)
from qerl.kernels.quant_matmul.hopper_plan import FewRowsPlan, ManyRowsPlan, all_many_rows_plans
from qerl.kernels.silu_mul import silu_mul

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
ROWS = [1, 3, 8, 9, 16, 17, 40, 64, 100, 128, 200, 300, 513, 2049, PACKED_ROWS + 1]


@pytest.fixture
def hopper_gpu() -> None:
    if not tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")


def _gate_and_up(channels: int, k: int, uniform: bool) -> GroupWeight:
    return in_tiles(make_group("nvfp4", (channels, channels), k, uniform, device="cuda"))


def _update_of_both(weight: GroupWeight, rank: int) -> LoraUpdate:
    a = torch.randn(2 * rank, weight.in_features, device="cuda").bfloat16() / math.sqrt(weight.in_features)
    b = torch.randn(weight.out_features * rank, device="cuda").bfloat16()
    return LoraUpdate(a, b, ((0, rank, 0), (rank, rank, weight.segments[0] * rank)))


def _same_but_for_the_order_of_sums(found: torch.Tensor, expected: torch.Tensor) -> None:
    """A sum that falls to the other side of the middle between two bf16 numbers is off by up to 0.8 %, and fewer than
    one in thirty does; what is rounded in another place differs by 3e-3."""
    assert rms_ratio(found, expected) < 1.2e-3


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("channels, k, uniform", [(16, 64, True), (304, 1088, False), (1536, 576, True)], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_silu_in_the_epilogue(channels: int, k: int, uniform: bool, m: int) -> None:
    weight = _gate_and_up(channels, k, uniform)
    x, bias = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(2 * channels, device="cuda").bfloat16()
    for rank in (0, 8, 32, 144):
        lora = _update_of_both(weight, rank) if rank else None
        for offset in (None, bias):
            found = quant_silu_matmul(x, weight, offset, lora)
            _same_but_for_the_order_of_sums(found, silu_mul(quant_matmul(x, weight, offset, lora)))
            assert torch.equal(found, quant_silu_matmul(x, weight, offset, lora))
            assert not hopper._workspace(x.device)[1].any()  # counters are zero between launches


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize(
    "plan",
    [plan for plan in all_many_rows_plans() if plan.cluster == 1],
    ids=lambda plan: f"{plan.name}-{plan.whole}",
)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_many_row_kernel_with_silu(plan: ManyRowsPlan, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no tile is shared, both ways sum in the same order: the same bits. That shows SiLU-mul and its roundings to
    be those of the other kernel, instruction by instruction."""
    make_u_inside(monkeypatch)
    weight = _gate_and_up(304, 1088, False)
    bias = torch.randn(608, device="cuda").bfloat16()
    for m in (1, plan.tokens - 1, plan.tokens + 3, 3 * plan.tokens):
        x = torch.randn(m, 1088, device="cuda").bfloat16()
        lora = _update_of_both(weight, rank) if rank else None
        y = torch.full((m, 608), float("nan"), dtype=torch.bfloat16, device="cuda")
        found = torch.full((m + 1, 304), float("nan"), dtype=torch.bfloat16, device="cuda")
        u = None if lora is None else torch.full((m, 2 * rank), float("nan"), dtype=torch.bfloat16, device="cuda")
        hopper.run(plan, x, weight, bias, lora, y, u)
        made = None if u is None else u.clone()
        if u is not None:
            u.fill_(float("nan"))
        hopper.run(dataclasses.replace(plan, silu=True), x, weight, bias, lora, found[:m], u)
        _same_but_for_the_order_of_sums(found[:m], silu_mul(y))
        assert found[m].isnan().all()  # nothing is written past the last row
        assert made is None or torch.equal(u, made)
        if plan.whole:
            assert torch.equal(found[:m], silu_mul(y))
        assert not hopper._workspace(x.device)[1].any()


@pytest.mark.parametrize(
    "plan",
    [*(FewRowsPlan(warps) for warps in (8, 12, 16)), *(FewRowsPlan(warps, pair=True) for warps in (8, 12))],
    ids=lambda plan: plan.name,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_few_row_kernel_with_silu(plan: FewRowsPlan) -> None:
    for channels, k in ((16, 64), (304, 1088), (4736, 3584)):
        weight = _gate_and_up(channels, k, True)
        for m in (1, 5, 8):
            x = torch.randn(m, k, device="cuda").bfloat16()
            y = torch.full((m, 2 * channels), float("nan"), dtype=torch.bfloat16, device="cuda")
            found = torch.full((m + 1, channels), float("nan"), dtype=torch.bfloat16, device="cuda")
            hopper.run(plan, x, weight, None, None, y)
            hopper.run(dataclasses.replace(plan, silu=True), x, weight, None, None, found[:m])
            _same_but_for_the_order_of_sums(found[:m], silu_mul(y))
            assert found[m].isnan().all()


@pytest.mark.parametrize("m", [1, 8, 24, 150])
@pytest.mark.usefixtures("poisoned_memory")
def test_silu_chains_in_graphs(m: int) -> None:
    """MLPs one after another, replayed with new inputs: the same bits as one by one."""
    gate_up = _gate_and_up(2048, 512, True)
    down = in_tiles(make_group("nvfp4", (512,), 2048, device="cuda"))
    lora = _update_of_both(gate_up, 32)
    x = torch.randn(m, 512, device="cuda").bfloat16()

    def chain(between: Callable[[], None]) -> list[torch.Tensor]:
        outputs, hidden = [], x
        for _ in range(4):
            outputs.append(quant_silu_matmul(hidden, gate_up, None, lora))
            between()
            hidden = quant_matmul(outputs[-1], down)
            between()
        return [*outputs, hidden]

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain(lambda: None)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(y, wanted) for y, wanted in zip(outputs, chain(torch.cuda.synchronize), strict=True))
        assert not hopper._workspace(x.device)[1].any()
