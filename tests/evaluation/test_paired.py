"""Comparisons of two evaluations against hand-computed and published values."""

import pytest

from qerl.evaluation.paired import compare, mcnemar_exact, newcombe_interval, sign_flip_test


def test_mcnemar_by_hand() -> None:
    # 2 * (C(12,0) + C(12,1) + C(12,2)) / 2^12 = 2 * 79 / 4096
    assert mcnemar_exact(10, 2) == mcnemar_exact(2, 10) == 158 / 4096
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(5, 0) == 2 / 32
    with pytest.raises(ValueError, match="-1"):
        mcnemar_exact(-1, 2)


def test_mcnemar_of_many_pairs_does_not_overflow() -> None:
    # normal approximation with continuity correction: z = 199 / sqrt(2200), p = 2.2e-5
    assert mcnemar_exact(1200, 1000) == pytest.approx(2.2e-5, rel=0.03)


def test_newcombe_published_example() -> None:
    # Newcombe 1998, table II: 36, 12, 2, 0 of 50, method 10: 0.0569 to 0.3404
    low, high = newcombe_interval(36, 12, 2, 0)
    assert low == pytest.approx(0.0569, abs=5e-5)
    assert high == pytest.approx(0.3404, abs=5e-5)


def test_newcombe_has_a_width_when_nothing_changed() -> None:
    low, high = newcombe_interval(0, 0, 0, 100)
    assert low < 0 < high
    assert low == -high


def test_sign_flip_by_enumeration() -> None:
    # all 2^6 sign patterns are equally likely: only 2 of 64 are as extreme as six equal gains
    assert sign_flip_test([1.0] * 6) == pytest.approx(2 / 64, abs=0.006)
    assert sign_flip_test([0.0] * 6) == 1.0
    assert sign_flip_test([0.5] * 40) == pytest.approx(1 / 10_001)
    assert sign_flip_test([0.3, -0.1, 0.2], seed=1) == sign_flip_test([0.3, -0.1, 0.2], seed=1)


def test_compare_single_samples() -> None:
    before = {"a": [False], "b": [False], "c": [True], "d": [False], "only-before": [True]}
    after = {"d": [False], "c": [False], "b": [True], "a": [True]}
    result = compare(before, after)
    assert (result.pairs, result.gained, result.lost) == (4, 2, 1)
    assert (result.before, result.after, result.difference) == (0.25, 0.5, 0.25)
    assert result.p_value == 1.0
    assert "McNemar" in result.test
    assert result.low < 0.25 < result.high


def test_compare_several_samples_uses_problems_as_units() -> None:
    before = {str(i): [False] * 4 for i in range(12)}
    after = {str(i): [True, True, False, False] for i in range(12)}
    result = compare(before, after)
    assert result.difference == 0.5
    assert "permutation" in result.test
    # 12 problems that all improved, not 48 samples: 2 / 2^12
    assert result.p_value == pytest.approx(2 / 4096, abs=6e-4)


def test_compare_refuses_disjoint_and_empty() -> None:
    with pytest.raises(ValueError, match="1 before, 2 after"):
        compare({"a": [True]}, {"b": [True], "c": [True]})
    with pytest.raises(ValueError, match="'a'"):
        compare({"a": []}, {"a": [True]})
