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
from qerl.rollout.pool import KVPool, NoMemoryForCacheError

BLOCK_BYTES = 2 * 4 * 8


def make_pool(**limits: int) -> KVPool:
    return KVPool(HashRunner(), EngineConfig(block_size=4, **limits))


def allocate(pool: KVPool, worst_blocks: int) -> KVCache:
    return pool.allocate(pool.plan(worst_blocks), worst_blocks)


def test_smaller_work_keeps_the_pool_and_larger_work_grows_it_by_a_quarter() -> None:
    pool = make_pool()
    first = allocate(pool, 100)
    assert first.num_blocks == 100
    assert allocate(pool, 7) is first
    assert pool.plan(101) == 125
    second = allocate(pool, 101)
    assert second.num_blocks == 125
    assert allocate(pool, 125) is second
    assert allocate(pool, 400).num_blocks == 400


def test_pool_at_its_bound_is_not_replaced_by_one_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.rollout.pool.AUTO_CPU_BYTES", 51 * BLOCK_BYTES)
    pool = make_pool()
    first = allocate(pool, 80)
    assert first.num_blocks == 50
    assert allocate(pool, 80) is first
    assert allocate(pool, 1000) is first
    # A bound that shrank meanwhile (others took the memory) does not move the pool either.
    monkeypatch.setattr("qerl.rollout.pool.AUTO_CPU_BYTES", 20 * BLOCK_BYTES)
    assert allocate(pool, 2000) is first


def test_half_of_the_free_memory_bounds_the_pool_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qerl.rollout.pool.available_bytes", lambda: 42 * BLOCK_BYTES)
    with caplog.at_level("INFO"):
        assert allocate(make_pool(), 16 << 20).num_blocks == 20
    assert "(taken as it fills), 20 blocks of 4 tokens; work at its longest would take 1.00 GiB" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert allocate(make_pool(), 20).num_blocks == 20
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


def test_files_that_a_container_has_read_are_not_used_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that had read its model's files had no memory left for the cache, though it could have had most."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    (tmp_path / "memory.max").write_text("900\n")
    (tmp_path / "memory.current").write_text("880\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 680\ninactive_file 600\nactive_file 80\n")
    assert available_bytes(tmp_path) == 900 - (880 - 600)


def test_no_memory_for_an_automatic_pool_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to raise memory_bytes, which nobody had given."""
    monkeypatch.setattr("qerl.rollout.pool.available_bytes", lambda: 2 * BLOCK_BYTES)
    pool = make_pool()
    words = (
        f"may take {BLOCK_BYTES} bytes, its share of the free memory.* take {2 * BLOCK_BYTES} bytes: free memory, or"
    )
    with pytest.raises(NoMemoryForCacheError, match=words):
        pool.plan(10)
    monkeypatch.setattr("qerl.rollout.pool.available_bytes", lambda: 20 * BLOCK_BYTES)
    assert allocate(pool, 5).num_blocks == 5
    # A pool that is there is used, however little is left beside it.
    monkeypatch.setattr("qerl.rollout.pool.available_bytes", lambda: 0)
    assert pool.plan(10) == 5


def test_what_the_pool_has_taken_on_the_cpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 200 * BLOCK_BYTES
    monkeypatch.setattr("qerl.rollout.pool.available_bytes", lambda: free)
    pool = make_pool()
    allocate(pool, 60)
    pool.count_used(50)
    pool.count_used(39)
    # The system counts 51 blocks as used; they go before a larger pool is made.
    free -= 51 * BLOCK_BYTES
    assert pool.plan(1000) == 99
    assert allocate(pool, 1000).num_blocks == 99
    # The new one has taken nothing yet but its null block.
    assert pool.plan(2000) == 99
    free += 51 * BLOCK_BYTES
    pool.release()
    assert pool.plan(2000) == 99


def test_given_sizes_are_kept_whatever_the_work() -> None:
    blocks, memory = make_pool(num_blocks=9), make_pool(memory_bytes=12 * BLOCK_BYTES + 5)
    for worst in (1, 500):
        assert allocate(blocks, worst).num_blocks == 9
        assert allocate(memory, worst).num_blocks == 11
    assert memory.kv.bytes == 12 * BLOCK_BYTES


def test_contents_of_a_failed_pass_do_not_stay() -> None:
    pool = make_pool()
    allocate(pool, 5).k.fill_(float("nan"))
    pool.discard_contents()
    assert not allocate(pool, 5).k.isnan().any()
    pool.release()
    assert pool.kv is None
    assert allocate(pool, 3).num_blocks == 3
