"""Gated MLP that rounds once between its matmuls, with the engine's own SiLU-mul."""

import torch
from torch import nn

from qerl.kernels.silu_mul import silu_mul


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``; takes over the projections of a stock MLP, names included.

    Args:
        mlp: a module with ``gate_proj``, ``up_proj``, ``down_proj`` and a SiLU.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            if name != "act_fn":
                self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., H] -> [..., H]."""
        return self.down_proj(silu_mul(torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)))


def is_silu_mlp(module: nn.Module) -> bool:
    """Whether ``module`` is a stock gated MLP with SiLU (and nothing else in it)."""
    names = {name for name, _ in module.named_children()}
    known = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    has_all = known <= names and names - known <= {"gate_proj_up_proj_weights", "down_proj_weights"}
    return has_all and type(module.act_fn).__name__ in ("SiLUActivation", "SiLU")
