"""Does a task pay for right answers, and only for them? Made-up completions, scored before any training.

A reward that pays an empty box or a list of all numbers is what a policy will learn, and a reward that does not pay
the right answer in the format that the prompt asks for teaches nothing. Both show on a handful of problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from qerl.evaluation.runner import Scorer
from qerl.tasks.base import Example, Excluded, Outcome, Task
from qerl.tasks.exact import exact_number
from qerl.tasks.examples import overlap, question_key

# Asked format -> (what in the prompt asks for it, how an answer is written in it); the first that is asked for counts.
FORMATS: dict[str, tuple[str, str]] = {
    "boxed": ("\\boxed", "\\boxed{%s}"),
    "answer tags": ("<answer>", "<answer>%s</answer>"),
    "code block": ("```python", "```python\n%s\n```"),
    "hashes": ("####", "#### %s"),
}
NO_FORMAT = "none"
# Equal to no gold by accident, unlike 0, 1 or 42.
_NO_ANSWER = "7919"
_LISTED = 21


@dataclass(frozen=True, slots=True)
class Probe:
    """A made-up completion; ``pays``: whether it deserves the full score."""

    name: str
    completion: str
    pays: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A scored probe; ``problem`` says what is wrong with the score, "" if nothing is."""

    example: Example
    probe: Probe
    outcome: Outcome
    problem: str


@dataclass(frozen=True, slots=True)
class Census:
    """Counts over a task's examples.

    ``excluded``, ``duplicates`` and ``overlap`` were dropped at load; ``repeated`` questions (within train, within
    test) and ``shared`` ones (in both) are still there. ``without_gold``: empty answers, where the task's own rule
    decides.
    """

    train: int
    test: int
    excluded: tuple[Excluded, ...]
    duplicates: tuple[str, ...]
    overlap: tuple[str, ...]
    missing_files: tuple[str, ...]
    repeated: tuple[int, int]
    shared: int
    without_gold: int


def census(task: Task) -> Census:
    """Count what a task holds and what it left out."""
    train = [question_key(example.question) for example in task.train]
    test = [question_key(example.question) for example in task.test]
    return Census(
        train=len(train),
        test=len(test),
        excluded=task.report.excluded,
        duplicates=task.report.duplicates,
        overlap=task.report.overlap,
        missing_files=task.report.missing_files,
        repeated=(len(train) - len(set(train)), len(test) - len(set(test))),
        shared=len(overlap(task.train, task.test)),
        without_gold=sum(not example.answer for example in (*task.train, *task.test)),
    )


def spread(examples: Sequence[Example], count: int) -> list[Example]:
    """``count`` examples at even distances, the first included."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def asked_format(task: Task) -> str:
    """The answer format that the prompt template asks for: a key of ``FORMATS``, or ``NO_FORMAT``."""
    text = f"{task.template.system or ''}\n{task.template.user}"
    return next((name for name, (mark, _) in FORMATS.items() if mark in text), NO_FORMAT)


def probes(task: Task, example: Example, others: Sequence[Example] = ()) -> list[Probe]:
    """Made-up completions for one example; ``others`` lend their golds to answers that list everything.

    Without a gold (programs, generators with a rule of their own) no right answer can be made up, and none is.
    """
    name = asked_format(task)
    form = FORMATS[name][1] if name != NO_FORMAT else "%s"
    gold, is_code = example.answer, name == "code block"
    wrong = f"print({_NO_ANSWER})" if is_code else _wrong(gold)
    made = [Probe("wrong, as asked", form % wrong), Probe("wrong, bare", wrong)]
    if gold and not is_code:
        listed = ", ".join(_all_answers(gold, [other.answer for other in others]))
        made = [
            Probe("right, as asked", form % gold, pays=True),
            Probe("right, bare", gold, pays=True),
            *made,
            Probe("all answers listed, as asked", form % listed),
            Probe("all answers listed, bare", listed),
            *_undone(gold, form),
            Probe("gold in a question", f"Could the answer be {gold}?"),
            Probe("right, then replaced", f"{form % gold}\n\nNo, that cannot be.\n\n{form % wrong}"),
        ]
    if is_code:
        made.append(Probe("ends before it answers", form % "raise SystemExit(0)"))
    made += [
        Probe("empty", ""),
        Probe("white space", " \n"),
        Probe("format without an answer", form % ""),
        Probe("filler in the format", form % "..."),
    ]
    # A chat template that opens the thinking wants it closed before anything counts.
    opened = "Let me think.\n</think>\n\n" if task.think_opened else ""
    distinct: dict[str, Probe] = {}
    for probe in made:
        distinct.setdefault(probe.completion, probe)
    told = [Probe(probe.name, opened + probe.completion, probe.pays) for probe in distinct.values()]
    return [*told, Probe("right, thinking not closed", form % gold)] if task.think_opened and gold else told


def _undone(gold: str, form: str) -> list[Probe]:
    """A sum with the gold's value: what a model answers that has learned to repeat the question."""
    value = exact_number(gold)
    if value is None or value.denominator != 1:
        return []
    echo = f"{value - 1} + 1"
    return [Probe("a calculation, as asked", form % echo), Probe("a calculation, bare", echo)]


def run_probes(
    task: Task, examples: Sequence[Example], scorer: Scorer, *, allow_partial: float = 0.0
) -> list[ProbeResult]:
    """Score the probes of ``examples``.

    Args:
        allow_partial: highest score that an answer which deserves nothing may get; above 0 for tasks that give
            partial credit on purpose.

    Raises:
        ValueError: ``allow_partial`` outside [0, 1).
    """
    if not 0 <= allow_partial < 1:
        raise ValueError(f"allow_partial = {allow_partial} must be at least 0 and below 1, the score of a right answer")
    tried = [(example, probe) for example in examples for probe in probes(task, example, examples)]
    outcomes = scorer.outcomes(
        [task.job(example, probe.completion) for example, probe in tried],
        [f"{example.id} ({probe.name})" for example, probe in tried],
    )
    return [
        ProbeResult(example, probe, outcome, _problem(probe, outcome, allow_partial))
        for (example, probe), outcome in zip(tried, outcomes, strict=True)
    ]


def _problem(probe: Probe, outcome: Outcome, allow_partial: float) -> str:
    if probe.pays:
        paid = outcome.score is not None and outcome.score >= 1
        return "" if paid else f"a right answer gets {_shown(outcome.score)}"
    paid = outcome.score is not None and outcome.score > allow_partial
    return f"an answer that deserves nothing gets {_shown(outcome.score)}" if paid else ""


def _shown(score: float | None) -> str:
    return "no score" if score is None else f"{score:g}"


def _wrong(gold: str) -> str:
    number = exact_number(gold)
    if number is None:
        return f"{_NO_ANSWER}1" if gold.strip() == _NO_ANSWER else _NO_ANSWER
    number += 1
    return str(number.numerator) if number.denominator == 1 else f"{number.numerator}/{number.denominator}"


def _all_answers(gold: str, others: Sequence[str]) -> list[str]:
    """The gold among other answers, never the last: numbers for a number, else other golds, else numbers."""
    number = exact_number(gold)
    texts = [] if number is not None else list(dict.fromkeys(text for text in others if text and text != gold))
    if not texts:
        texts = [str(n) for n in range(_LISTED) if n != number]
    middle = len(texts) // 2
    return [*texts[:middle], gold, *texts[middle:]]
