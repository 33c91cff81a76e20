"""Fused groups with LoRA that the tests of the LoRA kernels share."""

from dataclasses import dataclass

import torch

from qerl.kernels.lora import LoraSegment, PackedB

# Output features and rank of each member; a rank of 0 stands for a member without an adapter.
GROUPS = {
    "qkv-r32": ((136, 32), (64, 32), (64, 32)),
    "uneven": ((65, 3), (7, 0), (1, 17), (200, 8)),
    "one-r1": ((33, 1),),
}


@dataclass
class LoraCase:
    x: torch.Tensor
    a: torch.Tensor
    y: torch.Tensor
    b: PackedB

    def exact_update(self, u: torch.Tensor, active: tuple[bool, ...]) -> torch.Tensor:
        """float64 y + u B^T of the active members."""
        expected = self.y.double().clone()
        for segment, factor, is_active in zip(self.b.segments, self.b.views, active, strict=True):
            if is_active:
                part = u.double()[:, segment.rank_start : segment.rank_start + segment.rank] @ factor.double().t()
                expected[:, segment.out_start : segment.out_start + segment.out_features] += part
        return expected


def make_lora(name: str, rows: int, k: int, dtype: torch.dtype, device: str = "cpu") -> LoraCase:
    segments, out, rank = [], 0, 0
    for features, member_rank in GROUPS[name]:
        if member_rank:
            segments.append(LoraSegment(out, features, rank, member_rank))
        out, rank = out + features, rank + member_rank
    b = PackedB(segments, dtype, torch.device(device))
    b.buffer.copy_(torch.randn(b.buffer.shape))
    x, a, y = torch.randn(rows, k), torch.randn(rank, k) / k**0.5, 3 * torch.randn(rows, out)
    return LoraCase(*(t.to(device, dtype) for t in (x, a, y)), b)
