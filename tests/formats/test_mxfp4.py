"""MXFP4 against golden files of llm-compressor, against the compressed-tensors library, and by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl.formats import mxfp4
from qerl.formats.base import FormatError, NonFiniteWeightError, PackedTensor, PackingError, get_format, sqnr_db
from qerl.formats.disk_layout import quantization_config
from qerl.formats.e2m1 import VALUES

FORMAT = get_format("mxfp4")


def scale_bytes(packed: PackedTensor) -> torch.Tensor:
    return packed.block_scale.view(torch.uint8)


def awkward_weight(rows: int = 48, columns: int = 96) -> torch.Tensor:
    """bf16 weight with zero blocks of both signs, an outlier, tiny and subnormal blocks, ties, and saturation."""
    weight = torch.randn(rows, columns).mul(0.02)
    weight[0, :32] = 0.0
    weight[1, :32] = -0.0
    weight[2, 5] = 3.0
    weight[3, :32] *= 1e-6
    weight[4, :32] *= 1e-30
    weight[5, :32] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4)
    weight[6, :32] = -weight[5, :32]
    weight[7, :32] = 1e-39
    for row, largest in enumerate((3.98, 4.0, 6.0, 6.97, 7.0, 7.97), start=8):
        weight[row, :32] = weight[row, :32].clamp(-2, 2)
        weight[row, 3] = largest
    return weight.to(torch.bfloat16)


def test_golden_of_llm_compressor(shared_dir: Path) -> None:
    case = json.loads((shared_dir / "golden" / "nvfp4_golden.json").read_text())["cases"]["mxfp4"]
    field = case["tensors"]["gate_proj"]

    def tensor(key: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(field[key]), dtype=dtype).reshape(shape)

    (packed,) = FORMAT.quantize([tensor("weight_bf16_hex", torch.bfloat16, field["shape"])])
    assert torch.equal(packed.codes, tensor("weight_packed_hex", torch.uint8, field["weight_packed_shape"]))
    assert torch.equal(scale_bytes(packed), tensor("weight_scale_hex", torch.uint8, field["weight_scale_shape"]))
    decoded = FORMAT.dequantize(packed, torch.bfloat16).view(torch.int16)
    assert torch.equal(decoded, tensor("dequant_bf16_hex", torch.int16, field["shape"]))
    assert quantization_config("mxfp4", ["lm_head"]) == case["quantization_config"]


def library_quantize(weight: torch.Tensor) -> dict[str, Any]:
    """Through compressed-tensors' own primitives and compressor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    blocks = weight.reshape(weight.shape[0], -1, 32)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    packed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return packed | {"decoded": compressor.decompress(dict(packed), scheme)["weight"]}


@pytest.mark.parametrize("exponent", [-12, -3, 0, 4, 30])
def test_equal_to_the_compressed_tensors_library(exponent: int) -> None:
    weight = awkward_weight() * 10.0**exponent
    (mine,), theirs = FORMAT.quantize([weight]), library_quantize(weight)
    assert torch.equal(scale_bytes(mine), theirs["weight_scale"])
    assert torch.equal(mine.codes, theirs["weight_packed"])
    decoded = FORMAT.dequantize(mine, torch.bfloat16)
    assert torch.equal(decoded.view(torch.int16), theirs["decoded"].bfloat16().view(torch.int16))


def test_scale_and_codes_by_hand() -> None:
    # The largest magnitude over the scale lies in [3.5, 7): 3.48 gives the scale 1/2 (and 6.97, which saturates),
    # 3.5 gives 1 (and rounds to 4, a tie to even).
    for largest, exponent, code in ((3.484375, -1, 6.0), (3.5, 0, 4.0), (6.96875, 0, 6.0), (7.0, 1, 4.0)):
        weight = torch.zeros(1, 32)
        weight[0, 7] = -largest
        (packed,) = FORMAT.quantize([weight])
        assert scale_bytes(packed).tolist() == [[127 + exponent]], largest
        assert FORMAT.dequantize(packed)[0, 7] == -code * 2.0**exponent, largest
    weight = torch.tensor([[4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4])
    decoded = FORMAT.dequantize(FORMAT.quantize([weight])[0])
    assert decoded[0, :8].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_every_code_under_every_scale_is_exact_in_bf16() -> None:
    scale = torch.arange(mxfp4.LARGEST_SCALE_BYTE + 1, dtype=torch.uint8)
    codes = (torch.arange(16, dtype=torch.uint8) | torch.arange(16, dtype=torch.uint8) << 4).expand(len(scale), 16)
    packed = PackedTensor(
        "mxfp4", (len(scale), 32), codes.contiguous(), scale.view(torch.float8_e8m0fnu)[:, None], None
    )
    expected = torch.tensor(VALUES, dtype=torch.float64).repeat_interleave(2) * 2.0 ** (scale.double() - 127)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(FORMAT.dequantize(packed, dtype).double(), expected)
        assert torch.equal(FORMAT.unscaled(packed, dtype).double(), expected)


def test_extreme_weights_stay_finite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    weight = torch.full((2, 32), largest, dtype=torch.bfloat16)
    weight[1] = -1e-40
    (packed,) = FORMAT.quantize([weight])
    decoded = FORMAT.dequantize(packed)
    assert scale_bytes(packed).tolist() == [[252], [0]]
    assert bool((decoded[0] == 6 * 2.0**125).all()) and 0.7 < float(decoded[0, 0]) / largest < 0.8
    assert float((decoded[1].double() + 1e-40).abs().max()) <= 2.0**-129


def test_sqnr_of_gaussian_weights_is_bounded_on_both_sides() -> None:
    weight = torch.randn(256, 512).to(torch.bfloat16)
    assert 18.3 < sqnr_db(weight, FORMAT.dequantize(FORMAT.quantize([weight])[0])) < 19.2


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 192)
    (expected,) = FORMAT.quantize([weight])
    monkeypatch.setattr(mxfp4, "_CHUNK_BLOCKS", 5)
    (packed,) = FORMAT.quantize([weight])
    assert torch.equal(packed.codes, expected.codes) and torch.equal(scale_bytes(packed), scale_bytes(expected))


def test_size() -> None:
    (packed,) = FORMAT.quantize([torch.randn(8, 96)])
    assert 8 * packed.nbytes == FORMAT.bits_per_weight * 8 * 96
    assert packed.global_scale is None


def test_refusals() -> None:
    with pytest.raises(PackingError, match=r"in_features = 48 is not a multiple of the MXFP4 block size 32 \(16"):
        FORMAT.quantize([torch.randn(2, 48)])
    with pytest.raises(NonFiniteWeightError, match="1 NaN and 1 Inf"):
        FORMAT.quantize([torch.tensor([[float("nan"), float("inf")] + [0.0] * 30])])
    with pytest.raises(FormatError, match="mxfp4 has no method 'mse'; supported: rtn"):
        FORMAT.quantize([torch.randn(2, 32)], "mse")
    (packed,) = FORMAT.quantize([torch.randn(2, 64)])
    wrong = PackedTensor("mxfp4", (2, 64), packed.codes, scale_bytes(packed), None)
    with pytest.raises(PackingError, match=r"float8_e8m0fnu \[2, 2\], not torch.uint8"):
        FORMAT.dequantize(wrong)
    with pytest.raises(PackingError, match="not an mxfp4 tensor: format 'nvfp4'"):
        FORMAT.dequantize(get_format("nvfp4").quantize([torch.randn(2, 64)])[0])


@pytest.mark.gpu
def test_cuda_gives_the_same_bytes() -> None:
    weight = awkward_weight(512, 1024)
    (mine,), (expected,) = FORMAT.quantize([weight.cuda()]), FORMAT.quantize([weight])
    assert torch.equal(mine.codes.cpu(), expected.codes)
    assert torch.equal(scale_bytes(mine).cpu(), scale_bytes(expected))
    assert torch.equal(FORMAT.dequantize(mine).cpu(), FORMAT.dequantize(expected))
