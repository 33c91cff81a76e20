"""What an evaluation yields: one record per completion, one result with intervals; both on disk as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qerl.evaluation.metrics import average_at_n, majority_at_k, mean_pass_at_k, wilson_interval
from qerl.evaluation.storage import read_json, read_lines, write_json

RESULT_FILE = "result.json"
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One completion of one problem, as stored in ``samples.jsonl``.

    ``score`` is what the task gave (in [0, 1]); ``correct`` is a full score; ``reason`` and ``counter`` say
    why (see :class:`qerl.tasks.base.Outcome`). ``extracted`` is the answer found in the completion,
    ``tokens`` the number of generated tokens, ``sample`` the index within the problem.
    """

    id: str
    sample: int
    prompt: str
    completion: str
    answer: str
    extracted: str | None
    correct: bool
    score: float
    reason: str
    counter: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Everything that decides the outcome. Stored results are continued only when all of it is equal."""

    task: str
    n: int
    temperature: float
    max_new_tokens: int
    limit: int | None
    seed: int
    problems: int
    prompts_digest: str
    first_prompt: str
    top_p: float = 1.0
    model: str | None = None
    weights: str | None = None
    head: str | None = None
    adapter: str | None = None
    fingerprint: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Accuracy of a model on a task, with its 95 % Wilson interval over problems.

    ``accuracy`` is the share of fully correct samples, per problem, averaged over ``problems`` (avg@n);
    ``mean_score`` averages the task's scores. ``pass_at_k`` and ``majority_at_k`` map k = 1, 2, 4, ... n to
    figures. ``truncated_share`` counts completions stopped by the token limit. ``tokens`` are all generated
    tokens; ``seconds`` and ``tokens_per_s`` cover generation in this process only (``None`` when nothing was
    left to generate).
    """

    task: str
    accuracy: float
    low: float
    high: float
    problems: int
    n: int
    mean_score: float
    pass_at_k: dict[int, float]
    majority_at_k: dict[int, float]
    truncated_share: float
    no_answer_share: float
    timeouts: int
    mean_tokens: float
    tokens: int
    seconds: float | None
    tokens_per_s: float | None
    settings: EvalSettings
    records: tuple[SampleRecord, ...] = ()

    def summary(self) -> dict[str, float | int | str]:
        """The form of ``before`` and ``after`` in a run's ``summary.json``: accuracy, interval, problems."""
        return {
            "accuracy": self.accuracy,
            "low": self.low,
            "high": self.high,
            "n": self.problems,
            "task": self.task,
        }

    def outcomes(self) -> dict[str, list[bool]]:
        """Problem id -> right or wrong per sample: what :func:`qerl.evaluation.paired.compare` takes."""
        outcomes: dict[str, list[bool]] = {}
        for record in self.records:
            outcomes.setdefault(record.id, []).append(record.correct)
        return outcomes

    def save(self, directory: Path) -> Path:
        """Write ``result.json`` into ``directory`` atomically (the records are in ``samples.jsonl``)."""
        values = asdict(self)
        del values["records"]
        path = directory / RESULT_FILE
        write_json(path, values)
        return path

    @classmethod
    def load(cls, directory: Path) -> "EvalResult":
        """Read back what :func:`qerl.evaluate` wrote into ``directory``.

        Raises:
            FileNotFoundError: there is no finished result.
            ValueError: a file is damaged; names it and the field.
        """
        path = directory / RESULT_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{directory} holds no finished evaluation ({RESULT_FILE} is missing)")
        values = read_json(path)
        try:
            for name in ("pass_at_k", "majority_at_k"):
                values[name] = {int(k): float(figure) for k, figure in values[name].items()}
            settings = EvalSettings(**values.pop("settings"))
            return cls(**values, settings=settings, records=tuple(load_records(directory)))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a result of this version of qerl ({error}); evaluate again") from error


def load_records(directory: Path) -> list[SampleRecord]:
    """The records of ``samples.jsonl`` in ``directory``, finished evaluation or not; empty without the file.

    Raises:
        ValueError: a record with missing or unknown fields; names the line.
    """
    path = directory / SAMPLES_FILE
    if not path.is_file():
        return []
    records = []
    for number, row in enumerate(read_lines(path), start=1):
        try:
            records.append(SampleRecord(**row))
        except TypeError as error:
            raise ValueError(f"{path}, record {number}: {error}; evaluate again") from error
    return records


def summarize(records: Sequence[SampleRecord], settings: EvalSettings, seconds: float | None, fresh: int) -> EvalResult:
    """The result of ``records``; ``seconds`` went into ``fresh`` newly generated tokens.

    Raises:
        ValueError: a problem has another number of samples than ``settings.n``, or there are no records.
    """
    correct: dict[str, list[bool]] = {}
    answers: dict[str, list[str | None]] = {}
    for record in records:
        correct.setdefault(record.id, []).append(record.correct)
        answers.setdefault(record.id, []).append(record.extracted)
    for name, row in correct.items():
        if len(row) != settings.n:
            raise ValueError(f"problem {name!r} has {len(row)} samples, n = {settings.n} were asked for")
    rows = list(correct.values())
    accuracy = average_at_n(rows)
    low, high = wilson_interval(accuracy, len(rows))
    ks = [1 << i for i in range(settings.n.bit_length()) if 1 << i < settings.n] + [settings.n]
    tokens = sum(record.tokens for record in records)
    return EvalResult(
        task=settings.task,
        accuracy=accuracy,
        low=low,
        high=high,
        problems=len(rows),
        n=settings.n,
        mean_score=math.fsum(record.score for record in records) / len(records),
        pass_at_k={k: mean_pass_at_k(rows, k) for k in ks},
        majority_at_k={k: majority_at_k(list(answers.values()), rows, k) for k in ks},
        truncated_share=sum(record.finish_reason == "length" for record in records) / len(records),
        no_answer_share=sum(record.extracted is None for record in records) / len(records),
        timeouts=sum(record.counter in ("timeout", "exhausted") for record in records),
        mean_tokens=tokens / len(records),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=fresh / seconds if seconds else None,
        settings=settings,
        records=tuple(records),
    )
