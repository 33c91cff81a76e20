"""Rollout engine: token ids in, sampled completions out.

One call is a loop of schedule -> build batch -> forward -> sample -> postprocess over a paged KV cache. The
engine knows nothing of tokenizers, adapters, noise or quantization: it sees a
:class:`~qerl.rollout.core.Runner`. No K/V outlives a call, so a changed policy is never sampled from stale
keys; only the pool's memory is kept (``reset`` lets go of it).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qerl.rollout.batch import build_batch
from qerl.rollout.blocks import BlockAllocator
from qerl.rollout.core import (
    CompletionOutput,
    ForwardBatch,
    RequestTooLongError,
    Runner,
    SamplingParams,
)
from qerl.rollout.kv_cache import (
    KVCache,
    blocks_for_tokens,
    blocks_in_memory,
    bytes_per_block,
    worst_case_blocks,
)
from qerl.rollout.sampler import SampledTokens, keys_tensor, sample, sequence_key
from qerl.rollout.scheduler import Chunk, Prefix, Sample, ScheduledStep, Scheduler

# Upper bounds of a pool that sizes itself from the work: RAM is shared with everything else on the machine,
# GPU memory only with this process, which has loaded its weights by then.
AUTO_CPU_BYTES = 4 << 30
AUTO_CUDA_SHARE = 0.8

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    ``num_blocks`` fixes the KV pool in blocks, ``memory_bytes`` in bytes; with neither, each call gets what
    its worst case needs, at most 4 GiB on the CPU and 80 % of the free memory on CUDA. ``max_num_seqs``
    bounds the samples that run at once, ``max_batch_tokens`` the tokens of one forward pass (longer prompts
    are prefilled in chunks), ``max_model_len`` prompt plus completion (None: the model's own limit).

    Raises:
        ValueError: a limit is smaller than 1, or both sizes of the pool are given.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    max_model_len: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and memory_bytes={self.memory_bytes} both size the KV cache: "
                "give one of them"
            )


@dataclass(slots=True)
class EngineStats:
    """What the last ``generate`` call did.

    ``prompt_tokens`` and ``generated_tokens`` count what was asked and returned; ``computed_tokens`` every
    token that went through the model, recomputation after preemption included.
    """

    num_prompts: int = 0
    num_samples: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    peak_running: int = 0
    peak_blocks: int = 0
    num_blocks: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time; 0 before anything was generated."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class RolloutEngine:
    """Samples completions from a :class:`Runner` with continuous batching over a paged KV cache.

    Args:
        runner: the model.
        eos_token_ids: every token that ends a sample (a model may have several).
        config: limits; ``max_model_len`` may only lower the model's own limit.

    Raises:
        ValueError: an EOS id is outside the vocabulary, or ``max_model_len`` exceeds ``runner.max_position``.
    """

    def __init__(self, runner: Runner, eos_token_ids: Sequence[int], config: EngineConfig | None = None) -> None:
        self.runner = runner
        self.config = config or EngineConfig()
        self.eos_token_ids = frozenset(eos_token_ids)
        outside = sorted(token for token in self.eos_token_ids if not 0 <= token < runner.vocab_size)
        if outside:
            raise ValueError(f"EOS ids {outside} are outside the model's vocabulary of {runner.vocab_size}")
        self.max_model_len = self.config.max_model_len or runner.max_position
        if self.max_model_len > runner.max_position:
            raise ValueError(f"max_model_len={self.max_model_len} exceeds the model's {runner.max_position} positions")
        self.kv: KVCache | None = None
        self.scheduler: Scheduler | None = None
        self.stats = EngineStats()

    def reset(self) -> None:
        """Forget every cached key and value and free the pool's memory; the next call allocates it again.

        Raises:
            RuntimeError: called while ``generate`` runs (from its progress callback).
        """
        self._require_idle("reset")
        self.kv = None

    # no_grad, not inference_mode: a runner may keep workspaces that the training forward uses as well, and an
    # inference tensor must not be written outside inference mode.
    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        *,
        step: int = 0,
        prompt_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> list[list[CompletionOutput]]:
        """Sample ``sampling.n`` completions of every prompt.

        Args:
            prompts: token ids; none may be empty. Equal prompts are independent groups.
            sampling: how to sample; its seed, ``step``, the prompt's id and the sample's index key the
            randomness. step: training step, so that the same prompt gets new samples later.
            prompt_ids: distinct ids of the prompts that stay the same however they are batched over calls and
                ranks (default: their indices).
            progress: called after every forward pass with (finished samples, all samples, generated tokens).

        Returns:
            ``[prompt][sample]`` in the order asked. ``stats`` describes the call.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or prompt ids that do not match.
            RequestTooLongError: a prompt exceeds the model length or the KV cache. Nothing was generated.
            NonFiniteLogitsError: the model returned NaN. The pool is dropped; the engine stays usable.
            RuntimeError: called from its own progress callback.
        """
        self._require_idle("generate")
        started = time.perf_counter()
        ids = list(range(len(prompts))) if prompt_ids is None else list(prompt_ids)
        self._check_prompts(prompts, ids)
        self._check_lengths(prompts, sampling)
        self.stats = EngineStats(len(prompts), len(prompts) * sampling.n, sum(map(len, prompts)))
        if not prompts:
            return []
        self._prepare(prompts, sampling)
        groups = [
            self._queue(index, prompt, [sequence_key(sampling.seed, step, ids[index], i) for i in range(sampling.n)])
            for index, prompt in enumerate(prompts)
        ]
        try:
            self._run(sampling, progress)
        except BaseException:
            # A failed pass may have left NaN in the pool, which masked reads of a later call would spread.
            self.kv = None
            raise
        finally:
            self._record(started)
            self.scheduler = None
        return [[_output(sample) for sample in group.samples] for group in groups]

    def _prepare(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Give the call its KV pool and an empty scheduler over it."""
        num_blocks = self._plan_blocks(prompts, sampling)
        self._check_capacity(prompts, sampling, num_blocks)
        self.kv = self._pool(num_blocks)
        config = self.config
        self.scheduler = Scheduler(
            BlockAllocator(num_blocks), config.block_size, config.max_num_seqs, config.max_batch_tokens
        )

    def _run(self, sampling: SamplingParams, progress: Progress | None) -> None:
        """The loop over forward passes until every sample is finished."""
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_token_ids)
        finished = 0
        while self.scheduler.unfinished:
            step = self.scheduler.schedule()
            batch, drawing = build_batch(step.chunks, self.config.block_size, self.runner.device)
            logits = self._forward(step, batch)
            if drawing:
                finished += self._append(drawing, self._sample(drawing, logits, sampling), sampling, stop_ids)
            self.scheduler.advance(step)
            self.stats.steps += 1
            self.stats.computed_tokens += batch.token_ids.shape[0]
            if progress is not None:
                progress(finished, self.stats.num_samples, self.stats.generated_tokens)

    def _forward(self, step: ScheduledStep, batch: ForwardBatch) -> torch.Tensor:
        """Copy the blocks that would be written while shared, then run the model: float32 [R, V]."""
        self.kv.copy_blocks([source for source, _ in step.copies], [copy for _, copy in step.copies])
        return self.runner.forward(batch, self.kv)

    def _sample(self, drawing: list[Chunk], logits: torch.Tensor, sampling: SamplingParams) -> SampledTokens:
        """One token for each sample of ``drawing``; all samples of a fresh prompt draw from its one row."""
        keys = [drawer.key for chunk in drawing for drawer in chunk.drawers]
        positions = [chunk.end for chunk in drawing for _ in chunk.drawers]
        rows = None
        if len(keys) > len(drawing):
            per_sample = [row for row, chunk in enumerate(drawing) for _ in chunk.drawers]
            rows = torch.tensor(per_sample, dtype=torch.int64, device=logits.device)
        return sample(
            logits,
            sampling,
            keys_tensor(keys, logits.device),
            torch.tensor(positions, dtype=torch.int64, device=logits.device),
            rows,
        )

    def _append(
        self, drawing: list[Chunk], sampled: SampledTokens, sampling: SamplingParams, stop_ids: frozenset[int]
    ) -> int:
        """Append the sampled tokens (the one wait for the device a step); returns how many finished."""
        drawers = [drawer for chunk in drawing for drawer in chunk.drawers]
        finished = 0
        for drawer, token, logprob, temperature_logprob in zip(drawers, *sampled.tolist(), strict=True):
            drawer.token_ids.append(token)
            drawer.logprobs.append(logprob)
            drawer.temperature_logprobs.append(temperature_logprob)
            if token in stop_ids:
                drawer.finish_reason = "stop"
            elif drawer.num_generated == sampling.max_tokens:
                drawer.finish_reason = "length"
            finished += drawer.finish_reason is not None
        self.stats.generated_tokens += len(drawers)
        return finished

    def _queue(self, index: int, prompt: list[int], keys: list[tuple[int, int]]) -> Prefix:
        """Queue a prompt with one sample for each key of a random stream."""
        group = Prefix(index, list(prompt))
        group.samples = [Sample(group, number, key, list(prompt)) for number, key in enumerate(keys)]
        self.scheduler.add(group)
        return group

    def _check_prompts(self, prompts: list[list[int]], prompt_ids: list[int]) -> None:
        if len(prompt_ids) != len(prompts):
            raise ValueError(f"{len(prompt_ids)} prompt_ids for {len(prompts)} prompts")
        if len(set(prompt_ids)) != len(prompt_ids):
            raise ValueError(
                f"{len(prompt_ids)} prompt_ids hold only {len(set(prompt_ids))} distinct values: prompts with "
                "the same id would draw the same random numbers"
            )
        empty = [index for index, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise ValueError(
                f"{len(empty)} of {len(prompts)} prompts are empty (indices {_some(empty)}): "
                "start them with a BOS token"
            )
        vocab_size = self.runner.vocab_size
        outside = [i for i, prompt in enumerate(prompts) if min(prompt) < 0 or max(prompt) >= vocab_size]
        if outside:
            raise ValueError(
                f"{len(outside)} prompts (indices {_some(outside)}) hold token ids outside the model's "
                f"vocabulary of {vocab_size}: was another tokenizer used?"
            )

    def _check_lengths(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        too_long = [i for i, p in enumerate(prompts) if len(p) + sampling.max_tokens > self.max_model_len]
        if too_long:
            longest = max(len(prompts[index]) for index in too_long)
            raise RequestTooLongError(
                f"{len(too_long)} of {len(prompts)} prompts (indices {_some(too_long)}) do not fit: the longest "
                f"has {longest} tokens and max_tokens={sampling.max_tokens}, {longest + sampling.max_tokens} "
                f"together, over the limit of {self.max_model_len}; shorten or drop them, or lower max_tokens"
            )

    def _check_capacity(self, prompts: list[list[int]], sampling: SamplingParams, num_blocks: int) -> None:
        size = self.config.block_size
        # The last sampled token is never fed back, so it needs no place in the cache.
        needed = [blocks_for_tokens(len(prompt) + sampling.max_tokens - 1, size) for prompt in prompts]
        too_large = [index for index, blocks in enumerate(needed) if blocks > num_blocks]
        if too_large:
            raise RequestTooLongError(
                f"{len(too_large)} of {len(prompts)} prompts (indices {_some(too_large)}) can never fit the KV "
                f"cache: with max_tokens={sampling.max_tokens} the largest needs {max(needed)} blocks of {size} "
                f"tokens, the cache has {num_blocks}; raise num_blocks or memory_bytes, or lower max_tokens"
            )

    def _plan_blocks(self, prompts: list[list[int]], sampling: SamplingParams) -> int:
        """Blocks of the pool for this call (see :class:`EngineConfig`)."""
        config, runner = self.config, self.runner
        if config.num_blocks is not None:
            return config.num_blocks
        block_bytes = bytes_per_block(
            runner.num_layers, config.block_size, runner.num_kv_heads, runner.head_dim, runner.dtype
        )
        if config.memory_bytes is not None:
            return blocks_in_memory(config.memory_bytes, block_bytes)
        worst = worst_case_blocks(
            [len(p) for p in prompts], sampling.n, sampling.max_tokens, config.block_size, config.max_num_seqs
        )
        if self.kv is not None and self.kv.num_blocks >= worst:
            return self.kv.num_blocks
        limit = AUTO_CPU_BYTES
        if runner.device.type == "cuda":
            held = self.kv.bytes if self.kv is not None else 0
            limit = int(AUTO_CUDA_SHARE * (torch.cuda.mem_get_info(runner.device)[0] + held))
        return min(worst, blocks_in_memory(limit, block_bytes))

    def _pool(self, num_blocks: int) -> KVCache:
        """The pool of the last call if it has the right size, otherwise a new one."""
        if self.kv is not None and self.kv.num_blocks == num_blocks:
            return self.kv
        # The old pool goes first: two of them may not fit.
        self.kv = None
        runner = self.runner
        return KVCache(
            runner.num_layers,
            num_blocks,
            self.config.block_size,
            runner.num_kv_heads,
            runner.head_dim,
            runner.dtype,
            runner.device,
        )

    def _record(self, started: float) -> None:
        """Complete the statistics of a call, also of one that failed."""
        allocator = self.scheduler.allocator
        stats = self.stats
        stats.preemptions = self.scheduler.preemptions
        stats.peak_running = self.scheduler.peak_running
        stats.peak_blocks = allocator.peak_used
        stats.num_blocks = allocator.num_blocks
        stats.kv_bytes = self.kv.bytes if self.kv is not None else 0
        stats.seconds = time.perf_counter() - started

    def _require_idle(self, method: str) -> None:
        if self.scheduler is not None:
            raise RuntimeError(f"{method} was called while generate runs on the same engine")


def _output(sample: Sample) -> CompletionOutput:
    return CompletionOutput(
        prompt_index=sample.prefix.index,
        sample_index=sample.sample_index,
        token_ids=sample.token_ids[len(sample.prefix.token_ids) :],
        logprobs=sample.logprobs,
        temperature_logprobs=sample.temperature_logprobs,
        finish_reason=sample.finish_reason,
    )


def _some(indices: list[int]) -> str:
    """The first few of ``indices`` for an error message."""
    shown = ", ".join(map(str, indices[:8]))
    return shown if len(indices) <= 8 else f"{shown}, ..."
