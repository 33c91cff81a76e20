r"""Text that asks or supposes, as opposed to text that states: no answer is read out of it.

"Could the answer be 42?", "What if it is 42?", "Suppose the answer is 42." and "if x = 42, ..." name a number without
answering. What follows a supposition ("Assume each costs 5, so 3 cost 15.") states again.
"""

from __future__ import annotations

import re

# hidden from the search for sentences: formulas, and words set inside of undelimited ones ("\text{ if }"); the dollars
# of "$4 each, then $16" are money
_FORMULA = re.compile(
    r"\$\$.{1,4000}?\$\$|\\\[.{1,4000}?\\\]|\\\(.{1,4000}?\\\)|\$(?=\S)[^$]*?(?<=\S)\$(?!\d)|\\text\s*\{[^{}]*\}",
    re.DOTALL,
)
_HIDDEN = "\ue000"
# a full stop inside of a number or a name ends nothing; a run of marks is looked at once, from its start
_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]*_]*+(?=[\s.,;]|$)|[。！？؟]++|\n")
_ASKING = frozenset("?？؟")
_CLAUSE_END = r"(?:[.!](?:\s|$)|[。！？\n;]|,(?!\d)|\bthen\b|$)"
_CONCLUSION = r"(?:[.!](?:\s|$)|[。！？\n;]|\b(?:so|then|thus|hence|therefore|gives?|yields?|get|implies)\b|$)"
_SUPPOSITION = re.compile(
    rf"(?<![\w\\])(?:(?:if|whether|unless|assuming|supposing)\b[\s\S]*?(?={_CLAUSE_END})"
    rf"|(?:suppose|assume|imagine|pretend|what if|let us say|let's say)\b[\s\S]*?(?={_CONCLUSION}))",
    re.IGNORECASE,
)


def without_questions(text: str) -> str:
    """The text with every question and every supposition replaced by spaces: same length, same line breaks.

    A question is a sentence that ends with a question mark outside of formulas. A supposition is a clause opened by
    "if", "whether", "assuming", ... up to its comma, or by "suppose", "assume", "what if", ... up to the conclusion.
    """
    visible = _FORMULA.sub(lambda match: _HIDDEN * len(match[0]), text)
    spans: list[tuple[int, int]] = []
    start = 0
    for mark, end in [*((match[0], match.end()) for match in _END.finditer(visible)), ("", len(visible))]:
        if _ASKING.isdisjoint(mark):
            spans += [match.span() for match in _SUPPOSITION.finditer(visible, start, end)]
        else:
            spans.append((start, end))
        start = end
    parts, done = [], 0
    for first, last in spans:
        parts += [text[done:first], re.sub(r"[^\n]", " ", text[first:last])]
        done = last
    return "".join([*parts, text[done:]])
