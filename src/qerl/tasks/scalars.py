"""Equality of two single formulas, with the conventions for percent, degrees and rounded decimals."""

from __future__ import annotations

import mpmath

from qerl.tasks.evaluate import constant_value, rational, same_value
from qerl.tasks.expression import Node, rename, symbols

# a decimal stands for an exact value if it is that value correctly rounded, with at least so many significant digits
GOLD_DIGITS = 3
ANSWER_DIGITS = 5
_DIGITS = 150


def same_scalar(gold: Node, other: Node) -> bool:
    """Whether two formulas are equal; see the functions below for the conventions."""
    other = _in_case_of(gold, other)
    gold_mark, gold_bare = _marked(gold)
    other_mark, other_bare = _marked(other)
    if "percent" in (gold_mark, other_mark):
        return _same_percent(gold_mark, gold_bare, other_mark, other_bare)
    if "degree" in (gold_mark, other_mark):
        if _same_number(gold_bare, other_bare):
            return True
        # 180 degrees are pi, where only one side has the sign
        return gold_mark != other_mark and same_value(gold, other)
    return _same_number(gold, other)


def _in_case_of(gold: Node, other: Node) -> Node:
    """The other formula with its symbols in upper or lower case as in the gold, where that is unambiguous."""
    mine, theirs = symbols(gold), symbols(other)
    folded = {name.lower(): name for name in mine}
    if len(folded) != len(mine) or len({name.lower() for name in theirs}) != len(theirs):
        return other
    for name in theirs - mine:
        if name.lower() in folded:
            other = rename(other, name, folded[name.lower()])
    return other


def _same_percent(gold_mark: str, gold: Node, other_mark: str, other: Node) -> bool:
    """``62.5%`` equals ``5/8``, and ``62.5`` where the sign was left out.

    A fraction of one is never a percentage whose sign was left out: gold ``0.5`` is not ``0.5%``.
    """
    if gold_mark == other_mark:
        return _same_number(gold, other)
    hundredth = Node("percent", (gold if gold_mark else other,))
    if _same_number(gold if not gold_mark else hundredth, hundredth if not gold_mark else other):
        return True
    if not _same_number(gold, other):
        return False
    value = rational(gold)
    return gold_mark == "percent" or value is None or abs(value) >= 1


def _same_number(gold: Node, other: Node) -> bool:
    return same_value(gold, other) or _rounded(gold, other)


def _rounded(gold: Node, other: Node) -> bool:
    """A decimal against an exact form: equal if it is the exact value correctly rounded to its own last digit
    (a gold may also be cut off there).

    Two decimals, or a decimal and a fraction that is a short decimal itself, are never equal this way. The gold
    may be rounded to ``GOLD_DIGITS`` significant digits or more, the answer to ``ANSWER_DIGITS``.
    """
    if symbols(gold) or symbols(other):
        return False
    for decimal, exact, least in ((gold, other, GOLD_DIGITS), (other, gold, ANSWER_DIGITS)):
        places = _decimal_places(decimal)
        if places is None or _decimal_places(exact) is not None:
            continue
        value, target = rational(decimal), constant_value(exact, _DIGITS)
        if value is None or target is None or mpmath.isinf(target):
            continue
        significant = len(str(abs(value.numerator * 10**places // value.denominator)))
        if significant < least or (decimal is gold and places < 2):
            continue
        whole = rational(exact)
        if whole is not None and _terminates(whole.denominator):
            continue
        with mpmath.workdps(_DIGITS):
            step = 1 / mpmath.mpf(10) ** places
            short = abs(target) - abs(mpmath.mpf(value.numerator) / value.denominator)
            if value * target > 0 and (abs(short) <= step / 2 or (decimal is gold and 0 <= short < step)):
                return True
    return False


def _terminates(denominator: int) -> bool:
    """Whether fractions with this denominator are finite decimals."""
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _decimal_places(node: Node) -> int | None:
    """Places after the point of a number written in decimals (0 for an integer), None for any other formula."""
    if node.op in ("neg", "percent"):
        places = _decimal_places(node.args[0])
        return places if places is None or node.op == "neg" else places + 2
    return len(node.literal.partition(".")[2]) if node.op == "number" else None


def _marked(node: Node) -> tuple[str, Node]:
    """("percent" or "degree" or "", the formula without that sign)."""
    if node.op in ("percent", "degree"):
        return node.op, node.args[0]
    if node.op == "neg":
        mark, bare = _marked(node.args[0])
        return mark, Node("neg", (bare,))
    return "", node
