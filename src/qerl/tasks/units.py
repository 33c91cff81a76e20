"""Units of measurement and counted things beside a number: left out of the comparison unless two units disagree."""

from __future__ import annotations

import re

_UNITS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
    "ml": "ml milliliter millilitre", "l": "l liter litre", "ms": "ms millisecond", "s": "s sec second",
    "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "yr year",
    "cent": "cent", "dollar": "dollar usd", "euro": "euro", "yuan": "yuan", "rad": "rad radian",
    "mph": "mph", "kmh": "kmh kph", "n": "newton", "j": "joule", "w": "watt", "v": "volt", "hz": "hz hertz",
}  # fmt: skip
_BY_NAME = {name: unit for unit, names in _UNITS.items() for name in names.split()}
_QUALIFIERS = frozenset(["square", "sq", "cubic", "cu", "units", "unit", "per", "of"])
_LONG = sorted((n for n in _BY_NAME if len(n) >= 2), key=len, reverse=True)
# words after a number, a closing bracket or a percent or degree sign; a formula has no words of three letters there
_TRAILING = re.compile(
    r"(?<=[\d)}%°])(\s*)((?:square |sq\.? |cubic )?(?:"
    + "|".join(_LONG)
    + r")s?\b(?:\s*/\s*[a-z]+)?(?:\s*\^\s*\{?\d\}?)?)"
    r"|(?<=[\d)}%°])(\s+)([A-Za-z]{3,}(?:\s+[A-Za-z]+)*)\.?(?=\s*(?:$|,|;|\\and|\\or))"
)
_KEEP_TEXT = "and or sin cos tan cot sec csc log exp arcsin arccos arctan sqrt pi mod if when for"
_KEEP = frozenset(_KEEP_TEXT.split())


def cut_units(formula: str) -> tuple[str, list[str]]:
    """A formula without the plain words after its numbers, and these words."""
    words: list[str] = []

    def cut(match: re.Match[str]) -> str:
        text = match[2] or match[4]
        if text.split()[0].lower() in _KEEP:
            return match[0]
        words.append(text)
        return " "

    return _TRAILING.sub(cut, formula).strip(), words


def units_of(words: list[str]) -> frozenset[str]:
    """The known units among words, in one spelling; things that are counted (apples) are no units."""
    found = set()
    for phrase in words:
        for word in re.findall(r"[a-z]+", phrase.lower()):
            unit = _BY_NAME.get(word) or (_BY_NAME.get(word[:-1]) if word.endswith("s") else None)
            if unit is not None and word not in _QUALIFIERS:
                found.add(unit)
    return frozenset(found)


def units_disagree(gold: list[str], other: list[str]) -> bool:
    """Whether both name known units and none in common."""
    mine, theirs = units_of(gold), units_of(other)
    return bool(mine and theirs and not mine & theirs)
