"""What a task is: examples with gold answers, the one prompt template, and a score for a completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl.tasks.extract import extract_answer

if TYPE_CHECKING:
    from datasets import Dataset

    from qerl.tasks.prompts import PromptTemplate


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its gold answer.

    Attributes:
        id: Unique over the train and the test examples of a task.
        question: The bare question, without any instruction on the answer format.
        answer: The gold answer as text; empty only where a generator's own rule decides (no single answer).
        metadata: Whatever else the source had (difficulty, subject, the entry of a generator).
    """

    id: str
    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one completion.

    Attributes:
        correct: In [0, 1]; 1 is right.
        answer: The answer found in the completion, None where there was none.
        reason: Why, in a few words ("equal as exact numbers", "no answer found", ...).
    """

    correct: float
    answer: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reward function makes of one completion.

    Attributes:
        score: The reward, in [0, 1] for answers; None leaves the sample out of its group (a gold that cannot be
            compared with).
        counter: "", "no_answer", "unparsable_gold", "timeout", or "exhausted" (out of memory or stack).
        reason: In a few words.
    """

    score: float | None
    counter: str
    reason: str

    @classmethod
    def of(cls, score: Score) -> Outcome:
        """The outcome of a completion that was scored."""
        return cls(score.correct, "no_answer" if score.answer is None else "", score.reason)


class Excluded(NamedTuple):
    """A row that was left out, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading a task left out or found, by id of the row (row numbers count from 1).

    Attributes:
        excluded: Rows whose gold answer cannot be compared with, or that no test cases can be made of.
        duplicates: Training rows with the question of an earlier one, dropped.
        overlap: Training rows with a question of the test side, dropped.
        missing_files: Files of the task that the data folder does not have; their side is empty.
    """

    excluded: tuple[Excluded, ...] = ()
    duplicates: tuple[str, ...] = ()
    overlap: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()


class Task(ABC):
    """A named set of train and test examples with a prompt and a scoring rule.

    Attributes:
        name: The spec it was loaded from.
        train, test: Examples; either may be empty.
        template: The prompt template, the same in training and evaluation.
        report: What was excluded or found at load.
        think_opened: The chat template ends with an opened ``<think>``, so a completion without
            ``</think>`` has no answer yet.
    """

    def __init__(
        self,
        name: str,
        train: list[Example],
        test: list[Example],
        template: PromptTemplate,
        *,
        report: LoadReport | None = None,
        think_opened: bool = False,
    ) -> None:
        self.name = name
        self.train = train
        self.test = test
        self.template = template
        self.report = report or LoadReport()
        self.think_opened = think_opened
        self._by_id: dict[str, Example] = {}
        for example in (*train, *test):
            if example.id in self._by_id:
                raise ValueError(f"task {name}: the id {example.id!r} occurs twice; ids must be unique")
            self._by_id[example.id] = example

    def example(self, example_id: str) -> Example:
        """The example with this id. Raises ``KeyError`` naming the task when there is none."""
        try:
            return self._by_id[example_id]
        except KeyError:
            raise KeyError(f"task {self.name} has no example with id {example_id!r}") from None

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The chat messages of this example: the one prompt of training and evaluation."""
        return self.template.messages(example.question)

    def extract(self, completion: str) -> str | None:
        """The final answer in a completion as it is recorded, None where there is none."""
        return extract_answer(completion, think_opened=self.think_opened)

    @abstractmethod
    def score(self, example: Example, completion: str) -> Score:
        """Score the text of one completion. Never raises on any text."""

    @abstractmethod
    def job(self, example: Example, completion: str) -> tuple[Callable[..., Outcome], tuple[Any, ...]]:
        """:meth:`score` as a function of a module with picklable arguments, for ``RewardPool``."""


def to_dataset(examples: Iterable[Example], task: Task) -> Dataset:
    """Rows for TRL: ``{prompt: messages, answer: str, id: str, question: str}``, in the order given."""
    from datasets import Dataset

    return Dataset.from_list(
        [{"prompt": task.messages(e), "answer": e.answer, "id": e.id, "question": e.question} for e in examples]
    )
