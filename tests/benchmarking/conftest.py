"""A config.json small enough to measure on a CPU."""

import json
from pathlib import Path

import pytest
from tiny_models import tiny_model


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(tiny_model("qwen2", tied=False).config.to_dict(), default=str))
    return path
