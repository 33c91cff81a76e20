"""RMSNorm with a noise slot: where AQN (arXiv 2510.11696, section 3.3) adds its noise to the scale.

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
        """``x`` [..., H] -> same shape and dtype."""
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
