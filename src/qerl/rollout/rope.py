"""Cosines and sines of the rotary embedding for every position, computed once by the model's own module."""

import torch
from torch import nn


class RotaryTable:
    """Looks up what ``module`` (a transformers rotary embedding) gives for positions below ``num_positions``.

    The values are those of the module bit for bit: cosine and sine of each (position, frequency) do not depend on the
    other positions, except for rope types that scale with the length of the batch. Of these, "dynamic" is constant up
    to the model's own length, and "longrope" is refused by the runner. A lookup, unlike the module, never waits for
    the device to compare positions.
    """

    def __init__(self, module: nn.Module, num_positions: int) -> None:
        self._module = module
        self._num_positions = num_positions
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin on ``device``, fp32 [num_positions, D] each; computed at the first call."""
        if self._tables is None or self._tables[0].device != device:
            positions = torch.arange(self._num_positions, device=device)[None]
            cos, sin = self._module(torch.empty(0, dtype=torch.float32, device=device), positions)
            self._tables = cos[0].contiguous(), sin[0].contiguous()
        return self._tables

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of ``positions`` int64 [T]: fp32 [T, D] each."""
        cos, sin = self.tables(positions.device)
        return cos.index_select(0, positions), sin.index_select(0, positions)
