"""The reused buffer that many-row matmuls dequantize weights into.

One buffer per device, as large as the largest weight seen (2 bytes a weight in bf16). It holds nothing
between calls: it is written and read inside one call, so nobody may keep a view, and calls on one device
are ordered by ``launch_on`` (two streams at once would overwrite each other's weights).

CUDA graphs bake the address in. A buffer that was handed out during a capture is therefore kept for the life
of the process even when a larger one replaces it; `reserve_workspace` before the first capture avoids that.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class _Buffer:
    data: torch.Tensor
    captured: bool = False


_current: dict[torch.device, _Buffer] = {}
_captured: list[_Buffer] = []


def workspace(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor that shares memory with every other workspace of `device`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = _grown(num_bytes, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        buffer.captured = True
    return buffer.data[:num_bytes].view(dtype).view(shape)


def reserve_workspace(num_bytes: int, device: torch.device) -> None:
    """Grow the workspace of `device` to `num_bytes`: 2 * N * K of the largest group, before graphs are
    captured."""
    _grown(num_bytes, device)


def workspace_bytes(device: torch.device) -> int:
    """Bytes that workspaces of `device` hold now, replaced ones that captured graphs still use included."""
    held = [buffer for buffer in (*_current.values(), *_captured) if buffer.data.device == device]
    return sum(buffer.data.numel() for buffer in held)


def _grown(num_bytes: int, device: torch.device) -> _Buffer:
    buffer = _current.get(device)
    if buffer is None or buffer.data.numel() < num_bytes:
        if buffer is not None and buffer.captured:
            _captured.append(buffer)
        buffer = _Buffer(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        _current[device] = buffer
    return buffer
