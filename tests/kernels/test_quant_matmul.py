"""Quantized matmuls: the CPU reference and its errors, and on a GPU both CUDA paths."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from kernel_cases import exact_weight, make_group, rms_ratio, rounded_once
from test_tiles import in_tiles

from qerl.kernels.quant_matmul import (
    FEW_ROWS,
    ActivationDtypeError,
    GroupWeight,
    LoraUpdate,
    dequantize,
    quant_lora_matmul,
    quant_matmul,
    quant_matmul_dx,
    quant_silu_matmul,
    reserve_workspace,
    to_tiles,
    workspace_bytes,
)
from qerl.kernels.quant_matmul.config import few_rows_block_m, few_rows_config
from qerl.kernels.silu_mul import silu_mul

GROUPS = [
    ("nvfp4", (24, 8, 8), 64, True),
    ("nvfp4", (33, 1, 5), 144, False),
    ("nf4", (19, 2), 320, True),
]
GROUP_IDS = ["nvfp4", "nvfp4-own-scales", "nf4"]
ROWS = [(1,), (2, 3), (0,), (2, 0), (1, 130)]
FP32_BOUND = 1e-6
# Above cuBLAS's own error, which differs a little with the order of the sum.
SLACK = 1.02


def _exact(x: torch.Tensor, weight: GroupWeight) -> torch.Tensor:
    return x.double() @ exact_weight(weight).t()


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=GROUP_IDS)
def test_reference_against_fp64(group: tuple, rows: tuple[int, ...]) -> None:
    weight = make_group(*group)
    x, dy = torch.randn(*rows, weight.in_features), torch.randn(*rows, weight.out_features)
    y, dx = quant_matmul(x, weight), quant_matmul_dx(dy, weight)
    assert y.shape == dy.shape and dx.shape == x.shape
    if x.numel():
        assert rms_ratio(y, _exact(x, weight)) < FP32_BOUND
        assert rms_ratio(dx, dy.double() @ exact_weight(weight)) < FP32_BOUND


def test_bf16_is_rounded_once_after_bias() -> None:
    weight = make_group("nvfp4", (32,), 128)
    x, bias = torch.randn(5, 128).bfloat16(), torch.randn(32).bfloat16()
    expected = _exact(x, weight) + bias.double()
    assert rms_ratio(quant_matmul(x, weight, bias), expected) <= rounded_once(expected, torch.bfloat16)


def test_fp32_results_of_bf16_operands_are_not_rounded() -> None:
    weight = make_group("nvfp4", (33, 1, 5), 144, uniform=False)
    x, dy = torch.randn(5, 144).bfloat16(), torch.randn(2, 3, 39).bfloat16()
    y, dx = quant_matmul(x, weight, out_dtype=torch.float32), quant_matmul_dx(dy, weight, torch.float32)
    assert y.dtype == dx.dtype == torch.float32 and dx.shape == (2, 3, 144)
    assert rms_ratio(y, _exact(x, weight)) < FP32_BOUND
    assert rms_ratio(dx, dy.double() @ exact_weight(weight)) < FP32_BOUND
    assert torch.equal(quant_matmul(x, weight, out_dtype=torch.bfloat16), quant_matmul(x, weight))
    with pytest.raises(ActivationDtypeError, match=r"out_dtype must be float32 .*bfloat16, got torch.float64"):
        quant_matmul(x, weight, out_dtype=torch.float64)


def test_rows_of_a_weight() -> None:
    weight = make_group("nvfp4", (32, 16), 64, uniform=False)
    whole, part = dequantize(weight), weight.rows(36, 48)
    assert part.segments == (12,) and torch.equal(part.global_scale, weight.global_scale[1:])
    assert torch.equal(dequantize(part), whole[36:48])
    tiled = dataclasses.replace(weight, codes=to_tiles(weight.codes, weight.block_scale), block_scale=None)
    assert torch.equal(dequantize(tiled.rows(16, 32)), whole[16:32])
    for first, last in ((16, 33), (48, 64), (8, 8)):
        with pytest.raises(ValueError, match="in no single segment"):
            weight.rows(first, last)


def test_non_contiguous_activations() -> None:
    weight = make_group("nvfp4", (32,), 64)
    wide = torch.randn(64, 2, 7)
    x = wide.transpose(0, 2)
    assert torch.equal(quant_matmul(x, weight), quant_matmul(x.contiguous(), weight))


def test_dequantize_leaves_the_global_scale_out() -> None:
    weight = make_group("nvfp4", (16, 16), 64)
    values = dequantize(weight, dtype=torch.float32)
    assert torch.equal(values, dequantize(weight).float())
    assert rms_ratio(values * weight.uniform_scale, exact_weight(weight)) < FP32_BOUND
    out = torch.full((32, 64), float("nan"))
    assert dequantize(weight, out) is out
    assert torch.equal(out, values)


def test_fp16_is_refused_by_name() -> None:
    weight = make_group("nvfp4", (16,), 64)
    with pytest.raises(ActivationDtypeError, match=r"float16.*bfloat16"):
        quant_matmul(torch.randn(2, 64).half(), weight)
    with pytest.raises(ActivationDtypeError, match="float16"):
        quant_matmul_dx(torch.randn(2, 16).half(), weight)


def test_misuse_is_named() -> None:
    weight = make_group("nvfp4", (16,), 64)
    with pytest.raises(ValueError, match=r"must be 64 .*shape \[2, 48\]"):
        quant_matmul(torch.randn(2, 48), weight)
    with pytest.raises(ValueError, match="bias must be"):
        quant_matmul(torch.randn(2, 64), weight, torch.randn(15))
    with pytest.raises(ValueError, match="contiguous bf16 or fp32"):
        dequantize(weight, torch.empty(64, 16).t())
    with pytest.raises(ValueError, match="codes must be"):
        GroupWeight("nvfp4", (17,), 64, weight.codes, weight.block_scale, weight.global_scale)
    with pytest.raises(ValueError, match="multiple of 16"):
        GroupWeight("nvfp4", (16,), 40, weight.codes, weight.block_scale, weight.global_scale)
    with pytest.raises(ValueError, match="supported: nvfp4, nf4"):
        GroupWeight("int3", (16,), 64, weight.codes, weight.block_scale)


def test_lora_is_added_before_rounding_and_misuse_is_named() -> None:
    weight = make_group("nvfp4", (32, 16), 64, False, "cpu")
    x, a = torch.randn(3, 64).bfloat16(), torch.randn(16, 64).bfloat16() / 8
    b = torch.randn(32 * 8).bfloat16()
    lora = LoraUpdate(a, b, ((8, 8, 0), (0, 0, 0)))  # the second segment has no adapter
    y, u = quant_lora_matmul(x, weight, None, lora)
    assert torch.equal(u, (x.double() @ a.double().t()).bfloat16())
    added = torch.cat([u[:, 8:].double() @ b.view(32, 8).double().t(), torch.zeros(3, 16)], 1)
    expected = x.double() @ exact_weight(weight).t() + added
    assert rms_ratio(y, expected) <= 1.01 * rounded_once(expected, torch.bfloat16)
    assert torch.equal(quant_matmul(x, weight, None, lora), y)
    for wrong in (
        LoraUpdate(a[:, :32].contiguous(), b, lora.places),
        LoraUpdate(a, b[:-1], lora.places),
        LoraUpdate(a, b, ((4, 8, 0), (0, 0, 0))),
        LoraUpdate(a, b, ((8, 8, 0),)),
        LoraUpdate(a, b, ((0, 8, 3), (0, 0, 0))),
        LoraUpdate(a, b, ((-8, 8, 0), (0, 0, 0))),
        LoraUpdate(a.float(), b, lora.places),
        LoraUpdate(a, torch.randn(2 * 256).bfloat16()[::2], lora.places),
        LoraUpdate(a, b.view(32, 8), lora.places),
        LoraUpdate(a.to("meta"), b, lora.places),
    ):
        with pytest.raises(ValueError, match=r"got|multiples of 8|x is on cpu"):
            quant_matmul(x, weight, None, wrong)
    with pytest.raises(ValueError, match="on meta"):
        quant_matmul(x, weight, torch.empty(48, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("in_layout", [lambda weight: weight, in_tiles], ids=["rows", "tiles"])
def test_silu_of_gate_with_up_is_the_product_and_silu_mul(in_layout: Callable[[GroupWeight], GroupWeight]) -> None:
    weight = in_layout(make_group("nvfp4", (48, 48), 128, uniform=False))
    x, bias = torch.randn(5, 128).bfloat16(), torch.randn(96).bfloat16()
    places = ((8, 8, 48 * 8), (0, 8, 0))
    lora = LoraUpdate(torch.randn(16, 128).bfloat16(), torch.randn(96 * 8).bfloat16(), places)
    for arguments in ((), (bias,), (bias, lora)):
        expected = silu_mul(quant_matmul(x, weight, *arguments))
        assert torch.equal(quant_silu_matmul(x, weight, *arguments), expected)
    assert quant_silu_matmul(x[:0], weight).shape == (0, 48)
    x, weight = x.float(), make_group("nvfp4", (40, 40), 128)
    gate, up = _exact(x, weight).chunk(2, dim=1)
    assert rms_ratio(quant_silu_matmul(x, weight), torch.nn.functional.silu(gate) * up) < 2 * FP32_BOUND


def test_gate_and_up_must_match() -> None:
    x = torch.randn(2, 128)
    for segments in ((32, 16), (48,), (16, 16, 16)):
        with pytest.raises(ValueError, match="two segments of equal size"):
            quant_silu_matmul(x, make_group("nvfp4", segments, 128))
    with pytest.raises(ValueError, match="two segments of equal size"):
        quant_silu_matmul(x[None], make_group("nvfp4", (16, 16), 128))


@pytest.mark.parametrize("weight_format, checks", [("nvfp4", ("test_faketensor",)), ("nf4", ("test_schema",))])
def test_ops_are_well_formed_for_torch_compile(weight_format: str, checks: tuple[str, ...]) -> None:
    # The schema check multiplies its inputs, which torch cannot do with float8: it gets the nf4 weight.
    weight = make_group(weight_format, (33, 1, 5), 192, uniform=False)
    parts = (weight.codes, weight.block_scale, weight.global_scale, weight_format, list(weight.segments), None)
    ops = torch.ops.qerl
    torch.library.opcheck(ops.quant_matmul, (torch.randn(3, 192), *parts, None), test_utils=checks)
    factors = (torch.randn(8, 192), torch.randn(39 * 8), [0, 8, 0, 0, 8, 264, 0, 8, 272])
    torch.library.opcheck(ops.quant_lora_matmul, (torch.randn(3, 192), *parts, None, *factors), test_utils=checks)
    torch.library.opcheck(ops.quant_matmul_dx, (torch.randn(3, 39), *parts), test_utils=checks)
    even = make_group(weight_format, (24, 24), 192, uniform=False)
    parts_of_two = (even.codes, even.block_scale, even.global_scale, weight_format, [24, 24], None)
    factors = (torch.randn(8, 192), torch.randn(48 * 8), [0, 8, 0, 0, 8, 192])
    for lora in ((None, None, []), factors):
        inputs = (torch.randn(3, 192), *parts_of_two, None, *lora)
        torch.library.opcheck(ops.quant_silu_matmul, inputs, test_utils=checks)
    wide = (torch.randn(3, 192).bfloat16(), *parts, None, True)
    torch.library.opcheck(ops.quant_matmul, wide, test_utils=checks)
    torch.library.opcheck(ops.quant_matmul_dx, (torch.randn(3, 39).bfloat16(), *parts, True), test_utils=checks)
    torch.library.opcheck(ops.dequantize, (torch.zeros(39, 192), *parts), test_utils=checks)


def test_compiled_lora_equals_eager() -> None:
    weight = make_group("nvfp4", (24, 8), 64)
    x, lora = torch.randn(3, 64), LoraUpdate(torch.randn(8, 64), torch.randn(24 * 8), ((0, 8, 0), (0, 0, 0)))
    compiled = torch.compile(lambda x: quant_lora_matmul(x, weight, None, lora), backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(x), quant_lora_matmul(x, weight, None, lora), strict=True):
        assert torch.equal(found, expected)


def test_compiled_call_equals_eager() -> None:
    weight = make_group("nvfp4", (24, 8), 64)
    x = torch.randn(3, 64)
    compiled = torch.compile(lambda x: quant_matmul(x, weight) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), quant_matmul(x, weight) * 2)


def test_configurations_cover_k_and_keep_slices_long() -> None:
    for n, k in [(4608, 3584), (3584, 18944), (151936, 1024), (16, 16), (55296, 5120)]:
        for m in (1, 9, 33, 64):
            config = few_rows_config(m, n, k, 132)
            assert few_rows_block_m(m) >= m
            assert config.slices == 1 or k // config.slices >= 512
            assert config.block_k % 32 == 0
    assert few_rows_block_m(FEW_ROWS) == FEW_ROWS


def test_workspace_grows_and_is_counted() -> None:
    device = torch.device("cpu")
    before = workspace_bytes(device)
    reserve_workspace(before + 1024, device)
    assert workspace_bytes(device) == before + 1024
    reserve_workspace(16, device)
    assert workspace_bytes(device) == before + 1024


GPU_GROUPS = [
    ("nvfp4", (512, 128, 128), 896, True),
    ("nvfp4", (512, 128, 128), 896, False),
    ("nvfp4", (333,), 4112, True),
    ("nvfp4", (1,), 16, True),
    ("nvfp4", (130,), 576, True),
    ("nf4", (333, 4), 1088, True),
]
GPU_IDS = ["qkv", "qkv-own-scales", "odd-long", "one-row", "odd-576", "nf4"]
GPU_ROWS = [1, 2, 16, 17, FEW_ROWS, FEW_ROWS + 1, 300]


@pytest.mark.gpu
@pytest.mark.parametrize("m", GPU_ROWS)
@pytest.mark.parametrize("group", GPU_GROUPS, ids=GPU_IDS)
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_error_is_that_of_cublas_and_bits_repeat(group: tuple, m: int) -> None:
    weight = make_group(*group, device="cuda")
    x = torch.randn(m, weight.in_features, device="cuda").bfloat16()
    dy = torch.randn(m, weight.out_features, device="cuda").bfloat16()
    y, dx = quant_matmul(x, weight), quant_matmul_dx(dy, weight)
    values = dequantize(weight)
    assert torch.equal(values.cpu(), dequantize(_on_cpu(weight)))
    # cuBLAS on the same bf16 weights: its error is one rounding and an fp32 (or split) sum.
    cublas = rms_ratio(x @ values.t(), x.double() @ values.double().t())
    cublas_dx = rms_ratio(dy @ values, dy.double() @ values.double())
    expected, expected_dx = _exact(x, weight), dy.double() @ exact_weight(weight)
    assert rms_ratio(y, expected) <= max(SLACK * cublas, rounded_once(expected, torch.bfloat16))
    assert rms_ratio(dx, expected_dx) <= max(SLACK * cublas_dx, rounded_once(expected_dx, torch.bfloat16))
    assert torch.equal(y, quant_matmul(x, weight)) and torch.equal(dx, quant_matmul_dx(dy, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 100])
@pytest.mark.parametrize("group", GPU_GROUPS, ids=GPU_IDS)
def test_gpu_fp32_and_bias(group: tuple, m: int) -> None:
    weight = make_group(*group, device="cuda")
    x, bias = torch.randn(m, weight.in_features, device="cuda"), torch.randn(weight.out_features, device="cuda")
    dy = torch.randn(m, weight.out_features, device="cuda")
    assert rms_ratio(quant_matmul(x, weight, bias), _exact(x, weight) + bias.double()) < 2e-6
    assert rms_ratio(quant_matmul_dx(dy, weight), dy.double() @ exact_weight(weight)) < 2e-6
    y = quant_matmul(x.bfloat16(), weight, bias.bfloat16())
    expected = _exact(x.bfloat16(), weight) + bias.bfloat16().double()
    assert rms_ratio(y, expected) <= 1.05 * rounded_once(expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("m", GPU_ROWS)
@pytest.mark.parametrize("group", GPU_GROUPS, ids=GPU_IDS)
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_fp32_results_of_bf16_operands(group: tuple, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from qerl.kernels.quant_matmul import paths

    weight = make_group(*group, device="cuda")
    x = torch.randn(m, weight.in_features, device="cuda").bfloat16()
    dy = torch.randn(m, weight.out_features, device="cuda").bfloat16()
    bias = torch.randn(weight.out_features, device="cuda").bfloat16()
    for block_bytes in (paths.BLOCK_BYTES, 100 * weight.in_features * 2):
        monkeypatch.setattr(paths, "BLOCK_BYTES", block_bytes)
        y, dx = quant_matmul(x, weight, out_dtype=torch.float32), quant_matmul_dx(dy, weight, torch.float32)
        assert y.dtype == dx.dtype == torch.float32
        # Tensor cores round every addition of a long sum toward zero; a rounding to bf16 would be 1.7e-3.
        assert rms_ratio(y, _exact(x, weight)) < 1e-4
        assert rms_ratio(dx, dy.double() @ exact_weight(weight)) < 1e-4
        offset = quant_matmul(x, weight, bias, out_dtype=torch.float32)
        assert rms_ratio(offset, _exact(x, weight) + bias.double()) < 1e-4
        assert torch.equal(y, quant_matmul(x, weight, out_dtype=torch.float32))


@pytest.mark.gpu
def test_gpu_every_code_and_scale_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    weight = GroupWeight("nvfp4", (127,), 512, codes.cuda(), scales.cuda(), torch.ones(1, device="cuda"), 1.0)
    # One-hot rows read single weights: the product must be the weight itself, bit for bit.
    eye = torch.eye(512, device="cuda").bfloat16()
    for first in range(0, 512, FEW_ROWS):
        rows = eye[first : first + FEW_ROWS]
        assert torch.equal(quant_matmul(rows, weight), dequantize(weight).t()[first : first + FEW_ROWS])
    assert torch.equal(dequantize(weight).cpu(), dequantize(_on_cpu(weight)))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 48, 200])
@pytest.mark.parametrize("uniform", [True, False], ids=["one-scale", "own-scales"])
def test_gpu_cuda_graph_replays_with_new_inputs(m: int, uniform: bool) -> None:
    weight = make_group("nvfp4", (512, 128, 128), 896, uniform, device="cuda")
    x = torch.randn(m, 896, device="cuda").bfloat16()
    quant_matmul(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quant_matmul(x, weight)
    # A larger weight replaces the workspace meanwhile; the graph must not feel it.
    quant_matmul(torch.randn(128, 2048, device="cuda").bfloat16(), make_group("nvfp4", (2048,), 2048, device="cuda"))
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, quant_matmul(x, weight))


@pytest.mark.gpu
def test_gpu_unaligned_and_strided_activations() -> None:
    weight = make_group("nvfp4", (64,), 144, device="cuda")
    wide = torch.randn(6, 145, device="cuda").bfloat16()
    for x in (wide[:, 1:], wide.flatten()[1 : 1 + 5 * 144].view(5, 144)):
        assert torch.equal(quant_matmul(x, weight), quant_matmul(x.clone(), weight))


def _on_cpu(weight: GroupWeight) -> GroupWeight:
    global_scale = None if weight.global_scale is None else weight.global_scale.cpu()
    return GroupWeight(
        weight.format,
        weight.segments,
        weight.in_features,
        weight.codes.cpu(),
        weight.block_scale.cpu(),
        global_scale,
        weight.uniform_scale,
    )
