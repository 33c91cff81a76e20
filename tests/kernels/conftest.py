"""NaN poisoning: memory that a kernel should have written must not pass a test by luck."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def _poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        # 0xFF in every byte is NaN in each float format.
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -1)

    return allocate_poisoned


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.empty``, ``empty_like`` and ``new_empty`` return NaN for the duration of a test."""
    monkeypatch.setattr(torch, "empty", _poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poison(torch.Tensor.new_empty))
    yield
