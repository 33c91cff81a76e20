"""SiLU-mul: ``silu(gate) * up`` of a fused gate_up output, in fp32 and rounded once. Trainer and engine
share it."""

from typing import Any

import torch

from qerl.kernels.device import launch_on
from qerl.kernels.rows import aligned_rows
from qerl.kernels.silu_mul import reference

__all__ = ["silu_mul"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[..., 2 I]`` = [gate | up] -> ``[..., I]``; bf16, fp16 or fp32, any strides; differentiable.

    Raises:
        ValueError: an odd last dimension or another dtype.
        UnsupportedGPUError: a GPU below sm_80.
    """
    if gate_up.dtype not in _DTYPES or gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            "silu_mul takes a bf16, fp16 or fp32 tensor with an even last dimension (gate beside up), "
            f"got {gate_up.dtype} {list(gate_up.shape)}"
        )
    if not gate_up.is_cuda:
        return reference.silu_mul(gate_up)
    return _forward_op(gate_up.reshape(-1, gate_up.shape[-1])).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("qerl::silu_mul_forward", mutates_args=())
def _forward_op(gate_up: torch.Tensor) -> torch.Tensor:
    from qerl.kernels.silu_mul import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(gate_up.device):
        return launch.forward(aligned_rows(gate_up))


@_forward_op.register_fake
def _(gate_up):  # type: ignore[no-untyped-def]
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("qerl::silu_mul_backward", mutates_args=())
def _backward_op(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    from qerl.kernels.silu_mul import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(gate_up.device):
        return launch.backward(aligned_rows(dy), aligned_rows(gate_up))


@_backward_op.register_fake
def _(dy, gate_up):  # type: ignore[no-untyped-def]
    return gate_up.new_empty(gate_up.shape)


def _save_for_backward(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    return _backward_op(dy, *ctx.saved_tensors)


_forward_op.register_autograd(_backward, setup_context=_save_for_backward)
