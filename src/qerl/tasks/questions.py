r"""Text that asks or supposes, as opposed to text that states: no answer is read out of it.

"Could the answer be 42?", "What if it is 42?", "Suppose the answer is 42." and "if x = 42, ..." name a number without
answering. What follows a supposition ("Assume each costs 5, so 3 cost 15.") states again.
"""

from __future__ import annotations

import re

# hidden from the search for sentences: formulas, and words set inside of undelimited ones ("\text{ if }"); the dollars
# of "$4 each, then $16" are money
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\$(?=\S)[^$]*?(?<=\S)\$(?!\d)|\\text\s*\{[^{}]*\}", re.DOTALL
)
_HIDDEN = "\ue000"
# a full stop inside of a number or a name ends nothing
_SENTENCE_END = r"(?:[.!](?=[\s\"'”’)\]*]|$)|[。！\n])"
_QUESTION_END = r"(?:[!?]{0,4}\?[?!]*[\"'”’)\]*_]*(?=[\s.,;]|$)|[？؟])"
_QUESTION = re.compile(rf"(?:(?!{_SENTENCE_END}|{_QUESTION_END})[\s\S])*{_QUESTION_END}")
_STATEMENT = re.compile(rf"(?:(?!{_SENTENCE_END}|{_QUESTION_END})[\s\S])*(?:{_SENTENCE_END}|$)")
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
    position = 0
    while position < len(visible):
        match = _QUESTION.match(visible, position)
        if match is not None:
            spans.append(match.span())
        else:
            match = _STATEMENT.match(visible, position)
            assert match is not None
            spans += [found.span() for found in _SUPPOSITION.finditer(visible, *match.span())]
        position = max(match.end(), position + 1)
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], re.sub(r"[^\n]", " ", text[start:end])]
        done = end
    return "".join([*parts, text[done:]])
