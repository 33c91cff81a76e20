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


def make_results(capacity: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned token ids int64 [capacity] and results float64 [3, capacity]."""
    token_ids = torch.full((capacity,), -77, dtype=torch.int64, device=device)
    return token_ids, torch.full((3, capacity), -77.0, dtype=torch.float64, device=device)


def check_results(
    token_ids: torch.Tensor, results: torch.Tensor, drawn: torch.Tensor, logprobs: torch.Tensor, start: int
) -> None:
    """Of :func:`make_results`, the columns from ``start`` on hold exactly what was drawn, all others their poison."""
    expected_ids, expected = make_results(len(token_ids), str(token_ids.device))
    part = slice(start, start + len(drawn))
    expected_ids[part] = drawn
    expected[:, part] = torch.stack((drawn.double(), logprobs.double(), logprobs.double()))
    assert torch.equal(token_ids, expected_ids)
    assert torch.equal(results.isnan(), expected.isnan())
    assert torch.equal(results.nan_to_num(-5.0), expected.nan_to_num(-5.0))
