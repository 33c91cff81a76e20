"""The Hopper kernels on a Hopper GPU, every shape of tile, against fp64."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import can_make_u, exact_weight, make_group, make_u_inside, rms_ratio, rounded_once
from test_tiles import in_tiles

from qerl.kernels.lora import lora_shrink
from qerl.kernels.quant_matmul import (
    PACKED_ROWS,
    GroupWeight,
    LoraUpdate,
    dequantize,
    hopper,
    quant_lora_matmul,
    quant_matmul,
    quant_matmul_dx,
    tiles_supported,
    to_tiles,
    workspace_bytes,
)
from qerl.kernels.quant_matmul.hopper_plan import (
    SHARED_BYTES,
    FewRowsPlan,
    ManyRowsPlan,
    all_many_rows_plans,
    resident_clusters,
)
from qerl.kernels.rms_norm import add_rms_norm, rms_norm
from qerl.nn.random_weights import random_packed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
# Ragged everywhere: windows that fill no unit, tiles that fill no block, fewer units than multiprocessors.
# At the longest k, making a part of u takes many trips to the L2 cache.
GROUPS = [((16,), 64, True), ((304, 16, 48), 1088, False), ((576, 192, 192), 576, True), ((528,), 40960, True)]
GROUP_IDS = ["one-tile", "own-scales", "smollm2-qkv", "long-k"]
# Tensor cores round every addition of a long sum toward zero; a rounding to bf16 would be 1.7e-3.
FP32_BOUND = 1e-4
ROWS = [1, 3, 8, 9, 16, 17, 40, 64, 100, 128, 200, 300, 2100, PACKED_ROWS + 1]


@pytest.fixture
def hopper_gpu() -> None:
    if not tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")


@pytest.fixture(scope="module", params=GROUPS, ids=GROUP_IDS)
def weight(request: pytest.FixtureRequest) -> tuple[GroupWeight, torch.Tensor]:
    """A weight in tiles and its fp64 value."""
    rows = make_group("nvfp4", *request.param, device="cuda")
    return in_tiles(rows), exact_weight(rows)


def _update(weight: GroupWeight, rank: int) -> LoraUpdate:
    """LoRA of every other segment, with columns of u that no segment reads in between."""
    places, column, size = [], 0, 0
    for index, rows in enumerate(weight.segments):
        places.append((0, 0, 0) if index % 2 else (column, rank, size))
        column, size = column + rank, size + rows * rank
    a = torch.randn(column, weight.in_features, device="cuda").bfloat16() / math.sqrt(weight.in_features)
    return LoraUpdate(a, torch.randn(size, device="cuda").bfloat16(), tuple(places))


def _added(weight: GroupWeight, lora: LoraUpdate, u: torch.Tensor) -> torch.Tensor:
    """What LoRA adds for this u, in fp64."""
    parts = []
    for rows, (column, rank, place) in zip(weight.segments, lora.places, strict=True):
        factor = lora.b[place : place + rows * rank].view(rows, rank).double()
        parts.append(u[:, column : column + rank].double() @ factor.t())
    return torch.cat(parts, 1)


def _check_u(x: torch.Tensor, lora: LoraUpdate, u: torch.Tensor) -> None:
    exact = x.double() @ lora.a.double().t()
    assert rms_ratio(u, exact) <= 1.03 * rounded_once(exact, torch.bfloat16)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.usefixtures("poisoned_memory")
def test_product_bias_and_lora(weight: tuple[GroupWeight, torch.Tensor], m: int) -> None:
    packed, exact = weight
    x = torch.randn(m, packed.in_features, device="cuda").bfloat16()
    bias = torch.randn(packed.out_features, device="cuda").bfloat16()
    product = x.double() @ exact.t()
    for rank in (0, 8, 32, 144):
        lora = _update(packed, rank) if rank else None
        for offset in (None, bias):
            added = 0.0
            if lora is None:
                y = quant_matmul(x, packed, offset)
            else:
                y, u = quant_lora_matmul(x, packed, offset, lora)
                _check_u(x, lora, u)
                added = _added(packed, lora, u)
            expected = product + added + (0.0 if offset is None else offset.double())
            bound = rounded_once(expected, torch.bfloat16)
            assert rms_ratio(y, expected) <= 1.03 * bound
            assert torch.equal(y, quant_matmul(x, packed, offset, lora))
            wide = quant_matmul(x, packed, offset, lora, torch.float32)
            assert wide.dtype == torch.float32 and rms_ratio(wide, expected) < FP32_BOUND
            if (
                m <= PACKED_ROWS or lora is not None
            ) and offset is None:  # the same sums, one of them rounded at the end
                assert torch.equal(wide.bfloat16(), y)
            assert not hopper._workspace(x.device)[1].any()  # counters are zero between launches


@pytest.mark.parametrize("m", [3, 40])
def test_factors_may_start_anywhere(weight: tuple[GroupWeight, torch.Tensor], m: int) -> None:
    """As views into a flat buffer of parameters do."""
    packed, _ = weight
    lora = _update(packed, 8)
    x = torch.randn(m, packed.in_features, device="cuda").bfloat16()
    flat = torch.cat([lora.a.new_zeros(3), lora.a.flatten(), lora.b])
    a, b = flat[3 : 3 + lora.a.numel()].view_as(lora.a), flat[3 + lora.a.numel() :]
    found = quant_lora_matmul(x, packed, None, LoraUpdate(a, b, lora.places))
    assert all(map(torch.equal, found, quant_lora_matmul(x, packed, None, lora)))


def _plans() -> list:
    few = [FewRowsPlan(w, s) for w in (8, 12, 16) for s in (1, 2, 3, 5)]
    return few + [FewRowsPlan(w, s, True) for w in (8, 12) for s in (1, 4)] + all_many_rows_plans()


def _id(plan: FewRowsPlan | ManyRowsPlan) -> str:
    if isinstance(plan, FewRowsPlan):
        return f"{plan.name}-{plan.slices}"
    return f"{plan.name}-{plan.cluster if plan.whole else 'shared'}"


@pytest.mark.parametrize("plan", _plans(), ids=_id)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_kernel(weight: tuple[GroupWeight, torch.Tensor], plan, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    packed, exact = weight
    make_u_inside(monkeypatch)
    few = isinstance(plan, FewRowsPlan)
    n, k = exact.shape
    rows = (1, 5, 8) if few else (1, plan.tokens - 1, plan.tokens + 3)
    for m in rows:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        if few and (plan.slices > k // 64 or plan.shared_bytes(m, n, k, sms) > SHARED_BYTES):
            continue
        if not few and not plan.fits(m, n, k, sms):
            assert plan.cluster > k // (64 * plan.unit)
            continue
        run = hopper.run_few_rows if few else hopper.run_many_rows
        x = torch.randn(m, k, device="cuda").bfloat16()
        y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        partial, counters, slices = hopper._workspace(x.device)
        partial.fill_(255), slices.fill_(255)
        run(plan, x, packed, None, None, y)
        expected = x.double() @ exact.t()
        assert rms_ratio(y, expected) <= 1.03 * rounded_once(expected, torch.bfloat16)
        assert not counters.any()  # they are zero between launches
        wide = torch.full((m + 1, n), float("nan"), device="cuda")
        run(plan, x, packed, None, None, wide[:m])
        assert rms_ratio(wide[:m], expected) < FP32_BOUND and torch.equal(wide[:m].bfloat16(), y)
        assert wide[m].isnan().all()  # nothing is written past the last row
        lora = _update(packed, 32)
        shape = m, len(lora.a), n, k, sms
        assert few or (plan.lora_cut(*shape).slices is not None) == can_make_u(plan, *shape)
        u = torch.full((m + 1, lora.a.shape[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
        run(plan, x, packed, None, lora, y, u[:m])
        _check_u(x, lora, u[:m])
        expected += _added(packed, lora, u[:m])
        assert rms_ratio(y, expected) <= 1.03 * rounded_once(expected, torch.bfloat16)
        assert u[m].isnan().all() and not counters.any()


@pytest.mark.parametrize("cluster", [2, 3, 4])
@pytest.mark.usefixtures("poisoned_memory")
def test_as_many_clusters_as_are_said_to_run_at_once(cluster: int) -> None:
    """Their blocks wait for each other's slices of u: were they not all resident, this would hang."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    n = 128 * resident_clusters(cluster, sms)
    rows = make_group("nvfp4", (n,), 1024, device="cuda")
    packed = in_tiles(rows)
    lora = _update(packed, 32)
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    y, u = (torch.empty(16, width, device="cuda", dtype=torch.bfloat16) for width in (n, lora.a.shape[0]))
    plan = ManyRowsPlan(16, 2, whole=True, cluster=cluster)
    assert plan.lora_cut(16, 32, n, 1024, sms).slices is not None
    hopper.run_many_rows(plan, x, packed, None, lora, y, u)
    _check_u(x, lora, u)
    expected = x.double() @ exact_weight(rows).t() + _added(packed, lora, u)
    assert rms_ratio(y, expected) <= 1.03 * rounded_once(expected, torch.bfloat16)


def test_dequantize_and_dx(weight: tuple[GroupWeight, torch.Tensor]) -> None:
    packed, exact = weight
    scale = exact / (dequantize(packed).double() + (exact == 0))
    assert torch.allclose(dequantize(packed).double() * scale, exact, rtol=1e-12)
    assert torch.equal(dequantize(packed, dtype=torch.float32), dequantize(packed).float())
    cpu = dataclasses.replace(
        packed,
        codes=packed.codes.cpu(),
        global_scale=packed.global_scale.cpu(),
    )
    assert torch.equal(dequantize(packed).cpu(), dequantize(cpu))
    dy = torch.randn(70, packed.out_features, device="cuda").bfloat16()
    expected = dy.double() @ exact
    assert rms_ratio(quant_matmul_dx(dy, packed), expected) <= 1.2 * rounded_once(expected, torch.bfloat16)
    wide = quant_matmul_dx(dy, packed, torch.float32)
    assert wide.dtype == torch.float32 and rms_ratio(wide, expected) < FP32_BOUND
    x = torch.randn(5, packed.in_features, device="cuda")
    assert rms_ratio(quant_matmul(x, packed), x.double() @ exact.t()) < 2e-6


@pytest.mark.parametrize(
    "shape",
    [
        (1, 16, 64),
        (5, 24, 3584),
        (64, 96, 5120),
        (200, 96, 3584),
        (512, 32, 18944),
        (512, 256, 28672),
    ],  # workspace full
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_lora_shrink(shape: tuple[int, int, int]) -> None:
    m, r, k = shape
    assert not hopper._workspace(torch.device("cuda", 0))[1].any()
    x, a = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(r, k, device="cuda").bfloat16() / 60
    u, expected = lora_shrink(x, a), x.double() @ a.double().t()
    assert rms_ratio(u, expected) <= 1.03 * rounded_once(expected, torch.bfloat16)
    assert torch.equal(u, lora_shrink(x, a))


@pytest.mark.parametrize("m", [1, 8, 24, 150])
def test_chains_in_graphs(weight: tuple[GroupWeight, torch.Tensor], m: int) -> None:
    """Several norms and products with LoRA, each early to start, replayed with new inputs: same bits as one by one."""
    packed, _ = weight
    rank, columns = 32, packed.in_features
    if columns > 32768:
        pytest.skip("no norm has such long rows")
    norm = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
    factors = [torch.randn(rank, columns, device="cuda").bfloat16() / 60 for _ in range(6)]
    b = torch.randn(packed.out_features * rank, device="cuda").bfloat16()
    starts = [sum(packed.segments[:index]) for index in range(len(packed.segments))]
    places = tuple((0, rank, start * rank) for start in starts)
    x = torch.randn(m, columns, device="cuda").bfloat16()

    def chain(between: Callable[[], None]) -> list[torch.Tensor]:
        outputs, hidden = [], x
        for a in factors:
            normed = rms_norm(hidden, norm, None, 1e-6)
            between()
            y = quant_matmul(normed, packed, None, LoraUpdate(a, b, places))
            between()
            outputs.append(y)
            # The next input depends on this output, through a kernel that may start early as well.
            hidden = add_rms_norm(y[:, :1].expand(m, columns).contiguous(), normed, norm, None, 1e-6)[0]
        return outputs

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain(lambda: None)
    for _ in range(10):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(y, wanted) for y, wanted in zip(outputs, chain(torch.cuda.synchronize), strict=True))
        assert not hopper._workspace(x.device)[1].any()


@pytest.mark.parametrize("shape", [(152064, 3584), (49152, 576)], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_the_logits_of_a_head(shape: tuple[int, int]) -> None:
    from qerl.kernels.quant_matmul.paths import BLOCK_BYTES

    n, k = shape
    packed = random_packed("nvfp4", n, k, "cuda", torch.Generator("cuda").manual_seed(0))
    tiles = to_tiles(packed.codes, packed.block_scale)
    divisor = float(packed.global_scale)
    weight = GroupWeight("nvfp4", (n,), k, tiles, None, packed.global_scale, 1.0 / divisor)
    exact = dequantize(weight).double() / divisor
    for m in (1, 2, 8, 16, 64, 220, 300):
        x = torch.randn(m, k, device="cuda").bfloat16()
        assert rms_ratio(quant_matmul(x, weight, out_dtype=torch.float32), x.double() @ exact.t()) < FP32_BOUND
    dy = torch.randn(220, n, device="cuda").bfloat16()
    before = workspace_bytes(dy.device)
    dx = quant_matmul_dx(dy, weight, torch.float32)
    assert rms_ratio(dx, dy.double() @ exact) < 3 * FP32_BOUND  # sums of 30,000 products
    assert workspace_bytes(dy.device) <= max(before, BLOCK_BYTES)
