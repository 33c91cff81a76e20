"""The CUDA C++ products of Hopper as they are written, on a CPU: blocks together, turns at random, strict barriers."""

import ctypes
import dataclasses
import math

import pytest
import torch
from emulated_products import Emulator, Result, build_products
from kernel_cases import can_make_u, exact_weight, make_group, rms_ratio, rounded_once
from test_tiles import in_tiles

from qerl.kernels.quant_matmul import LoraUpdate
from qerl.kernels.quant_matmul.hopper_plan import FewRowsPlan, ManyRowsPlan

# (rows of a tile, warpgroups, whole tiles), multiprocessors, segments, windows of k, rows, ranks.
# Every shape of tile; more parts of u than blocks, blocks that make none and blocks whose first tile begins
# elsewhere; ragged ends of n, k, m and the ranks; tiles of one to three segments, some of them without LoRA.
_MANY = [
    ((16, 2, False), 5, (48, 16, 240), 61, 19, (144, 0, 72)),
    ((16, 2, True), 6, (272,), 62, 16, (32,)),
    ((16, 3, False), 4, (80, 48, 32), 45, 9, (8, 72, 144)),
    ((16, 3, True), 3, (208, 16), 33, 31, (72, 0)),
    ((32, 2, False), 7, (48, 16, 240), 37, 35, (144, 0, 72)),
    ((32, 2, True), 5, (272,), 30, 32, (32,)),
    ((32, 3, False), 5, (80, 48, 32), 49, 33, (8, 72, 144)),
    ((32, 3, True), 4, (208, 16), 33, 20, (72, 0)),
    ((64, 2, False), 7, (48, 16, 240), 29, 67, (144, 0, 72)),
    ((64, 2, True), 5, (272,), 30, 63, (8,)),
    ((64, 3, False), 5, (80, 48, 32), 31, 67, (8, 72, 144)),
    ((64, 3, True), 4, (208, 16), 33, 50, (72, 0)),
    ((128, 2, False), 8, (48, 16, 240), 25, 131, (144, 0, 72)),
    ((128, 2, True), 3, (144,), 35, 127, (32,)),
    ((128, 3, False), 3, (80, 48, 32), 31, 131, (8, 32, 72)),
    ((128, 3, True), 4, (208, 16), 33, 100, (72, 0)),
    ((256, 2, False), 3, (48, 16, 80), 9, 259, (144, 0, 72)),  # more parts of u than blocks: from an earlier kernel
    ((256, 2, False), 4, (48, 16, 80), 9, 259, (144, 0, 72)),
    ((256, 2, True), 2, (144,), 15, 300, (8,)),  # more steps than stages
    ((256, 2, True), 3, (144,), 7, 255, (32,)),
    ((16, 2, False), 12, (48, 16, 240), 20, 9, (32, 0, 8)),  # parts of two steps
    ((16, 2, False), 3, (304, 16), 3, 40, (8, 8)),  # tiles of one unit: early copies could cross them
    ((64, 2, False), 3, (304, 16), 3, 130, None),
    ((128, 3, False), 5, (16, 400), 9, 130, None),
    ((16, 3, True), 2, (16,), 1, 1, (8,)),
    # Clusters: shares of two token blocks for three and four, a tile without channels of its last warps.
    ((16, 2, True, False, 3), 9, (48, 16, 240), 61, 19, (144, 0, 72)),
    ((16, 3, True, False, 4), 4, (80, 48), 45, 9, (8, 72)),
    ((32, 2, True, False, 2), 8, (272,), 37, 35, None),
    ((32, 3, True, False, 3), 6, (80, 48, 32), 49, 33, (8, 72, 144)),
    ((64, 2, True, False, 4), 8, (144,), 30, 67, (32,)),
    ((64, 3, True, False, 2), 8, (208, 16), 33, 67, (72, 0)),
    ((128, 2, True, False, 3), 6, (48, 16, 80), 25, 100, (144, 0, 72)),
    ((128, 3, True, False, 2), 4, (80, 48, 32), 5, 131, (8, 32, 72)),
    ((256, 2, True, False, 3), 6, (48, 16, 80), 9, 255, (144, 0, 72)),
    ((256, 2, True, False, 4), 4, (48, 16, 16), 7, 200, None),
]
# (warps, parts of k, pairs of blocks), as above.
_FEW = [
    ((8, 1, False), 5, (48, 16, 240), 33, 8, (144, 0, 72)),
    ((8, 3, False), 7, (80, 48, 32), 13, 3, (8, 72, 32)),
    ((12, 2, False), 6, (272,), 21, 5, (32,)),
    ((16, 1, False), 3, (208, 16), 9, 1, (72, 0)),
    ((8, 1, True), 6, (48, 16, 240), 33, 7, (144, 0, 72)),
    ((12, 1, True), 8, (48, 16), 12, 8, (8, 32)),  # blocks without tiles
    ((12, 2, True), 9, (80, 48, 32), 7, 2, (0, 8, 0)),
    ((16, 2, False), 4, (48,), 5, 6, None),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_products(tmp_path_factory.mktemp("products"), "many_rows.cu", "few_rows.cu", "few_rows_wide.cu")


def _update(segments: tuple[int, ...], k: int, ranks: tuple[int, ...]) -> LoraUpdate:
    places, column, size = [], 0, 0
    for rows, rank in zip(segments, ranks, strict=True):
        places.append((column, rank, size) if rank else (0, 0, 0))
        column, size = column + rank, size + rows * rank
    a = torch.randn(column, k).bfloat16() / math.sqrt(k)
    return LoraUpdate(a, torch.randn(size).bfloat16(), tuple(places))


class Product:
    """A weight, rows of x and what multiplying them must give; if not `plain`, with bias and global scales of their
    own."""

    def __init__(
        self, segments: tuple[int, ...], windows: int, m: int, ranks: tuple[int, ...] | None, plain: bool
    ) -> None:
        torch.manual_seed(windows + m)
        rows = make_group("nvfp4", segments, 64 * windows, uniform=plain)
        self.weight, self.x = in_tiles(rows), torch.randn(m, 64 * windows).bfloat16()
        self.bias = None if plain else torch.randn(self.weight.out_features).bfloat16()
        self.lora = _update(segments, 64 * windows, ranks) if ranks else None
        self.product = self.x.double() @ exact_weight(rows).t() + (0.0 if plain else self.bias.double())

    def check(self, result: Result) -> None:
        """Against fp64: u, and y for that u; nothing is written past the last row."""
        m, expected = self.x.shape[0], self.expected(result)
        assert result.y[m].isnan().all()
        bound = 1e-6 if result.y.dtype == torch.float32 else 1.03 * rounded_once(expected, torch.bfloat16)
        assert rms_ratio(result.y[:m], expected) <= bound

    def needs_a_kernel_before(self, emulator: Emulator, plan: FewRowsPlan | ManyRowsPlan) -> bool:
        """Whether u comes from there."""
        if self.lora is None:
            return False
        weight, ranks = self.weight, self.lora.a.shape[0]
        shape = self.x.shape[0], ranks, weight.out_features, weight.in_features
        return not can_make_u(plan, *shape, emulator.multiprocessors)

    def expected(self, result: Result) -> torch.Tensor:
        """y in fp64 for the u of `result`, which is checked."""
        m, expected = self.x.shape[0], self.product
        if self.lora is not None:
            u, exact = result.u[:m], self.x.double() @ self.lora.a.double().t()
            assert result.u[m].isnan().all()
            assert rms_ratio(u, exact) <= 1.03 * rounded_once(exact, torch.bfloat16)
            added = []
            for rows, (column, rank, place) in zip(self.weight.segments, self.lora.places, strict=True):
                factor = self.lora.b[place : place + rows * rank].view(rows, rank).double()
                added.append(u[:, column : column + rank].double() @ factor.t())
            expected = expected + torch.cat(added, 1)
        return expected


def _check_turns(
    emulator: Emulator, plan: FewRowsPlan | ManyRowsPlan, product: Product, dtype: torch.dtype, turns: int
) -> None:
    """Whatever the order in which threads, copies and blocks take their turns: the same bits."""
    inputs = plan, product.x, product.weight, product.bias, product.lora
    first = emulator.run(*inputs, seed=0, dtype=dtype)
    product.check(first)
    assert emulator.kernels_before == product.needs_a_kernel_before(emulator, plan)
    for seed in range(1, turns):
        again = emulator.run(*inputs, seed=seed, dtype=dtype)
        assert torch.equal(again.y[:-1], first.y[:-1])
        assert first.u is None or torch.equal(again.u[:-1], first.u[:-1])


@pytest.mark.parametrize(
    "kind, plan, multiprocessors, segments, windows, m, ranks",
    [(kind, *case) for kind, cases in ((ManyRowsPlan, _MANY), (FewRowsPlan, _FEW)) for case in cases],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_products(
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[FewRowsPlan] | type[ManyRowsPlan],
    plan: tuple[int | bool, ...],
    multiprocessors: int,
    segments: tuple[int, ...],
    windows: int,
    m: int,
    ranks: tuple[int, ...] | None,
) -> None:
    product = Product(segments, windows, m, ranks, plain=plan[2])
    emulator = Emulator(library, multiprocessors, monkeypatch)
    _check_turns(emulator, kind(*plan), product, torch.bfloat16, turns=4)


@pytest.mark.parametrize(
    "plan, case",
    [
        (ManyRowsPlan(64, 2, False), _MANY[8]),
        (ManyRowsPlan(64, 2, True, cluster=3), _MANY[8]),
        (FewRowsPlan(8), _FEW[0]),
    ],
    ids=str,
)
def test_wide(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, plan, case) -> None:  # type: ignore[no-untyped-def]
    """The fp32 result of the same sums."""
    product = Product(*case[2:], plain=False)
    emulator = Emulator(library, case[1], monkeypatch)
    _check_turns(emulator, plan, product, torch.float32, turns=2)
    inputs = plan, product.x, product.weight, product.bias, product.lora
    wide, narrow = emulator.run(*inputs, seed=3, dtype=torch.float32), emulator.run(*inputs, seed=4)
    assert torch.equal(wide.y[:-1].bfloat16(), narrow.y[:-1])


@pytest.mark.parametrize("ranks", [None, (8, 0, 32)], ids=["plain", "lora"])
def test_blocks_of_rows(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...] | None) -> None:
    """More rows than a launch takes."""
    pytest.importorskip("triton")
    from qerl.kernels.quant_matmul import paths

    emulator = Emulator(library, 5, monkeypatch)
    monkeypatch.setattr(paths, "MANY_ROWS", 40)
    product = Product((48, 16, 240), 5, 100, ranks, plain=False)
    inputs = product.x, product.weight, product.bias
    y, u = paths.lora_matmul(*inputs, product.lora) if ranks else (paths.matmul(*inputs), None)
    product.check(
        Result(*(None if t is None else torch.nn.functional.pad(t, (0, 0, 0, 1), value=math.nan) for t in (y, u)))
    )
    assert emulator.kernels_before == 0  # each launch makes its rows of u


@pytest.mark.parametrize("case", [_MANY[0], _MANY[6], _MANY[8], _MANY[12], _MANY[14]], ids=str)
def test_sums_of_u_that_warps_share(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, case) -> None:  # type: ignore[no-untyped-def]
    """Several of them a block, of fewer slices than the choice would have shared out."""
    plan, (multiprocessors, segments, windows, m, ranks) = ManyRowsPlan(*case[0]), case[1:]
    product = Product(segments, windows, m, ranks, plain=False)
    emulator = Emulator(library, multiprocessors, monkeypatch)
    shape = m, product.lora.a.shape[0], product.weight.out_features, product.weight.in_features, multiprocessors
    cut = plan.lora_cut(*shape)
    sums = math.ceil(shape[1] / 16) * math.ceil(m / 8)
    assert cut.sharers == 1 and sums > plan.grid(m, *shape[2:])
    shared = dataclasses.replace(cut, sharers=plan.lora_warps)
    monkeypatch.setattr(ManyRowsPlan, "lora_cut", lambda self, *shape: shared)
    _check_turns(emulator, plan, product, torch.bfloat16, turns=4)
