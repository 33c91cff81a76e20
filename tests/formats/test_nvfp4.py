"""NVFP4 against golden files of llm-compressor, against the compressed-tensors library, and by property."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl.formats import nvfp4
from qerl.formats.base import (
    FormatError,
    NonFiniteWeightError,
    PackedTensor,
    PackingError,
    get_format,
    sqnr_db,
)

FORMAT = get_format("nvfp4")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that -0.0 and NaN compare by pattern."""
    return tensor.contiguous().view(torch.uint8)


def awkward_weight(rows: int = 48, columns: int = 96) -> torch.Tensor:
    """bf16 weight with a zero block, a -0.0 block, an outlier, underflowing blocks, ties and an E4M3 tie."""
    weight = torch.randn(rows, columns).mul(0.02)
    weight[0, :16] = 0.0
    weight[1, :16] = -0.0
    weight[2, 5] = 3.0
    weight[3, :16] *= 1e-6
    weight[4, :16] *= 1e-3
    weight[5, :16] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2) * 0.0078125
    weight[6, :16] = -weight[5, :16]
    weight[7, 16:32] = 1e-30
    return weight.to(torch.bfloat16)


def block_errors(weight: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
    difference = weight.double() - FORMAT.dequantize(packed).double()
    return difference.reshape(-1, 16).square().sum(-1)


# --- against the real libraries ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(shared_dir: Path) -> dict[str, Any]:
    text = (shared_dir / "golden" / "nvfp4_golden.json").read_text()
    return json.loads(text)["cases"]["nvfp4"]["tensors"]


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("down_proj",)], ids="+".join)
def test_golden_of_llm_compressor(golden: dict[str, Any], names: tuple[str, ...]) -> None:
    def tensor(field: dict[str, Any], key: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(field[key]), dtype=dtype).reshape(shape)

    fields = [golden[name] for name in names]
    weights = [tensor(field, "weight_bf16_hex", torch.bfloat16, field["shape"]) for field in fields]
    for field, packed in zip(fields, FORMAT.quantize(weights), strict=True):
        codes = tensor(field, "weight_packed_hex", torch.uint8, field["weight_packed_shape"])
        scale = tensor(field, "weight_scale_hex", torch.uint8, field["weight_scale_shape"])
        decoded = tensor(field, "dequant_bf16_hex", torch.int16, field["shape"])
        assert torch.equal(packed.codes, codes)
        assert torch.equal(bits(packed.block_scale), scale)
        assert packed.global_scale.tolist() == [field["weight_global_scale"]]
        assert torch.equal(FORMAT.dequantize(packed, torch.bfloat16).view(torch.int16), decoded)


def library_quantize(weights: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The same fused group through compressed-tensors' own primitives and compressor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    low = torch.stack([weight.min() for weight in weights]).min()
    high = torch.stack([weight.max() for weight in weights]).max()
    divisor = generate_gparam(low.reshape(1), high.reshape(1))
    results = []
    for weight in weights:
        blocks = weight.reshape(weight.shape[0], -1, 16)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
        packed = compressor.compress(state, scheme)
        packed["decoded"] = compressor.decompress(dict(packed), scheme)["weight"]
        results.append(packed)
    return results


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_the_compressed_tensors_library(seed: int) -> None:
    torch.manual_seed(seed)
    scale = 10.0 ** (seed - 3)
    group = [
        awkward_weight() * scale,
        torch.randn(16, 96).to(torch.bfloat16) * scale,
        torch.zeros(2, 32).bfloat16(),
    ]
    for mine, theirs in zip(FORMAT.quantize(group), library_quantize(group), strict=True):
        assert torch.equal(mine.global_scale, theirs["weight_global_scale"])
        assert torch.equal(bits(mine.block_scale), bits(theirs["weight_scale"]))
        assert torch.equal(mine.codes, theirs["weight_packed"])
        assert torch.equal(bits(FORMAT.dequantize(mine, torch.bfloat16)), bits(theirs["decoded"].bfloat16()))


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38])
def test_library_agrees_on_extreme_tensors(value: float) -> None:
    weight = torch.full((2, 32), value, dtype=torch.bfloat16)
    (mine,), (theirs,) = FORMAT.quantize([weight]), library_quantize([weight])
    assert torch.equal(mine.global_scale, theirs["weight_global_scale"])
    assert torch.equal(bits(mine.block_scale), bits(theirs["weight_scale"]))
    assert torch.equal(mine.codes, theirs["weight_packed"])


# --- definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FORMAT.methods)
def test_all_zero_tensor_has_finite_scales_and_exact_zeros(method: str) -> None:
    (packed,) = FORMAT.quantize([torch.zeros(4, 48)], method)
    assert packed.global_scale.tolist() == [1.0]
    assert packed.block_scale.float().unique().tolist() == [0.125]
    assert bool((FORMAT.dequantize(packed) == 0).all())
    assert bool((FORMAT.unscaled(packed, torch.bfloat16) == 0).all())


@pytest.mark.parametrize("method", FORMAT.methods)
def test_zero_blocks_decode_to_zero(method: str) -> None:
    weight = awkward_weight()
    (packed,) = FORMAT.quantize([weight], method)
    decoded = FORMAT.dequantize(packed)
    assert bool((decoded[:2, :16] == 0).all())
    assert bool(torch.isfinite(decoded).all())
    assert bool(torch.isfinite(packed.block_scale.float()).all())


def test_representable_weights_survive_exactly() -> None:
    # amax 6 gives G = 448 and block scale 448: every E2M1 value is then representable.
    row = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
    weight = row.repeat(3, 2)
    (packed,) = FORMAT.quantize([weight])
    assert packed.global_scale.tolist() == [448.0]
    assert torch.equal(FORMAT.dequantize(packed), weight)


def test_group_shares_the_global_scale_of_its_largest_member() -> None:
    small, large = torch.randn(16, 32) * 0.01, torch.randn(8, 32)
    packed = FORMAT.quantize([small, large])
    (alone,) = FORMAT.quantize([large])
    assert packed[0].global_scale.tolist() == packed[1].global_scale.tolist() == alone.global_scale.tolist()
    assert packed[0].global_scale.data_ptr() != packed[1].global_scale.data_ptr()


def test_unscaled_is_exact_in_bf16_and_the_scaled_weight_follows_from_it() -> None:
    (packed,) = FORMAT.quantize([awkward_weight()])
    exact = FORMAT.unscaled(packed, torch.float32)
    assert torch.equal(FORMAT.unscaled(packed, torch.bfloat16).float(), exact)
    scaled = exact.double() / packed.global_scale.double()
    torch.testing.assert_close(FORMAT.dequantize(packed).double(), scaled, rtol=2**-22, atol=0)


def test_every_code_times_every_scale_is_exact_in_bf16() -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = (codes[0::2] | (codes[1::2] << 4)).repeat(127, 1)
    packed = PackedTensor("nvfp4", (127, 16), pairs, scales.reshape(127, 1), torch.ones(1))
    assert torch.equal(FORMAT.unscaled(packed, torch.bfloat16).float(), FORMAT.unscaled(packed, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_read_as_bf16(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 32).to(dtype)
    (packed,), (expected,) = FORMAT.quantize([weight]), FORMAT.quantize([weight.to(torch.bfloat16)])
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(packed.global_scale, expected.global_scale)


def test_noncontiguous_input_is_not_modified() -> None:
    base = torch.randn(32, 64)
    before = base.clone()
    (packed,) = FORMAT.quantize([base.T])
    (expected,) = FORMAT.quantize([base.T.contiguous()])
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(base, before)


def test_size_matches_bits_per_weight() -> None:
    (packed,) = FORMAT.quantize([torch.randn(64, 128)])
    assert packed.nbytes == 64 * 128 * FORMAT.bits_per_weight / 8 + 4
    assert packed.to("cpu").nbytes == packed.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("method", FORMAT.methods)
def test_cuda_gives_the_same_bytes(method: str) -> None:
    group = [awkward_weight(), torch.randn(2048, 2048).to(torch.bfloat16), torch.zeros(2, 32).bfloat16()]
    on_gpu = FORMAT.quantize([weight.cuda() for weight in group], method)
    for mine, expected in zip(on_gpu, FORMAT.quantize(group, method), strict=True):
        assert torch.equal(mine.codes.cpu(), expected.codes)
        assert torch.equal(bits(mine.block_scale.cpu()), bits(expected.block_scale))
        assert torch.equal(mine.global_scale.cpu(), expected.global_scale)
        assert torch.equal(bits(FORMAT.dequantize(mine).cpu()), bits(FORMAT.dequantize(expected)))


# --- quality ------------------------------------------------------------------------------------------------------


def test_sqnr_of_gaussian_weights_is_bounded_on_both_sides() -> None:
    weight = torch.randn(256, 512).to(torch.bfloat16)
    rtn = sqnr_db(weight, FORMAT.dequantize(FORMAT.quantize([weight])[0]))
    mse = sqnr_db(weight, FORMAT.dequantize(FORMAT.quantize([weight], "mse")[0]))
    assert 20.2 < rtn < 20.8
    assert 21.5 < mse < 22.3


@pytest.mark.parametrize("seed", range(3))
def test_mse_is_not_worse_on_any_block(seed: int) -> None:
    torch.manual_seed(seed)
    # Student-t tails: some blocks have one large value, for which saturating or 6 -> 4 wins.
    weight = torch.distributions.StudentT(3.0).sample((64, 160)).to(torch.bfloat16)
    weight[: awkward_weight().shape[0], :96] = awkward_weight()
    (rtn,), (mse,) = FORMAT.quantize([weight]), FORMAT.quantize([weight], "mse")
    before, after = block_errors(weight, rtn), block_errors(weight, mse)
    assert bool((after <= before).all())
    assert int((after < before).sum()) > before.numel() // 3
    assert torch.equal(rtn.global_scale, mse.global_scale)


def test_mse_finds_the_scale_that_maps_the_maximum_to_four() -> None:
    # 4 and 3 side by side are exact with the maximum at 4, but 4.5 falls between 4 and 6 with it at 6.
    weight = torch.full((1, 32), 0.0)
    weight[0, :16] = torch.tensor([4.0, 3.0] * 8)
    weight[0, 16] = 24.0
    (rtn,), (mse,) = FORMAT.quantize([weight]), FORMAT.quantize([weight], "mse")
    assert float(block_errors(weight, mse)[0]) == 0.0
    assert float(block_errors(weight, rtn)[0]) > 0.1
    assert float(mse.block_scale[0, 0].float() / mse.global_scale) == 1.0


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = awkward_weight()
    whole = [FORMAT.quantize([weight], method)[0] for method in FORMAT.methods]
    monkeypatch.setattr(nvfp4, "_CHUNK_BLOCKS", 7)
    for method, expected in zip(FORMAT.methods, whole, strict=True):
        (packed,) = FORMAT.quantize([weight], method)
        assert torch.equal(packed.codes, expected.codes)
        assert torch.equal(bits(packed.block_scale), bits(expected.block_scale))


@pytest.mark.parametrize("seed", range(12))
def test_error_is_within_the_step_of_the_block(seed: int) -> None:
    torch.manual_seed(seed)
    rows, blocks = int(torch.randint(1, 9, ())), int(torch.randint(1, 9, ()))
    weight = (torch.randn(rows, blocks * 16) * 10.0 ** float(torch.randint(-4, 4, ()))).to(torch.bfloat16)
    (packed,) = FORMAT.quantize([weight])
    assert packed.codes.shape == (rows, blocks * 8)
    assert packed.block_scale.shape == (rows, blocks)
    error = (weight.float() - FORMAT.dequantize(packed)).abs().reshape(rows, blocks, 16)
    step = packed.block_scale.float() / packed.global_scale
    # Half of the widest gap (4 to 6) is one step; E4M3 rounding (2**-4) and bf16 (2**-8, twice) of 6 steps add
    # at most 0.43 where the maximum saturates.
    assert bool((error.amax(-1) <= 1.43 * step).all())


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [8, 17, 3420])
def test_width_that_cannot_be_packed(columns: int) -> None:
    with pytest.raises(PackingError, match=rf"in_features = {columns} .*16"):
        FORMAT.quantize([torch.randn(2, columns)])


def test_nonfinite_weights_are_counted() -> None:
    weight = torch.randn(4, 32)
    weight[0, :3] = float("nan")
    weight[1, 0] = float("-inf")
    with pytest.raises(NonFiniteWeightError, match=r"weight 1 .* 3 NaN and 1 Inf among 128"):
        FORMAT.quantize([torch.randn(4, 32), weight])


def test_overflow_of_fp32_in_bf16_is_refused() -> None:
    with pytest.raises(NonFiniteWeightError, match="1 Inf"):
        FORMAT.quantize([torch.tensor([[3.4e38] + [0.0] * 15])])


@pytest.mark.parametrize(
    "weight", [torch.randn(16), torch.randn(2, 2, 16), torch.zeros(2, 16, dtype=torch.int8), torch.zeros(0, 16)]
)
def test_only_floating_matrices(weight: torch.Tensor) -> None:
    with pytest.raises(PackingError, match="matrix"):
        FORMAT.quantize([weight])


def test_empty_group() -> None:
    with pytest.raises(PackingError, match="at least one"):
        FORMAT.quantize([])


def test_unknown_names_list_the_supported_ones() -> None:
    with pytest.raises(FormatError, match=r"'int4'.*nvfp4, nf4, mxfp4"):
        get_format("int4")
    with pytest.raises(FormatError, match=r"'gptq'.*rtn, mse"):
        FORMAT.quantize([torch.randn(2, 16)], "gptq")


def test_layouts_that_do_not_fit_are_refused() -> None:
    (packed,) = FORMAT.quantize([torch.randn(4, 32)])
    with pytest.raises(PackingError, match=r"uint8 \[4, 16\]"):
        PackedTensor("nvfp4", (4, 32), packed.codes[:2], packed.block_scale, packed.global_scale)
    bad_scale = PackedTensor("nvfp4", (4, 32), packed.codes, packed.block_scale[:, :1], packed.global_scale)
    with pytest.raises(PackingError, match=r"float8_e4m3fn \[4, 2\]"):
        FORMAT.dequantize(bad_scale)
    no_divisor = PackedTensor("nvfp4", (4, 32), packed.codes, packed.block_scale, None)
    with pytest.raises(PackingError, match="global scale None"):
        FORMAT.unscaled(no_divisor, torch.bfloat16)
