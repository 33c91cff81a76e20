"""Exact or high-precision values of formulas, and the test whether two formulas are equal.

Formulas without symbols that are rational are compared as fractions. All others are evaluated with mpmath at 150 and
at 400 digits: two constants that agree to both are equal for every answer that occurs (numbers as close as that and
different are not written as answers). With symbols, the same test at fixed random points, positive and negative;
points where the gold formula is not real do not count unless it is real nowhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

import mpmath

from qerl.tasks.expression import Node, contains, symbols

_DIGITS = (150, 400)
_MAX_EXPONENT = 20_000
_MAX_BITS = 400_000
_MAX_FACTORIAL = 5_000
# the ranges that sample points are drawn from, one point each; fractions of both signs and beyond 1
_RANGES = ((0.1, 0.9), (0.1, 0.9), (1.1, 4.0), (1.1, 4.0), (4.0, 9.0), (-0.9, -0.1), (-4.0, -1.1))

Point = Mapping[str, mpmath.mpf]


class UndecidedError(ValueError):
    """A formula too large to evaluate, or undefined (division by zero, infinity minus infinity)."""


@lru_cache(maxsize=4096)
def rational(node: Node) -> Fraction | None:
    """The exact value of a formula of rationals, None if it has symbols, roots or is too large."""
    if node.op == "number":
        return node.value
    if node.op in ("symbol", "constant", "call", "pm", "mp", "degree"):
        return None
    values = [rational(arg) for arg in node.args]
    if any(value is None for value in values):
        return None
    return _rational_op(node.op, values)


def _rational_op(op: str, values: list[Fraction]) -> Fraction | None:
    first, second = values[0], values[-1]
    match op:
        case "add":
            return first + second
        case "mul":
            return first * second
        case "div":
            return first / second if second else None
        case "neg":
            return -first
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(first.numerator // first.denominator)
        case "ceil":
            return Fraction(-(-first.numerator // first.denominator))
        case "percent":
            return first / 100
        case "pow":
            return _rational_power(first, second)
        case "root":
            return _rational_root(first, second)
        case "factorial" if first.denominator == 1 and 0 <= first <= _MAX_FACTORIAL:
            return Fraction(math.factorial(int(first)))
        case "binom" if first.denominator == second.denominator == 1 and 0 <= second <= first <= _MAX_FACTORIAL:
            return Fraction(math.comb(int(first), int(second)))
    return None


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _rational_root(base, Fraction(exponent.denominator))
        return None if root is None else _rational_power(root, Fraction(exponent.numerator))
    if base == 0:
        return Fraction(0) if exponent > 0 else (Fraction(1) if exponent == 0 else None)
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if (abs(exponent) > _MAX_EXPONENT and abs(base) != 1) or bits * abs(exponent) > _MAX_BITS:
        return None
    return base ** int(exponent)


def _rational_root(value: Fraction, order: Fraction) -> Fraction | None:
    """The exact root if it is rational; odd roots of negative numbers are real."""
    if order.denominator != 1 or not 1 <= order <= 64:
        return None
    n = int(order)
    if value < 0:
        root = _rational_root(-value, order) if n % 2 else None
        return None if root is None else -root
    top, bottom = _integer_root(value.numerator, n), _integer_root(value.denominator, n)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, n: int) -> int | None:
    if value.bit_length() > _MAX_BITS:
        return None
    low, high = 0, 1 << (value.bit_length() // n + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**n <= value else (low, middle - 1)
    return low if low**n == value else None


def evaluate(node: Node, point: Point, log_base: int | None = None) -> mpmath.mpc:
    """The value at a point, at mpmath's current precision. ``log_base``: of ``\\log``, None for e.

    Raises:
        UndecidedError: Too large, or undefined.
    """
    exact = rational(node)
    if exact is not None:
        return mpmath.mpf(exact.numerator) / exact.denominator
    try:
        value = _value(node, point, log_base)
    except (ZeroDivisionError, OverflowError, ValueError, TypeError, mpmath.libmp.NoConvergence) as error:
        raise UndecidedError(f"{node.op}: {error}") from error
    if mpmath.isnan(value):
        raise UndecidedError(f"{node.op}: not a number")
    return value


_CALLS = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "coth": mpmath.coth,
    "ln": mpmath.log, "lg": lambda x: mpmath.log(x, 10),
}  # fmt: skip


def _value(node: Node, point: Point, log_base: int | None) -> mpmath.mpc:
    if node.op == "symbol":
        return point[node.name]
    if node.op == "constant":
        return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1), "infty": mpmath.inf}[node.name]
    values = [evaluate(arg, point, log_base) for arg in node.args]
    first, second = values[0], values[-1]
    match node.op:
        case "add":
            return first + second
        case "mul":
            return first * second
        case "div":
            return first / second
        case "neg":
            return -first
        case "degree":
            return first * mpmath.pi / 180
        case "percent":
            return first / 100
        case "abs":
            return abs(first)
        case "floor":
            return mpmath.floor(first)
        case "ceil":
            return mpmath.ceil(first)
        case "pow":
            return _power(first, second)
        case "root":
            return _root(first, second)
        case "factorial" if abs(first) <= _MAX_FACTORIAL:
            return mpmath.gamma(first + 1)
        case "binom" if max(abs(first), abs(second)) <= _MAX_FACTORIAL:
            return mpmath.binomial(first, second)
        case "call":
            return _call(node.name, first, log_base)
    raise UndecidedError(f"no value for {node.op}")


def _call(name: str, argument: mpmath.mpc, log_base: int | None) -> mpmath.mpc:
    if abs(argument) > 1e9:
        raise UndecidedError(f"{name} of a number above 1e9")
    if name == "exp":
        return _power(+mpmath.e, argument)
    if name == "log":
        return mpmath.log(argument) if log_base is None else mpmath.log(argument, log_base)
    return _CALLS[name](argument)


def _power(base: mpmath.mpc, exponent: mpmath.mpc) -> mpmath.mpc:
    if abs(exponent) > _MAX_EXPONENT or (base != 0 and abs(mpmath.log(abs(base))) * abs(exponent) > _MAX_BITS):
        raise UndecidedError("a power too large to compare")
    return base**exponent


def _root(value: mpmath.mpc, order: mpmath.mpc) -> mpmath.mpc:
    if mpmath.im(value) == 0 and mpmath.re(value) < 0 and mpmath.isint(order) and int(mpmath.re(order)) % 2 == 1:
        return -((-value) ** (1 / order))
    return value ** (1 / order)


def sample_points(names: frozenset[str]) -> list[dict[str, mpmath.mpf]]:
    """Fixed random rationals for each name, one point a range; the same in every process."""
    points = []
    for number, (low, high) in enumerate(_RANGES):
        point = {}
        for name in sorted(names):
            draw = random.Random(f"{name}/{number}").uniform(low, high)
            point[name] = mpmath.mpf(round(draw * 9973)) / 9973
        points.append(point)
    return points


def constant_value(node: Node, digits: int = _DIGITS[0]) -> mpmath.mpf | None:
    """The real value of a formula without symbols (infinities included); None if it is not real or undecided."""
    if symbols(node) or contains(node, "pm", "mp"):
        return None
    with mpmath.workdps(digits + 20):
        try:
            value = evaluate(node, {})
        except UndecidedError:
            return None
        if abs(mpmath.im(value)) > mpmath.mpf(10) ** (-digits // 2):
            return None
        return +mpmath.re(value)


def same_value(gold: Node, other: Node) -> bool:
    """Whether two formulas are equal: exactly for rationals, else as the module's text says.

    Undecided cases (too large, undefined) are unequal. ``\\log`` may be natural or to base 10, but the same in both.
    """
    left, right = rational(gold), rational(other)
    if left is not None and right is not None:
        return left == right
    names = symbols(gold)
    if names != symbols(other) and (not names or not symbols(other)):
        # a formula with symbols can still be constant (x - x), but not as an answer
        return False
    bases = (None, 10) if contains_log(gold) or contains_log(other) else (None,)
    return any(_same_at_all(gold, other, base) for base in bases)


def contains_log(node: Node) -> bool:
    """Whether a ``\\log`` without a base occurs."""
    return (node.op == "call" and node.name == "log") or any(contains_log(arg) for arg in node.args)


def _same_at_all(gold: Node, other: Node, log_base: int | None) -> bool:
    names = symbols(gold) | symbols(other)
    with mpmath.workdps(_DIGITS[-1] + 20):
        points = sample_points(names) if names else [{}]
    decided = unreal = 0
    for point in points:
        verdict = _same_at(gold, other, point, log_base)
        if verdict == "different":
            return False
        decided += verdict == "same"
        unreal += verdict == "same, not real"
    return decided > 0 or (unreal > 0 and contains(gold, "i")) or unreal == len(points)


def _same_at(gold: Node, other: Node, point: Point, log_base: int | None) -> str:
    real = True
    for digits in _DIGITS if not point else _DIGITS[:1]:
        with mpmath.workdps(digits + 20):
            try:
                left = evaluate(gold, point, log_base)
            except UndecidedError:
                return "undefined"
            try:
                right = evaluate(other, point, log_base)
            except UndecidedError:
                return "different"
            tolerance = mpmath.mpf(10) ** (-(3 * digits) // 4)
            # what rounding leaves of an exact zero
            noise = mpmath.mpf(10) ** (10 - digits)
            real = abs(mpmath.im(left)) <= noise
            if mpmath.isinf(left) or mpmath.isinf(right):
                if left != right:
                    return "different"
            elif abs(left - right) > max(tolerance * max(abs(left), abs(right)), noise):
                return "different" if real or contains(gold, "i") or not point else "undefined"
    return "same" if real else "same, not real"
