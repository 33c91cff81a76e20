"""Sets of real numbers as sorted intervals, from intervals, inequalities, unions and set builders.

So ``-4 < m \\leq 0`` equals ``(-4, 0]`` and ``m \\in (-4, 0]``. Ends must be numbers; sets with symbolic ends are
compared part by part in :mod:`qerl.tasks.compare`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mpmath

from qerl.tasks.evaluate import UndecidedError, constant_value, evaluate
from qerl.tasks.expression import Node, symbols
from qerl.tasks.names import is_name
from qerl.tasks.values import Formula, Group, Relation, SetBuilder, Special, Union, Value

_TOLERANCE = mpmath.mpf(10) ** -100
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high``; a point has both ends closed and equal."""

    low: mpmath.mpf
    low_closed: bool
    high: mpmath.mpf
    high_closed: bool


RealSet = tuple[Interval, ...]
ALL: RealSet = (Interval(-mpmath.inf, False, mpmath.inf, False),)


def real_set(value: Value) -> RealSet | None:
    """The set that an answer describes, None if it is none of the forms, has symbolic ends or several variables."""
    return _set_of(value) if len(_variables(value)) <= 1 else None


def _variables(value: Value | None) -> frozenset[str]:
    """The symbols of all relations in a value."""
    if isinstance(value, Formula):
        return symbols(value.node)
    if isinstance(value, Relation):
        texts = frozenset(t for t, side in zip(value.texts, value.sides, strict=True) if side is None)
        return texts.union(*(_variables(side) for side in value.sides))
    if isinstance(value, SetBuilder):
        return _variables(value.condition)
    parts = value.items if isinstance(value, Group) else (value.parts if isinstance(value, Union) else ())
    return frozenset().union(*map(_variables, parts))


def _set_of(value: Value) -> RealSet | None:
    if isinstance(value, Special):
        return ALL if value.name == "R" else (() if value.name == "empty" else None)
    if isinstance(value, SetBuilder):
        return _set_of(value.condition)
    if isinstance(value, Union):
        return _union(value)
    if isinstance(value, Relation):
        return _relation_set(value)
    if isinstance(value, Group):
        return _group(value)
    return None


def same_set(left: RealSet, right: RealSet) -> bool:
    """Whether two sets are equal."""
    return len(left) == len(right) and all(
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and _near(a.low, b.low)
        and _near(a.high, b.high)
        for a, b in zip(left, right, strict=True)
    )


def _near(a: mpmath.mpf, b: mpmath.mpf) -> bool:
    if mpmath.isinf(a) or mpmath.isinf(b):
        return a == b
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b), 1)


def _group(value: Group) -> RealSet | None:
    if value.opening == "{":
        points = [_end(item) for item in value.items]
        return None if None in points else _merge([Interval(p, True, p, True) for p in points])
    if value.opening:
        if len(value.items) != 2:
            return None
        low, high = (_end(item) for item in value.items)
        if low is None or high is None or low > high:
            return None
        return (
            Interval(
                low, value.opening == "[" and low != -mpmath.inf, high, value.closing == "]" and high != mpmath.inf
            ),
        )
    parts = [_set_of(item) for item in value.items]
    if any(part is None for part in parts):
        return None
    if value.joint == "or":
        return _merge([interval for part in parts for interval in part])
    # "x > 1 and x < 5" holds where both do; "x = 1, x = 2" and a list of intervals are meant as their union
    if all(isinstance(item, Relation) for item in value.items):
        if any("=" in item.signs for item in value.items):
            return None
        result = parts[0]
        for part in parts[1:]:
            result = _intersect(result, part)
        return result or None
    return _merge([interval for part in parts for interval in part])


def _union(value: Union) -> RealSet | None:
    parts = [_set_of(part) for part in value.parts]
    if any(part is None for part in parts):
        return None
    if value.op == "or":
        return _merge([interval for part in parts for interval in part])
    result = parts[0]
    for part in parts[1:]:
        result = _intersect(result, _complement(part))
    return result


def _end(value: Value | None) -> mpmath.mpf | None:
    return constant_value(value.node) if isinstance(value, Formula) else None


def _relation_set(value: Relation) -> RealSet | None:
    """The solutions of a chain of linear relations in one symbol (or one name like ``f(x)`` alone on a side)."""
    if value.signs == ("in",):
        return _set_of(value.sides[1]) if value.sides[1] is not None else None
    if "in" in value.signs:
        return None
    result = ALL
    names: set[str] = set()
    for index, sign in enumerate(value.signs):
        solved = _solve(value, index, sign)
        if solved is None:
            return None
        name, part = solved
        names.add(name)
        result = _intersect(result, part)
    return result if len(names) == 1 else None


def _solve(value: Relation, index: int, sign: str) -> tuple[str, RealSet] | None:
    left, right = value.sides[index], value.sides[index + 1]
    a, b = _end(left), _end(right)
    if a is None and b is None:
        if not isinstance(left, Formula) or not isinstance(right, Formula):
            return None
        return _solve_linear(Node("add", (left.node, Node("neg", (right.node,)))), sign)
    if a is not None and b is not None:
        return None
    side, end, sign = (left, b, sign) if b is not None else (right, a, _FLIP[sign])
    text = value.texts[index] if b is not None else value.texts[index + 1]
    if isinstance(side, Formula) and len(symbols(side.node)) == 1:
        shifted = Node("add", (side.node, Node("neg", ((right if b is not None else left).node,))))
        linear = _solve_linear(shifted, sign)
        if linear is not None:
            return linear
    return (text, _half_line(sign, end)) if is_name(text, side) else None


def _solve_linear(node: Node, sign: str) -> tuple[str, RealSet] | None:
    """Solutions of ``node sign 0`` for a node that is linear in its one symbol."""
    names = symbols(node)
    if len(names) != 1:
        return None
    (name,) = names
    with mpmath.workdps(150):
        try:
            at = [evaluate(node, {name: mpmath.mpf(x)}) for x in (0, 1, 7)]
        except UndecidedError:
            return None
        slope = at[1] - at[0]
        if any(mpmath.im(v) != 0 for v in at) or slope == 0 or not _near(at[2], at[0] + 7 * slope):
            return None
        root = -at[0] / slope
    return name, _half_line(sign if slope > 0 else _FLIP[sign], root)


def _half_line(sign: str, end: mpmath.mpf) -> RealSet:
    below = Interval(-mpmath.inf, False, end, sign == "<=")
    above = Interval(end, sign == ">=", mpmath.inf, False)
    match sign:
        case "<" | "<=":
            return (below,)
        case ">" | ">=":
            return (above,)
        case "=":
            return (Interval(end, True, end, True),)
    return (below, above)


def _merge(intervals: list[Interval]) -> RealSet:
    merged: list[Interval] = []
    for item in sorted(intervals, key=lambda i: (i.low, not i.low_closed)):
        if merged and (
            item.low < merged[-1].high
            or (_near(item.low, merged[-1].high) and (item.low_closed or merged[-1].high_closed))
        ):
            last = merged.pop()
            if _near(item.high, last.high):
                high, closed = last.high, last.high_closed or item.high_closed
            else:
                high, closed = max((last.high, last.high_closed), (item.high, item.high_closed))
            merged.append(Interval(last.low, last.low_closed, high, closed))
        else:
            merged.append(item)
    return tuple(merged)


def _intersect(left: RealSet, right: RealSet) -> RealSet:
    result = []
    for a in left:
        for b in right:
            low = max(a.low, b.low)
            high = min(a.high, b.high)
            low_closed = all(i.low_closed for i in (a, b) if i.low == low)
            high_closed = all(i.high_closed for i in (a, b) if i.high == high)
            if low < high or (low == high and low_closed and high_closed):
                result.append(Interval(low, low_closed, high, high_closed))
    return tuple(sorted(result, key=lambda i: i.low))


def _complement(value: RealSet) -> RealSet:
    result = ALL
    for item in value:
        outside = []
        if item.low != -mpmath.inf:
            outside.append(Interval(-mpmath.inf, False, item.low, not item.low_closed))
        if item.high != mpmath.inf:
            outside.append(Interval(item.high, not item.high_closed, mpmath.inf, False))
        result = _intersect(result, tuple(outside))
    return result
