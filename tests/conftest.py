"""Shared fixtures: seeds, the optional shared material, skipping of GPU tests where there is no GPU."""

import os
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, save_tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on machines without CUDA."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared data and golden files (``QERL_SHARED`` or ``../shared``), or skip."""
    default = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("QERL_SHARED", default))
    if not path.is_dir():
        pytest.skip(f"shared data not found at {path} (set QERL_SHARED)")
    return path


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """bf16 checkpoints of tiny random models, one per family of the runner."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(root / family, family) for family in FAMILIES}
