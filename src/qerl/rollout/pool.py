"""How large the KV pool is, and that it stays where it is.

Captured graphs hold the pool's address, so it is kept between calls and replaced only when a call needs more
than it was made for.
"""

import logging

import torch

from qerl.rollout.config import EngineConfig
from qerl.rollout.core import Runner
from qerl.rollout.host_memory import available_bytes
from qerl.rollout.kv_cache import KVCache, blocks_in_memory, bytes_per_block

_log = logging.getLogger(__name__)

# Upper bounds of a pool that sizes itself from the work: RAM is shared with everything else on the machine,
# GPU memory only with this process, which has loaded its weights by then.
AUTO_CPU_BYTES = 4 << 30
AUTO_CPU_SHARE = 0.5
AUTO_CUDA_SHARE = 0.8
# A pool that has to be replaced grows by at least this factor: every move voids the captured graphs.
_GROWTH = 1.25


class NoMemoryForCacheError(ValueError):
    """The KV cache was to size itself, and its share of the free memory holds no block."""


class KVPool:
    """Owner of the one KV cache of an engine (``kv``; None before the first use).

    Free memory changes while a call starts, so a call plans once: what it checked is what it gets.
    """

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.runner = runner
        self.config = config
        self.kv: KVCache | None = None
        self.dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else runner.dtype
        self.block_bytes = bytes_per_block(
            runner.num_layers, config.block_size, runner.num_kv_heads, runner.head_dim, self.dtype
        )
        self._made_for = 0
        self._most_used = 0

    def plan(self, worst_blocks: int) -> int:
        """Blocks that the pool should have for work that needs at most ``worst_blocks``, by the memory free now.

        Raises:
            ValueError: the memory given holds no block.
            NoMemoryForCacheError: no size was given, there is no pool yet, and the free memory holds no block.
        """
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        if self.config.memory_bytes is not None:
            return blocks_in_memory(self.config.memory_bytes, self.block_bytes)
        held = 0 if self.kv is None else self.kv.num_blocks
        if self.kv is not None and worst_blocks <= max(self._made_for, held):
            return held
        wanted = max(worst_blocks, int(_GROWTH * held))
        limit = self._limit()
        num_blocks = max(held, min(wanted, limit // self.block_bytes - 1))
        if num_blocks < 1:
            raise NoMemoryForCacheError(
                f"the KV cache may take {limit:,} bytes, its share of the free memory, but one block and the null "
                f"block take {2 * self.block_bytes:,} bytes: free memory, or set the size of the cache "
                "(memory_bytes or num_blocks; in training kv_cache_gb)"
            )
        return num_blocks

    def allocate(self, num_blocks: int, worst_blocks: int) -> KVCache:
        """The pool of ``num_blocks``, as planned for work of at most ``worst_blocks``; the last one if it has that
        size."""
        self._made_for = max(self._made_for, worst_blocks)
        if self.kv is None or self.kv.num_blocks != num_blocks:
            # The old pool goes first: two of them may not fit.
            self._drop()
            runner = self.runner
            self.kv = KVCache(
                runner.num_layers,
                num_blocks,
                self.config.block_size,
                runner.num_kv_heads,
                runner.head_dim,
                self.dtype,
                runner.device,
            )
            self._describe(worst_blocks)
        return self.kv

    def _describe(self, worst_blocks: int) -> None:
        kv, on_cpu = self.kv, self.runner.device.type != "cuda"
        bounded = ""
        if kv.num_blocks < worst_blocks:
            wanted = _readable((worst_blocks + 1) * self.block_bytes)
            bounded = f"; work at its longest would take {wanted}, samples wait where it does not fit"
        _log.info(
            "KV cache: %s%s, %d blocks of %d tokens%s",
            _readable(kv.bytes), " (taken as it fills)" if on_cpu else "", kv.num_blocks, kv.block_size, bounded,
        )  # fmt: skip

    def count_used(self, num_blocks: int) -> None:
        """So many blocks were in use at once since the last count."""
        self._most_used = max(self._most_used, num_blocks)

    def release(self) -> None:
        """Free the memory; the next call allocates it again."""
        self._drop()
        self._made_for = 0

    def discard_contents(self) -> None:
        """After a failed pass: no NaN may stay, since masked reads of a later call would spread it.

        On CUDA the pool is zeroed in place (its address is in captured graphs), elsewhere it is dropped.
        """
        kv, made_for = self.kv, self._made_for
        # Stays released if the device is beyond use and zeroing fails too.
        self.release()
        if kv is not None and kv.k.is_cuda:
            kv.k.zero_()
            kv.v.zero_()
            self.kv, self._made_for = kv, made_for

    def _drop(self) -> None:
        self.kv = None
        self._most_used = 0

    def _limit(self) -> int:
        """Bytes of a new pool at most; what the present one has taken counts as free, since it goes first."""
        if self.runner.device.type != "cuda":
            # The system gives memory as it is written, and blocks are handed out from the first one on.
            held = 0 if self.kv is None else (self._most_used + 1) * self.block_bytes
            return min(AUTO_CPU_BYTES, int(AUTO_CPU_SHARE * (available_bytes() + held)))
        # What torch keeps for reuse counts as free: it gives it back when the pool is allocated.
        device = self.runner.device
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        held = 0 if self.kv is None else self.kv.bytes
        return int(AUTO_CUDA_SHARE * (torch.cuda.mem_get_info(device)[0] + cached + held))


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"
