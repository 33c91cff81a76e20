"""Plain numbers as exact rationals: the fast path that decides most answers without any parser.

Decimals are exact (0.1 is 1/10), leading zeros do not matter, thousands separators must stand in groups of three,
and a currency sign in front is dropped. Percent, degrees and units are not plain: :mod:`qerl.tasks.verify` has them.
"""

from __future__ import annotations

import re
from fractions import Fraction

_PLAIN = re.compile(
    r"(?P<sign>[-+−–]?)\s*(?:\\?\$|€|£)?\s*(?P<sign2>[-−]?)"
    r"(?:(?P<grouped>\d{1,3}(?:,\d{3})+)|(?P<digits>\d+)|(?=\.\d))(?P<decimals>\.\d*)?(?:[eE](?P<power>[-+]?\d{1,3}))?"
    r"(?:\s*/\s*(?P<denominator>\d+))?\s*\.?"
)
_FRAC = re.compile(r"([-+−]?)\s*\\[dt]?frac\s*\{\s*([-−]?\d+)\s*\}\s*\{\s*([-−]?\d+)\s*\}\s*\.?")
_MAX_DIGITS = 4000


def exact_number(text: str) -> Fraction | None:
    """The value of an integer, decimal, ``a/b`` or ``\\frac{a}{b}``; None for anything else.

    >>> exact_number("$1,200.50"), exact_number("073"), exact_number("18.")
    (Fraction(2401, 2), Fraction(73, 1), Fraction(18, 1))
    """
    text = text.strip()
    if not text or len(text) > _MAX_DIGITS:
        return None
    match = _PLAIN.fullmatch(text)
    if match is not None:
        integer = (match["grouped"] or "").replace(",", "") or match["digits"] or "0"
        decimals = (match["decimals"] or "").removeprefix(".")
        value = Fraction(int(integer + decimals), 10 ** len(decimals))
        value *= Fraction(10) ** int(match["power"] or 0)
        if match["denominator"] is not None:
            denominator = int(match["denominator"])
            if denominator == 0:
                return None
            value /= denominator
        if (match["sign"] in "-−–" and match["sign"] != "") != (match["sign2"] != ""):
            value = -value
        return value
    match = _FRAC.fullmatch(text)
    if match is None:
        return None
    numerator, denominator = (int(part.replace("−", "-")) for part in match.group(2, 3))
    if denominator == 0:
        return None
    value = Fraction(numerator, denominator)
    return -value if match.group(1) in ("-", "−") else value
