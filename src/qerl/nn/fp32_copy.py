"""A model's own fp32 forward: the reference that tells which of two 16-bit forwards is off."""

import copy

import torch
from torch import nn

from qerl.nn.surgery import quant_groups


def fp32_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that holds dequantized weights and computes in fp32; ``model`` is left as it is.

    Takes 4 bytes a weight. Adapters, noise slots and a scoring head come along.
    """
    made = copy.deepcopy(model)
    for group in quant_groups(made).values():
        group.unpack()
    return made.to(torch.float32)
