"""SiLU-mul in the epilogue of gate and up: the CUDA C++ as it is written, on a CPU (as test_products_emulated.py)."""

import ctypes
import math

import pytest
import torch
from emulated_products import Emulator, Result, build_products
from kernel_cases import rms_ratio
from test_products_emulated import Product

from qerl.kernels.quant_matmul import hopper
from qerl.kernels.quant_matmul.hopper_plan import FewRowsPlan, ManyRowsPlan

# A sum that falls to the other side of the middle between two bf16 numbers is off by 0.4 %, and fewer than one in fifty
# does. Without one of the two roundings before SiLU the error would be 3e-3.
_BOUND = 6e-4
# (rows of a tile, warpgroups, whole tiles), multiprocessors, channels of gate, windows of k, rows, ranks.
# Every shape of tile; tiles whose last pairs are missing, blocks of tokens that end early or have no rows at all.
_MANY = [
    ((16, 2, False), 5, 208, 61, 19, (144, 72)),
    ((16, 2, True), 6, 272, 22, 9, (0, 32)),
    ((16, 3, False), 4, 80, 45, 9, (8, 72)),
    ((16, 3, True), 3, 112, 33, 31, None),
    ((32, 2, False), 7, 144, 37, 35, (144, 0)),
    ((32, 3, True), 4, 112, 33, 20, (72, 8)),
    ((64, 2, False), 7, 176, 29, 67, (144, 72)),
    ((64, 2, True), 3, 16, 9, 63, (8, 8)),  # a single pair
    ((64, 3, False), 5, 80, 31, 130, None),
    ((128, 2, False), 8, 176, 25, 131, (32, 72)),
    ((128, 2, True), 3, 80, 15, 127, (32, 32)),
    ((128, 3, False), 3, 80, 31, 131, (8, 32)),
    ((256, 2, False), 3, 80, 9, 259, (144, 8)),  # more parts of u than blocks: from an earlier kernel
    ((256, 2, False), 4, 80, 9, 259, (144, 8)),
    ((256, 2, True), 3, 80, 7, 255, None),
    ((16, 2, True), 3, 304, 3, 40, None),  # tiles of one unit: one warp of a pair may be far ahead
    ((256, 2, True), 2, 176, 2, 300, None),
]
# (warps, parts of k, pairs of blocks), as above.
_FEW = [
    ((8, 1, False), 5, 176, 33, 8, (144, 72)),
    ((12, 1, False), 6, 208, 21, 5, (32, 32)),
    ((16, 1, False), 3, 112, 9, 1, (72, 0)),
    ((16, 1, False), 4, 16, 5, 6, None),
    ((8, 1, True), 6, 176, 33, 7, (0, 72)),
    ((12, 1, True), 8, 48, 12, 8, (8, 32)),  # blocks without tiles
    ((12, 1, True), 2, 400, 3, 3, None),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_products(tmp_path_factory.mktemp("silu"), "many_rows_silu.cu", "few_rows_silu.cu")


@pytest.mark.parametrize(
    "kind, plan, multiprocessors, channels, windows, m, ranks",
    [(kind, *case) for kind, cases in ((ManyRowsPlan, _MANY), (FewRowsPlan, _FEW)) for case in cases],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_gate_and_up(
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[FewRowsPlan] | type[ManyRowsPlan],
    plan: tuple[int, int, bool],
    multiprocessors: int,
    channels: int,
    windows: int,
    m: int,
    ranks: tuple[int, ...] | None,
) -> None:
    """Against fp64 sums, rounded where the two kernels round; whatever the order of turns, the same bits."""
    product = Product((channels, channels), windows, m, ranks, plain=plan[2])
    emulator = Emulator(library, multiprocessors, monkeypatch)
    inputs = kind(*plan, silu=True), product.x, product.weight, product.bias, product.lora
    first = emulator.run(*inputs, seed=0)
    assert emulator.kernels_before == product.needs_a_kernel_before(emulator, inputs[0])
    gate, up = product.expected(first).bfloat16().double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert rms_ratio(first.y[:m], expected.bfloat16()) <= _BOUND
    assert first.y[m].isnan().all()
    for seed in range(1, 4):
        again = emulator.run(*inputs, seed=seed)
        assert torch.equal(again.y[:-1], first.y[:-1])


def test_blocks_of_rows(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a launch takes; where one of them has no kernel, nothing is launched before that is known."""
    pytest.importorskip("triton")
    from qerl.kernels.quant_matmul import paths

    Emulator(library, 5, monkeypatch)
    monkeypatch.setattr(paths, "MANY_ROWS", 40)
    product = Product((80, 80), 5, 100, (8, 32), plain=False)
    h = paths.silu_matmul(product.x, product.weight, product.bias, product.lora)
    u = torch.nn.functional.pad(
        product.x.double() @ product.lora.a.double().t(), (0, 0, 0, 1), value=math.nan
    ).bfloat16()
    gate, up = product.expected(Result(h, u)).bfloat16().double().chunk(2, dim=1)
    assert rms_ratio(h, (torch.nn.functional.silu(gate) * up).bfloat16()) <= _BOUND
    apart = torch.zeros(100, 80)
    monkeypatch.setattr(hopper, "silu_plan", lambda *shape, ranks: None)
    monkeypatch.setattr(paths, "lora_matmul", lambda *inputs: (torch.ones(100, 160), None))
    monkeypatch.setattr(paths.silu_mul, "forward", lambda gate_up: apart)
    assert paths.silu_matmul(product.x, product.weight, product.bias, product.lora) is apart
