"""Lengths of completions to generate: long-tailed ones, as reasoning models write them."""

import math

import torch

# Spread of log(length): one standard deviation is a factor of e.
LOG_SIGMA = 1.0


def lognormal_lengths(count: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """``count`` log-normal lengths between 1 and ``longest`` whose mean is ``mean`` (up to rounding).

    The location is found by bisection on the drawn numbers, so that cutting at ``longest`` does not shift the mean.

    Raises:
        ValueError: ``mean`` is not between 1 and ``longest``, or ``count`` is not positive.
    """
    if count < 1 or not 1 <= mean <= longest:
        raise ValueError(f"lengths need count >= 1 and 1 <= mean <= longest, got {count}, {mean} and {longest}")
    spread = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * LOG_SIGMA

    def lengths(location: float) -> torch.Tensor:
        return (location + spread).exp().round().clamp(1, longest)

    low, high = -10.0, math.log(longest) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(lengths(middle).mean()) < mean else (low, middle)
    return [int(length) for length in lengths(high).tolist()]
