"""Tokens of a normalized formula, and cutting them at separators outside of all brackets."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<env>\\(?:begin|end)\s*\{[a-zA-Z]+\*?\})"
    r"|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<rowend>\\\\(?:\[[^\]]*\])?)"
    r"|(?P<command>\\(?:[a-zA-Z]+|[{}|%_&#]))"
    r"|(?P<op><=|>=|!=|:=|==|[-+*/^_=<>(){}\[\]|,;:!%°'&])"
    r"|(?P<letter>[a-zA-Z])"
)
_WORDS = re.compile(
    r"(?<![a-zA-Z\\])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|sqrt|ln|log|lg|exp|pi)(?![a-zA-Z])"
)
OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
CLOSING = frozenset(OPENING.values())
MAX_TOKENS = 1500


class FormulaError(ValueError):
    """A formula that this parser does not read; says where."""


@dataclass(frozen=True, slots=True)
class Token:
    """``kind`` is one of number, command, op, letter, env, rowend; ``spaced``: white space stood before it."""

    kind: str
    text: str
    spaced: bool


def tokenize(text: str) -> list[Token]:
    """Tokens of a normalized formula.

    Raises:
        FormulaError: A character that no formula has, or more than ``MAX_TOKENS`` tokens.
    """
    text = _WORDS.sub(r"\\\1 ", text)
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise FormulaError(f"unknown character {text[position]!r}")
        position = match.end()
        if match.lastgroup == "space":
            spaced = True
            continue
        tokens.append(Token(match.lastgroup or "", match.group(0).replace(" ", ""), spaced))
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise FormulaError(f"more than {MAX_TOKENS} tokens")
    return tokens


def split_at(tokens: list[Token], separators: frozenset[str]) -> tuple[list[list[Token]], list[str]]:
    """Cut at separators outside of brackets and environments: the parts and the separators between them.

    Raises:
        FormulaError: Brackets that do not match. Intervals may mix ``(`` and ``[``.
    """
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = environments = 0
    for token in tokens:
        if token.kind == "env":
            environments += 1 if token.text.startswith(r"\begin") else -1
        elif token.text in OPENING:
            depth += 1
        elif token.text in CLOSING:
            depth -= 1
            if depth < 0:
                raise FormulaError(f"{token.text} without its opening bracket")
        if depth == 0 and environments == 0 and token.text in separators:
            found.append(token.text)
            parts.append([])
        else:
            parts[-1].append(token)
    if depth or environments:
        raise FormulaError("a bracket that is not closed")
    return parts, found


def enclosed(tokens: list[Token]) -> bool:
    """Whether the first token is a bracket that the last one closes (``(`` with ``]`` counts too)."""
    if len(tokens) < 2 or tokens[0].text not in OPENING or tokens[-1].text not in CLOSING:
        return False
    depth = 0
    for position, token in enumerate(tokens):
        depth += (token.text in OPENING) - (token.text in CLOSING)
        if depth == 0:
            return position == len(tokens) - 1
    return False
