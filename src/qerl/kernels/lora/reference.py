"""The two halves of a LoRA update in plain torch; the CPU path."""

import torch

from qerl.kernels.lora.packed import PackedB


def lora_shrink(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """``x a^T``, [T, K] x [R, K] -> [T, R]; also the path for many rows on CUDA."""
    return x @ a.t()


def lora_expand(y: torch.Tensor, u: torch.Tensor, b: PackedB, active: tuple[bool, ...]) -> None:
    """``y[:, segment] += u[:, ranks] B^T`` for every active member, each sum rounded once; mutates ``y`` [T, N]."""
    for segment, factor, is_active in zip(b.segments, b.views, active, strict=True):
        if is_active:
            columns = slice(segment.out_start, segment.out_start + segment.out_features)
            ranks = slice(segment.rank_start, segment.rank_start + segment.rank)
            y[:, columns].addmm_(u[:, ranks], factor.t())
