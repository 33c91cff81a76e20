"""The seeded draw: misuse and the op on the CPU, kernels on a GPU (its distribution: rollout/test_sampler.py)."""

import math

import pytest
import torch
from sampling_cases import check_results, make_results, make_samples

from qerl.kernels.sampling import reference, sample_rows, sample_rows_into


def test_misuse_is_named() -> None:
    logits, keys, positions, _ = make_samples(3, 10, 3)
    with pytest.raises(ValueError, match="logits must be float32"):
        sample_rows(logits.bfloat16(), keys, positions, 1.0)
    with pytest.raises(ValueError, match=r"keys must be int64 \[3, 2\]"):
        sample_rows(logits, keys[:2], positions, 1.0)
    with pytest.raises(ValueError, match=r"positions must be int64 \[3\]"):
        sample_rows(logits, keys, positions.int(), 1.0)
    with pytest.raises(ValueError, match="got -1"):
        sample_rows(logits, keys, positions, -1.0)
    token_ids, results = make_results(3)
    with pytest.raises(ValueError, match="got -1"):
        sample_rows_into(logits, keys, positions, -1.0, token_ids, results)
    with pytest.raises(ValueError, match=r"token_ids must be torch.int64 \[3\]"):
        sample_rows_into(logits, keys, positions, 1.0, token_ids[:2], results)
    with pytest.raises(ValueError, match=r"results must be torch.float64 \[3, 3\]"):
        sample_rows_into(logits, keys, positions, 1.0, token_ids, results.float())
    with pytest.raises(ValueError, match=r"contiguous rows.*strides \(1, 3\)"):
        sample_rows_into(logits, keys, positions, 1.0, token_ids, results.T)
    with pytest.raises(ValueError, match="logits are on cpu, results on meta"):
        sample_rows_into(logits, keys, positions, 1.0, token_ids, results.to("meta"))


def test_op_is_well_formed() -> None:
    logits, keys, positions, rows = make_samples(3, 10, 5)
    checks = ("test_schema", "test_faketensor")
    for temperature in (0.0, 1.0):
        arguments = (logits, keys, positions, temperature, rows)
        torch.library.opcheck(torch.ops.qerl.sample_rows, arguments, test_utils=checks)
        token_ids, results = make_results(16)
        arguments = (logits, keys[:3], positions[:3], temperature, token_ids[5:8], results[:, 5:8])
        torch.library.opcheck(torch.ops.qerl.sample_rows_into, arguments, test_utils=checks)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("samples, start", [(1, 0), (16, 0), (5, 3)])
def test_draws_go_where_they_are_wanted(samples: int, start: int, device: str, temperature: float) -> None:
    logits, keys, positions, _ = (tensor.to(device) for tensor in make_samples(samples, 3000, samples))
    if samples > 1:
        logits[1] = math.nan
    expected = sample_rows(logits, keys, positions, temperature)
    token_ids, results = make_results(16, device)
    part = slice(start, start + samples)
    sample_rows_into(logits, keys, positions, temperature, token_ids[part], results[:, part])
    check_results(token_ids, results, *expected, start)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_rows_draw_nothing(device: str, temperature: float) -> None:
    logits, keys, positions, _ = (tensor.to(device)[:0] for tensor in make_samples(2, 300, 2))
    token_ids, logprobs = sample_rows(logits, keys, positions, temperature)
    assert (token_ids.dtype, logprobs.dtype) == (torch.int64, torch.float32) and len(token_ids) == len(logprobs) == 0
    held, results = make_results(16, device)
    sample_rows_into(logits, keys, positions, temperature, held[5:5], results[:, 5:5])
    assert (held == -77).all() and (results == -77).all()


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "rows, vocab_size, samples", [(1, 1, 1), (3, 5, 7), (1, 151_936, 4), (2, 1025, 9), (300, 9000, 400)]
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_draws_are_those_of_the_reference(rows: int, vocab_size: int, samples: int, temperature: float) -> None:
    case = make_samples(rows, vocab_size, samples)
    logits, keys, positions, index = (tensor.cuda() for tensor in case)
    token_ids, logprobs = sample_rows(logits, keys, positions, temperature, index)
    expected_ids, expected = reference.sample_rows(case[0], case[1], case[2], temperature, case[3])
    # The exponentials of two devices differ in their last bits, so a border between tokens may lie beside a uniform.
    same = token_ids.cpu() == expected_ids
    assert (~same).sum() <= (1 if temperature else 0)
    torch.testing.assert_close(logprobs.cpu()[same], expected[same], rtol=1e-6, atol=3e-6)
    again = sample_rows(logits, keys, positions, temperature, index)
    assert torch.equal(again[0], token_ids) and torch.equal(again[1], logprobs)


@pytest.mark.gpu
def test_gpu_counter_is_that_of_the_cpu() -> None:
    from qerl.kernels.sampling import triton as kernels

    keys, positions = torch.randint(0, 1 << 32, (500, 2)), torch.randint(0, 1 << 62, (500,))
    out = torch.zeros(500, dtype=torch.float64, device="cuda")
    kernels.uniforms_kernel[(500,)](keys.cuda(), positions.cuda(), out)
    assert torch.equal(out.cpu(), reference.uniforms(keys, positions))


@pytest.mark.gpu
@pytest.mark.parametrize("row", [math.nan, math.inf])
def test_gpu_marks_rows_without_a_distribution(row: float) -> None:
    logits, keys, positions, _ = (t.cuda() for t in make_samples(4, 3000, 4))
    logits[2, 2222] = row
    token_ids, logprobs = sample_rows(logits, keys, positions, 1.0)
    assert logprobs.isnan().tolist() == [False, False, True, False]
    assert token_ids.min() >= 0 and token_ids.max() < 3000


@pytest.mark.gpu
def test_gpu_graph_draws_from_new_logits() -> None:
    logits, keys, positions, _ = (t.cuda() for t in make_samples(8, 5000, 8))
    expected = sample_rows(logits, keys, positions, 1.0)
    shown = torch.zeros_like(logits)
    sample_rows(shown, keys, positions, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids, logprobs = sample_rows(shown, keys, positions, 1.0)
    shown.copy_(logits)
    graph.replay()
    assert torch.equal(token_ids, expected[0]) and torch.equal(logprobs, expected[1])
