"""The quantized matmul kernels in Triton's interpreter (started by test_interpreter.py)."""

import pytest
import torch
from kernel_cases import exact_weight, join_segments, make_group, rms_ratio, rounded_once

from qerl.formats.base import PackedTensor, get_format
from qerl.kernels.quant_matmul import launch, paths, reference
from qerl.kernels.quant_matmul.config import FEW_ROWS, FewRowsConfig
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _all_codes_and_scales() -> GroupWeight:
    """16 columns of every code under each of the 127 scale bytes that are positive and finite, zero included."""
    codes = torch.arange(256, dtype=torch.uint8)[:128].reshape(1, 128).repeat(127, 1)
    codes[:, 64:] |= 0x80
    scales = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 16).view(torch.float8_e4m3fn)
    packed = PackedTensor("nvfp4", (127, 256), codes, scales, torch.tensor([3.0]))
    return join_segments([packed])


def _flat_nf4() -> GroupWeight:
    """K = 96: blocks of 64 run over row ends."""
    return join_segments([get_format("nf4").quantize([torch.randn(5, 96)])[0]])


WEIGHTS = {
    "every-code-and-scale": _all_codes_and_scales,
    "nvfp4-odd-rows": lambda: make_group("nvfp4", (33, 1, 5), 144, uniform=False),
    "nvfp4-one-row": lambda: make_group("nvfp4", (1,), 16),
    "nf4": lambda: make_group("nf4", (19, 2), 320),
    "nf4-flat": _flat_nf4,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_dequantize_equals_reference(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype)
    launch.dequantize_into(weight, out)
    assert torch.equal(out, reference.dequantize(weight, dtype))


@pytest.mark.parametrize("slices", [1, 3], ids=["whole", "split"])
@pytest.mark.parametrize("m", [1, 7, 65])
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_rows(name: str, m: int, slices: int) -> None:
    weight = WEIGHTS[name]()
    x = torch.randn(m, weight.in_features).bfloat16()
    bias = torch.randn(weight.out_features).bfloat16() if m == 7 else None
    config = FewRowsConfig(block_n=32, block_k=64, slices=slices, num_warps=4, num_stages=3)
    y = launch.few_rows_matmul(x, weight, bias, config)
    expected = x.double() @ exact_weight(weight).t()
    if bias is not None:
        expected += bias.double()
    assert y.shape == (m, weight.out_features)
    assert rms_ratio(y, expected) <= rounded_once(expected, torch.bfloat16)


@pytest.mark.parametrize("slices", [1, 3], ids=["whole", "split"])
@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_rows_in_fp32(name: str, m: int, slices: int) -> None:
    weight = WEIGHTS[name]()
    x = torch.randn(m, weight.in_features).bfloat16()
    bias = torch.randn(weight.out_features).bfloat16() if m == 7 else None
    config = FewRowsConfig(block_n=32, block_k=64, slices=slices, num_warps=4, num_stages=3)
    y = launch.few_rows_matmul(x, weight, bias, config, torch.float32)
    expected = x.double() @ exact_weight(weight).t() + (0 if bias is None else bias.double())
    assert y.dtype == torch.float32 and rms_ratio(y, expected) < 1e-6


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("uniform", [True, False], ids=["one-scale", "own-scales"])
@pytest.mark.parametrize("weight_format", ["nvfp4", "nf4"])
def test_blocks_of_rows(weight_format: str, uniform: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_group(weight_format, (80, 9, 33), 192, uniform)
    monkeypatch.setattr(paths, "BLOCK_BYTES", 40 * 192 * 4)
    x, dy = torch.randn(13, 192), torch.randn(13, 122)
    bias = torch.randn(122) if with_bias else None
    exact = exact_weight(weight)
    expected = x.double() @ exact.t() + (0 if bias is None else bias.double())
    assert rms_ratio(paths.blockwise_matmul(x, weight, bias), expected) < 1e-6
    assert rms_ratio(paths.blockwise_matmul_dx(dy, weight), dy.double() @ exact) < 1e-6
    if weight_format == "nvfp4":
        blocks = [(rows.start, rows.stop) for rows, _, _ in paths._dense_blocks(weight, torch.float32)]
        assert blocks == [(0, 32), (32, 64), (64, 80), (80, 89), (89, 121), (121, 122)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_only_wider_results_come_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group larger than a block is dequantized at once where the result has the dtype of the operand."""
    weight, shapes, plain = make_group("nvfp4", (80, 48), 192), [], paths.dequantize_into
    monkeypatch.setattr(paths, "BLOCK_BYTES", 40 * 192 * dtype.itemsize)

    def recorded(part: GroupWeight, out: torch.Tensor) -> None:
        shapes.append(tuple(out.shape))
        plain(part, out)

    monkeypatch.setattr(paths, "dequantize_into", recorded)
    x, dy = torch.randn(FEW_ROWS + 1, 192).to(dtype), torch.randn(3, 128).to(dtype)
    for out_dtype in (None, dtype):
        y, dx = paths.matmul(x, weight, None, out_dtype), paths.matmul_dx(dy, weight, out_dtype)
        assert y.dtype == dx.dtype == dtype
    assert shapes == 4 * [(128, 192)]


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("uniform", [True, False], ids=["one-scale", "own-scales"])
@pytest.mark.parametrize("weight_format", ["nvfp4", "nf4"])
def test_dequantized_path(weight_format: str, uniform: bool, with_bias: bool) -> None:
    weight = make_group(weight_format, (24, 9, 8), 192, uniform)
    x = torch.randn(13, 192)
    bias = torch.randn(41) if with_bias else None
    y = paths.dequantized_matmul(x, weight, bias)
    expected = x.double() @ exact_weight(weight).t() + (0 if bias is None else bias.double())
    assert rms_ratio(y, expected) < 1e-6


@pytest.mark.parametrize("m", [0, 3, FEW_ROWS + 1])
def test_lora_where_no_kernel_adds_it(m: int) -> None:
    weight = make_group("nvfp4", (32, 16), 192, uniform=False)
    x, a, b, bias = torch.randn(m, 192), torch.randn(16, 192), torch.randn(32 * 8), torch.randn(48)
    y, u = paths.lora_matmul(x, weight, bias, LoraUpdate(a, b, ((8, 8, 0), (0, 0, 0))))
    assert u.shape == (m, 16) and y.shape == (m, 48)
    exact_u = x.double() @ a.double().t()
    added = torch.cat([exact_u[:, 8:] @ b.view(32, 8).double().t(), torch.zeros(m, 16)], 1)
    expected = x.double() @ exact_weight(weight).t() + bias.double() + added
    assert m == 0 or (rms_ratio(u, exact_u) < 1e-6 and rms_ratio(y, expected) < 1e-6)


def test_rows_come_in_blocks_of_about_equal_size() -> None:
    assert [list(paths._row_blocks(m, 10)) for m in (0, 1, 10)] == [[], [slice(0, 1)], [slice(0, 10)]]
    assert list(paths._row_blocks(21, 10)) == [slice(0, 7), slice(7, 14), slice(14, 21)]
    assert list(paths._row_blocks(11, 10)) == [slice(0, 6), slice(6, 11)]


@pytest.mark.parametrize("uniform", [True, False], ids=["one-scale", "own-scales"])
@pytest.mark.parametrize("weight_format", ["nvfp4", "nf4"])
def test_dequantized_gradient(weight_format: str, uniform: bool) -> None:
    weight = make_group(weight_format, (24, 9, 8), 192, uniform)
    dy = torch.randn(13, 41)
    assert rms_ratio(paths.dequantized_matmul_dx(dy, weight), dy.double() @ exact_weight(weight)) < 1e-6
