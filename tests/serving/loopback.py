"""A real server on a loopback port, over a tiny model."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import uvicorn

from qerl.rollout.build import build_engine
from qerl.rollout.engine import RolloutEngine
from qerl.serving.app import Server
from qerl.serving.requests import RequestParser
from qerl.serving.worker import EngineWorker


@dataclass
class Running:
    """A server that listens."""

    engine: RolloutEngine
    worker: EngineWorker
    url: str

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def used_blocks(self) -> int:
        return self.engine.scheduler.allocator.num_used

    def wait_until_idle(self) -> None:
        """Every request is done and every block free, within seconds."""
        deadline = time.monotonic() + 10
        while self.worker.open_requests or self.used_blocks():
            assert time.monotonic() < deadline, f"{self.used_blocks()} blocks are still held"
            time.sleep(0.01)


def run_server(model: Path, key: str | None = None, num_blocks: int | None = None, **options: int) -> Iterator[Running]:
    """Start a server, yield it, stop it. ``num_blocks``: size of the KV cache."""
    engine, tokenizer, _ = build_engine(model, device="cpu", **options)
    if num_blocks is not None:
        config = dataclasses.replace(engine.config, num_blocks=num_blocks)
        engine = RolloutEngine(engine.runner, tuple(engine.eos_token_ids), config)
    worker = EngineWorker(engine)
    parser = RequestParser(tokenizer, "tiny", engine.max_model_len, engine.runner.vocab_size)
    config = uvicorn.Config(
        Server(worker, parser, key).app(), host="127.0.0.1", port=0, log_level="warning", log_config=None
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(engine, worker, f"http://127.0.0.1:{port}")
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()
