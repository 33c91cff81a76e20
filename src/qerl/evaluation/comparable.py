"""May two evaluations be compared? Their model may differ; everything else must not, or must be waived by name."""

from collections.abc import Iterable
from dataclasses import fields

from qerl.evaluation.result import EvalResult, EvalSettings, SampleRecord

# What a comparison is about.
_SUBJECT = frozenset({"model", "weights", "head", "adapter", "fingerprint"})
# Checked on the problems themselves: a digest of token ids differs between tokenizers that read the same text.
_BY_PROBLEM = frozenset({"task", "prompts_digest", "first_prompt", "limit", "problems"})
PROBLEMS, PROMPTS = "problems", "prompts"


class NotComparableError(ValueError):
    """Two evaluations differ in more than the model; the message names each difference."""


def waivable() -> tuple[str, ...]:
    """Names of the differences that :func:`require_comparable` can be told to accept."""
    settings = [field.name for field in fields(EvalSettings) if field.name not in _SUBJECT | _BY_PROBLEM]
    return (*settings, PROBLEMS, PROMPTS)


def require_comparable(first: EvalResult, second: EvalResult, allowed: Iterable[str] = ()) -> None:
    """Pass when the two differ in the model only, or in what ``allowed`` names (see :func:`waivable`).

    The task and the gold answers of shared problems must be equal in any case.

    Raises:
        NotComparableError: other differences.
        ValueError: ``allowed`` names no known difference.
    """
    allowed = set(allowed)
    unknown = sorted(allowed - set(waivable()))
    if unknown:
        raise ValueError(f"no such difference: {', '.join(unknown)}; known: {', '.join(waivable())}")
    if first.task != second.task:
        raise NotComparableError(f"different tasks: {first.task} and {second.task}")
    one, two = _problems(first), _problems(second)
    differing = _settings(first.settings, second.settings)
    if one.keys() != two.keys():
        shared, only_one, only_two = (
            len(one.keys() & two.keys()),
            len(one.keys() - two.keys()),
            len(two.keys() - one.keys()),
        )
        differing[PROBLEMS] = f"{shared} shared, {only_one} only in the first, {only_two} only in the second"
    common = [name for name in one if name in two]
    golds = [name for name in common if one[name].answer != two[name].answer]
    if golds:
        raise NotComparableError(
            f"{first.task}: {len(golds)} of {len(common)} shared problems have other gold answers, first {golds[0]!r}: "
            f"{one[golds[0]].answer!r} and {two[golds[0]].answer!r}; the data changed, evaluate again"
        )
    prompts = [name for name in common if one[name].prompt != two[name].prompt]
    if prompts:
        differing[PROMPTS] = f"differ in {len(prompts)} of {len(common)} shared problems, first {prompts[0]!r}"
    refused = {name: text for name, text in differing.items() if name not in allowed}
    if refused:
        shown = "; ".join(f"{name}: {text}" for name, text in refused.items())
        waive = " ".join(f"--allow {name}" for name in refused)
        raise NotComparableError(
            f"{first.task}: the evaluations differ in more than the model ({shown}). Evaluate again with equal "
            f"settings, or accept the difference with {waive}"
        )


def _settings(first: EvalSettings, second: EvalSettings) -> dict[str, str]:
    """The settings that differ, as text. By name, so that a setting added later is compared as well."""
    differing = {}
    for field in fields(EvalSettings):
        if field.name not in _SUBJECT | _BY_PROBLEM:
            one, two = getattr(first, field.name), getattr(second, field.name)
            if one != two:
                differing[field.name] = f"{one!r} and {two!r}"
    return differing


def _problems(result: EvalResult) -> dict[str, SampleRecord]:
    """The first sample of each problem."""
    problems: dict[str, SampleRecord] = {}
    for record in result.records:
        problems.setdefault(record.id, record)
    return problems
