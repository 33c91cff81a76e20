"""Rollout engine: token ids in, sampled completions out.

One call is a loop of schedule -> forward -> sample -> postprocess over a paged KV cache (see ``loop.py``). The
engine knows nothing of tokenizers, adapters, noise or quantization: it sees a
:class:`~qerl.rollout.core.Runner`. No K/V outlives a call, so a changed policy is never sampled from stale
keys; only the pool's memory is kept (``reset`` lets go of it).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from qerl.rollout.attention import decode_kernel_serves
from qerl.rollout.blocks import BlockAllocator
from qerl.rollout.checks import check_capacity, check_lengths, check_prompt_ids, check_prompts, check_token_ids
from qerl.rollout.config import EngineConfig, EngineStats
from qerl.rollout.core import CompletionOutput, Runner, SamplingParams
from qerl.rollout.decode_step import DecodeBuffers, bucket_sizes
from qerl.rollout.decoder import Decoder
from qerl.rollout.draft_log import DraftLog
from qerl.rollout.graphs import CudaCapture, StepGraphs
from qerl.rollout.history import CompletionHistory
from qerl.rollout.kv_cache import KVCache, blocks_for_tokens, worst_case_blocks
from qerl.rollout.loop import StepLoop
from qerl.rollout.pool import KVPool
from qerl.rollout.sampler import sequence_key
from qerl.rollout.scheduler import Prefix, Sample, Scheduler
from qerl.rollout.session import EngineSession
from qerl.rollout.speculation import Speculation

__all__ = ["EngineConfig", "EngineStats", "Progress", "RolloutEngine"]

Progress = Callable[[int, int, int], None]


class RolloutEngine:
    """Samples completions from a :class:`Runner` with continuous batching over a paged KV cache.

    Args:
        runner: the model.
        eos_token_ids: every token that ends a sample (a model may have several).
        config: limits; ``max_model_len`` may only lower the model's own limit.

    Raises:
        ValueError: an EOS id is outside the vocabulary, ``max_model_len`` exceeds ``runner.max_position``, or a
            sequence has no room for ``speculative_tokens``.
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
        if self.config.speculative_tokens >= self.max_model_len:
            raise ValueError(
                f"speculative_tokens={self.config.speculative_tokens} must be smaller than the "
                f"{self.max_model_len} tokens that a sequence may have"
            )
        self.pool = KVPool(runner, self.config)
        self.decoder: Decoder | None = None
        self.scheduler: Scheduler | None = None
        self.stats = EngineStats()
        self.history = CompletionHistory(self.config.speculative_history)
        self._busy_with = ""
        self._draft_log = DraftLog()

    @property
    def kv(self) -> KVCache | None:
        """The KV cache as the last call left it."""
        return self.pool.kv

    def reset(self) -> None:
        """Forget every cached key and value, free the pool's memory and the captured graphs; the next call makes them
        again.

        Raises:
            RuntimeError: called while ``generate`` runs (from its progress callback) or a session is open.
        """
        self._require_idle("reset")
        self._drop_decoder()
        self.pool.release()

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
            progress: called after every forward pass with (finished samples, all samples, generated tokens). An
                exception from it ends the call; the engine stays usable.

        Returns:
            ``[prompt][sample]`` in the order asked. ``stats`` describes the call.

        Raises:
            NotTokenIdsError: texts, tensors or a flat list instead of lists of token ids.
            ValueError: an empty prompt, a token outside the vocabulary, or prompt ids that do not match.
            RequestTooLongError: a prompt exceeds the model length or the KV cache. Nothing was generated.
            NonFiniteLogitsError: the model returned NaN. The pool's contents are dropped; the engine stays usable.
            RuntimeError: called from its own progress callback, or while a session is open.
        """
        check_token_ids(prompts)
        self._require_idle("generate")
        started = time.perf_counter()
        ids = list(range(len(prompts))) if prompt_ids is None else list(prompt_ids)
        check_prompt_ids(ids, len(prompts))
        check_prompts(prompts, self.runner.vocab_size)
        check_lengths(prompts, sampling, self.max_model_len)
        self.stats = EngineStats(len(prompts), len(prompts) * sampling.n, sum(map(len, prompts)))
        if not prompts:
            return []
        loop = self._start_call(prompts, sampling)
        groups = []
        for index, prompt in enumerate(prompts):
            keys = [sequence_key(sampling.seed, step, ids[index], i) for i in range(sampling.n)]
            groups.append(self.group(index, prompt, sampling, keys))
            loop.add(groups[-1])
        try:
            with self.computing():
                self._run(loop, progress)
        except BaseException:
            self.discard_contents()
            raise
        finally:
            loop.record()
            self.stats.seconds = time.perf_counter() - started
            self._finish()
        for group in groups:
            self.remember(group)
        return [[_output(sample) for sample in group.samples] for group in groups]

    def open_session(self) -> EngineSession:
        """A session for requests that come and go; ``generate`` is refused until it is closed.

        The pool is sized for ``max_num_seqs`` sequences of ``max_model_len`` tokens, within the bounds of
        :class:`EngineConfig`. ``stats`` counts over the whole session.

        Raises:
            RuntimeError: a session is open already, or called while ``generate`` runs.
        """
        self._require_idle("open_session")
        self.stats = EngineStats()
        worst = self.config.max_num_seqs * blocks_for_tokens(self.max_model_len, self.config.block_size)
        return EngineSession(self, self._start("a session", self.pool.plan(worst), worst))

    def group(self, index: int, prompt: list[int], sampling: SamplingParams, keys: list[tuple[int, int]]) -> Prefix:
        """A group of a checked prompt with one sample for each key of a random stream (for sessions)."""
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_token_ids)
        group = Prefix(index, list(prompt), sampling, stop_ids)
        group.samples = [Sample(group, number, key, list(prompt)) for number, key in enumerate(keys)]
        return group

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What every step runs under (for sessions).

        no_grad, not inference_mode: a runner may keep workspaces that the training forward uses as well, and an
        inference tensor must not be written outside inference mode. Events, graphs and Triton take the current GPU, so
        it is made the runner's.
        """
        device = self.runner.device
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    def discard_contents(self) -> None:
        """Let nothing that a failed pass wrote reach a later call (for sessions)."""
        self.pool.discard_contents()

    def remember(self, group: Prefix) -> None:
        """Keep the completions of a finished group for drafts, within ``speculative_history`` (for sessions)."""
        for sample in group.samples:
            self.history.add(group.token_ids, sample.token_ids[len(group.token_ids) :])

    def forget_completions(self) -> None:
        """Drop what ``speculative_history`` has kept of earlier calls."""
        self.history.clear()

    def end_session(self) -> None:
        """Called by the session when it closes."""
        self._finish()

    def _start_call(self, prompts: list[list[int]], sampling: SamplingParams) -> StepLoop:
        """The loop of a ``generate`` call, once the pool is known to hold each of its prompts.

        Raises:
            RequestTooLongError: a prompt with its completion exceeds the KV cache.
        """
        config = self.config
        worst = worst_case_blocks(
            [len(p) for p in prompts], sampling.n, sampling.max_tokens, config.block_size, config.max_num_seqs
        )
        num_blocks = self.pool.plan(worst)
        check_capacity(prompts, sampling, num_blocks, config.block_size)
        return self._start("generate", num_blocks, worst)

    def _start(self, name: str, num_blocks: int, worst_blocks: int) -> StepLoop:
        """Give ``name`` a KV pool as planned for ``worst_blocks`` and an empty scheduler over it."""
        if self.kv is not None and num_blocks != self.kv.num_blocks:
            # The pool moves, so graphs over it are void; their memory may be needed for the new one.
            self._drop_decoder()
        kv = self.pool.allocate(num_blocks, worst_blocks)
        if self.decoder is None:
            self.decoder = self._make_decoder()
        config = self.config
        self.scheduler = Scheduler(
            BlockAllocator(kv.num_blocks), config.block_size, config.max_num_seqs, config.max_batch_tokens
        )
        self._busy_with = name
        speculation = None
        if config.speculative_tokens:
            cuda = self.runner.device.type == "cuda"
            speculation = Speculation(config, cuda, self.decoder.size_of, self.history)
        return StepLoop(
            self.decoder,
            kv,
            self.scheduler,
            self.stats,
            eager_refill=name != "generate",
            speculation=speculation,
        )

    def _drop_decoder(self) -> None:
        if self.decoder is not None:
            self.decoder.graphs.clear()
        self.decoder = None

    def _make_decoder(self) -> Decoder:
        """Static buffers for decode steps; graphs, look-ahead and rounding of batch sizes only where they pay."""
        runner, config = self.runner, self.config
        cuda = runner.device.type == "cuda"
        look_ahead = int(cuda)
        graphs = cuda and config.cuda_graphs and decode_kernel_serves(runner.head_dim, config.block_size)
        capture = CudaCapture(runner.device) if graphs else None
        return Decoder(
            runner,
            DecodeBuffers(
                config.max_rows,
                blocks_for_tokens(self.max_model_len, config.block_size),
                runner.device,
                depth=look_ahead + 1,
                seats=config.max_num_seqs,
            ),
            StepGraphs(capture, None if capture is None else capture.wait),
            bucket_sizes(config.max_rows) if cuda else None,
            look_ahead,
        )

    def _run(self, loop: StepLoop, progress: Progress | None) -> None:
        """The loop over forward passes until every sample is finished."""
        while loop.unfinished:
            loop.step()
            if progress is not None:
                progress(loop.finished, self.stats.num_samples, self.stats.generated_tokens)

    def _finish(self) -> None:
        self._draft_log.count(self.stats)
        self.pool.count_used(self.scheduler.allocator.peak_used)
        self.scheduler = None
        self._busy_with = ""

    def _require_idle(self, method: str) -> None:
        if self._busy_with:
            what = "generate runs" if self._busy_with == "generate" else "a session is open"
            raise RuntimeError(f"{method} was called while {what} on the same engine")


def _output(sample: Sample) -> CompletionOutput:
    return CompletionOutput(
        prompt_index=sample.prefix.index,
        sample_index=sample.sample_index,
        token_ids=sample.token_ids[len(sample.prefix.token_ids) :],
        logprobs=sample.logprobs,
        temperature_logprobs=sample.temperature_logprobs,
        finish_reason=sample.finish_reason,
    )
