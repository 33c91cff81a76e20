"""What the capture itself does, with stand-ins for torch's graph (the graphs themselves: test_graphs_cuda.py)."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from qerl.rollout.graphs import CudaCapture, GraphCaptureError


class FakeGraph:
    """Records nothing; says when it is replayed."""

    def __init__(self) -> None:
        self.replays = 0

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
    assert [replay.__self__.replays for replay in replays] == [0, 1, 0]


def test_step_that_waits_for_the_device_is_named(captures: list[tuple[object, object]]) -> None:
    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(GraphCaptureError, match=r"not permitted.*cuda_graphs=False"):
        CudaCapture(torch.device("cpu"))(waits)
