"""What the capture itself does, with stand-ins for torch's graph (the graphs themselves: test_graphs_cuda.py)."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from qerl.rollout.graphs import MAX_KINDS, CudaCapture, GraphCaptureError, StepGraphs


class FakeGraph:
    """Records nothing; says when it is replayed."""

    made: list["FakeGraph"]

    def __init__(self) -> None:
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """(pool, stream) of every capture."""
    made: list[tuple[object, object]] = []

    @contextmanager
    def graph(graph: FakeGraph, pool: object, stream: object, *, capture_error_mode: str):  # type: ignore[no-untyped-def]
        assert capture_error_mode == "thread_local"
        made.append((pool, stream))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(FakeGraph, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    return made


def test_captures_share_pool_and_stream_and_return_the_replay(captures: list[tuple[object, object]]) -> None:
    capture = CudaCapture(torch.device("cpu"))
    ran: list[int] = []
    replays = [capture(lambda: ran.append(1)) for _ in range(3)]
    assert len(set(captures)) == 1 and len(captures) == 4, "three and the anchor of the pool"
    assert ran == [1, 1, 1], "recorded, not run, where it is a real capture"
    replays[1]()
    assert [graph.replays for graph in FakeGraph.made] == [0, 0, 1, 0], "the anchor of the pool comes first"


def test_step_that_waits_for_the_device_is_named(captures: list[tuple[object, object]]) -> None:
    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(GraphCaptureError, match=r"not permitted.*cuda_graphs=False"):
        CudaCapture(torch.device("cpu"))(waits)


def test_capture_waits_for_its_own_device(captures: list[tuple[object, object]], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    CudaCapture(torch.device("cpu")).wait()
    assert waited == [torch.device("cpu")]


class Replay:
    """A graph on a device that takes its time: running from its replay until the device is waited for."""

    def __init__(self, kind: int, running: set[int], events: list[str]) -> None:
        self.kind, self.running, self.events = kind, running, events

    def __call__(self) -> None:
        self.running.add(self.kind)

    def __del__(self) -> None:
        self.events.append(f"{self.kind} destroyed{' while it ran' if self.kind in self.running else ''}")


@pytest.fixture
def device() -> tuple[StepGraphs, list[str]]:
    """Graphs of kinds 0, 1, ... (in the order of capture), all replayed and not waited for; what happened to them."""
    running: set[int] = set()
    events: list[str] = []

    def wait() -> None:
        events.append("waited")
        running.clear()

    kinds = iter(range(100))
    graphs = StepGraphs(lambda step: Replay(next(kinds), running, events), wait)
    for kind in range(MAX_KINDS):
        for _ in range(2):
            graphs.run(kind, 1, lambda: None)
    assert len(running) == MAX_KINDS and not events
    return graphs, events


def test_the_oldest_kind_is_destroyed_after_its_replay(device: tuple[StepGraphs, list[str]]) -> None:
    graphs, events = device
    graphs.run("one more", 1, lambda: None)
    assert events == ["waited", "0 destroyed"]


def test_a_kind_without_graphs_is_forgotten_at_once(device: tuple[StepGraphs, list[str]]) -> None:
    graphs, events = device
    graphs.validate("moved")
    for kind in range(2 * MAX_KINDS):  # each met once
        graphs.run(kind, 1, lambda: None)
    assert events == ["waited", *(f"{kind} destroyed" for kind in range(MAX_KINDS))]


@pytest.mark.parametrize("forget", [StepGraphs.clear, lambda graphs: graphs.validate("moved")])
def test_all_graphs_are_destroyed_after_their_replays(device: tuple[StepGraphs, list[str]], forget) -> None:  # type: ignore[no-untyped-def]
    graphs, events = device
    forget(graphs)
    assert events == ["waited", *(f"{kind} destroyed" for kind in range(MAX_KINDS))]
    forget(graphs)
    assert len(events) == MAX_KINDS + 1, "nothing is left to wait for"
