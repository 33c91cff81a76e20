"""The guard against GPUs that are too old."""

import threading
from contextlib import nullcontext

import pytest
import torch

from qerl.kernels import device


def test_old_gpu_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device._check_capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(device.UnsupportedGPUError, match="Tesla T4 is sm_75; the kernels need sm_80"):
        device.launch_on(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    device.launch_on(torch.device("cuda", 0))
    device._check_capability.cache_clear()


def test_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: pytest.fail("asked for a GPU"))
    with device.launch_on(torch.device("cpu")):
        pass


def test_no_dependent_launch_without_a_gpu() -> None:
    assert device.dependent_launch(torch.device("cpu")) is False


class Streams:
    """Stands in for CUDA's streams: which one is current, whether it is captured, who waited for whom."""

    class Stream:
        def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
            self.name, self.waits = name, waits

        def wait_stream(self, other: "Streams.Stream") -> None:
            self.waits.append((self.name, other.name))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self.all = {name: self.Stream(name, self.waits) for name in ("a", "b", "capture")}
        self.current, self.capturing = "a", False
        monkeypatch.setattr(device, "_last_streams", {})
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.all[self.current])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def launch(self, name: str, index: int = 0) -> None:
        self.current, self.capturing = name, name == "capture"
        with device.in_launch_order(index):
            pass


def test_a_launch_waits_for_the_stream_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    for name in ("a", "a", "b", "b", "a"):
        streams.launch(name)
    assert streams.waits == [("b", "a"), ("a", "b")]
    streams.launch("b", index=1)  # another device has an order of its own
    assert len(streams.waits) == 2


def test_a_capture_neither_waits_nor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    for name in ("a", "capture", "a", "capture", "b"):
        streams.launch(name)
    assert streams.waits == [("b", "a")]


def test_threads_launch_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    Streams(monkeypatch)
    entered = threading.Event()

    def other() -> None:
        with device.in_launch_order(0):
            entered.set()

    with device.in_launch_order(0):
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(5)
    assert entered.is_set()
