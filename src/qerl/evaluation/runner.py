"""Evaluate a model on a task: render prompts, generate in batches, score, store, summarize.

Anything with :class:`~qerl.rollout.engine.RolloutEngine`'s ``generate`` serves as generator. Each completion
is seeded by (seed, index of the problem, sample), so that neither the batch size nor a restart changes a
result.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qerl.evaluation.prompts import PromptRenderer, RenderedPrompt, Tokenizer
from qerl.evaluation.result import EvalResult, EvalSettings, SampleRecord, summarize
from qerl.evaluation.store import SampleStore
from qerl.rollout.core import CompletionOutput, GreedySamplesError, SamplingParams
from qerl.tasks.base import Example, Outcome, Task
from qerl.tasks.workers import Job, RewardPool

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int], None]


class Generator(Protocol):
    """What evaluation asks of an engine: token ids in, completions [prompt][sample] out."""

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        *,
        step: int = 0,
        prompt_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> list[list[CompletionOutput]]: ...


class Scorer(Protocol):
    """What evaluation asks of a :class:`~qerl.tasks.workers.RewardPool`."""

    def outcomes(self, jobs: Sequence[Job], ids: Sequence[str] | None = None) -> list[Outcome]: ...


@dataclass(frozen=True, slots=True)
class _Problem:
    index: int
    example: Example
    prompt: RenderedPrompt


def evaluate(
    generator: Generator,
    tokenizer: Tokenizer,
    task: Task,
    *,
    n: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int = 512,
    limit: int | None = None,
    seed: int = 0,
    examples: Sequence[Example] | None = None,
    pool: Scorer | None = None,
    batch_size: int | None = None,
    output_dir: str | Path | None = None,
    resume: bool = True,
    progress: Progress | None = None,
    model: str | None = None,
    weights: str | None = None,
    head: str | None = None,
    adapter: str | None = None,
    fingerprint: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> EvalResult:
    """Evaluate ``generator`` on the first ``limit`` test examples of ``task`` (or of ``examples``).

    Args:
        n: samples per problem; more than 1 needs ``temperature`` > 0.
        top_p: nucleus sampling; below 1 needs ``temperature`` > 0, because greedy decoding would ignore it.
        pool: scores the completions; default: worker processes with a deadline, for this call.
        batch_size: problems per call of the generator and per write to disk; default 512 // n.
        output_dir: gets ``samples.jsonl``, ``settings.json`` and, at the end, ``result.json``. Results with the
            same settings, partial or finished, are continued unless ``resume`` is false; then replaced.
        progress: called with (finished samples, all samples, generated tokens of this call).
        model, weights, head, adapter: recorded names (head: None or ``auto`` is that of the model).
        fingerprint: identity of the weights (file hash, training step). Give it when the same path may hold
            other weights later: results with another fingerprint are not continued.
        template_options: passed to the chat template, for example ``{"enable_thinking": False}``.
        max_model_len: longest prompt + completion in tokens; default: the generator's.

    Raises:
        SettingsMismatchError: ``output_dir`` holds results of other settings.
        ValueError: impossible settings, no or duplicate examples, prompts too long for the model, a gold
            answer that cannot be compared with, or a generator that returns another number of samples.
    """
    _check_sampling(n, temperature, top_p, limit, batch_size)
    renderer = PromptRenderer(tokenizer, template_options)
    problems = _prepare(renderer, task, task.test if examples is None else examples, limit)
    _check_lengths(problems, max_new_tokens, max_model_len or getattr(generator, "max_model_len", None))
    _warn_open_think(problems[0], task)
    settings = EvalSettings(
        task=task.name,
        n=n,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        limit=limit,
        seed=seed,
        problems=len(problems),
        prompts_digest=_digest(problems),
        first_prompt=problems[0].prompt.text,
        model=model,
        weights=weights,
        head=None if head == "auto" else head,
        adapter=adapter,
        fingerprint=fingerprint,
        template_options=renderer.template_options,
    )
    store = SampleStore(None if output_dir is None else Path(output_dir), settings, resume=resume)
    if (finished := store.finished_result()) is not None:
        logger.info("%s: finished evaluation with the same settings found in %s", task.name, output_dir)
        return finished
    with ExitStack() as stack:
        scorer = stack.enter_context(RewardPool()) if pool is None else pool
        run = _Run(generator, tokenizer, task, scorer, settings, progress)
        return run.finish(problems, store, batch_size or max(1, 512 // n))


class _Run:
    """Generation and scoring of one evaluation, with the running counts."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        task: Task,
        scorer: Scorer,
        settings: EvalSettings,
        progress: Progress | None,
    ) -> None:
        self.generator, self.tokenizer, self.task = generator, tokenizer, task
        self.scorer, self.settings, self.progress = scorer, settings, progress
        self.sampling = SamplingParams(
            n=settings.n,
            max_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
        )
        self.total = settings.problems * settings.n
        self.finished = self.tokens = 0
        self.seconds = 0.0

    def finish(self, problems: Sequence[_Problem], store: SampleStore, batch_size: int) -> EvalResult:
        """Do what ``store`` does not hold yet, batch by batch, and write the result."""
        pending = [problem for problem in problems if problem.example.id not in store.done]
        self.finished = (len(problems) - len(pending)) * self.settings.n
        for start in range(0, len(pending), batch_size):
            store.append(self.batch(pending[start : start + batch_size]))
        order = {problem.example.id: problem.index for problem in problems}
        records = sorted(store.records, key=lambda record: (order[record.id], record.sample))
        result = summarize(records, self.settings, self.seconds or None, self.tokens)
        store.finish(result)
        return result

    def batch(self, problems: Sequence[_Problem]) -> list[SampleRecord]:
        """Generate and score ``sampling.n`` completions of each problem."""
        started = time.perf_counter()
        outputs = self.generator.generate(
            [problem.prompt.token_ids for problem in problems],
            self.sampling,
            prompt_ids=[problem.index for problem in problems],
            progress=self._forward_progress if self.progress else None,
        )
        self.seconds += time.perf_counter() - started
        _check_counts(outputs, problems, self.sampling.n)
        records = self._score(problems, outputs)
        self.finished += len(records)
        self.tokens += sum(record.tokens for record in records)
        if self.progress:
            self.progress(self.finished, self.total, self.tokens)
        return records

    def _forward_progress(self, finished: int, _total: int, tokens: int) -> None:
        assert self.progress is not None
        self.progress(self.finished + finished, self.total, self.tokens + tokens)

    def _score(self, problems: Sequence[_Problem], outputs: Sequence[Sequence[CompletionOutput]]) -> list[SampleRecord]:
        """One record per completion, in the order of the problems."""
        rows = [
            (problem, sample, output, self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
            for problem, samples in zip(problems, outputs, strict=True)
            for sample, output in enumerate(samples)
        ]
        jobs = [self.task.job(problem.example, completion) for problem, _, _, completion in rows]
        outcomes = self.scorer.outcomes(jobs, [problem.example.id for problem, *_ in rows])
        return [
            self._record(problem, sample, output, completion, outcome)
            for (problem, sample, output, completion), outcome in zip(rows, outcomes, strict=True)
        ]

    def _record(
        self, problem: _Problem, sample: int, output: CompletionOutput, completion: str, outcome: Outcome
    ) -> SampleRecord:
        example = problem.example
        if outcome.score is None:
            raise ValueError(
                f"task {self.task.name}: the gold answer {example.answer!r} of {example.id!r} cannot be "
                f"compared with ({outcome.reason}); leave the problem out"
            )
        return SampleRecord(
            id=example.id,
            sample=sample,
            prompt=problem.prompt.text,
            completion=completion,
            answer=example.answer,
            extracted=self.task.extract(completion),
            correct=outcome.score >= 1.0,
            score=float(outcome.score),
            reason=outcome.reason,
            counter=outcome.counter,
            finish_reason=output.finish_reason,
            tokens=len(output.token_ids),
        )


def _prepare(renderer: PromptRenderer, task: Task, examples: Sequence[Example], limit: int | None) -> list[_Problem]:
    chosen = list(examples[:limit])
    if not chosen:
        absent = "".join(f"; the data folder has no {file}" for file in task.report.missing_files)
        raise ValueError(
            f"task {task.name} has no test examples to evaluate ({len(task.train)} train examples{absent}); pass "
            "examples, or load the task with a test side (split='test' or test_size for a file)"
        )
    seen: set[str] = set()
    for example in chosen:
        if example.id in seen:
            raise ValueError(f"task {task.name} has two examples with the id {example.id!r}; ids must be unique")
        seen.add(example.id)
    return [_Problem(index, example, renderer.render(task.messages(example))) for index, example in enumerate(chosen)]


def _check_sampling(n: int, temperature: float, top_p: float, limit: int | None, batch_size: int | None) -> None:
    if n < 1:
        raise ValueError(f"n = {n}: at least 1 sample per problem is needed")
    if n > 1 and temperature == 0:
        raise GreedySamplesError.of(n)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} must be above 0 and at most 1")
    if top_p < 1 and temperature == 0:
        raise ValueError(f"top_p = {top_p} has no effect at temperature 0; set temperature > 0 or top_p = 1")
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: give a positive number of problems, or none for all")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: give a positive number of problems")


def _check_lengths(problems: Sequence[_Problem], max_new_tokens: int, max_model_len: int | None) -> None:
    if max_model_len is None:
        return
    room = max_model_len - max_new_tokens
    too_long = [problem for problem in problems if len(problem.prompt.token_ids) > room]
    if too_long:
        longest = max(too_long, key=lambda problem: len(problem.prompt.token_ids))
        raise ValueError(
            f"{len(too_long)} of {len(problems)} prompts have more than {room} tokens (model length "
            f"{max_model_len} - {max_new_tokens} new tokens); the longest is {longest.example.id!r} with "
            f"{len(longest.prompt.token_ids)}. Lower max_new_tokens or raise max_model_len"
        )


def _warn_open_think(problem: _Problem, task: Task) -> None:
    if problem.prompt.text.rstrip().endswith("<think>") and not task.think_opened:
        logger.warning(
            "%s: the chat template ends with an opened <think>; load the task with think_opened=True, or "
            "numbers in unfinished thoughts count as answers",
            task.name,
        )


def _check_counts(outputs: Sequence[Sequence[Any]], problems: Sequence[_Problem], n: int) -> None:
    counts = [len(samples) for samples in outputs]
    if counts != [n] * len(problems):
        raise ValueError(
            f"the generator returned {sum(counts)} samples in {len(counts)} groups for {len(problems)} "
            f"prompts with n = {n} ({n * len(problems)} expected), so the accuracy would be wrong"
        )


def _digest(problems: Sequence[_Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr((problem.example.id, problem.prompt.token_ids, problem.example.answer)).encode())
    return digest.hexdigest()[:16]
