"""QuantLinear: a frozen linear whose weight is a row segment of a :class:`~qerl.nn.group.WeightGroup`.

Gradients flow through the packed weight (``dX = dY W``) into whatever lies before it; the weight itself never has a
gradient. Nothing dequantized is kept for the backward pass: the weight is decoded again.
"""

from typing import Any

import torch
from torch import nn

from qerl.formats.base import PackedTensor
from qerl.kernels.quant_matmul import GroupWeight, LoraUpdate, quant_lora_matmul, quant_matmul, quant_matmul_dx
from qerl.nn.group import WeightGroup, dense_linear

_STATE_NAMES = {
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "nf4": ("weight_packed", "weight_absmax"),
    "bf16": ("weight",),
}


class _QuantMatmul(torch.autograd.Function):
    """y = x W^T with packed W; saves the (resident) packed weight only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return quant_matmul(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        dx = quant_matmul_dx(grad, ctx.weight) if ctx.needs_input_grad[0] else None
        return dx, None, None


class _QuantLoraMatmul(torch.autograd.Function):
    """y = x W^T + (x a^T) b^T with packed W, rounded once; saves x, the low-rank product and the factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: GroupWeight,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        update = LoraUpdate(a, b.reshape(-1), ((0, b.shape[1], 0),))
        y, u = quant_lora_matmul(rows, weight, bias, update)
        ctx.weight = weight
        ctx.save_for_backward(rows, u, a, b)
        return y.view(*x.shape[:-1], b.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, u, a, b = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        du = dy @ b
        dx = None
        if ctx.needs_input_grad[0]:
            dx = quant_matmul_dx(dy, ctx.weight).addmm_(du, a).view(*grad.shape[:-1], a.shape[1])
        da = du.t() @ rows if ctx.needs_input_grad[3] else None
        db = dy.t() @ u if ctx.needs_input_grad[4] else None
        return dx, None, None, da, db


class GroupHandle(nn.Module):
    """A module that stands for one row segment of a group and stores it in state dicts under the names of a linear.

    Args:
        group: owner of the packed bytes. Held outside the list of submodules, so that handles of one group share it.
        segment: index of this projection in the group.
    """

    def __init__(self, group: WeightGroup, segment: int) -> None:
        super().__init__()
        self._owner = (group,)
        self.segment = segment
        self.in_features = group.in_features
        self.out_features = group.segments[segment]

    @property
    def group(self) -> WeightGroup:
        """The owner of the packed bytes."""
        return self._owner[0]

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed = self.group.packed_tensor(self.segment)
        tensors = (
            (packed,) if isinstance(packed, torch.Tensor) else (packed.codes, packed.block_scale, packed.global_scale)
        )
        for name, tensor in zip(_STATE_NAMES[self.group.format], tensors, strict=False):
            destination[prefix + name] = tensor.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:  # type: ignore[no-untyped-def]
        names = [prefix + name for name in _STATE_NAMES[self.group.format]]
        present = [name for name in names if name in state_dict]
        if len(present) == len(names):
            tensors = [state_dict.pop(name) for name in names]
            if self.group.format == "bf16":
                self.group.load_segment(self.segment, tensors[0])
            else:
                shape = (self.out_features, self.in_features)
                global_scale = tensors[2] if len(tensors) == 3 else None
                packed = PackedTensor(self.group.format, shape, tensors[0], tensors[1], global_scale)
                self.group.load_segment(self.segment, packed)
        elif strict:
            missing_keys.extend(name for name in names if name not in state_dict)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class QuantLinear(GroupHandle):
    """``y = x W^T + bias`` with W frozen in a group's packed buffer.

    Args:
        group: owner of the packed bytes. It is registered once, beside its handles, so the bytes are counted and moved
            once.
        segment: index of this projection in the group.
        bias: ``[out_features]`` or None; an ordinary (frozen) Parameter.
    """

    def __init__(self, group: WeightGroup, segment: int, bias: torch.Tensor | None = None) -> None:
        super().__init__(group, segment)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def qweight(self) -> nn.Parameter:
        """The group's buffer: PEFT reads device and dtype of a quantized layer from an attribute of this name."""
        return self.group.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in_features] in the compute dtype -> [..., out_features]."""
        group = self.group
        if group.format != "bf16" and x.is_cuda:
            return _QuantMatmul.apply(x, group.segment_weight(self.segment), self.bias)
        start = group.starts[self.segment]
        return dense_linear(x, group.dense()[start : start + self.out_features], self.bias)

    def forward_with_lora(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        """``x W^T + bias + (x a^T) b^T`` rounded once, or None where the kernels of this weight cannot do that.

        Args:
            x: [..., in_features] in the compute dtype.
            a: [r, in_features], b: [out_features, r] in that dtype, scaling included; gradients reach them.
        """
        group = self.group
        if not (x.is_cuda and group.adds_lora(x.dtype, (a.shape[0],))):
            return None
        return _QuantLoraMatmul.apply(x, group.segment_weight(self.segment), self.bias, a, b)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W ``[out_features, in_features]``, global scale included."""
        start = self.group.starts[self.segment]
        return self.group.dense()[start : start + self.out_features].to(dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.group.format}"
        )
