"""The sampler draws from the exact distribution, reports its log-probs, and depends on nothing but its key."""

import math
from collections.abc import Callable

import pytest
import torch

from qerl.rollout.core import NonFiniteLogitsError, SamplingParams
from qerl.rollout.sampler import SampledTokens, keys_tensor, sample, sequence_key, uniforms

CPU = torch.device("cpu")
INF = math.inf


def _keys(count: int, seed: int = 0) -> torch.Tensor:
    return keys_tensor([sequence_key(seed, 0, row, 0) for row in range(count)], CPU)


def _draw_many(logits: list[float], sampling: SamplingParams, count: int = 40_000) -> SampledTokens:
    """``count`` draws from one row, at as many positions of one stream."""
    return sample(
        torch.tensor([logits]),
        sampling,
        _keys(1).expand(count, 2),
        torch.arange(count),
        torch.zeros(count, dtype=torch.int64),
    )


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def _draw_at(monkeypatch: pytest.MonkeyPatch, uniforms: Callable[..., torch.Tensor]) -> None:
    """Replace the counter in the plain and in the truncated draw."""
    for module in ("qerl.kernels.sampling.reference", "qerl.rollout.sampler"):
        monkeypatch.setattr(f"{module}.uniforms", uniforms)


def test_uniforms_match_pure_integer_arithmetic() -> None:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        return x ^ (x >> 15)

    keys = [sequence_key(seed, 3, 2**40 + seed, 7) for seed in range(-3, 4)]
    keys += [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF)]
    positions = [0, 1, 5, 2**20, 2**31, 2**32 - 1, 17, 123_456, 9]
    expected = []
    for (low, high), position in zip(keys, positions, strict=True):
        first = mix(mix(position) ^ low)
        second = mix((first + high) & 0xFFFFFFFF)
        third = mix(second ^ mix((low + 0x9E3779B9) & 0xFFFFFFFF))
        bits = (second & 0x3FFFFFF) << 26 | (third & 0x3FFFFFF)
        expected.append((2 * bits + 1) * 2.0**-53)
    assert uniforms(keys_tensor(keys, CPU), torch.tensor(positions)).tolist() == expected


def test_uniforms_are_uniform_in_every_counter() -> None:
    count = 64_000
    fields = torch.arange(count).tolist()
    streams = {
        "position": uniforms(_keys(1).expand(count, 2), torch.arange(count)),
        "seed": uniforms(keys_tensor([sequence_key(i, 0, 0, 0) for i in fields], CPU), torch.ones(count).long()),
        "sample": uniforms(keys_tensor([sequence_key(0, 1, 2, i) for i in fields], CPU), torch.ones(count).long()),
    }
    for name, stream in streams.items():
        assert stream.min() > 0 and stream.max() < 1, name
        assert stream.unique().numel() == count, name
        counts = torch.histc(stream.float(), 64, 0, 1)
        # 63 degrees of freedom: 126 is beyond 99.9995 %.
        assert _chi_square(counts, torch.full((64,), 1 / 64)) < 126, name
        lagged = torch.corrcoef(torch.stack([stream[:-1], stream[1:]]))[0, 1].abs()
        assert lagged < 5 / math.sqrt(count), name


def test_every_part_of_the_key_changes_the_stream() -> None:
    base = (11, 22, 33, 44)
    keys = {sequence_key(*base)}
    for field in range(4):
        for change in (1, -1, 2**32, 2**33):
            keys.add(sequence_key(*(value + change * (field == i) for i, value in enumerate(base))))
    assert len(keys) == 17
    assert sequence_key(1, 2, 3, 4) != sequence_key(2, 1, 3, 4)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 1000])
def test_frequencies_match_the_distribution(vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    drawn = _draw_many(logits.tolist(), SamplingParams(temperature=0.7))
    counts = torch.bincount(drawn.token_ids, minlength=vocab_size).double()
    exact = (logits.double() / 0.7).softmax(-1)
    freedom = vocab_size - 1
    assert _chi_square(counts, exact) <= freedom + 5 * math.sqrt(2 * freedom)


# Probabilities .4 .3 .2 .06 .04 in shuffled places; token 5 is impossible.
PROBABILITIES = [0.2, 0.4, 0.04, 0.3, 0.06, 0.0]
LOGITS = [math.log(p) if p else -INF for p in PROBABILITIES]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0: 0.2, 1: 0.4, 2: 0.04, 3: 0.3, 4: 0.06}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 3}, {1: 4 / 9, 3: 3 / 9, 0: 2 / 9}),
        ({"top_k": 100}, {0: 0.2, 1: 0.4, 2: 0.04, 3: 0.3, 4: 0.06}),
        # .4 + .3 = .7 falls short of .75, so the third token that reaches it stays.
        ({"top_p": 0.75}, {1: 4 / 9, 3: 3 / 9, 0: 2 / 9}),
        ({"top_p": 0.65}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.01}, {1: 1.0}),
        # .06 / .4 = .15 and .04 / .4 = .1
        ({"min_p": 0.12}, {1: 0.4 / 0.96, 3: 0.3 / 0.96, 0: 0.2 / 0.96, 4: 0.06 / 0.96}),
        ({"min_p": 1.0}, {1: 1.0}),
        # top_p counts the mass after top_k: .4/.7 = .57 reaches .5 alone; before top_k it would not.
        ({"top_k": 2, "top_p": 0.5}, {1: 1.0}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.6}, {1: 4 / 7, 3: 3 / 7}),
    ],
)
def test_truncated_distributions_by_hand(options: dict[str, float], kept: dict[int, float]) -> None:
    drawn = _draw_many(LOGITS, SamplingParams(**options))
    counts = torch.bincount(drawn.token_ids, minlength=6).double()
    assert set(counts.nonzero().flatten().tolist()) == set(kept)
    exact = torch.tensor([kept[token] for token in sorted(kept)], dtype=torch.float64)
    assert _chi_square(counts[sorted(kept)], exact) < 30
    for token, probability in kept.items():
        chosen = drawn.token_ids == token
        torch.testing.assert_close(
            drawn.logprobs[chosen].exp().double().unique().item(), probability, rtol=1e-5, atol=0
        )
        reported = drawn.temperature_logprobs[chosen].exp().unique().item()
        torch.testing.assert_close(reported, PROBABILITIES[token], rtol=1e-5, atol=0)


def test_temperature_comes_before_the_other_filters() -> None:
    # At T = 2 the probabilities are proportional to their square roots, so .06 / .4 becomes .387.
    drawn = _draw_many(LOGITS, SamplingParams(temperature=2.0, min_p=0.35))
    assert set(drawn.token_ids.tolist()) == {0, 1, 3, 4}
    drawn = _draw_many(LOGITS, SamplingParams(temperature=1.0, min_p=0.35))
    assert set(drawn.token_ids.tolist()) == {0, 1, 3}


def test_ties_at_the_kth_token_are_kept_and_top_p_prefers_the_lower_id() -> None:
    drawn = _draw_many([1.0, 2.0, 1.0, 1.0], SamplingParams(top_k=2))
    assert set(drawn.token_ids.tolist()) == {0, 1, 2, 3}
    drawn = _draw_many([0.0, 0.0, 0.0, 0.0], SamplingParams(top_p=0.5))
    assert set(drawn.token_ids.tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.8}, {"min_p": 0.02}])
def test_logprobs_are_log_softmax_of_the_processed_logits(temperature: float, options: dict[str, float]) -> None:
    rows, vocab_size = 64, 5000
    logits = 4 * torch.randn(rows, vocab_size)
    drawn = sample(logits, SamplingParams(temperature=temperature, **options), _keys(rows), torch.arange(rows))
    scaled = logits.double() / temperature
    processed = scaled.clone()
    if "top_k" in options:
        kth = scaled.topk(50).values[:, -1:]
        processed[scaled < kth] = -INF
    if "top_p" in options:
        ordered, index = scaled.sort(descending=True)
        mass = ordered.softmax(-1)
        dropped = mass.cumsum(-1) - mass >= 0.8
        processed.scatter_(-1, index, ordered.masked_fill(dropped, -INF))
    if "min_p" in options:
        mass = scaled.softmax(-1)
        processed[mass < 0.02 * mass.amax(-1, keepdim=True)] = -INF
    pick = drawn.token_ids[:, None]
    for reported, distribution in ((drawn.logprobs, processed), (drawn.temperature_logprobs, scaled)):
        exact = distribution.log_softmax(-1).gather(-1, pick)[:, 0]
        torch.testing.assert_close(reported.double(), exact, rtol=1e-6, atol=3e-6)


def test_greedy_takes_the_first_best_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -INF, 2.0, 5.0]])
    drawn = sample(logits, SamplingParams(temperature=0.0, top_k=1), _keys(2), torch.arange(2))
    assert drawn.token_ids.tolist() == [1, 0]
    exact = logits.log_softmax(-1).gather(-1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, exact)
    torch.testing.assert_close(drawn.temperature_logprobs, exact)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 7}, {"temperature": 0.0}])
def test_a_draw_does_not_depend_on_the_batch_around_it(options: dict[str, float]) -> None:
    sampling = SamplingParams(**options)
    logits = torch.randn(100, 300)
    keys, positions = _keys(100), torch.arange(100) * 3
    whole = sample(logits, sampling, keys, positions)
    order = torch.randperm(100)
    shuffled = sample(logits, sampling, keys[order], positions[order], order)
    assert torch.equal(shuffled.token_ids, whole.token_ids[order])
    assert torch.equal(shuffled.logprobs, whole.logprobs[order])
    for row in (0, 57, 99):
        part = slice(row, row + 1)
        alone = sample(logits[part], sampling, keys[part], positions[part])
        assert alone.token_ids[0] == whole.token_ids[row]
        assert alone.logprobs[0] == whole.logprobs[row]
        assert alone.temperature_logprobs[0] == whole.temperature_logprobs[row]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_pieces_of_a_large_batch_agree_with_the_whole(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, keys, positions = torch.randn(13, 40), _keys(26), torch.arange(26)
    rows = torch.arange(13).repeat_interleave(2)
    sampling = SamplingParams(**options)
    whole = sample(logits, sampling, keys, positions, rows)
    monkeypatch.setattr("qerl.rollout.sampler._MAX_LOGITS_AT_ONCE", 3 * 40)
    pieces = sample(logits, sampling, keys, positions, rows)
    assert pieces.tolist() == whole.tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, 200)
    before = logits.clone()
    for sampling in (SamplingParams(top_p=0.5, top_k=9, min_p=0.1), SamplingParams(temperature=0.0)):
        sample(logits, sampling, _keys(4), torch.arange(4))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bits", [0, 2**52 - 1])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.999}, {"temperature": 50.0}])
def test_extreme_uniforms_never_reach_an_impossible_token(
    bits: int, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    extreme = (2 * bits + 1) * 2.0**-53
    _draw_at(monkeypatch, lambda keys, positions: torch.full(positions.shape, extreme, dtype=torch.float64))
    for vocab_size in (5, 128, 640, 151_936):
        logits = torch.zeros(1, vocab_size)
        # Impossible at both ends, where an off-by-one of the search would land.
        logits[0, 0] = logits[0, -1] = -INF
        drawn = sample(logits, SamplingParams(**options), _keys(1), torch.zeros(1).long())
        assert 0 < drawn.token_ids.item() < vocab_size - 1
        if bits == 0:
            assert drawn.token_ids.item() == 1
        elif "top_p" not in options:
            assert drawn.token_ids.item() == vocab_size - 2


def test_the_cut_between_two_tokens_belongs_to_the_upper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # 256 equal weights are exact, so u = k / 256 hits the cut below token k, at chunk borders as well.
    cuts = torch.arange(256, dtype=torch.float64) / 256
    _draw_at(monkeypatch, lambda keys, positions: cuts)
    drawn = sample(torch.zeros(256, 256), SamplingParams(), _keys(256), torch.arange(256))
    assert drawn.token_ids.tolist() == list(range(256))
    # An impossible token at the start of the second chunk: the cut at its border belongs to the token after it.
    logits = torch.zeros(256, 257)
    logits[:, 128] = -INF
    drawn = sample(logits, SamplingParams(), _keys(256), torch.arange(256))
    assert drawn.token_ids.tolist() == [*range(128), *range(129, 257)]


def test_all_mass_on_one_token() -> None:
    drawn = _draw_many([-INF, -INF, 3.0, -INF], SamplingParams(), count=500)
    assert set(drawn.token_ids.tolist()) == {2}
    assert set(drawn.logprobs.tolist()) == {0.0}
    drawn = _draw_many([0.0, 1000.0, -1000.0], SamplingParams(), count=500)
    assert set(drawn.token_ids.tolist()) == {1}


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, INF, 1.0], [INF, INF, INF], [-INF, -INF, -INF]], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1}], ids=str)
def test_logits_without_a_distribution_are_named(row: list[float], options: dict[str, float]) -> None:
    logits = torch.zeros(4, 3)
    logits[2] = torch.tensor(row)
    drawn = sample(logits, SamplingParams(**options), _keys(4), torch.arange(4))
    assert drawn.token_ids.min() >= 0 and drawn.token_ids.max() < 3
    with pytest.raises(NonFiniteLogitsError, match=r"1 of 4 rows .*row 2"):
        drawn.tolist()


def test_tolist_keeps_large_ids_and_float32_exactly() -> None:
    logprob = torch.tensor([-0.1], dtype=torch.float32)
    columns = SampledTokens(torch.tensor([2**24 + 1]), logprob, logprob).tolist()
    assert columns == ([2**24 + 1], [logprob.item()], [logprob.item()])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"temperature": 0.0}])
def test_cuda_draws_the_same_tokens(options: dict[str, float]) -> None:
    sampling = SamplingParams(**options)
    # Logits whose exponentials differ by far more than the two devices' exp do.
    logits = torch.randn(256, 4096).mul(8).round().div(4)
    keys, positions = _keys(256), torch.arange(256)
    cpu = sample(logits, sampling, keys, positions)
    cuda = sample(logits.cuda(), sampling, keys.cuda(), positions.cuda())
    assert torch.equal(uniforms(keys, positions), uniforms(keys.cuda(), positions.cuda()).cpu())
    assert torch.equal(cuda.token_ids.cpu(), cpu.token_ids)
    torch.testing.assert_close(cuda.logprobs.cpu(), cpu.logprobs, rtol=1e-6, atol=2e-6)
    again = sample(logits.cuda(), sampling, keys.cuda(), positions.cuda())
    assert again.tolist() == cuda.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
def test_cuda_truncated_draws_can_be_captured(options: dict[str, float]) -> None:
    """Nothing waits for the device, so that a graph of a draw follows new logits."""
    sampling = SamplingParams(**options)
    logits, keys, positions = torch.randn(16, 4096).cuda(), _keys(16).cuda(), torch.arange(16).cuda()
    expected = sample(logits, sampling, keys, positions)
    shown = torch.zeros_like(logits)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sample(shown, sampling, keys, positions)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample(shown, sampling, keys, positions)
    shown.copy_(logits)
    graph.replay()
    assert drawn.tolist() == expected.tolist()
