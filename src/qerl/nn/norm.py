"""The residual stream (fp32) and RMSNorm with a noise slot, where AQN adds its noise to the scale
(arXiv 2510.11696, section 3.3).

``y = ((weight + noise) * x / rms(x))`` is computed in fp32 and rounded once, the same op in the rollout engine and in
the trainer. The noise is a separate fp32 buffer and is never added into ``weight``: in bf16 the spacing of values just
above 1 is 7.8e-3, so a sigma of 5e-4 added into a bf16 weight would vanish. The buffer is not persistent: no state
dict, and so no checkpoint, can hold noise.
"""

import torch
from torch import nn

from qerl.kernels.rms_norm import rms_norm

# The norms that the paper perturbs: before attention and before the MLP, in every decoder layer.
AQN_NORM_NAMES = ("input_layernorm", "post_attention_layernorm")


class ResidualEmbedding(nn.Embedding):
    """Token embedding that starts the residual stream in fp32.

    Layers add their bf16 outputs to it, so hidden states are never rounded between layers. That rounding, twice a layer
    to 2^-9 of the whole stream, is what separates two implementations of one bf16 model most: engine and trainer sum in
    different orders, and every rounding can turn a last-bit difference into a full one.
    """

    @classmethod
    def of(cls, embedding: nn.Embedding) -> "ResidualEmbedding":
        """Take over the (frozen) weight of ``embedding``; no copy."""
        taken = cls(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, _weight=embedding.weight.data
        )
        return taken.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> fp32 [..., H]."""
        return super().forward(input).float()


class RMSNorm(nn.Module):
    """Drop-in for the RMSNorm of the Llama/Qwen family.

    Args:
        weight: scale ``[H]``; kept as the Parameter it is (no copy).
        eps: added to the mean square.
    """

    noise: torch.Tensor

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps
        noise = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        self.register_buffer("noise", noise, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., H]: the fp32 residual stream, or heads in the compute dtype -> [..., H] in the compute dtype."""
        return rms_norm(x, self.weight, self.noise, self.variance_epsilon)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        noise = self.noise
        super()._apply(fn, recurse)
        self.noise = noise.to(self.weight.device)  # moved, never rounded: `.to(bfloat16)` casts buffers
        return self

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def aqn_norms(model: nn.Module) -> dict[str, RMSNorm]:
    """The norms that AQN perturbs, by module name (without PEFT's prefix, so that seeds do not depend on it)."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm) and name.rsplit(".", 1)[-1] in AQN_NORM_NAMES
    }
