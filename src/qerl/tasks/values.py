r"""The shapes of answers: one formula, a list, a set, a tuple or interval, a relation, a matrix, a ratio, words.

``parse_value`` cuts a normalized answer at its outermost separators, loosest first: ``or``, ``;``, ``and``, commas;
then ``\cup`` and ``\setminus``; then relation signs; then ``:``; what is left is a bracket, a matrix or a formula.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qerl.tasks.expression import Node, parse_expression
from qerl.tasks.tokens import FormulaError, Token, enclosed, split_at, tokenize


@dataclass(frozen=True, slots=True)
class Formula:
    """One expression."""

    node: Node


@dataclass(frozen=True, slots=True)
class Words:
    """A text answer, reduced by ``latex.as_text``."""

    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Items between brackets. ``opening`` + ``closing``: "" a bare list, ``{}`` a set, else a tuple or an interval.

    ``joint`` is what stood between the items of a bare list: "," or "or".
    """

    opening: str
    closing: str
    items: tuple[Value, ...]
    joint: str = ","


@dataclass(frozen=True, slots=True)
class Union:
    """``A \\cup B`` or, with ``op`` "minus", A without B."""

    op: str
    parts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """``a < b <= c``: sides and the signs between them (=, !=, <, >, <=, >=, in). ``names``: text of the sides."""

    sides: tuple[Value | None, ...]
    signs: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetBuilder:
    """``{x | condition}``."""

    variable: str
    condition: Value


@dataclass(frozen=True, slots=True)
class Ratio:
    """``a : b : c``, with the text of it for clock times."""

    parts: tuple[Value, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of formulas."""

    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True)
class Based:
    """A numeral in a base, ``204_5``, without leading zeros."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Special:
    """A named set: R, Z, N, Q, C, empty."""

    name: str


Value = Formula | Words | Group | Union | Relation | SetBuilder | Ratio | Matrix | Based | Special

_RELATIONS = frozenset({"=", "!=", "<", ">", "<=", ">=", r"\in", ":=", "=="})
_SETS = {r"\setR": "R", r"\setZ": "Z", r"\setN": "N", r"\setQ": "Q", r"\setC": "C", r"\emptyset": "empty"}
_MATRIX = re.compile(r"\\(?:begin|end)\{(?:[pbvBV]?matrix|smallmatrix|array)\*?\}")


def parse_value(text: str) -> Value:
    """The value of a normalized answer without words (``latex.split_text``).

    Raises:
        FormulaError: Not read by this grammar.
    """
    tokens = tokenize(text)
    if not tokens:
        raise FormulaError("nothing there")
    return _listed(tokens)


def _listed(tokens: list[Token]) -> Value:
    for separators, joint in ((r"\or", "or"), (";", ","), (r"\and", ","), (",", ",")):
        parts, found = split_at(tokens, frozenset({separators}))
        if not found:
            continue
        parts = [part for part in parts if part]
        if len(parts) == 1:
            return _listed(parts[0])
        items = tuple(_listed(part) for part in parts)
        # "1, 2, and 3" is one flat list
        flat = tuple(
            inner
            for item in items
            for inner in (item.items if isinstance(item, Group) and not item.opening and joint == "," else (item,))
        )
        return Group("", "", flat, joint)
    return _related(tokens)


def _related(tokens: list[Token]) -> Value:
    parts, found = split_at(tokens, frozenset({r"\approx"}))
    if found and not parts[0]:
        return _related(parts[-1])
    if found and all(parts):
        # an exact value counts, not the rounded one after it; a mere name has no other value
        if len(parts[0]) == 1 and parts[0][0].kind in ("letter", "command"):
            return Relation((_side(parts[0]), _side(parts[-1])), ("=",), (spell(parts[0]), spell(parts[-1])))
        tokens = parts[0]
    parts, signs = split_at(tokens, _RELATIONS)
    if not signs:
        return _united(tokens)
    if not all(parts):
        raise FormulaError("a relation without one of its sides")
    sides = tuple(_side(part) for part in parts)
    signs = ["in" if sign == r"\in" else sign.replace(":=", "=").replace("==", "=") for sign in signs]
    return Relation(sides, tuple(signs), tuple(spell(part) for part in parts))


def _side(tokens: list[Token]) -> Value | None:
    """A side of a relation, None where this grammar does not read it (it may still be a name)."""
    try:
        return _united(tokens)
    except FormulaError:
        return None


def _united(tokens: list[Token]) -> Value:
    parts, found = split_at(tokens, frozenset({r"\cup"}))
    if found:
        return Union("or", tuple(_united(part) for part in parts if part))
    parts, found = split_at(tokens, frozenset({r"\setminus", r"\backslash"}))
    if found:
        return Union("minus", tuple(_united(part) for part in parts))
    parts, found = split_at(tokens, frozenset({"-"}))
    if len(parts) == 2 and parts[0] and parts[0][0].text == r"\{" and parts[1] and parts[1][0].text == r"\{":
        return Union("minus", tuple(_united(part) for part in parts))
    return _proportion(tokens)


def _proportion(tokens: list[Token]) -> Value:
    parts, found = split_at(tokens, frozenset({":"}))
    if found and all(parts):
        return Ratio(tuple(_single(part) for part in parts), spell(tokens))
    return _single(tokens)


def _single(tokens: list[Token]) -> Value:
    if not tokens:
        raise FormulaError("nothing there")
    if len(tokens) == 1 and tokens[0].text in _SETS:
        return Special(_SETS[tokens[0].text])
    based = _based(tokens)
    if based is not None:
        return based
    inner = tokens[1:-1]
    if enclosed(tokens):
        if len(inner) > 1 and _MATRIX.fullmatch(inner[0].text) and _MATRIX.fullmatch(inner[-1].text):
            return _matrix(inner)
        opening, closing = tokens[0].text, tokens[-1].text
        if opening == r"\{" or (opening == "{" and split_at(inner, frozenset({","}))[1]):
            return _set(inner)
        parts, found = split_at(inner, frozenset({",", ";"}))
        if found and opening in "([" and all(parts):
            return Group(opening, closing, tuple(_related(part) for part in parts))
        if opening in "({" and split_at(inner, frozenset({",", r"\cup", r"\or", *_RELATIONS}))[1]:
            return _listed(inner)
    elif len(tokens) > 2 and tokens[0].text in "([" and tokens[-1].text in ")]":
        parts, found = split_at(inner, frozenset({","})) if _balanced(inner) else ([], [])
        if found and all(parts):
            return Group(tokens[0].text, tokens[-1].text, tuple(_related(part) for part in parts))
    if _MATRIX.fullmatch(tokens[0].text):
        return _matrix(tokens)
    return Formula(parse_expression(tokens))


def _balanced(tokens: list[Token]) -> bool:
    try:
        split_at(tokens, frozenset())
    except FormulaError:
        return False
    return True


def _set(tokens: list[Token]) -> Value:
    if not tokens:
        return Special("empty")
    for bar in ("|", ":"):
        parts, found = split_at(tokens, frozenset({bar}))
        if len(found) == 1 and all(parts) and _has_relation(parts[1]):
            variable = parts[0]
            cut = [i for i, token in enumerate(variable) if token.text == r"\in"]
            return SetBuilder(spell(variable[: cut[0]] if cut else variable), _listed(parts[1]))
    parts, _ = split_at(tokens, frozenset({",", ";"}))
    return Group("{", "}", tuple(_related(part) for part in parts if part))


def _has_relation(tokens: list[Token]) -> bool:
    return any(token.text in _RELATIONS for token in tokens)


def _matrix(tokens: list[Token]) -> Matrix:
    if len(tokens) < 3 or not tokens[-1].text.startswith(r"\end") or tokens[0].text == r"\begin{vmatrix}":
        raise FormulaError("not one matrix")
    body = tokens[1:-1]
    if any(token.kind == "env" for token in body):
        raise FormulaError("a matrix in a matrix, or two of them")
    if tokens[0].text == r"\begin{array}" and body and body[0].text == "{":
        closing = next((i for i, token in enumerate(body) if token.text == "}"), len(body))
        body = body[closing + 1 :]
    rows: list[list[list[Token]]] = [[[]]]
    for token in body:
        if token.kind == "rowend":
            rows.append([[]])
        elif token.text == "&":
            rows[-1].append([])
        else:
            rows[-1][-1].append(token)
    kept = [row for row in rows if any(row)]
    if not kept or len({len(row) for row in kept}) != 1:
        raise FormulaError("rows of different lengths")
    return Matrix(tuple(tuple(Formula(parse_expression(cell)) for cell in row) for row in kept))


def _based(tokens: list[Token]) -> Based | None:
    sign = "-" if tokens[0].text == "-" else ""
    tokens = tokens[len(sign) :]
    if len(tokens) < 3 or tokens[1].text != "_" or not tokens[0].text.isdigit():
        return None
    base = "".join(token.text for token in tokens[2:]).strip("{}()")
    if not base.isdigit() or len(base) > 2 or not 2 <= int(base) <= 36:
        return None
    return Based(sign + (tokens[0].text.lstrip("0") or "0"), int(base))


def spell(tokens: list[Token]) -> str:
    """Tokens as text without white space; braces around one token are dropped."""
    text = "".join(token.text + (" " if token.kind == "command" else "") for token in tokens)
    return re.sub(r"\{(\w+)\}", r"\1", text).replace(" ", "") if "\\" not in text else text
