"""Median times of device work, and the copies of a weight that keep it out of the cache."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# A pass over the rotated weights must be longer than the L2 cache (50 MB on an H200) remembers.
BYTES_PAST_CACHE = 260e6
# One replay of a graph is measured at least this often, and on until the time below is spent.
_MIN_REPLAYS, _MAX_REPLAYS, _BUDGET_US = 5, 15, 40e3
# The device is kept busy so long before a measured replay: what a launch takes to reach an idle device (some 10 to 25
# us, docs/log.md) would be counted. Where a replay takes this many times longer, it does not matter.
_BUSY_US, _NEGLIGIBLE = 200.0, 25
# A measured graph takes at least so long: between the end of one graph and the first kernel of the next some 10 us
# pass, which no kernel inside a step pays.
_PASS_US = 1000.0


class CheckFailedError(ValueError):
    """A result that is too far from its reference; its time would mean nothing."""


def rotation(num_bytes: float, device: torch.device, most: int = 128) -> int:
    """How many copies of an operand of ``num_bytes`` a pass must walk through; 1 on the CPU.

    At most ``most``: operands so small that more were needed stay in the cache, which only tests meet.
    """
    if device.type != "cuda":
        return 1
    return min(most, max(1, round(BYTES_PAST_CACHE / num_bytes + 0.5)))


@dataclass(frozen=True, slots=True)
class Timed:
    """Work to time: ``call(i)``, i = 0 .. ``copies`` - 1, walks through operands that together outgrow the cache."""

    call: Callable[[int], object]
    copies: int


def median_us(call: Callable[[int], object], copies: int, device: torch.device) -> float:
    """Median time in microseconds of one ``call(i)``; see :func:`medians_us`."""
    return medians_us([Timed(call, copies)], device)[0]


def medians_us(works: Sequence[Timed], device: torch.device, rest_s: float = 0.0) -> list[float]:
    """Median time in microseconds of one call of each of ``works``, measured in turns.

    What heats a GPU slows what comes after it (10 % in products of many rows), so works that are compared take turns.
    On CUDA a turn is the replay of a graph behind other replays; the graph repeats the copies until one replay takes
    ``_PASS_US``, so launches cost what they cost in a captured decode step, and the gap between two graphs is shared by
    many. Every call runs once before capture: kernels are compiled then, and what a weight prepares at its first use
    may wait for the host, which a capture must not. On the CPU a turn is a plain loop.

    A GPU that works all the time is at its power limit, and slower for it; one that rests for ``rest_s`` seconds before
    each turn is not.
    """
    if device.type != "cuda":
        return [_median_cpu_us(work.call, work.copies, rest_s) for work in works]
    passes = [_capture(work, device) for work in works]
    times: list[list[float]] = [[] for _ in works]
    while not all(_measured(taken) for taken in times):  # all go on until the last is done: each has had its neighbours
        for one, taken in zip(passes, times, strict=True):
            time.sleep(rest_s)
            taken.append(_replay_us(one.graph, one.ahead))
    return [statistics.median(taken) / one.calls for one, taken in zip(passes, times, strict=True)]


@dataclass(frozen=True, slots=True)
class _Pass:
    """A captured graph of ``calls`` calls, and how many replays keep the device busy before a measured one."""

    graph: torch.cuda.CUDAGraph
    calls: int
    ahead: int


def _capture(work: Timed, device: torch.device) -> _Pass:
    for index in range(work.copies):
        work.call(index)
    graph = _graph(work, 1, device)
    graph.replay()
    once = _replay_us(graph, 0)
    repeats = repeats_in_graph(once)
    if repeats > 1:
        graph = _graph(work, repeats, device)
        graph.replay()
    return _Pass(graph, repeats * work.copies, replays_ahead(repeats * once))


def _graph(work: Timed, repeats: int, device: torch.device) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for index in range(work.copies):
                work.call(index)
    return graph


def _measured(times: list[float]) -> bool:
    return len(times) >= _MAX_REPLAYS or (len(times) >= _MIN_REPLAYS and sum(times) >= _BUDGET_US)


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


def repeats_in_graph(pass_us: float) -> int:
    """How often a graph holds a pass over the copies that takes ``pass_us``."""
    return math.ceil(_PASS_US / max(1.0, min(pass_us, _PASS_US)))


def replays_ahead(replay_us: float) -> int:
    """Replays of ``replay_us`` that keep the device busy until a measured one is launched."""
    return 0 if replay_us > _NEGLIGIBLE * _BUSY_US else max(1, math.ceil(_BUSY_US / replay_us))


def _median_cpu_us(call: Callable[[int], object], copies: int, rest_s: float) -> float:
    call(0)
    times = []
    for _ in range(_MIN_REPLAYS):
        time.sleep(rest_s)
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
