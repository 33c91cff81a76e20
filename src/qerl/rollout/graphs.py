"""Decode steps in CUDA graphs: one launch instead of hundreds.

A graph is captured for the shape of a batch (its size, and whether drafts are among its rows) and a kind of step (how
it samples), when that pair is wanted for the second time: the first time runs eagerly, which compiles the kernels and
is a step like any other. Graphs share one memory pool, which is sound because they run one after another and leave
their results in static buffers outside it. They hold addresses, so they live as long as the KV pool and every tensor of
the model stay where they are (``fingerprint``); values may change in between: an optimizer step or noise in a norm's
slot reaches the next replay.

Replays are asynchronous, and nobody waits for steps whose tokens are not wanted any more. So the device is waited for
before graphs are let go of: neither they nor the tensors that they address are freed under a replay.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

import torch

from qerl.kernels.device import launch_on

# Kinds of steps whose graphs are kept; a server may see any number of temperatures.
MAX_KINDS = 4

Step = Callable[[], object]
Capture = Callable[[Step], Step]


class StepGraphs:
    """Replays steps from graphs where it can.

    Args:
        capture: makes a replayable step from one that just ran; None runs every step as it is.
        wait: returns once no replay is in flight; None where replays are done when they return.
    """

    def __init__(self, capture: Capture | None, wait: Callable[[], object] | None = None) -> None:
        self.captures = 0
        self.replays = 0
        self._capture = capture
        self._wait = wait
        self._fingerprint: Hashable = None
        # kind -> shape -> the replayable step, or None after the first run.
        self._steps: OrderedDict[Hashable, dict[Hashable, Step | None]] = OrderedDict()

    @property
    def enabled(self) -> bool:
        """False when every step runs eagerly."""
        return self._capture is not None

    def validate(self, fingerprint: Hashable) -> None:
        """Forget all graphs if ``fingerprint`` (every address they hold) is not what it was."""
        if fingerprint != self._fingerprint:
            self.clear()
            self._fingerprint = fingerprint

    def clear(self) -> None:
        """Forget all graphs, once none of them runs."""
        self._wait_before_forgetting(self._steps.values())
        self._steps.clear()

    def run(self, kind: Hashable, shape: Hashable, step: Step) -> None:
        """Run ``step``, from a graph if there is one or if it is time to capture it.

        Steps of one kind (a sampling distribution) and shape must be the same work on the same tensors.
        """
        if self._capture is None:
            step()
            return
        steps = self._steps.setdefault(kind, {})
        self._steps.move_to_end(kind)
        if len(self._steps) > MAX_KINDS:
            self._wait_before_forgetting([next(iter(self._steps.values()))])
            self._steps.popitem(last=False)
        if shape not in steps:
            steps[shape] = None
            step()
            return
        if steps[shape] is None:
            steps[shape] = self._capture(step)
            self.captures += 1
        self.replays += 1
        steps[shape]()

    def _wait_before_forgetting(self, kinds: Iterable[dict[Hashable, Step | None]]) -> None:
        if self._wait is not None and any(step is not None for steps in kinds for step in steps.values()):
            self._wait()


class GraphCaptureError(RuntimeError):
    """A decode step could not be captured."""


class CudaCapture:
    """Captures steps on one device into graphs that share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)
        # torch refuses a pool whose graphs are all gone, so one graph stays as long as the pool.
        self._anchor = self(lambda: torch.zeros(1, device=device))

    def wait(self) -> None:
        """Return once everything that was launched on the device is done."""
        torch.cuda.synchronize(self._device)

    def __call__(self, step: Step) -> Step:
        """Record ``step`` (it does not run) and return its replay.

        Raises:
            GraphCaptureError: the step waits for the device, or CUDA refused.
        """
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (data loading, a server) may use CUDA meanwhile.
        try:
            with (
                torch.cuda.device(self._device),
                # A capture that fails leaves its own stream current; this puts ours back.
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                step()
        except RuntimeError as error:
            raise GraphCaptureError(
                f"a decode step could not be captured in a CUDA graph ({error}); cuda_graphs=False decodes without"
            ) from error
        device = self._device

        def replay() -> None:
            with launch_on(device):
                graph.replay()

        return replay
