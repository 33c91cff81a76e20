"""The guard against GPUs that are too old."""

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
