"""Median times of device work, and the copies of a weight that keep it out of the cache."""

import math
import statistics
import time
from collections.abc import Callable

import torch

# A pass over the rotated weights must be longer than the L2 cache (50 MB on an H200) remembers.
BYTES_PAST_CACHE = 260e6
# One replay of a graph is measured at least this often, and on until the time below is spent.
_MIN_REPLAYS, _MAX_REPLAYS, _BUDGET_US = 5, 15, 40e3
# The device is kept busy so long before a measured replay: what a launch takes to reach an idle device (some 10 to 25
# us, docs/log.md) would be counted. Where a replay takes this many times longer, it does not matter.
_BUSY_US, _NEGLIGIBLE = 200.0, 25


class CheckFailedError(ValueError):
    """A result that is too far from its reference; its time would mean nothing."""


def rotation(num_bytes: float, device: torch.device, most: int = 128) -> int:
    """How many copies of an operand of ``num_bytes`` a pass must walk through; 1 on the CPU.

    At most ``most``: operands so small that more were needed stay in the cache, which only tests meet.
    """
    if device.type != "cuda":
        return 1
    return min(most, max(1, round(BYTES_PAST_CACHE / num_bytes + 0.5)))


def median_us(call: Callable[[int], object], copies: int, device: torch.device) -> float:
    """Median time in microseconds of one ``call(i)``, i = 0 .. copies - 1, over repeated passes.

    On CUDA a pass is the replay of a graph behind other replays, so launches cost what they cost in a captured decode
    step. Every call runs once before capture: kernels are compiled then, and what a weight prepares at its first use
    may wait for the host, which a capture must not. On the CPU a pass is a plain loop.
    """
    if device.type != "cuda":
        return _median_cpu_us(call, copies)
    for index in range(copies):
        call(index)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            call(index)
    graph.replay()
    ahead = replays_ahead(_replay_us(graph, 0))
    times: list[float] = []
    while len(times) < _MAX_REPLAYS and (len(times) < _MIN_REPLAYS or sum(times) < _BUDGET_US):
        times.append(_replay_us(graph, ahead))
    return statistics.median(times) / copies


def _replay_us(graph: torch.cuda.CUDAGraph, ahead: int) -> float:
    """Time of one replay, launched while the device works on ``ahead`` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ahead):
        graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def replays_ahead(replay_us: float) -> int:
    """Replays of ``replay_us`` that keep the device busy until a measured one is launched."""
    return 0 if replay_us > _NEGLIGIBLE * _BUSY_US else max(1, math.ceil(_BUSY_US / replay_us))


def _median_cpu_us(call: Callable[[int], object], copies: int) -> float:
    call(0)
    times = []
    for _ in range(_MIN_REPLAYS):
        started = time.perf_counter()
        for index in range(copies):
            call(index)
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times) / copies


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rms_ratio(result: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of ``expected``, in float64."""
    error = (result.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt())
