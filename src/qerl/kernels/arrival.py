"""Counters by which the programs of one launch find out which of them arrives last.

A split sum is added up by the last program of its launch, in a fixed order: no second launch, the same bits every run.
One buffer per device, zero between launches (the last program clears its counter). Launches on one device are
ordered by ``launch_on``: two at once would count each other's programs.
"""

import torch

_COUNTERS = 1 << 14
_buffers: dict[torch.device, torch.Tensor] = {}


class TooManyCountersError(ValueError):
    """A launch would need more counters than the buffer holds."""


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` int32 zeros. The first call on a device allocates and must not be captured in a CUDA graph.

    Raises:
        TooManyCountersError: more than 16384; split less.
    """
    if count > _COUNTERS:
        raise TooManyCountersError(f"{count} counters wanted, the buffer of a device holds {_COUNTERS}: split less")
    buffer = _buffers.get(device)
    if buffer is None:
        buffer = _buffers[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return buffer
