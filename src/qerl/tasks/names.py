"""Relations that only name their value: ``x = 3``, ``f(x) = 2x``, ``(p, q) = (3, 2)``, ``|AB| = 1``."""

from __future__ import annotations

import re
from dataclasses import replace

from qerl.tasks.expression import rename, symbols
from qerl.tasks.values import Formula, Group, Relation, Value

_SUBSCRIPT = r"(?:_(?:\{[\w\\ +^{}-]+\}|\w+|\\[a-z]+ ?))?"
_LETTER = rf"(?:[A-Za-z]|\\[a-zA-Z]+ ?){_SUBSCRIPT}'*"
_POINTS = rf"(?:\|?[A-Z]{{1,4}}{_SUBSCRIPT}\|?)"
_NAME = re.compile(
    rf"{_LETTER}(?:\([\w,\\ ]{{1,12}}\))?|{_POINTS}|\\(?:angle|triangle|overline) ?\{{?[A-Z]{{1,4}}\}}?"
    rf"|{_POINTS}(?:[:/]{_POINTS})+|\\frac ?\{{?{_POINTS}\}}?\{{?{_POINTS}\}}?|[A-Z][a-z]{{2,}}|[a-z]{{4,}}"
    r"|(?:[a-z]?[A-Z])\(\d+\)"
)
_FUNCTION_COMMANDS = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|lg|exp|sqrt|pi|infty|sum|int|lim|prod|binom)\b"
)
_APPLIED = re.compile(r"[A-Za-z](?:_\w+)?'*\(([a-z])\)")


def is_name(text: str, side: Value | None) -> bool:
    """Whether a side of a relation (its text, and its value if it is a formula) is a mere name."""
    if text in ("e", "i"):
        return False
    if isinstance(side, Group):
        inner = text.strip()[1:-1]
        return side.opening == "(" and all(_plain(part) for part in _outer_commas(inner))
    return _plain(text)


def named_value(relation: Relation) -> tuple[str, Value] | None:
    """(name, value) of ``x = y = 3`` and of ``x = 1 + 2 = 3``; None for other relations.

    All sides but the last are names, or numbers after a first name; the last side is what was arrived at.
    """
    if any(sign != "=" for sign in relation.signs) or relation.sides[-1] is None:
        return None
    heads = list(zip(relation.texts[:-1], relation.sides[:-1], strict=True))
    if not is_name(*heads[0]):
        return None
    for text, side in heads[1:]:
        calculation = isinstance(side, Formula) and not symbols(side.node)
        if not calculation and not is_name(text, side):
            return None
    return relation.texts[0], relation.sides[-1]


def same_names(gold: str, other: str) -> bool:
    """Whether two names may name the same: equal, or both stand for the values of a function (``f(x)``, ``y``)."""
    gold, other = (re.sub(r"[{}\s]", "", name) for name in (gold, other))
    if gold == other:
        return True
    applied = [bool(_APPLIED.fullmatch(name)) for name in (gold, other)]
    if all(applied):
        return gold[0] == other[0]
    return (applied[0] and other == "y") or (applied[1] and gold == "y")


def same_argument(gold: str, other: str, value: Value) -> Value:
    """The value of ``other`` with its argument named as in ``gold``: ``f(z) = z`` and ``f(x) = x`` agree."""
    mine, theirs = (_APPLIED.fullmatch(re.sub(r"[{}\s]", "", name)) for name in (gold, other))
    return value if mine is None or theirs is None else renamed(value, theirs[1], mine[1])


def renamed(value: Value, old: str, new: str) -> Value:
    """A formula (or a group of them) with one symbol renamed; other shapes stay as they are."""
    if isinstance(value, Formula):
        return Formula(rename(value.node, old, new))
    if isinstance(value, Group):
        return replace(value, items=tuple(renamed(item, old, new) for item in value.items))
    return value


def _plain(text: str) -> bool:
    return _NAME.fullmatch(text.strip()) is not None and _FUNCTION_COMMANDS.search(text) is None


def _outer_commas(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
