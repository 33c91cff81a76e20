"""QuantHead: an output head whose weight is packed, the same bytes for trainer, engine and transformers' forward.

Logits are fp32 and not rounded on the way, as those of the 16-bit head are where they are scored or sampled from
(:mod:`qerl.nn.head`). The head is frozen; gradients flow through it into the hidden states.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from qerl.nn.group import WeightGroup
from qerl.nn.linear import GroupHandle


class _Logits(torch.autograd.Function):
    """fp32 logits of a packed head; saves nothing but the (resident) weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: WeightGroup) -> torch.Tensor:
        ctx.group, ctx.dtype = group, hidden.dtype
        return group.logits(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.logits_dx(grad, ctx.dtype), None


class QuantHead(GroupHandle):
    """``logits = hidden W^T`` in fp32, W frozen and packed; takes the place of a model's ``nn.Linear`` head.

    No :class:`~qerl.nn.linear.QuantLinear`, so that no adapter is put on it.

    Args:
        group: a group of one segment ``[vocab, hidden]``; registered here, as ``weights``.
    """

    def __init__(self, group: WeightGroup) -> None:
        super().__init__(group, 0)
        self.weights = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., H] in the compute dtype -> fp32 [..., vocab]."""
        logits = _Logits.apply(hidden.reshape(-1, self.in_features), self.group)
        return logits.view(*hidden.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"hidden={self.in_features}, vocab={self.out_features}, format={self.group.format}"


def weight_of(head: nn.Module) -> torch.Tensor | WeightGroup:
    """What an output head multiplies by: its weight [V, H], or the group of a packed head."""
    return head.group if isinstance(head, QuantHead) else head.weight


def head_weight(model: PreTrainedModel) -> torch.Tensor | WeightGroup:
    """:func:`weight_of` the head of ``model``."""
    return weight_of(model.get_output_embeddings())
