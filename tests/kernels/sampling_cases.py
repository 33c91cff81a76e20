"""Logits, keys and positions that the tests of the sampling kernels share."""

import math

import torch


def make_samples(rows: int, vocab_size: int, samples: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(logits [R, V], keys [N, 2], positions [N], rows [N]).

    Logits are multiples of 1/4 with many ties and a few tokens at -inf, so that the last bits of two exponentials
    decide nothing.
    """
    generator = torch.Generator().manual_seed(seed + vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator).mul(8).round().div(4)
    if vocab_size > 4:
        logits[:, 0] = logits[:, vocab_size - 1] = -math.inf
    keys = torch.randint(0, 1 << 32, (samples, 2), generator=generator)
    positions = torch.randint(0, 1 << 40, (samples,), generator=generator)
    return logits, keys, positions, torch.randint(0, rows, (samples,), generator=generator)
