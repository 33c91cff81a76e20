"""What the kernel tests share: packed weights, their fp64 meaning, and the error measure."""

import math

import pytest
import torch

from qerl.formats.base import PackedTensor, get_format
from qerl.kernels.quant_matmul import GroupWeight, hopper_plan
from qerl.kernels.quant_matmul.hopper_plan import FewRowsPlan, ManyRowsPlan


def make_group(
    weight_format: str, segments: tuple[int, ...], k: int, uniform: bool = True, device: str = "cpu"
) -> GroupWeight:
    """A quantized group of normal weights; with ``uniform=False`` its nvfp4 segments have different global scales."""
    generator = torch.Generator().manual_seed(k + sum(segments))
    weights = [torch.randn(rows, k, generator=generator) * 0.02 * (i + 1) for i, rows in enumerate(segments)]
    quantize = get_format(weight_format).quantize
    packed = quantize(weights) if uniform else [quantize([weight])[0] for weight in weights]
    return join_segments(packed, device)


def join_segments(packed: list[PackedTensor], device: str = "cpu") -> GroupWeight:
    """The group of packed members."""
    first = packed[0]
    codes = torch.cat([member.codes for member in packed])
    scales = torch.cat([member.block_scale.view(torch.uint8) for member in packed]).view(first.block_scale.dtype)
    global_scale, uniform_scale = None, None
    if first.global_scale is not None:
        global_scale = torch.cat([member.global_scale for member in packed])
        values = set(global_scale.tolist())
        uniform_scale = 1.0 / values.pop() if len(values) == 1 else None
        global_scale = global_scale.to(device)
    segments = tuple(member.shape[0] for member in packed)
    return GroupWeight(
        first.format, segments, first.shape[1], codes.to(device), scales.to(device), global_scale, uniform_scale
    )


def exact_weight(weight: GroupWeight) -> torch.Tensor:
    """float64 ``[N, K]`` with the global scale, on the weight's device; written without the code under test."""
    shape = (weight.out_features, weight.in_features)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).reshape(shape).long()
    if weight.format == "nvfp4":
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=weight.device)
        table = torch.cat([values, -values])
        scales = weight.block_scale.to(torch.float64).repeat_interleave(16, 1)
        rows = torch.tensor(weight.segments, device=weight.device)
        divisor = weight.global_scale.double().repeat_interleave(rows)[:, None]
        return table[codes] * scales / divisor
    from qerl.formats.nf4 import CODE_BOOK

    book = torch.tensor(CODE_BOOK, device=weight.device)
    absmax = weight.block_scale.flatten().repeat_interleave(64)[: codes.numel()].reshape(shape)
    return (book[codes] * absmax).to(torch.bfloat16).double()


def rms_ratio(result: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of the expectation; NaN in `result` gives NaN, which no bound accepts."""
    wanted = expected.detach().double()
    error = (result.detach().double() - wanted).square().mean().sqrt()
    return float(error / wanted.square().mean().sqrt())


def rounded_once(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Bound on the RMS ratio of a result that is computed in fp32 and rounded once to `dtype`.

    2 % and 1e-6 above the error of rounding the exact result: an fp32 sum has an error of its own, and may fall to the
    other neighbour where the exact one lies near the middle of two numbers.
    """
    wanted = expected.detach()
    return 1.02 * rms_ratio(wanted.to(dtype), wanted) + 1e-6


def make_u_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA's u is made inside every product that can, however long that takes: a kernel before would hide mistakes."""
    monkeypatch.setattr(hopper_plan, "_U_KERNEL_US", math.inf)
    # Uncached: what was asked before must not be answered, nor this be remembered.
    monkeypatch.setattr(hopper_plan.ManyRowsPlan, "lora_cut", hopper_plan.ManyRowsPlan.lora_cut.__wrapped__)


def can_make_u(plan: FewRowsPlan | ManyRowsPlan, m: int, ranks: int, n: int, k: int, multiprocessors: int) -> bool:
    """Whether a product can make u, of so few ranks that its workspace holds it: a block makes one part at most."""
    if isinstance(plan, FewRowsPlan):
        return True
    return math.ceil(m / plan.tokens) * math.ceil(ranks / (64 * plan.groups)) <= plan.grid(m, n, k, multiprocessors)
