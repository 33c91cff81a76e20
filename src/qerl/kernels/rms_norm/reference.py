"""RMSNorm with a noise slot in plain torch."""

import torch


def output_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype of the result: that of ``x``, or of the weight where ``x`` is an fp32 residual stream."""
    return weight.dtype if x.dtype == torch.float32 else x.dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``(weight + noise) * (x * rsqrt(mean(x^2) + eps))`` in fp32 over the last dimension, rounded once."""
    wide = x.float()
    scale = weight.float() if noise is None else weight.float() + noise
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scale * normalized).to(output_dtype(x, weight))
