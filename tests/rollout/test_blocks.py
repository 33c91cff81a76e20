"""Reference counts of the block allocator, and the pool that the blocks live in."""

import random

import pytest
import torch

from qerl.rollout.blocks import BlockAllocator
from qerl.rollout.kv_cache import (
    NULL_BLOCK,
    KVCache,
    blocks_for_tokens,
    blocks_in_memory,
    bytes_per_block,
    worst_case_blocks,
)


def test_shared_block_is_free_only_after_its_last_owner() -> None:
    allocator = BlockAllocator(4)
    first = allocator.allocate(2)
    second = allocator.share(first)
    assert [allocator.ref_count(block) for block in first] == [2, 2]
    allocator.free(first)
    allocator.check_integrity([second])
    assert allocator.num_free == 2
    allocator.free(second)
    assert allocator.num_free == 4
    assert allocator.peak_used == 2
    allocator.check_integrity([])


def test_null_block_is_never_handed_out() -> None:
    assert NULL_BLOCK not in BlockAllocator(7).allocate(7)


def test_misuse_is_caught() -> None:
    allocator = BlockAllocator(2)
    [block] = allocator.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        allocator.allocate(2)
    allocator.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free([block])
    with pytest.raises(AssertionError, match="cannot be shared"):
        allocator.share([block])
    with pytest.raises(ValueError, match="got 0"):
        BlockAllocator(0)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[1]], "block 2 has 0 owners but a count of 1"),
        ([[1, 2], [2]], "block 2 has 2 owners but a count of 1"),
        ([[1, 2, 2]], "twice in one table"),
        ([[1, 2], [3]], "block 3 has 1 owners but a count of 0"),
        ([[1, 2], [NULL_BLOCK]], "null block"),
    ],
)
def test_integrity_check_finds_wrong_tables(tables: list[list[int]], message: str) -> None:
    allocator = BlockAllocator(3)
    assert sorted(allocator.allocate(2)) == [1, 2]
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity(tables)


def test_random_use_keeps_every_block_accounted_for() -> None:
    rng = random.Random(0)
    allocator = BlockAllocator(40)
    tables: list[list[int]] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.4 and allocator.num_free:
            tables.append(allocator.allocate(rng.randint(1, min(4, allocator.num_free))))
        elif action < 0.6 and tables:
            tables.append(allocator.share(rng.choice(tables)))
        elif tables:
            allocator.free(tables.pop(rng.randrange(len(tables))))
        allocator.check_integrity(tables)
    assert allocator.peak_used == 40


def _pool(**changes: int) -> KVCache:
    sizes = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 5} | changes
    return KVCache(**sizes, dtype=torch.float32, device="cpu")


def test_write_reaches_only_its_layer_and_slots() -> None:
    kv = _pool()
    k, v = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    kv.write(1, k, v, torch.tensor([1 * 4 + 3, 3 * 4 + 0]))
    expected_k, expected_v = torch.zeros_like(kv.k), torch.zeros_like(kv.v)
    expected_k[1, 1, 3], expected_k[1, 3, 0] = k
    expected_v[1, 1, 3], expected_v[1, 3, 0] = v
    assert torch.equal(kv.k, expected_k)
    assert torch.equal(kv.v, expected_v)


def test_write_casts_to_the_dtype_of_the_pool() -> None:
    kv = KVCache(1, 1, 1, 1, 1, torch.bfloat16, "cpu")
    kv.write(0, torch.tensor([[[1 + 2**-12]]]), torch.tensor([[[3.0]]]), torch.tensor([1]))
    assert kv.k[0, 1].item() == 1.0
    assert kv.v[0, 1].item() == 3.0


def test_copy_reads_every_source_before_it_writes() -> None:
    kv = _pool()
    kv.k.normal_()
    kv.v.normal_()
    k, v = kv.k.clone(), kv.v.clone()
    kv.copy_blocks([1, 2], [2, 3])
    assert torch.equal(kv.k, k[:, [0, 1, 1, 2]])
    assert torch.equal(kv.v, v[:, [0, 1, 1, 2]])
    kv.copy_blocks([], [])
    assert torch.equal(kv.k, k[:, [0, 1, 1, 2]])


def test_pool_refuses_an_empty_dimension() -> None:
    with pytest.raises(ValueError, match="blocks=0"):
        _pool(num_blocks=0)
    with pytest.raises(ValueError, match="layers=0"):
        _pool(num_layers=0)


def test_pool_fills_the_memory_it_was_given() -> None:
    block = bytes_per_block(2, 4, 2, 5, torch.float32)
    assert block == 2 * 2 * 4 * 2 * 5 * 4
    assert blocks_in_memory(4 * block + 17, block) == 3
    assert _pool(num_blocks=3).bytes == 4 * block
    with pytest.raises(ValueError, match=f"{2 * block - 1:,} bytes .* {2 * block:,} bytes"):
        blocks_in_memory(2 * block - 1, block)


def test_blocks_for_tokens_rounds_up() -> None:
    assert [blocks_for_tokens(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("prompt_lens", "n", "max_tokens", "max_num_seqs", "expected"),
    [
        # 10 tokens = 2 full blocks + a partial one, held by the group; a sample needs blocks 3..4 for 10 + 5.
        ([10], 1, 6, 8, 3 + 2),
        ([10], 3, 6, 8, 3 + 3 * 2),
        # Only two samples run at once.
        ([10], 3, 6, 2, 3 + 2 * 2),
        # The larger group counts when one sequence runs: 20 tokens = 5 blocks, 20 + 5 tokens need 2 more.
        ([10, 20], 1, 6, 1, 5 + 2),
        ([8], 2, 1, 8, 2),
    ],
)
def test_worst_case_by_hand(prompt_lens: list[int], n: int, max_tokens: int, max_num_seqs: int, expected: int) -> None:
    assert worst_case_blocks(prompt_lens, n, max_tokens, 4, max_num_seqs) == expected
