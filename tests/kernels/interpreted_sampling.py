"""The sampling kernels in Triton's interpreter (started by test_interpreter.py)."""

import math

import pytest
import torch
from sampling_cases import check_results, make_results, make_samples

from qerl.kernels.sampling import launch, reference
from qerl.kernels.sampling import triton as kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_counter_is_that_of_the_reference_bit_for_bit() -> None:
    keys = torch.randint(0, 1 << 32, (60, 2))
    keys[:2] = torch.tensor([[0, 0], [0xFFFFFFFF, 0xFFFFFFFF]])
    positions = torch.randint(0, 1 << 62, (60,))
    positions[:3] = torch.tensor([0, 1, (1 << 32) - 1])
    out = torch.empty(60, dtype=torch.float64)
    kernels.uniforms_kernel[(60,)](keys, positions, out)
    assert torch.equal(out, reference.uniforms(keys, positions))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0], ids=["greedy", "cold", "one"])
@pytest.mark.parametrize("rows, vocab_size, samples", [(1, 1, 1), (3, 5, 7), (2, 1025, 9), (2, 700, 20), (1, 4099, 9)])
@pytest.mark.parametrize("chunk", [64, 1024])
def test_draws_are_those_of_the_reference(
    rows: int, vocab_size: int, samples: int, chunk: int, temperature: float
) -> None:
    logits, keys, positions, index = make_samples(rows, vocab_size, samples)
    token_ids, logprobs = launch.sample_rows(logits, keys, positions, temperature, index, chunk)
    expected_ids, expected = reference.sample_rows(logits, keys, positions, temperature, index)
    assert torch.equal(token_ids, expected_ids)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "cold"])
@pytest.mark.parametrize("samples, start", [(1, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize("vocab_size", [1, 130])
def test_draws_go_where_they_are_wanted(vocab_size: int, samples: int, start: int, temperature: float) -> None:
    logits, keys, positions, _ = make_samples(samples, vocab_size, samples)
    if samples > 1:
        logits[1] = math.nan
    expected = launch.sample_rows(logits, keys, positions, temperature, None, 64)
    token_ids, results = make_results(16)
    part = slice(start, start + samples)
    launch.sample_rows_into(logits, keys, positions, temperature, token_ids[part], results[:, part], 64)
    check_results(token_ids, results, *expected, start)


def test_one_sample_a_row_without_an_index() -> None:
    logits, keys, positions, _ = make_samples(6, 200, 6)
    token_ids, _ = launch.sample_rows(logits, keys, positions, 1.0, None, 64)
    assert torch.equal(token_ids, reference.sample_rows(logits, keys, positions, 1.0)[0])


def test_cut_between_two_tokens_belongs_to_the_upper_one() -> None:
    """Equal weights: every token is drawn from its own interval, at the borders of chunks too."""
    keys, positions = torch.randint(0, 1 << 32, (40, 2)), torch.arange(40)
    token_ids, _ = launch.sample_rows(torch.zeros(40, 256), keys, positions, 1.0, None, 64)
    assert torch.equal(token_ids, (reference.uniforms(keys, positions) * 256).long())


@pytest.mark.parametrize("row", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_give_nan(row: list[float], temperature: float) -> None:
    logits = torch.full((3, 130), row[0])
    logits[0] = logits[2] = 0
    logits[1, 77] = row[1]
    _, keys, positions, _ = make_samples(3, 130, 3)
    token_ids, logprobs = launch.sample_rows(logits, keys, positions, temperature, None, 64)
    assert token_ids.min() >= 0 and token_ids.max() < 130
    assert logprobs.isnan().tolist() == [False, True, False]


def test_chunks_follow_from_shapes() -> None:
    assert launch.chunk_size(1, 152_064, 132) == launch.SMALL_CHUNK
    assert launch.chunk_size(256, 152_064, 132) == launch.LARGE_CHUNK
