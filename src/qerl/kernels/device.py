"""Which GPUs the kernels run on."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

MINIMUM_CAPABILITY = (8, 0)
# Programmatic dependent launch where the GPU has it; a benchmark may set False before the first launch to compare.
DEPENDENT_LAUNCH = True

_launching = threading.RLock()
# Device index -> the stream of its latest launch.
_last_streams: dict[int, torch.cuda.Stream] = {}


class UnsupportedGPUError(ValueError):
    """The GPU is too old for the kernels."""


def launch_on(device: torch.device) -> AbstractContextManager[object]:
    """The context in which kernels for tensors on `device` are launched: on the GPU, :func:`in_launch_order`.

    Does nothing for the CPU, where only Triton's interpreter launches.

    Raises:
        UnsupportedGPUError: a CUDA device below sm_80 (no bf16 tensor cores).
    """
    if device.type != "cuda":
        return nullcontext()
    index = torch.cuda.current_device() if device.index is None else device.index
    _check_capability(index)
    return in_launch_order(index)


@contextmanager
def in_launch_order(index: int) -> Iterator[None]:
    """CUDA device `index` is current, and what is launched on its current stream starts after whatever was launched in
    such a context before, by any thread on any stream.

    Workspaces and counters are one a device, and some kernels wait for blocks of their own launch: two of them at once
    would read each other's sums, or wait for ever. Launches that are captured are ordered where the engine replays its
    graphs; who captures our ops in graphs of their own must order their replays themselves.
    """
    with _launching, torch.cuda.device(index):
        stream = torch.cuda.current_stream(index)
        if not torch.cuda.is_current_stream_capturing():
            last = _last_streams.get(index, stream)
            if last != stream:
                stream.wait_stream(last)
            _last_streams[index] = stream
        yield


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
