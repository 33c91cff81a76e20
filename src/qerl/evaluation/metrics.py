"""Accuracy figures of sampled completions and their uncertainty. Plain numbers in, plain numbers out.

A problem has ``n`` samples, each right or wrong. All figures are means over problems, so every problem weighs
the same. Intervals treat problems, not samples, as the independent draws: samples of one problem are
correlated.
"""

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples, drawn without replacement, is right.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, equation 1), in
    exact integer arithmetic.

    Raises:
        ValueError: ``k`` exceeds the samples that were made, or the counts are impossible.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} correct of {num_samples} samples is impossible")
    if k < 1:
        raise ValueError(f"pass@{k}: k must be at least 1")
    if k > num_samples:
        raise ValueError(
            f"pass@{k} needs at least {k} samples per problem, but {num_samples} were made; "
            f"generate with n >= {k} or ask for k <= {num_samples}"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Mean of :func:`pass_at_k` over problems; ``correct[problem][sample]``, problems may differ in ``n``."""
    _require_problems(correct)
    return math.fsum(pass_at_k(len(row), sum(row), k) for row in correct) / len(correct)


def average_at_n(correct: Sequence[Sequence[bool]]) -> float:
    """avg@n: the share of right samples, per problem, averaged over problems (equals pass@1)."""
    return mean_pass_at_k(correct, 1)


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: Sequence[Sequence[bool]], k: int) -> float:
    """maj@k: the share of problems whose most frequent answer among the first ``k`` samples is right.

    Answers are compared as extracted, white space at the ends aside. Samples without an answer do not vote; a
    tie goes to the answer that came first; a problem where nothing voted is wrong.

    Raises:
        ValueError: ``k`` exceeds the samples of a problem, or the shapes of the two arguments differ.
    """
    _require_problems(correct)
    if [len(row) for row in answers] != [len(row) for row in correct]:
        raise ValueError("answers and correct must have the same samples per problem")
    right = 0
    for problem_answers, problem_correct in zip(answers, correct, strict=True):
        if not 1 <= k <= len(problem_answers):
            raise ValueError(
                f"maj@{k} needs at least {k} samples per problem, but {len(problem_answers)} were made; "
                f"generate with n >= {k} or ask for a smaller k, at least 1"
            )
        right += _majority_is_right(problem_answers[:k], problem_correct[:k])
    return right / len(correct)


def wilson_interval(proportion: float, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a proportion seen on ``count`` problems (95 % by default).

    With the mean of ``n`` samples per problem as the proportion it is conservative: a problem's share of
    right samples lies in [0, 1] and so varies at most as much as a coin of the same mean.

    Raises:
        ValueError: no problems, or a proportion outside [0, 1].
    """
    if count < 1:
        raise ValueError("an interval needs at least 1 problem, got 0")
    if not 0.0 <= proportion <= 1.0:
        raise ValueError(f"a proportion lies in [0, 1], got {proportion}")
    square = z * z
    centre = proportion + square / (2 * count)
    spread = z * math.sqrt(proportion * (1 - proportion) / count + square / (4 * count * count))
    scale = 1 + square / count
    # The clamps only remove rounding: the bounds touch 0 and 1 exactly at proportions 0 and 1.
    low = 0.0 if proportion == 0.0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if proportion == 1.0 else min(1.0, (centre + spread) / scale)
    return low, high


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of ``values`` (one per problem), reproducible by ``seed``.

    Degenerate where all values are equal (width 0): prefer :func:`wilson_interval` for right-or-wrong
    results.

    Raises:
        ValueError: no values, or a level outside (0, 1).
    """
    if len(values) == 0:
        raise ValueError("a bootstrap interval needs at least 1 value, got 0")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level lies strictly between 0 and 1, got {level}")
    means = bootstrap_means(values, resamples=resamples, seed=seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_means(values: Sequence[float], *, resamples: int, seed: int) -> np.ndarray:
    """Means of ``resamples`` draws with replacement, float64 [resamples]."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    # In slices: 10,000 draws of 10,000 problems at once would take 800 MB.
    slice_len = max(1, 1_000_000 // len(array))
    for start in range(0, resamples, slice_len):
        stop = min(start + slice_len, resamples)
        means[start:stop] = array[rng.integers(0, len(array), (stop - start, len(array)))].mean(axis=1)
    return means


def _majority_is_right(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    votes: dict[str, int] = {}
    verdict: dict[str, bool] = {}
    for answer, is_right in zip(answers, correct, strict=True):
        if answer is None:
            continue
        key = answer.strip()
        votes[key] = votes.get(key, 0) + 1
        verdict.setdefault(key, is_right)
    if not votes:
        return False
    # max() keeps the first of equals and dicts keep insertion order: the tie rule above.
    return verdict[max(votes, key=lambda key: votes[key])]


def _require_problems(correct: Sequence[Sequence[bool]]) -> None:
    if len(correct) == 0:
        raise ValueError("no problems were evaluated: accuracy of 0 problems is undefined")
