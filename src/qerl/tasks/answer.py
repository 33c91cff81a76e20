"""An answer as it is compared: its spelling, its words, and every way to read its formula."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from qerl.tasks.extract import extract, is_bare
from qerl.tasks.latex import as_text, normalize, split_text
from qerl.tasks.tokens import FormulaError
from qerl.tasks.units import cut_units
from qerl.tasks.values import Value, parse_value

_MAX_LENGTH = 4000
# more plain words than this make a sentence, which is compared as a text
_MAX_PROSE = 3
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_LABEL = re.compile(r"(?:(?<=^)|(?<=[,;]\s)|(?<=[,;]))\s*[A-Za-z]{3,}\s*[:=](?!=)\s*")
_FIXED_TEXTS = {
    "infinitely many": r"\infty", "infinity": r"\infty", "infinite": r"\infty", "all real numbers": r"\setR",
    "empty set": r"\emptyset", "half": r"\frac{1}{2}", "zero": "0", "one": "1", "two": "2", "three": "3",
    "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip


Source = Literal["gold", "answer", "text"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prepared answer.

    Attributes:
        spelling: Normalized, without white space; equal spellings are equal answers.
        text: Reduced for comparison as words.
        is_text: Words, or a single letter: nothing to calculate with.
        values: The readings of its formula; empty if this grammar cannot read it.
        words: Words that were cut out (units, things counted).
        qualifier: What followed "where", "for all", "such that".
        formula: The normalized formula behind ``values``.
        problem: Why there are no values, "" if there are.
    """

    spelling: str
    text: str
    is_text: bool
    values: tuple[Value, ...]
    words: tuple[str, ...]
    qualifier: str
    formula: str
    problem: str


@lru_cache(maxsize=8192)
def prepare(text: str, source: Source) -> Answer:
    """The answer behind a text.

    ``source`` "answer": already extracted, taken as it is. "text": of more than a bare answer, the final answer
    counts. "gold": the same, but no number is picked out of prose whose answer is not marked.
    """
    if source != "answer":
        text = core(text, source == "gold")
    normal = normalize(text[:_MAX_LENGTH])
    formula, words, qualifier = split_text(normal)
    formula = re.sub(r"(^|[,;]|\\and|\\or)\s*[=:](?!=)", r"\1 ", _LABEL.sub("", formula)).strip(" ,;")
    reduced = as_text(normal)
    formula = _FIXED_TEXTS.get(reduced, formula)
    formula, units = cut_units(formula)
    is_text = _is_text(formula, reduced) or _prose_words(normal) > _MAX_PROSE
    letter = re.fullmatch(r"[A-Za-z]", formula)
    values, problem = ((), "a text") if is_text and not letter else _readings(formula)
    return Answer(
        spelling=re.sub(r"\s+", "", normal),
        text=reduced,
        is_text=is_text,
        values=values,
        words=(*words, *units),
        qualifier=qualifier,
        formula=formula,
        problem=problem if len(text) <= _MAX_LENGTH else f"longer than {_MAX_LENGTH} characters",
    )


def core(text: str, is_gold: bool) -> str:
    """The answer within a gold or a prediction that may be a whole solution; bare answers stay as they are."""
    if r"\boxed" in text or r"\fbox" in text or not is_bare(text):
        found = extract(text)
        if found is not None and not (is_gold and found.kind in ("formula", "number")):
            return found.text
    return text.strip()


def _prose_words(normal: str) -> int:
    """Plain words outside of ``\\text``, labels ("Maximum = 2") and units left aside."""
    plain = cut_units(_LABEL.sub("", normal))[0]
    plain = re.sub(r"\\[a-zA-Z]+\s*(?:\{[a-zA-Z ]*\})?", " ", plain)
    return len(re.findall(r"(?<![a-zA-Z])(?:[A-Z]?[a-z]{3,})(?![a-zA-Z])", plain))


def _is_text(formula: str, reduced: str) -> bool:
    if not formula:
        return bool(reduced)
    if re.fullmatch(r"\(?[A-Za-z]\)?", formula):
        return True
    if re.search(r"\\|\d|[=<>^_|+*/]", formula):
        return False
    words = re.findall(r"[A-Za-z]+", formula)
    return any(len(word) >= 3 for word in words) and not re.search(r"[(){}]", formula)


def _readings(formula: str) -> tuple[tuple[Value, ...], str]:
    """``1,234`` may be one number or two; everything else has one reading."""
    spellings = [formula]
    if _GROUPED.fullmatch(re.sub(r"^[-+]|\.\d+$|[%°]$", "", formula)):
        spellings.insert(0, formula.replace(",", ""))
    elif _GROUPED.search(formula) and ", " in formula:
        spellings.insert(0, _GROUPED.sub(lambda m: m[0].replace(",", ""), formula))
    values, problem = [], ""
    for spelling in spellings:
        try:
            values.append(parse_value(spelling))
        except (FormulaError, RecursionError) as error:
            problem = str(error)
    return tuple(values), "" if values else problem
