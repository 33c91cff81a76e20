"""The pool's size follows the work, and its address changes only when it must grow."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hash_runner import HashRunner

from qerl.rollout.config import EngineConfig
from qerl.rollout.host_memory import available_bytes
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.pool import KVPool

BLOCK_BYTES = 2 * 4 * 8


def make_pool(**limits: int) -> KVPool:
    return KVPool(HashRunner(), EngineConfig(block_size=4, **limits))


def test_smaller_work_keeps_the_pool_and_larger_work_grows_it_by_a_quarter() -> None:
    pool = make_pool()
    first = pool.allocate(100)
    assert first.num_blocks == 100
    assert pool.allocate(7) is first
    assert pool.plan(101) == 125
    second = pool.allocate(101)
    assert second.num_blocks == 125
    assert pool.allocate(125) is second
    assert pool.allocate(400).num_blocks == 400


def test_pool_at_its_bound_is_not_replaced_by_one_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.rollout.pool.AUTO_CPU_BYTES", 51 * BLOCK_BYTES)
    pool = make_pool()
    first = pool.allocate(80)
    assert first.num_blocks == 50
    assert pool.allocate(80) is first
    assert pool.allocate(1000) is first
    # A bound that shrank meanwhile (others took the memory) does not move the pool either.
    monkeypatch.setattr("qerl.rollout.pool.AUTO_CPU_BYTES", 20 * BLOCK_BYTES)
    assert pool.allocate(2000) is first


def test_half_of_the_free_memory_bounds_the_pool_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qerl.rollout.pool.available_bytes", lambda: 42 * BLOCK_BYTES)
    with caplog.at_level("INFO"):
        assert make_pool().allocate(16 << 20).num_blocks == 20
    assert "(taken as it fills), 20 blocks of 4 tokens; work at its longest would take 1.00 GiB" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert make_pool().allocate(20).num_blocks == 20
    assert "20 blocks of 4 tokens" in caplog.text and "at its longest" not in caplog.text


def test_memory_of_a_cache_is_taken_as_it_fills() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(4, 1 << 14, 16, 4, 64, torch.bfloat16, "cpu")
    assert cache.bytes > 1 << 30 and process.memory_info().rss - before < 64 << 20
    assert not cache.k[-1, -3:].any(), "zeros"
    cache.k[:, :2048] = 1
    assert 60 << 20 < process.memory_info().rss - before < 128 << 20


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("max", "5", 1000), ("900", "300", 600), ("5000", "0", 1000), ("9", "20", 0)]
)
def test_a_container_limits_the_free_memory(
    limit: str, used: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert available_bytes(tmp_path) == 1000
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert available_bytes(tmp_path) == expected


def test_given_sizes_are_kept_whatever_the_work() -> None:
    blocks, memory = make_pool(num_blocks=9), make_pool(memory_bytes=12 * BLOCK_BYTES + 5)
    for worst in (1, 500):
        assert blocks.allocate(worst).num_blocks == 9
        assert memory.allocate(worst).num_blocks == 11
    assert memory.kv.bytes == 12 * BLOCK_BYTES


def test_contents_of_a_failed_pass_do_not_stay() -> None:
    pool = make_pool()
    pool.allocate(5).k.fill_(float("nan"))
    pool.discard_contents()
    assert not pool.allocate(5).k.isnan().any()
    pool.release()
    assert pool.kv is None
    assert pool.allocate(3).num_blocks == 3
