"""NF4 against hand values and, where installed, against bitsandbytes."""

import pytest
import torch

from qerl.formats import nf4
from qerl.formats.base import NonFiniteWeightError, PackedTensor, PackingError, get_format, sqnr_db
from qerl.formats.disk_layout import swap_nibbles
from qerl.formats.nf4 import CODE_BOOK

FORMAT = get_format("nf4")


def test_code_book_values_survive_exactly_in_code_and_as_bf16_in_value() -> None:
    row = torch.tensor(CODE_BOOK * 4).to(torch.bfloat16)
    (packed,) = FORMAT.quantize([row.reshape(1, 64)])
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), -1).flatten()
    assert codes.tolist() == list(range(16)) * 4
    assert packed.block_scale.tolist() == [[1.0]]
    assert torch.equal(FORMAT.dequantize(packed)[0], row.float())


def test_nearest_entry_by_hand() -> None:
    # absmax 2; relative values 1, 0.03 (nearer to 0), 0.05 (nearer to 0.0796), -0.9 (nearer to -1).
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([2.0, 0.06, 0.1, -1.8])
    (packed,) = FORMAT.quantize([weight])
    assert packed.block_scale.tolist() == [[2.0]]
    assert packed.codes[0, :3].tolist() == [15 | 7 << 4, 8 | 0 << 4, 7 | 7 << 4]
    expected = torch.tensor([2.0, 0.0, 2 * CODE_BOOK[8], -2.0]).to(torch.bfloat16).float()
    assert torch.equal(FORMAT.dequantize(packed)[0, :4], expected)


def test_every_weight_goes_to_the_nearest_entry() -> None:
    weight = torch.randn(64, 128).to(torch.bfloat16)
    (packed,) = FORMAT.quantize([weight])
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), -1).reshape(-1, 64)
    relative = weight.double().reshape(-1, 64) / packed.block_scale.double().reshape(-1, 1)
    distances = (relative[..., None] - torch.tensor(CODE_BOOK, dtype=torch.float64)).abs()
    chosen = distances.gather(-1, codes.long()[..., None])[..., 0]
    # The reciprocal in fp32 may decide a near tie the other way, by no more than its rounding.
    assert bool((chosen <= distances.amin(-1) + 2**-22).all())


def test_weight_is_defined_as_rounded_to_bf16() -> None:
    (packed,) = FORMAT.quantize([torch.randn(8, 128)])
    decoded = FORMAT.dequantize(packed)
    assert torch.equal(decoded, decoded.to(torch.bfloat16).float())
    assert torch.equal(FORMAT.unscaled(packed, torch.float32), decoded)
    assert packed.global_scale is None


def test_zero_blocks_are_exact() -> None:
    weight = torch.randn(2, 128)
    weight[0, :64] = 0.0
    (packed,) = FORMAT.quantize([weight])
    assert bool((FORMAT.dequantize(packed)[0, :64] == 0).all())
    assert bool(torch.isfinite(packed.block_scale).all())


@pytest.mark.parametrize("shape", [(1, 2), (4, 8), (3, 10), (5, 96), (2, 66)], ids=str)
def test_blocks_run_over_row_ends_where_the_width_is_no_multiple(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(torch.bfloat16)
    (packed,) = FORMAT.quantize([weight])
    flat = weight.float().flatten()
    pieces = flat.split(64)
    assert packed.block_scale.tolist() == [float(piece.abs().max()) for piece in pieces]
    decoded = FORMAT.dequantize(packed)
    assert decoded.shape == shape
    # Padding a copy by hand to whole blocks must give the same values.
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).reshape(-1, 64)
    (whole,) = FORMAT.quantize([padded])
    assert torch.equal(decoded.flatten(), FORMAT.dequantize(whole).flatten()[: flat.numel()])


def test_sqnr_of_gaussian_weights_is_bounded_on_both_sides() -> None:
    weight = torch.randn(256, 512).to(torch.bfloat16)
    assert 20.4 < sqnr_db(weight, FORMAT.dequantize(FORMAT.quantize([weight])[0])) < 21.0


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 192)
    (expected,) = FORMAT.quantize([weight])
    monkeypatch.setattr(nf4, "_CHUNK_BLOCKS", 5)
    (packed,) = FORMAT.quantize([weight])
    assert torch.equal(packed.codes, expected.codes)


@pytest.mark.gpu
def test_cuda_gives_the_same_bytes() -> None:
    weight = torch.randn(2048, 2048).to(torch.bfloat16)
    weight[0, :64] = 0.0
    (mine,), (expected,) = FORMAT.quantize([weight.cuda()]), FORMAT.quantize([weight])
    assert torch.equal(mine.codes.cpu(), expected.codes)
    assert torch.equal(mine.block_scale.cpu(), expected.block_scale)
    assert torch.equal(FORMAT.dequantize(mine).cpu(), FORMAT.dequantize(expected))


def test_refusals() -> None:
    with pytest.raises(PackingError, match="in_features = 65 is odd"):
        FORMAT.quantize([torch.randn(2, 65)])
    with pytest.raises(NonFiniteWeightError, match="1 NaN"):
        FORMAT.quantize([torch.full((1, 64), float("nan")).where(torch.arange(64) == 3, torch.zeros(()))])
    (packed,) = FORMAT.quantize([torch.randn(2, 64)])
    wrong = PackedTensor("nf4", (2, 64), packed.codes, packed.block_scale.flatten(), None)
    with pytest.raises(PackingError, match=r"float32 \[2, 1\]"):
        FORMAT.dequantize(wrong)


@pytest.mark.parametrize("shape", [(32, 256), (4, 8), (5, 96), (7, 130)], ids=str)
def test_equal_to_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape).to(torch.bfloat16)
    weight[0, :8] = 0.0
    raw, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    (packed,) = FORMAT.quantize([weight])
    assert torch.equal(swap_nibbles(packed.codes).flatten(), raw.flatten())
    assert torch.equal(packed.block_scale.flatten(), state.absmax)
    if shape[1] % 64 == 0:
        theirs = functional.dequantize_4bit(raw, state)
    else:
        # Its CPU kernel (0.50) decodes by row what its quantizer packed by flat blocks; decode its state by hand.
        nibbles = torch.stack((raw.flatten() >> 4, raw.flatten() & 15), -1).flatten().int()
        scale = state.absmax.repeat_interleave(64)[: weight.numel()]
        theirs = (state.code[nibbles] * scale).reshape(shape).to(torch.bfloat16)
    assert torch.equal(FORMAT.dequantize(packed, torch.bfloat16), theirs)
