"""Which GPUs the kernels run on."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

MINIMUM_CAPABILITY = (8, 0)
# Programmatic dependent launch where the GPU has it; a benchmark may set False before the first launch to compare.
DEPENDENT_LAUNCH = True


class UnsupportedGPUError(ValueError):
    """The GPU is too old for the kernels."""


def launch_on(device: torch.device) -> AbstractContextManager[object]:
    """The context in which kernels for tensors on `device` are launched (Triton takes the current GPU, not theirs).

    Does nothing for the CPU, where only Triton's interpreter launches.

    Raises:
        UnsupportedGPUError: a CUDA device below sm_80 (no bf16 tensor cores).
    """
    if device.type != "cuda":
        return nullcontext()
    _check_capability(torch.cuda.current_device() if device.index is None else device.index)
    return torch.cuda.device(device)


@cache
def multiprocessor_count(index: int) -> int:
    """Streaming multiprocessors of CUDA device `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` are launched with programmatic dependent launch (sm_90 and later)."""
    return DEPENDENT_LAUNCH and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _check_capability(index: int) -> None:
    capability = torch.cuda.get_device_capability(index)
    if capability < MINIMUM_CAPABILITY:
        raise UnsupportedGPUError(
            f"{torch.cuda.get_device_name(index)} is sm_{capability[0]}{capability[1]}; the kernels need "
            f"sm_{MINIMUM_CAPABILITY[0]}{MINIMUM_CAPABILITY[1]} or newer (bf16 tensor cores). "
            "Choose another GPU with CUDA_VISIBLE_DEVICES, or run on the CPU"
        )
