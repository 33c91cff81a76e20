"""math-verify for the formulas that the strict grammar does not read, with its acceptance checked again.

math-verify's parser may drop what it does not understand and take the rest for the whole. So an acceptance counts
only if every letter and number of both texts is still there in what was parsed, and if numbers agree to 50 digits.
Its signal-based timeouts work in main threads only; they are off here, the deadline is the worker pool's.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from functools import lru_cache
from typing import Any

_DIGITS = 50
# sympy multiplies such numbers out: powers of powers, and exponents or factorials of five digits and more
_HUGE = re.compile(r"\^\s*\{?[-+]?\d{5,}|\d{5,}\s*\}?\s*!|\^\s*\{?\s*\d+\s*\^\s*\{?\s*\d+\s*\^|!\s*!")
_MAX_LENGTH = 400
# it warns on every process that its timeouts are off
logging.getLogger("math_verify").setLevel(logging.ERROR)


@lru_cache(maxsize=2048)
def _parse(formula: str) -> Any | None:
    from math_verify import LatexExtractionConfig, parse

    if len(formula) > _MAX_LENGTH or _HUGE.search(formula):
        return None
    parsed = parse(
        f"${_spelled(formula)}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def _spelled(formula: str) -> str:
    """Back from the normalized vocabulary to plain LaTeX."""
    formula = re.sub(r"\\set([A-Z])", r"\\mathbb{\1}", formula).replace("°", r"^\circ ").replace("%", r"\%")
    return formula.replace(r"\and", ",").replace(r"\or", ",").replace("<=", r"\leq ").replace(">=", r"\geq ")


def can_parse(formula: str) -> bool:
    """Whether math-verify reads a formula as a whole."""
    parsed = _parse(formula)
    return parsed is not None and _complete(formula, parsed)


def symbolic_verdict(gold: str, other: str) -> tuple[bool, str]:
    """(equal, reason) of two normalized formulas."""
    from math_verify import verify

    left, right = _parse(gold), _parse(other)
    if left is None or right is None:
        return False, "not read: " + ("the gold answer" if left is None else "the answer")
    if not verify(left, right, timeout_seconds=None):
        return False, "different by math-verify"
    if not _complete(gold, left) or not _complete(other, right):
        return False, "equal by math-verify, refused: it dropped a part of a formula"
    if not _numbers_agree(left, right):
        return False, "equal by math-verify, refused: the numbers differ"
    return True, "equal by math-verify"


def _complete(formula: str, parsed: Any) -> bool:
    """Whether each number and letter of a formula is in its parsed form, counted once each."""
    import sympy

    text = sympy.srepr(parsed)
    plain = re.sub(r"\\(?:begin|end)\{[a-zA-Z]+\*?\}|\\[a-zA-Z]+", " ", formula)
    letters = set(re.findall(r"[a-zA-Z]", plain)) - set("eid")
    names = "".join(re.findall(r"Symbol\('([^']*)'", text))
    if not letters <= set(names):
        return False
    numbers = Counter(re.findall(r"\d+", plain))
    if isinstance(parsed, sympy.MatrixBase | sympy.MatrixExpr):
        return True
    present = set(re.findall(r"\d+", text)) | {"1", "0", "2", "10"}
    return set(numbers) <= present


def _numbers_agree(left: Any, right: Any) -> bool:
    """Whether two parsed constants agree to many digits; anything that is no constant passes."""
    import sympy

    if not all(isinstance(value, sympy.Expr) and value.is_number for value in (left, right)):
        return True
    a, b = (sympy.N(value, _DIGITS) for value in (left, right))
    if not (a.is_finite and b.is_finite):
        return a == b
    return bool(abs(a - b) <= sympy.Float(10, _DIGITS) ** -(_DIGITS - 10) * max(abs(a), abs(b)))
