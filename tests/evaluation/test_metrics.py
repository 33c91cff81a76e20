"""Accuracy figures against values computed by hand."""

import itertools
import random

import pytest

from qerl.evaluation.metrics import (
    average_at_n,
    bootstrap_interval,
    majority_at_k,
    mean_pass_at_k,
    pass_at_k,
    wilson_interval,
)


def test_pass_at_k_by_hand() -> None:
    # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
    assert pass_at_k(10, 3, 5) == 1 - 21 / 252
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(8, 3, 1) == 3 / 8


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (6, 1, 4), (7, 4, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_naive_estimate_is_not() -> None:
    rng = random.Random(0)
    rate, n, k, rounds = 0.3, 6, 3, 4000
    counts = [sum(rng.random() < rate for _ in range(n)) for _ in range(rounds)]
    truth = 1 - (1 - rate) ** k
    estimate = sum(pass_at_k(n, c, k) for c in counts) / rounds
    naive = sum(1 - (1 - c / n) ** k for c in counts) / rounds
    assert abs(estimate - truth) < 0.015
    assert truth - naive > 0.02


def test_pass_at_k_beyond_the_samples_made_is_an_error_with_numbers() -> None:
    # cases.md row 13: pass@k over n = 64 with 8 samples made
    with pytest.raises(ValueError, match=r"pass@64 needs at least 64 samples per problem, but 8 were made"):
        pass_at_k(8, 4, 64)
    with pytest.raises(ValueError, match="8 were made"):
        mean_pass_at_k([[True] * 64, [True] * 8], 64)
    with pytest.raises(ValueError, match="at least 1"):
        pass_at_k(8, 4, 0)
    with pytest.raises(ValueError, match="9 correct of 8"):
        pass_at_k(8, 9, 1)


def test_average_uses_the_samples_that_were_made() -> None:
    # 8 of 8 and 0 of 4: 0.5, whatever n was asked for
    assert average_at_n([[True] * 8, [False] * 4]) == 0.5
    with pytest.raises(ValueError, match="0 problems"):
        average_at_n([])


def test_majority_by_hand() -> None:
    answers = [["7", "8", "8 "], ["1", "2", None], [None, None, None]]
    correct = [[False, True, True], [True, False, False], [False, False, False]]
    # problem 1: 8 wins; problem 2: tie, "1" came first; problem 3: no vote
    assert majority_at_k(answers, correct, 3) == 2 / 3
    assert majority_at_k(answers, correct, 1) == 1 / 3
    with pytest.raises(ValueError, match="maj@4 needs at least 4 samples per problem, but 3 were made"):
        majority_at_k(answers, correct, 4)
    with pytest.raises(ValueError, match="same samples"):
        majority_at_k([["1"]], [[True, False]], 1)


def test_wilson_by_hand() -> None:
    # p = 0.5, n = 10, z^2 = 3.8415: centre 0.5, half width sqrt(0.025 + 0.0096) * 1.96 / 1.384
    low, high = wilson_interval(0.5, 10)
    assert low == pytest.approx(0.2366, abs=5e-5)
    assert high == pytest.approx(0.7634, abs=5e-5)
    # p = 0: high = z^2 / (n + z^2)
    assert wilson_interval(0.0, 128) == (0.0, pytest.approx(3.841459 / 131.841459, abs=1e-6))
    assert wilson_interval(1.0, 128)[1] == 1.0
    with pytest.raises(ValueError, match="at least 1 problem"):
        wilson_interval(0.5, 0)
    with pytest.raises(ValueError, match=r"1\.2"):
        wilson_interval(1.2, 10)


def test_bootstrap_is_seeded_and_near_the_normal_interval() -> None:
    values = [1.0] * 40 + [0.0] * 60
    first = bootstrap_interval(values, seed=3)
    assert first == bootstrap_interval(values, seed=3)
    assert first != bootstrap_interval(values, seed=4)
    # 0.4 +- 1.96 * sqrt(0.24 / 100)
    assert first[0] == pytest.approx(0.304, abs=0.012)
    assert first[1] == pytest.approx(0.496, abs=0.012)
    with pytest.raises(ValueError, match="at least 1 value"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([1.0], level=95)
