"""Requests that come and go while the engine runs: what a server builds on.

One session at a time; it owns the engine until it is closed. Every request has its own sampling parameters, and its
randomness depends on its seed and on nothing else: the same request gives the same tokens whatever runs beside it.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.rollout.checks import check_capacity, check_lengths, check_prompts, check_token_ids
from qerl.rollout.core import FinishReason, SamplingParams
from qerl.rollout.drawn import DrawnTokens
from qerl.rollout.loop import StepLoop
from qerl.rollout.sampler import sequence_key
from qerl.rollout.scheduler import Prefix

if TYPE_CHECKING:
    from qerl.rollout.engine import RolloutEngine


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One new token of one sample. ``finish_reason`` is set on the sample's last token; log-probs are as in
    :class:`~qerl.rollout.core.CompletionOutput`."""

    request_id: int
    sample_index: int
    token_id: int
    logprob: float
    temperature_logprob: float
    finish_reason: FinishReason | None


class EngineSession:
    """Made by :meth:`RolloutEngine.open_session`; also a context manager that closes itself.

    Not thread safe: one thread calls ``add``, ``abort`` and ``step``.
    """

    def __init__(self, engine: "RolloutEngine", loop: StepLoop) -> None:
        self._engine = engine
        self._loop: StepLoop | None = loop
        self._requests: dict[int, Prefix] = {}
        self._next_id = 0

    def add(self, prompt: list[int], sampling: SamplingParams) -> int:
        """Queue ``sampling.n`` completions of ``prompt``; returns the request's id (0, 1, 2, ... in order).

        Requests are served first come, first served. May be called between steps.

        Raises:
            NotTokenIdsError: a text or a tensor instead of a list of token ids.
            ValueError: an empty prompt or a token outside the vocabulary.
            RequestTooLongError: prompt plus ``max_tokens`` exceed the model length or the KV cache.
            RuntimeError: the session is closed.
        """
        check_token_ids([prompt])
        loop, engine = self._open(), self._engine
        check_prompts([prompt], engine.runner.vocab_size)
        check_lengths([prompt], sampling, engine.max_model_len)
        check_capacity([prompt], sampling, loop.kv.num_blocks, loop.kv.block_size)
        request_id = self._next_id
        self._next_id += 1
        keys = [sequence_key(sampling.seed, 0, 0, index) for index in range(sampling.n)]
        request = engine.group(request_id, prompt, sampling, keys)
        self._requests[request_id] = request
        loop.add(request)
        engine.stats.num_prompts += 1
        engine.stats.num_samples += sampling.n
        engine.stats.prompt_tokens += len(prompt)
        return request_id

    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks; ids that are unknown or finished are left alone.

        Raises:
            RuntimeError: the session is closed.
        """
        loop = self._open()
        request = self._requests.pop(request_id, None)
        if request is not None:
            loop.abort(request)

    def step(self) -> list[StepOutput]:
        """Run one step; its new tokens, those of a sample together and in order. Mostly one a sample, several where
        drafts were right, none where prompts were only partly prefilled.

        Raises:
            NonFiniteLogitsError: the model returned NaN; the session is closed then.
            RuntimeError: the session is closed.
        """
        loop = self._open()
        if not loop.unfinished:
            return []
        started = time.perf_counter()
        try:
            with self._engine.computing():
                drawn = loop.step()
        except BaseException:
            self._engine.discard_contents()
            self.close()
            raise
        loop.record()
        self._engine.stats.seconds += time.perf_counter() - started
        return self._outputs(drawn)

    @property
    def has_unfinished(self) -> bool:
        """True while a request waits for tokens."""
        return self._loop is not None and self._loop.unfinished

    def close(self) -> None:
        """Give the engine back; unfinished requests are dropped. Closing twice is harmless."""
        if self._loop is None:
            return
        for request_id in list(self._requests):
            self.abort(request_id)
        self._loop = None
        self._engine.end_session()

    def __enter__(self) -> "EngineSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> StepLoop:
        if self._loop is None:
            raise RuntimeError("the session is closed: open another with engine.open_session()")
        return self._loop

    def _outputs(self, drawn: DrawnTokens) -> list[StepOutput]:
        outputs = [
            StepOutput(sample.prefix.index, sample.sample_index, token, logprob, temperature_logprob, reason)
            for sample, token, logprob, temperature_logprob, reason in zip(*drawn.columns(), strict=True)
        ]
        for request_id in {output.request_id for output in outputs if output.finish_reason is not None}:
            if all(sample.finish_reason is not None for sample in self._requests[request_id].samples):
                self._engine.remember(self._requests.pop(request_id))
        return outputs
