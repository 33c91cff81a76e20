"""Equations: equal up to a constant factor, and a formula that is an equation solved for its one other symbol."""

from __future__ import annotations

import mpmath

from qerl.tasks.evaluate import UndecidedError, evaluate, sample_points
from qerl.tasks.expression import Node, symbols
from qerl.tasks.values import Formula, Relation

_DIGITS = 150
_TOLERANCE = mpmath.mpf(10) ** -100
_LARGE = mpmath.mpf(10) ** 40


def same_equation(gold: Relation, other: Relation) -> bool:
    """``x^2/4 + y^2/3 = 1`` and ``x^2/16 + y^2/12 = 1/4``: left minus right differ by a constant factor."""
    left, right = _residual(gold), _residual(other)
    if left is None or right is None or symbols(left) != symbols(right) or not symbols(left):
        return False
    factor = None
    with mpmath.workdps(_DIGITS):
        for point in sample_points(symbols(left)):
            try:
                a, b = evaluate(left, point), evaluate(right, point)
            except UndecidedError:
                continue
            # near 0 or so large that the symbols no longer show in it: a ratio would say nothing
            if not all(_TOLERANCE < abs(value) < _LARGE for value in (a, b)):
                return False
            if factor is not None and abs(a / b - factor) > _TOLERANCE * abs(factor):
                return False
            factor = a / b
    return factor is not None


def expression_of_equation(equation: Relation, formula: Node) -> bool:
    """``xy = 6`` and ``6/x``: the formula has all symbols but one, the equation is linear in that one and holds."""
    residual = _residual(equation)
    if residual is None:
        return False
    missing = symbols(residual) - symbols(formula)
    if len(missing) != 1 or not symbols(formula) <= symbols(residual):
        return False
    (name,) = missing
    with mpmath.workdps(_DIGITS):
        for point in sample_points(symbols(formula)):
            try:
                value = evaluate(formula, point)
                at = [evaluate(residual, {**point, name: value + step}) for step in (0, 1, 2)]
            except UndecidedError:
                return False
            scale = max(abs(at[1]), abs(at[2]))
            linear = abs(at[2] - 2 * at[1] + at[0]) <= _TOLERANCE * scale
            if scale == 0 or not linear or abs(at[0]) > _TOLERANCE * scale:
                return False
    return True


def _residual(relation: Relation) -> Node | None:
    """Left minus right of a single equation between formulas."""
    if relation.signs != ("=",) or not all(isinstance(side, Formula) for side in relation.sides):
        return None
    left, right = relation.sides
    return Node("add", (left.node, Node("neg", (right.node,))))
