"""What speculative decoding brings on real prompts: acceptance, and tokens a second beside those without it.

Random prompts or weights would say nothing here: what is guessed is text that repeats. Samples end at the model's EOS,
since what a model writes after it repeats more than text does.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from qerl.benchmarking.agreement import check_agreement
from qerl.benchmarking.results import Row
from qerl.benchmarking.rollout import free_memory, labels
from qerl.benchmarking.subject import Subject, UnsupportedBenchError
from qerl.benchmarking.timing import CheckFailedError, synchronize
from qerl.evaluation.prompts import PromptRenderer
from qerl.nn.loading import eos_token_ids
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.kv_cache import blocks_for_tokens

# Bounds what is kept for later epochs; no measurement here comes near.
_HISTORY_TOKENS = 1 << 24
# Two passes meet and capture every size, unless rounding parts them; the next one shows that it is so.
_MOST_WARM_UPS = 6


@dataclass(frozen=True, slots=True)
class SpeculativePlan:
    """What to measure with drafts.

    Attributes:
        tokens: drafts a sample at most.
        chats: the prompts, each the messages of a chat.
        group: samples of a prompt (one where it is greedy: they would be equal).
        temperatures: measured one after another.
        epochs: passes over the prompts, each with samples of its own; drafts of later ones know the earlier ones.
    """

    tokens: int
    chats: Sequence[Sequence[Mapping[str, str]]]
    group: int
    temperatures: Sequence[float]
    epochs: int


def check_plan(plan: SpeculativePlan, batches: Sequence[int]) -> None:
    """Before a model is loaded.

    Raises:
        UnsupportedBenchError: a temperature that cannot be sampled at, or a batch that no whole number of groups fills.
    """
    for temperature in plan.temperatures:
        try:
            SamplingParams(temperature=temperature)
        except ValueError as error:
            raise UnsupportedBenchError(f"--temperature: {error}") from error
        for batch in batches:
            group = _group(plan, temperature, batch)
            if batch % group:
                raise UnsupportedBenchError(f"--batch {batch} is no multiple of --group {group}")


def prompt_ids(folder: Path, plan: SpeculativePlan) -> list[list[int]]:
    """Token ids of the prompts for the model in ``folder``."""
    renderer = PromptRenderer(AutoTokenizer.from_pretrained(folder))
    return [renderer.render(chat).token_ids for chat in plan.chats]


def _group(plan: SpeculativePlan, temperature: float, batch: int) -> int:
    return 1 if temperature == 0 else min(plan.group, batch)


def _work(plan: SpeculativePlan, batches: Sequence[int]) -> list[tuple[int, float, int]]:
    """(samples at once, temperature, group) of each measurement: no batch is larger than all samples together, and what
    two batches so have in common is measured once."""
    work = {}
    for batch in batches:
        for temperature in plan.temperatures:
            group = _group(plan, temperature, batch)
            work[min(batch, group * len(plan.chats)), temperature, group] = None
    return list(work)


@dataclass(slots=True)
class _Pass:
    """One pass over the prompts: what came, how long it took, and the engine's counts."""

    outputs: list[CompletionOutput]
    seconds: float = 0.0
    tokens: int = 0
    decode_steps: int = 0
    speculative_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    graph_captures: int = 0


def measure_speculative(
    subject: Subject, folder: Path, plan: SpeculativePlan, batches: Sequence[int], new: int
) -> Iterator[Row]:
    """A row for each batch size, temperature and epoch: at most ``new`` tokens a sample, ``batch`` samples at once (all
    there are, where the batch is larger).

    Raises:
        UnsupportedBenchError: see :func:`check_plan`.
        CheckFailedError: the engine's log-probs with drafts are wrong.
    """
    check_plan(plan, batches)
    prompts = prompt_ids(folder, plan)
    eos = eos_token_ids(subject.model, AutoTokenizer.from_pretrained(folder).eos_token_id)
    longest = max(map(len, prompts)) + new
    for batch, temperature, group in _work(plan, batches):
        sampling = SamplingParams(n=group, max_tokens=new, temperature=temperature, seed=subject.seed)
        engines = [_engine(subject, batch, longest, eos, drafts) for drafts in (0, plan.tokens)]
        for engine in engines:
            _warm_up(engine, prompts, sampling, batch)
        for epoch in range(plan.epochs):
            plain, drafting = (_pass(engine, prompts, sampling, batch, epoch) for engine in engines)
            # Greedy samples report log-probs at temperature 1, which is what transformers is asked for.
            scored = temperature in (0, 1)
            agreement = check_agreement(subject, prompts[0], drafting.outputs[0]) if scored else {"parity": None}
            sizes = {"batch": batch, "group": group, "samples": len(plain.outputs), "new": new}
            what = {"temperature": temperature, "epoch": epoch + 1, "speculative_tokens": plan.tokens}
            yield {**labels(subject), **sizes, **what, **_figures(plain, drafting), **agreement}
        for engine in engines:
            engine.reset()
        free_memory(subject.device)


def _engine(subject: Subject, batch: int, longest: int, eos: Sequence[int], drafts: int) -> RolloutEngine:
    blocks = batch * (blocks_for_tokens(longest, 16) + 1)
    return subject.engine(
        batch,
        longest,
        blocks,
        eos=eos,
        speculative_tokens=drafts,
        # Every batch is tried; whether drafts pay there is for the engine to say.
        speculative_max_batch=batch,
        speculative_history=_HISTORY_TOKENS if drafts else 0,
    )


def _warm_up(engine: RolloutEngine, prompts: list[list[int]], sampling: SamplingParams, batch: int) -> None:
    """Kernels compile at a size's first step and graphs are captured at its second; which sizes come is seen only by
    doing the same work, from nothing each time, until nothing is captured. That is slow on a CPU, where nothing has to
    be compiled.

    Raises:
        CheckFailedError: graphs are captured over and over.
    """
    if engine.runner.device.type != "cuda":
        engine.generate(prompts[:1], SamplingParams(n=sampling.n, max_tokens=4))
        engine.forget_completions()
        return
    for _ in range(_MOST_WARM_UPS):
        captures = _pass(engine, prompts, sampling, batch, 0).graph_captures
        engine.forget_completions()
        if captures == 0 and engine.stats.graph_replays:
            return
    raise CheckFailedError(f"{captures} graphs were captured in warm-up {_MOST_WARM_UPS} of the same work")


def _pass(engine: RolloutEngine, prompts: list[list[int]], sampling: SamplingParams, batch: int, epoch: int) -> _Pass:
    """All prompts, as many at once as the batch holds."""
    done, device = _Pass([]), engine.runner.device
    at_once = batch // sampling.n
    for first in range(0, len(prompts), at_once):
        ids = range(first, min(first + at_once, len(prompts)))
        synchronize(device)
        started = time.perf_counter()
        outputs = engine.generate([prompts[i] for i in ids], sampling, step=epoch, prompt_ids=ids)
        synchronize(device)
        done.seconds += time.perf_counter() - started
        done.outputs += [sample for samples in outputs for sample in samples]
        stats = engine.stats
        done.tokens += stats.generated_tokens
        done.decode_steps += stats.decode_steps
        done.speculative_steps += stats.speculative_steps
        done.drafted += stats.drafted_tokens
        done.accepted += stats.accepted_tokens
        done.graph_captures += stats.graph_captures
    return done


def _figures(plain: _Pass, drafting: _Pass) -> Row:
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain.outputs, drafting.outputs, strict=True))
    rates = [done.tokens / done.seconds for done in (plain, drafting)]
    return {
        "acceptance": round(drafting.accepted / drafting.drafted, 4) if drafting.drafted else None,
        "drafted": drafting.drafted,
        "accepted": drafting.accepted,
        "speculative_steps": drafting.speculative_steps,
        "decode_steps": drafting.decode_steps,
        "plain_decode_steps": plain.decode_steps,
        "tokens_per_s": round(rates[1], 1),
        "plain_tokens_per_s": round(rates[0], 1),
        "over_plain": round(rates[1] / rates[0], 3),
        "equal_samples": equal,
        "graph_captures": plain.graph_captures + drafting.graph_captures,
    }
