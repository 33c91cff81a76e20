"""Did the model change? Comparison of two evaluations on the same problems.

The same problems before and after are pairs, and only pairs that differ carry information. One sample per
problem: McNemar's exact test and Newcombe's interval for the difference. Several samples per problem: a
sign-flip permutation test and a bootstrap over problems.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qerl.evaluation.metrics import bootstrap_interval, wilson_interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of :func:`compare`: ``difference`` is after - before, ``low`` and ``high`` its 95 % interval.

    ``gained`` and ``lost`` count the problems that went up and down; ``test`` names the test of ``p_value``
    (two-sided).
    """

    pairs: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    p_value: float
    gained: int
    lost: int
    test: str


def compare(before: Mapping[str, Sequence[bool]], after: Mapping[str, Sequence[bool]], *, seed: int = 0) -> Comparison:
    """Compare two evaluations, each ``problem id -> right or wrong per sample``, on the ids they share.

    Raises:
        ValueError: no shared ids, or a problem without samples.
    """
    ids = [name for name in before if name in after]
    if not ids:
        raise ValueError(
            f"no problem appears in both evaluations ({len(before)} before, {len(after)} after); "
            "evaluate the same task with the same limit and seed"
        )
    empty = [name for name in ids if not before[name] or not after[name]]
    if empty:
        raise ValueError(f"{len(empty)} problems have no samples, first {empty[0]!r}")
    first = [sum(before[name]) / len(before[name]) for name in ids]
    second = [sum(after[name]) / len(after[name]) for name in ids]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    gained, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    single = all(len(before[name]) == len(after[name]) == 1 for name in ids)
    if single:
        both = sum(a == 1 and b == 1 for a, b in zip(first, second, strict=True))
        low, high = newcombe_interval(both, gained, lost, len(ids) - both - gained - lost)
        p_value, test = mcnemar_exact(gained, lost), "McNemar's exact test"
    else:
        low, high = bootstrap_interval(differences, seed=seed)
        p_value, test = sign_flip_test(differences, seed=seed), "paired sign-flip permutation test"
    return Comparison(
        pairs=len(ids),
        before=math.fsum(first) / len(ids),
        after=math.fsum(second) / len(ids),
        difference=math.fsum(differences) / len(ids),
        low=low,
        high=high,
        p_value=p_value,
        gained=gained,
        lost=lost,
        test=test,
    )


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact p-value that ``gained`` and ``lost`` pairs come from a fair coin (McNemar 1947).

    Raises:
        ValueError: a negative count.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"counts cannot be negative: gained {gained}, lost {lost}")
    total = gained + lost
    tail = sum(math.comb(total, i) for i in range(min(gained, lost) + 1))
    # Integers up to the one division, which Python rounds correctly however large they are.
    return min(1.0, 2 * tail / 2**total)


def newcombe_interval(both: int, gained: int, lost: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference of paired proportions (after - before).

    Method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635-2650): Wilson intervals of the two
    proportions, joined with the correlation of the pairs. Unlike a bootstrap it has a width when no pair
    differs.

    Raises:
        ValueError: no pairs.
    """
    count = both + gained + lost + neither
    after, before = (both + gained) / count if count else 0.0, (both + lost) / count if count else 0.0
    low_after, high_after = wilson_interval(after, count)
    low_before, high_before = wilson_interval(before, count)
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    product = both * neither - gained * lost
    if product > 0:
        product = max(product - count / 2, 0.0)
    phi = product / math.sqrt(margins) if margins else 0.0
    difference = after - before
    below = _joined(after - low_after, high_before - before, phi)
    above = _joined(high_after - after, before - low_before, phi)
    return max(-1.0, difference - below), min(1.0, difference + above)


def sign_flip_test(differences: Sequence[float], *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided permutation p-value that paired differences are symmetric around 0.

    The observed assignment counts as one of the draws, so that the p-value is never 0.

    Raises:
        ValueError: no differences.
    """
    if len(differences) == 0:
        raise ValueError("a paired test needs at least 1 pair, got 0")
    array = np.asarray(differences, dtype=np.float64)
    observed = abs(array.sum())
    rng = np.random.default_rng(seed)
    extreme = 0
    slice_len = max(1, 1_000_000 // len(array))
    for start in range(0, resamples, slice_len):
        rows = min(slice_len, resamples - start)
        signs = rng.integers(0, 2, (rows, len(array)), dtype=np.int8) * 2.0 - 1.0
        # The margin keeps sums that are equal but for summation order on the side of the observed one.
        extreme += int((np.abs(signs @ array) >= observed - 1e-9).sum())
    return (extreme + 1) / (resamples + 1)


def _joined(first: float, second: float, phi: float) -> float:
    return math.sqrt(max(0.0, first * first - 2 * phi * first * second + second * second))
