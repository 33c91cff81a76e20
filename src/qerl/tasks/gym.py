"""reasoning-gym data sets as tasks: disjoint train and test questions, answers extracted before scoring."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from qerl.tasks.base import Example, Outcome, Score, Task
from qerl.tasks.exact import exact_number
from qerl.tasks.extract import extract_answer
from qerl.tasks.prompts import prompt_template
from qerl.tasks.verify import verify

# item i of a reasoning-gym data set with seed s is drawn from seed s + i: far apart seeds share no item
_TEST_SEED_OFFSET = 1 << 30
_DRAWS_PER_QUESTION = 20
_MIN_DRAWS = 2_000
_QUOTIENT = re.compile(r"\d\s*[/÷]\s*\d|\\[dt]?frac")
# the scorer of these compares numbers within a stated tolerance, or accepts other forms than one number
_OWN_SCORER = frozenset({"power_function", "polynomial_equations", "complex_arithmetic", "advanced_geometry"})


class GymTask(Task):
    """Questions of one reasoning-gym data set.

    A numeric gold is compared exactly. Any other answer goes to the data set's own ``score_answer``, which gets the
    extracted answer only: many of those functions pay for a gold that is merely contained in a longer text.
    """

    def __init__(self, dataset_name: str, config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dataset_name = dataset_name
        self._config = config

    def score(self, example: Example, completion: str) -> Score:
        """In [0, 1]: exact for numeric golds, the data set's own score of the extracted answer otherwise."""
        return score_entry(self._dataset_name, self._config, example, completion, self.think_opened)

    def job(self, example: Example, completion: str) -> tuple[Callable[..., Outcome], tuple[Any, ...]]:
        """The scoring as a job for a worker process (which then imports reasoning-gym)."""
        return gym_job, (self._dataset_name, self._config, example, completion, self.think_opened)


def gym_job(name: str, config: dict[str, Any], example: Example, completion: str, think_opened: bool) -> Outcome:
    """:func:`score_entry` for a worker process."""
    return Outcome.of(score_entry(name, config, example, completion, think_opened))


def score_entry(name: str, config: dict[str, Any], example: Example, completion: str, think_opened: bool) -> Score:
    """Score one completion of an example of the reasoning-gym data set ``name``."""
    answer = extract_answer(completion, think_opened=think_opened)
    if answer is None:
        return Score(0.0, None, "no answer found")
    if name not in _OWN_SCORER and exact_number(example.answer) is not None:
        if _QUOTIENT.search(answer) and not _QUOTIENT.search(example.answer):
            return Score(0.0, answer, "a quotient for a gold that is none")  # "10 / 2" repeats the question
        verdict = verify(example.answer, answer, extracted=True)
        return Score(float(verdict.equal), answer, verdict.reason)
    own = float(_scorer(name, json.dumps(config, sort_keys=True)).score_answer(answer, example.metadata["entry"]))
    return Score(min(max(own, 0.0), 1.0), answer, "scored by reasoning-gym")


@lru_cache(maxsize=8)
def _scorer(name: str, config: str) -> Any:
    """A data set made only for its ``score_answer``."""
    return _create(name, 0, 1, json.loads(config))


def load_gym_task(
    name: str,
    common: dict[str, Any],
    *,
    size: int = 1024,
    test_size: int = 256,
    seed: int = 0,
    **config: Any,
) -> Task:
    """``reasoning_gym:NAME`` with ``size`` train and ``test_size`` test questions, all of different text.

    Raises:
        ValueError: Unknown data set or configuration field, sizes below 0, or too few distinct questions.
    """
    from reasoning_gym.factory import DATASETS

    spec = f"reasoning_gym:{name}"
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown reasoning-gym data set {name!r}{hint}; there are {len(DATASETS)}")
    if size < 0 or test_size < 0 or size + test_size == 0:
        raise ValueError(f"{spec}: size={size}, test_size={test_size}; they must be >= 0 and not both 0")
    # the test side first: it must not change with the number of training questions
    seen: set[str] = set()
    test = _draw(name, "test", seed + _TEST_SEED_OFFSET, test_size, seen, config)
    train = _draw(name, "train", seed, size, seen, config)
    template = prompt_template(common.get("prompt", "answer_tags"), common.get("system"))
    return GymTask(
        name, config, spec, train, test, template, think_opened=common.get("think_opened", False),
    )  # fmt: skip


def _create(name: str, seed: int, size: int, config: dict[str, Any]) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    fields = [f for f in DATASETS[name][1].__dataclass_fields__ if f not in ("seed", "size")]
    for key in config:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"reasoning_gym:{name}: unknown option {key!r}{hint}; it has {', '.join(fields)}")
    try:
        return create_dataset(name, seed=seed, size=size, **config)
    except AssertionError as error:
        raise ValueError(f"reasoning_gym:{name}: configuration {config} refused: {error}") from error


def _draw(name: str, side: str, seed: int, count: int, seen: set[str], config: dict[str, Any]) -> list[Example]:
    """``count`` examples whose questions are not in ``seen``; ``seen`` is extended."""
    if count == 0:
        return []
    limit = max(_MIN_DRAWS, _DRAWS_PER_QUESTION * count)
    dataset = _create(name, seed, limit, config)
    examples: list[Example] = []
    for index in range(limit):
        entry = dataset[index]
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        answer = "" if entry["answer"] is None else str(entry["answer"])
        examples.append(Example(f"{name}-{side}-{index:07d}", entry["question"], answer, {"entry": entry}))
        if len(examples) == count:
            return examples
    raise ValueError(
        f"reasoning_gym:{name}: {len(examples)} distinct {side} questions in {limit} draws, {count} wanted "
        f"(after {len(seen) - len(examples)} taken by the other side); lower size / test_size or widen the "
        f"configuration ({config or 'defaults'})"
    )
