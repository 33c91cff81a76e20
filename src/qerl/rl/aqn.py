"""Adaptive quantization noise: fill and clear the noise slots of RMSNorms (arXiv 2510.11696, section 3.3).

Noise never enters a weight. Each target norm has a separate fp32 slot that is filled before a rollout and zeroed after
it, so the clean policy is restored exactly and no checkpoint or evaluation can hold noise. Values depend on (seed,
update, norm name) alone: they repeat across runs, resumes, devices and ranks.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch


class NoiseSlot(Protocol):
    """A norm with an fp32 ``noise`` buffer [H]."""

    noise: torch.Tensor


class AQNError(RuntimeError):
    """Noise that would not act, or that would act where it must not."""


def _seed_of(seed: int, update: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{update}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch seeds are signed 64-bit


class NoiseInjector:
    """Owns the noise of a model's target norms.

    Args:
        norms: target norms by name (see :func:`qerl.nn.norm.aqn_norms`).
        seed: run seed.

    Raises:
        AQNError: no norm to act on.
    """

    def __init__(self, norms: Mapping[str, NoiseSlot], seed: int) -> None:
        if not norms:
            raise AQNError(
                "AQN found no RMSNorm to perturb: the model has no input_layernorm / post_attention_layernorm of the "
                "plain form weight * x / rms(x). Set aqn_schedule='none' to train without noise."
            )
        self.norms = dict(norms)
        self.seed = seed
        self.active_sigma = 0.0

    def fill(self, sigma: float, update: int) -> int:
        """Draw N(0, sigma^2) into every slot (mutates them); returns how many norms were touched.

        Raises:
            AQNError: a slot stayed zero although sigma is positive.
        """
        if sigma == 0:
            self.clear()
            return 0
        touched = 0
        for name, norm in self.norms.items():
            generator = torch.Generator().manual_seed(_seed_of(self.seed, update, name))
            # Drawn on the CPU, so that a GPU run and a CPU run see the same noise.
            values = torch.randn(norm.noise.shape, generator=generator) * sigma
            norm.noise.copy_(values)
            touched += bool(values.any())
        if touched != len(self.norms):
            raise AQNError(f"AQN touched {touched} of {len(self.norms)} norms at sigma={sigma}")
        self.active_sigma = sigma
        return touched

    def clear(self) -> None:
        """Zero every slot: the clean policy, bit for bit."""
        for norm in self.norms.values():
            norm.noise.zero_()
        self.active_sigma = 0.0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The clean policy inside the block (evaluation), the same noise again after it."""
        saved = {name: norm.noise.clone() for name, norm in self.norms.items()}
        sigma = self.active_sigma
        self.clear()
        try:
            yield
        finally:
            for name, norm in self.norms.items():
                norm.noise.copy_(saved[name])
            self.active_sigma = sigma
