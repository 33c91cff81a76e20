"""The gradient of the input from packed weights on a Hopper GPU, every shape of tile, against fp64."""

import pytest
import torch
from kernel_cases import exact_weight, make_group, rms_ratio, rounded_once
from test_tiles import in_tiles

from qerl.kernels.quant_matmul import GroupWeight, hopper, hopper_grad, quant_matmul_dx, tiles_supported
from qerl.kernels.quant_matmul.hopper_grad_plan import GRAD_ROWS, InputGradPlan, all_input_grad_plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
# Ragged everywhere: row tiles that fill no step, windows that fill no tile, more and fewer tiles than multiprocessors.
GROUPS = [((16,), 64, True), ((592,), 1088, True), ((576, 192, 192), 576, True), ((9488,), 448, True)]
GROUP_IDS = ["one-window", "ragged", "smollm2-qkv", "long-sum"]


@pytest.fixture
def hopper_gpu() -> None:
    if not tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")


@pytest.fixture(scope="module", params=GROUPS, ids=GROUP_IDS)
def weight(request: pytest.FixtureRequest) -> tuple[GroupWeight, torch.Tensor]:
    """A weight in tiles and its fp64 value."""
    rows = make_group("nvfp4", *request.param, device="cuda")
    return in_tiles(rows), exact_weight(rows)


def _run(plan: InputGradPlan, dy: torch.Tensor, packed: GroupWeight) -> torch.Tensor:
    """dx, in memory that was NaN and with a row of NaN after it."""
    dx = torch.full((len(dy) + 1, packed.in_features), float("nan"), dtype=torch.bfloat16, device="cuda")
    hopper._workspace(dy.device)[0].fill_(255)
    hopper_grad.run_input_grad(plan, dy, packed, dx[:-1])
    assert dx[-1].isnan().all()  # nothing is written past the last row
    assert not hopper._workspace(dy.device)[1].any()  # counters are zero between launches
    return dx[:-1]


@pytest.mark.parametrize("plan", all_input_grad_plans(), ids=lambda p: f"{p.name}-{p.whole}")
def test_every_kernel(weight: tuple[GroupWeight, torch.Tensor], plan: InputGradPlan) -> None:
    packed, exact = weight
    for m in (1, plan.tokens - 1, plan.tokens + 3, 5 * plan.tokens + 17):
        dy = torch.randn(m, packed.out_features, device="cuda").bfloat16()
        expected = dy.double() @ exact
        dx = _run(plan, dy, packed)
        assert rms_ratio(dx, expected) <= 1.03 * rounded_once(expected, torch.bfloat16)
        assert torch.equal(dx, _run(plan, dy, packed))


@pytest.mark.parametrize("plan", all_input_grad_plans(), ids=lambda p: f"{p.name}-{p.whole}")
def test_single_weights(weight: tuple[GroupWeight, torch.Tensor], plan: InputGradPlan) -> None:
    """One-hot rows read single channels: every weight at its place, to the last bit."""
    packed, exact = weight
    for first in range(0, packed.out_features, 2048):
        last = min(packed.out_features, first + 2048)
        dy = torch.zeros(last - first, packed.out_features, device="cuda", dtype=torch.bfloat16)
        dy[torch.arange(last - first), torch.arange(first, last)] = 1.0
        assert torch.allclose(_run(plan, dy, packed).double(), exact[first:last], rtol=2**-8, atol=0)


def test_what_is_not_finite_stays_in_its_row(weight: tuple[GroupWeight, torch.Tensor]) -> None:
    """Past the ends of dy and of the weights there are zeros, not what memory held."""
    packed, _ = weight
    dy = torch.randn(70, packed.out_features, device="cuda").bfloat16()
    clean = quant_matmul_dx(dy, packed)
    dy[3], dy[69] = float("nan"), float("inf")
    dx = quant_matmul_dx(dy, packed)
    others = [row for row in range(70) if row not in (3, 69)]
    assert torch.equal(dx[others], clean[others]) and clean.isfinite().all()
    assert not dx[[3, 69]].isfinite().any()


@pytest.mark.parametrize("m", [1, 63, 300, GRAD_ROWS, GRAD_ROWS + 1])
@pytest.mark.usefixtures("poisoned_memory")
def test_the_op(weight: tuple[GroupWeight, torch.Tensor], m: int) -> None:
    packed, exact = weight
    dy = torch.randn(m, packed.out_features, device="cuda").bfloat16()
    expected = dy.double() @ exact
    dx = quant_matmul_dx(dy, packed)
    assert rms_ratio(dx, expected) <= 1.03 * rounded_once(expected, torch.bfloat16)
    assert torch.equal(dx, quant_matmul_dx(dy, packed))


def test_members_with_scales_of_their_own() -> None:
    """The group goes through the workspace; a member by itself, whose scale is on the device, does not."""
    rows = make_group("nvfp4", (304, 16, 48), 1088, uniform=False, device="cuda")
    packed, exact = in_tiles(rows), exact_weight(rows)
    assert hopper_grad.plan_for(70, packed) is None
    dy = torch.randn(70, packed.out_features, device="cuda").bfloat16()
    for first, last in ((0, 304), (304, 320), (320, 368)):
        member = packed.rows(first, last)
        assert member.uniform_scale is None and hopper_grad.plan_for(70, member) is not None
        part = dy[:, first:last].contiguous()
        expected = part.double() @ exact[first:last]
        assert rms_ratio(quant_matmul_dx(part, member), expected) <= 1.03 * rounded_once(expected, torch.bfloat16)


def test_chains_in_graphs(weight: tuple[GroupWeight, torch.Tensor]) -> None:
    """Gradients that follow each other, each early to start, replayed with new inputs: same bits as one by one."""
    packed, _ = weight
    dy = torch.randn(150, packed.out_features, device="cuda").bfloat16()

    def chain() -> list[torch.Tensor]:
        outputs, hidden = [], dy
        for _ in range(4):
            outputs.append(quant_matmul_dx(hidden, packed))
            hidden = hidden + outputs[-1][:, :1]
        return outputs

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain()
    for _ in range(5):
        dy.copy_(torch.randn_like(dy))
        graph.replay()
        assert all(torch.equal(dx, wanted) for dx, wanted in zip(outputs, chain(), strict=True))
        assert not hopper._workspace(dy.device)[1].any()
