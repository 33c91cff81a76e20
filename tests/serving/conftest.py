"""One server for most tests, and an engine of its own over the same model."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from loopback import Running, run_server

from qerl.rollout.build import build_engine
from qerl.rollout.engine import RolloutEngine


@pytest.fixture(scope="session")
def running(tiny_checkpoints: dict[str, Path]) -> Iterator[Running]:
    yield from run_server(tiny_checkpoints["qwen2"], max_num_seqs=8)


@pytest.fixture(scope="session")
def client(running: Running) -> openai.OpenAI:
    return running.client()


@pytest.fixture(scope="session")
def engine(tiny_checkpoints: dict[str, Path]) -> RolloutEngine:
    return build_engine(tiny_checkpoints["qwen2"], device="cpu", max_num_seqs=8)[0]
