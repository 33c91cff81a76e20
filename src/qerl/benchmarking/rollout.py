"""Rollout speed of a model: decode and prefill at fixed lengths, continuous against static batches at long-tailed ones.

Prompts are distinct random tokens, so no prefix is shared; every token is sampled at temperature 1 and no token ends a
sample. Decode is timed by difference, as one times a server that gives no insight: the time of N tokens minus the time
of one, over N - 1 steps. Warm-ups run until nothing is captured any more; the rows say how many graphs were captured in
the measured part (0) and how long its slowest decode step was, which shows whether a kernel was compiled in it.
"""

import gc
import math
import resource
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from time import perf_counter

import torch

from qerl.benchmarking.agreement import check_agreement
from qerl.benchmarking.ceilings import Ceilings
from qerl.benchmarking.results import Row
from qerl.benchmarking.subject import Subject
from qerl.benchmarking.timing import CheckFailedError, synchronize
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.decode_step import bucket_sizes
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.kv_cache import blocks_for_tokens

# Decode steps of a warm-up with every sequence running.
_WARM_UP_STEPS = 6
# A batch size runs eagerly when it is first met and is captured the second time: after two warm-ups all are replayed,
# which a third one, without a capture, shows.
_WARM_UPS = 2
_MOST_WARM_UPS = 5
# Long-tailed lengths are shortened by this for the warm-up, which so meets the batch sizes of the real run.
_WARM_UP_SHARE = 32


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of ``length`` uniformly random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def make_engine(subject: Subject, slots: int, longest: int) -> RolloutEngine:
    """An engine whose pool holds ``slots`` sequences of ``longest`` tokens (prompt and completion)."""
    blocks = slots * (blocks_for_tokens(longest, 16) + 1)
    return subject.engine(slots, longest, blocks)


def measure_fixed(
    subject: Subject, ceilings: Ceilings, batches: Sequence[int], prompt: int, new: int, on_row: Callable[[Row], None]
) -> None:
    """One row for each batch size: ``new`` tokens after ``prompt`` ones; handed to ``on_row`` as they come.

    Raises:
        CheckFailedError: tokens are missing, log-probs not finite, or the engine disagrees with transformers.
        ValueError: fewer than 2 new tokens, between which there is nothing to time.
    """
    if new < 2:
        raise ValueError(f"--new must be at least 2 to time decode steps, got {new}")
    engine = make_engine(subject, max(batches), prompt + new)
    for batch in batches:
        prompts = random_prompts(batch, prompt, subject.geometry.vocab, seed=batch)
        # Prompts are prefilled step by step, and those that are through decode meanwhile.
        prefill_steps = -(-batch * prompt // engine.config.max_batch_tokens)
        timed = partial(_timed, engine, prompts, seed=subject.seed)
        warm_up(engine, partial(timed, min(new, prefill_steps + _WARM_UP_STEPS)))
        reset_peak(subject.device)
        prefill_s = min(timed(1)[0] for _ in range(2))
        clock = StepClock(batch)
        total_s, outputs = timed(new, clock)
        stats = engine.stats
        agreement = check_outputs(subject, prompts, outputs, new)
        row = _fixed_row(subject, ceilings, batch, prompt, new, prefill_s, total_s)
        counts = {"steps": stats.steps, "graph_replays": stats.graph_replays, "preemptions": stats.preemptions}
        slowest = {"graph_captures": stats.graph_captures, "slowest_step_ms": round(clock.slowest_ms, 3)}
        on_row(row | agreement | counts | slowest)
    engine.reset()
    free_memory(subject.device)


def _fixed_row(
    subject: Subject, ceilings: Ceilings, batch: int, prompt: int, new: int, prefill_s: float, total_s: float
) -> Row:
    decode_s = total_s - prefill_s
    if decode_s <= 0:
        raise CheckFailedError(
            f"{new} tokens took {total_s:.4f} s, 1 token {prefill_s:.4f} s: too short to time; raise --new"
        )
    step_s = decode_s / (new - 1)
    context = prompt + new / 2
    floor_us = ceilings.floor_us(subject.step_bytes(batch, context), subject.step_flops(batch, context))
    return {
        **labels(subject),
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "tokens_per_s": round(batch / step_s, 1),
        "ms_per_step": round(1e3 * step_s, 4),
        "roofline_share": round(floor_us / (1e6 * step_s), 4),
        "peak_gb": round(peak_bytes(subject.device) / 1e9, 3),
        "prefill_s": round(prefill_s, 4),
        "end_to_end_tokens_per_s": round(batch * new / total_s, 1),
    }


def measure_prefill(subject: Subject, ceilings: Ceilings, sequences: int, length: int) -> Row:
    """Seconds from ``sequences`` prompts of ``length`` tokens to one sampled token each; best of two."""
    engine = make_engine(subject, sequences, length + 1)
    prompts = random_prompts(sequences, length, subject.geometry.vocab, seed=sequences)
    timed = partial(_timed, engine, prompts, 1, seed=subject.seed)
    warm_up(engine, timed)
    seconds = min(timed()[0] for _ in range(2))
    # Attention is left out of the FLOPs: at these lengths it is a few per cent of them.
    floor_us = ceilings.floor_us(0, sequences * length * (subject.step_flops(1, 0) - 2.0 * subject.head_parameters))
    engine.reset()
    free_memory(subject.device)
    return {
        **labels(subject),
        "sequences": sequences,
        "prompt": length,
        "seconds": round(seconds, 4),
        "prompt_tokens_per_s": round(sequences * length / seconds, 1),
        "roofline_share": round(floor_us / (1e6 * seconds), 4),
    }


def measure_long_tailed(subject: Subject, slots: int, prompt: int, lengths: Sequence[int]) -> Row:
    """Completions of the given lengths over ``slots`` places: continuous batching, and static batches of ``slots``.

    A static batch runs until its longest completion is done, as padded generation does; only wanted tokens count.
    Both times include prefill. Of the static batches of one size only the one with the longest completion runs
    (``static_runs``), with the time of every step noted; the others end within it, and take the time it had taken by
    their last step: rows, prompt length and positions of each step are the same (but for a prefill in parts).

    Raises:
        CheckFailedError: tokens are missing.
    """
    engine = make_engine(subject, slots, prompt + max(lengths))
    prompts = random_prompts(len(lengths), prompt, subject.geometry.vocab, seed=len(lengths))
    short = [-(-length // _WARM_UP_SHARE) for length in lengths]
    warm_up(engine, partial(run_continuous, engine, prompts, short, subject.seed))
    # Sizes that the tail shrinks through, which short lengths may skip.
    for size in {min(size, len(prompts)) for size in bucket_sizes(slots)}:
        steps = min(max(lengths), _WARM_UP_STEPS)
        warm_up(engine, partial(_timed, engine, prompts[:size], steps, seed=subject.seed))
    reset_peak(subject.device)
    synchronize(subject.device)
    started = perf_counter()
    drawn = run_continuous(engine, prompts, lengths, subject.seed)
    synchronize(subject.device)
    continuous_s = perf_counter() - started
    captures, steps = engine.stats.graph_captures, engine.stats.steps
    if drawn != sum(lengths):
        raise CheckFailedError(f"continuous batching returned {drawn} tokens, {sum(lengths)} were asked")
    static_s, runs = _static_seconds(engine, prompts, lengths, slots, subject.seed)
    engine.reset()
    free_memory(subject.device)
    return {
        **labels(subject),
        "slots": slots,
        "samples": len(lengths),
        "prompt": prompt,
        "mean_new": round(sum(lengths) / len(lengths), 1),
        "max_new": max(lengths),
        "tokens_per_s": round(sum(lengths) / continuous_s, 1),
        "static_tokens_per_s": round(sum(lengths) / static_s, 1),
        "continuous_over_static": round(static_s / continuous_s, 3),
        "continuous_s": round(continuous_s, 3),
        "static_s": round(static_s, 3),
        "static_runs": runs,
        "steps": steps,
        "static_steps": sum(max(lengths[first : first + slots]) for first in range(0, len(lengths), slots)),
        "graph_captures": captures,
        "peak_gb": round(peak_bytes(subject.device) / 1e9, 3),
    }


def _static_seconds(
    engine: RolloutEngine, prompts: list[list[int]], lengths: Sequence[int], slots: int, seed: int
) -> tuple[float, int]:
    """(seconds of all static batches, how many of them ran); see :func:`measure_long_tailed`."""
    longest: dict[int, list[int]] = {}
    for first in range(0, len(lengths), slots):
        batch = lengths[first : first + slots]
        longest.setdefault(len(batch), []).append(max(batch))
    seconds = 0.0
    for rows, steps in longest.items():
        clock = StepClock(rows)
        _timed(engine, prompts[:rows], max(steps), clock, seed=seed)
        seconds += sum(clock.seconds_until(rows * count) for count in steps)
    return seconds, len(longest)


def run_continuous(engine: RolloutEngine, prompts: Sequence[list[int]], lengths: Sequence[int], seed: int) -> int:
    """Generate ``lengths[i]`` tokens of ``prompts[i]`` in one session; returns how many tokens came.

    ``seed`` is of all of them: each request draws from a stream of its own.
    """
    drawn = 0
    with closing(engine.open_session()) as session:
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            session.add(prompt, SamplingParams(max_tokens=length, seed=(seed << 20) + index, ignore_eos=True))
        while session.has_unfinished:
            drawn += len(session.step())
    return drawn


class StepClock:
    """Times of the forward passes of a ``generate`` call, as its ``progress`` callback.

    Args:
        rows: sequences of the call; a pass that gives each of them a token is a decode step.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._tokens = [0]
        self._times = [perf_counter()]

    def __call__(self, finished: int, samples: int, tokens: int) -> None:
        self._times.append(perf_counter())
        self._tokens.append(tokens)

    @property
    def slowest_ms(self) -> float:
        """Longest time between the results of a pass and of the decode step behind it; 0 without decode steps."""
        passes = list(zip(self._times, self._tokens, strict=True))
        # The first pass that gives every row a token may be the prefill.
        decode = [after[0] - before[0] for before, after in pairwise(passes[1:]) if after[1] - before[1] == self._rows]
        return 1e3 * max(decode, default=0.0)

    def seconds_until(self, tokens: int) -> float:
        """Seconds from the start until ``tokens`` tokens had come.

        Raises:
            CheckFailedError: fewer came.
        """
        index = bisect_left(self._tokens, tokens)
        if index == len(self._tokens):
            raise CheckFailedError(f"{self._tokens[-1]} tokens came, {tokens} were asked")
        return self._times[index] - self._times[0]


def warm_up(engine: RolloutEngine, run: Callable[[], object]) -> None:
    """Call ``run``, which uses ``engine``, until every kernel is compiled and every graph of it captured.

    Raises:
        CheckFailedError: graphs are captured over and over.
    """
    for count in range(1, _MOST_WARM_UPS + 1):
        run()
        if count >= _WARM_UPS and engine.stats.graph_captures == 0:
            return
    raise CheckFailedError(
        f"{engine.stats.graph_captures} graphs were captured in warm-up {_MOST_WARM_UPS} of the same work: its time "
        "would hold captures"
    )


def _timed(
    engine: RolloutEngine, prompts: list[list[int]], new: int, clock: StepClock | None = None, *, seed: int
) -> tuple[float, list[list[CompletionOutput]]]:
    device = engine.runner.device
    synchronize(device)
    started = perf_counter()
    sampling = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, seed=seed)
    outputs = engine.generate(prompts, sampling, progress=clock)
    synchronize(device)
    return perf_counter() - started, outputs


def check_outputs(subject: Subject, prompts: list[list[int]], outputs: list[list[CompletionOutput]], new: int) -> Row:
    """Every sample is whole and finite, and the first one is scored rightly; returns its differences.

    Raises:
        CheckFailedError: with the numbers.
    """
    for index, (sample,) in enumerate(outputs):
        if len(sample.token_ids) != new or not all(map(math.isfinite, sample.logprobs)):
            raise CheckFailedError(f"sample {index} has {len(sample.token_ids)} of {new} tokens, or infinite log-probs")
    return check_agreement(subject, prompts[0], outputs[0][0])


def labels(subject: Subject) -> Row:
    """What tells rows of one subject from another's."""
    return {
        "engine": "qerl",
        "model": subject.name,
        "weights": subject.weights,
        "lora_rank": subject.lora_rank,
        "kv_dtype": subject.kv_name,
        "head_dtype": subject.head_name,
    }


def free_memory(device: torch.device) -> None:
    """Give cached blocks back, so that the next pool finds them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Start counting the largest allocation anew (GPU only)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Largest allocation on the GPU since the last reset; on the CPU, of this process since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
