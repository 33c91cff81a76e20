"""Launches of the gradient of the input over weights in tiles, on Hopper (see ``cuda/input_grad.cuh``)."""

import ctypes

import torch

from qerl.kernels.device import multiprocessor_count
from qerl.kernels.quant_matmul import hopper
from qerl.kernels.quant_matmul.hopper_grad_plan import STEP_CHANNELS, InputGradPlan, input_grad_plan
from qerl.kernels.quant_matmul.tensor_map import bf16_map, byte_map
from qerl.kernels.quant_matmul.tiles import TILE_ROWS, WINDOW_BYTES, WINDOW_COLUMNS
from qerl.kernels.quant_matmul.weight import GroupWeight

# A window as the copies see it: eight rows of codes and one of scales.
_ROW_BYTES = 64
_CODE_ROWS = 8
_STEP_TILES = STEP_CHANNELS // TILE_ROWS


def plan_for(m: int, weight: GroupWeight) -> InputGradPlan | None:
    """How dx of ``m`` rows is computed from packed weights; None where dequantizing them first is the way.

    That is where weights are in rows, or members have global scales of their own: the sum runs over them.
    """
    if weight.layout != "tiles" or (weight.uniform_scale is None and len(weight.segments) > 1):
        return None
    sms = multiprocessor_count(weight.device.index)
    return input_grad_plan(m, weight.out_features, weight.in_features, sms)


def run_input_grad(plan: InputGradPlan, dy: torch.Tensor, weight: GroupWeight, dx: torch.Tensor) -> None:
    """Launch one kernel: ``dy`` bf16 [M, N] contiguous, M > 0, weights of one global scale -> bf16 `dx` [M, K]."""
    index = dy.device.index
    shape, sms = (dy.shape[0], weight.out_features, weight.in_features), multiprocessor_count(index)
    params = hopper.product_params(dy, weight, None, dx)
    params.slices = plan.waves(*shape, sms)
    place = (plan.grid(*shape, sms), 1, 1), plan.shared_bytes, index
    launch = hopper.kernel_launch("input_grad", plan.name, 128 * plan.groups + 128, *place, plan.macro)
    launch(params, bf16_map(dy.data_ptr(), *dy.shape, plan.tokens), *_weight_maps(weight, plan.groups))


def _weight_maps(weight: GroupWeight, groups: int) -> tuple[ctypes.Array, ctypes.Array]:
    """Of the codes and the scales of ``groups`` neighbouring windows in the row tiles of a step."""
    address = weight.codes.data_ptr()
    windows, tiles = weight.in_features // WINDOW_COLUMNS, weight.out_features // TILE_ROWS
    strides = (WINDOW_BYTES, windows * WINDOW_BYTES)
    sizes, box = (_ROW_BYTES, windows, tiles), (_ROW_BYTES, groups, _STEP_TILES)
    codes = byte_map(
        address,
        (_ROW_BYTES, _CODE_ROWS, windows, tiles),
        (_ROW_BYTES, *strides),
        (_ROW_BYTES, _CODE_ROWS, groups, _STEP_TILES),
        "64B",
    )
    return codes, byte_map(address + _CODE_ROWS * _ROW_BYTES, sizes, strides, box, "NONE")
