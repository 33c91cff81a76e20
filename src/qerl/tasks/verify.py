r"""Is an answer equal to the gold answer?

In this order: plain numbers as exact rationals; the same spelling; texts as texts; the shapes of
:mod:`qerl.tasks.values` compared by :mod:`qerl.tasks.compare` with exact or high-precision arithmetic; and, only for
formulas that this grammar does not read (integrals, sums, limits, matrix products), math-verify, whose acceptance is
then checked again (:mod:`qerl.tasks.symbolic`). No comparison has an absolute tolerance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from qerl.tasks.answer import Answer, prepare
from qerl.tasks.compare import equal
from qerl.tasks.exact import exact_number
from qerl.tasks.expression import calculates
from qerl.tasks.units import units_disagree
from qerl.tasks.values import Formula

_MAX_WORDS = 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether gold and answer are equal, and why."""

    equal: bool
    reason: str


@lru_cache(maxsize=8192)
def check_gold(gold: str) -> str | None:
    """None if this gold answer can be compared with, else the reason why not."""
    if exact_number(gold) is not None:
        return None
    answer = prepare(gold, "gold")
    if not any(char.isalnum() for char in answer.spelling.replace("text", "")):
        return "no letter and no digit"
    if answer.is_text and len(answer.text.split()) > _MAX_WORDS:
        return f"prose of {len(answer.text.split())} words, compared only up to {_MAX_WORDS}"
    if answer.is_text or answer.values:
        return None
    from qerl.tasks.symbolic import can_parse

    return None if can_parse(answer.formula) else answer.problem


def verify(gold: str, answer: str, *, extracted: bool = False) -> Verdict:
    """Compare an answer with a gold answer.

    Args:
        gold: A bare answer, with or without delimiters, or a solution with its answer marked.
        answer: A bare answer, or a text whose final answer counts.
        extracted: ``answer`` comes from ``extract_answer``: it is taken as it is.

    Never raises on any text. May run long on a pathological formula that only math-verify reads:
    ``RewardPool.verify`` has a deadline.
    """
    left, right = exact_number(gold), exact_number(answer)
    if left is not None and right is not None:
        if left == right:
            return Verdict(True, "equal as exact numbers")
        # a decimal may be the rounded form of a fraction
        if "." not in gold and "." not in answer:
            return Verdict(False, "different exact numbers")
    mine, theirs = prepare(gold, "gold"), prepare(answer, "answer" if extracted else "text")
    if not theirs.spelling:
        return Verdict(False, "no answer")
    if units_disagree(list(mine.words), list(theirs.words)):
        return Verdict(False, "different units")
    if _qualifiers_disagree(mine, theirs):
        return Verdict(False, "different qualifiers")
    if mine.spelling == theirs.spelling:
        return Verdict(True, "the same text")
    if mine.is_text or theirs.is_text:
        if mine.text == theirs.text or _states(mine, theirs):
            return Verdict(True, "equal as texts")
        if not (mine.values and theirs.values):
            return Verdict(False, "different texts")
    if mine.values and theirs.values:
        stated = theirs.values
        if left is not None:
            # "3 + 2" for 5 repeats the question: a model that is paid for it learns to echo
            stated = [v for v in stated if not (isinstance(v, Formula) and calculates(v.node))]
            if not stated:
                return Verdict(False, "a calculation left undone")
        same = any(equal(a, b) for a in mine.values for b in stated)
        return Verdict(same, "equal by value" if same else "different by value")
    return _by_math_verify(mine, theirs)


def _qualifiers_disagree(gold: Answer, other: Answer) -> bool:
    """Whether both say "for all x in [0, 1]" or the like, with different numbers."""
    if not (gold.qualifier and other.qualifier):
        return False
    mine, theirs = (sorted(re.findall(r"\d+", answer.qualifier)) for answer in (gold, other))
    return bool(mine and theirs and mine != theirs)


def _states(gold: Answer, other: Answer) -> bool:
    """A gold sentence "... is odd" and the answer "odd"."""
    head, verb, tail = re.fullmatch(r"(.*?)(?:\b(is|are|was|were)\b\s*([^.]*))?", gold.text).groups()
    if not verb or not other.text or re.search(r"\b(?:not|no|never|neither)\b", gold.text):
        return False
    return bool(head.strip()) and tail == other.text


def _by_math_verify(gold: Answer, other: Answer) -> Verdict:
    from qerl.tasks.symbolic import symbolic_verdict

    same, reason = symbolic_verdict(gold.formula, other.formula)
    return Verdict(same, reason)
