"""Model surgery: frozen group linears and slotted norms in place of the stock modules of a Hugging Face decoder.

Replacement is by explicit projection names, never by substring; what was replaced is returned and counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from qerl.formats.base import FUSED_GROUPS
from qerl.nn.group import WeightGroup
from qerl.nn.linear import QuantLinear
from qerl.nn.mlp import GatedMLP, is_silu_mlp
from qerl.nn.norm import ResidualEmbedding, RMSNorm

# Projections of a decoder layer that share no input with another one.
SINGLE_PROJECTIONS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class ProjectionGroup:
    """One fused group found in the model.

    Attributes:
        parent: the module that holds the projections (``self_attn`` or ``mlp``) and its name.
        names: projection names, in fused order.
        linears: the stock modules they replace (parameters may be on the meta device).
    """

    parent_name: str
    parent: nn.Module
    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]

    @property
    def full_names(self) -> tuple[str, ...]:
        """Module names as in a checkpoint."""
        return tuple(f"{self.parent_name}.{name}" for name in self.names)


def find_projection_groups(model: nn.Module) -> Iterator[ProjectionGroup]:
    """Groups of stock linears in decoder layers, in model order."""
    candidates = (*FUSED_GROUPS, *((name,) for name in SINGLE_PROJECTIONS))
    for parent_name, parent in list(model.named_modules()):
        for names in candidates:
            linears = tuple(getattr(parent, name, None) for name in names)
            if all(type(linear) is nn.Linear for linear in linears):
                yield ProjectionGroup(parent_name, parent, names, linears)


def install_group(found: ProjectionGroup, group: WeightGroup, biases: list[torch.Tensor | None]) -> None:
    """Replace the stock linears of ``found`` by handles on ``group`` (mutates the model)."""
    found.parent.register_module("_".join((*found.names, "weights")), group)
    for index, (name, bias) in enumerate(zip(found.names, biases, strict=True)):
        setattr(found.parent, name, QuantLinear(group, index, bias))


def _computes_rms_norm(module: nn.Module, weight: nn.Parameter, eps: float) -> bool:
    """Whether ``module`` is exactly ``weight * x / rms(x)``; tried on numbers, since class names do not tell.

    (Gemma's norm multiplies by ``1 + weight``, others scale before or after a cast.)
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, weight.shape[0], generator=generator).to(weight.device, torch.float32)
    with torch.no_grad():
        original = module.weight
        module.weight = nn.Parameter(original.float(), requires_grad=False)
        found = module(x)
        module.weight = original
        expected = weight.float() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def install_norms(model: nn.Module) -> list[str]:
    """Give every plain RMSNorm a noise slot (mutates the model); returns the names of the replaced norms."""
    replaced = []
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        is_norm = type(module).__name__.endswith("RMSNorm") and not isinstance(module, RMSNorm)
        if not is_norm or eps is None or weight is None or not _computes_rms_norm(module, weight, eps):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], RMSNorm(weight, eps))
        replaced.append(name)
    return replaced


def install_residual_stream(model: PreTrainedModel) -> bool:
    """Let the residual stream run in fp32 (mutates the model), where that is safe; returns whether it was done.

    It needs a plain embedding (others scale or normalize their output) and norms that take fp32 and give the compute
    dtype, which only the replaced ones do.
    """
    embedding = model.get_input_embeddings()
    norms = [m for m in model.modules() if type(m).__name__.endswith("Norm")]
    if type(embedding) is not nn.Embedding or not all(isinstance(m, RMSNorm) for m in norms):
        return False
    model.set_input_embeddings(ResidualEmbedding.of(embedding))
    return True


def install_mlps(model: nn.Module) -> list[str]:
    """Give every stock SiLU MLP one rounding between its matmuls (mutates the model); returns their names."""
    replaced = []
    for name, module in list(model.named_modules()):
        if is_silu_mlp(module):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], GatedMLP(module))
            replaced.append(name)
    return replaced


def quant_groups(model: nn.Module) -> dict[str, WeightGroup]:
    """All weight groups of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, WeightGroup)}


def packed_parameters(model: nn.Module) -> list[str]:
    """Names of all packed buffers, as ``model`` knows them."""
    return [f"{name}.packed" for name in quant_groups(model)]
