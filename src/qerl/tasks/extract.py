"""Find the final answer in a completion.

Order (the first kind that occurs decides; of several of one kind the last wins):

1. ``\\boxed{...}`` (or ``\\fbox``); boxes joined by nothing but commas, "and", "or" and names are one list; a
   "final answer is ..." with a number or formula after the last box replaces it,
2. ``<answer>...</answer>``,
3. ``#### ...`` up to the end of the line,
4. "the answer is ...", "final answer: ...", "answer: ...",
5. a text that is nothing but an answer (one short line without prose),
6. the last formula between dollar signs or ``\\(...\\)``,
7. the last number.

4 to 7 read statements only: questions ("Could the answer be 42?") and suppositions ("if it is 42, ...") are left out
(:mod:`qerl.tasks.questions`).

Thinking does not count: what stands before the last ``</think>`` is ignored, and a ``<think>`` that is never
closed (written by the model, or opened by the chat template: ``think_opened=True``) means no answer.
A completion whose only box is never closed was cut off in its answer and has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qerl.tasks.questions import without_questions

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_GAP = re.compile(
    r"(?:\\text\s*\{\s*(?:and|or|for part \(?\w+\)?|,|\s)*\}|\\(?:quad|qquad|[,;:! ()\[\]])|\band\b|\bor\b"
    r"|for part \(?\w+\)?|[A-Za-z]\w*(?:_\{?\w+\}?)?\s*=|[\s,;.$])*"
)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_PHRASE = re.compile(
    r"(?:\b(?:final\s+)?(?:answer|result)\b[^\n.:=]{0,80}?(?:\bis\b\s*:?|:|=)|\banswer\b\s*(?=\\\[|\$|\\\())"
    r"(?:\s*\*{1,2}(?=\s|$))?\s*",
    re.IGNORECASE,
)
_FINAL = re.compile(r"\bfinal\s+answer\s+is\b\s*:?\s*", re.IGNORECASE)
_CHATTER = re.compile(r"<\|[a-z_]+\|>.*$|I hope it is correct\.?.*$", re.DOTALL | re.IGNORECASE)
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$([^$]+?)\$", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.\\])[-+−]?\s?[$€£]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?"
    r"|(?<![\w.\\])[-+−]?[$€£]?\.\d+"
)
_UNIT_AFTER = re.compile(r"\s*(?:\\?%|percent\b|pct\b|°|\\circ|\^\\circ|degrees\b)")
# words of two letters; any other two letters are factors of a product
_SHORT_WORDS_TEXT = "am an as at be by do go he if in is it me my no of on or so to up us we"
_SHORT_WORDS = frozenset(_SHORT_WORDS_TEXT.split())
_SENTENCE_WORDS = _SHORT_WORDS | frozenset(
    ("the", "are", "total", "answer", "equals", "gives", "get", "have", "has", "thus")
)
_MAX_BARE = 600


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer and the kind of mark that it was found by ("boxed", "answer tag", "hashes", "phrase", "bare",
    "formula", "number")."""

    text: str
    kind: str


def extract_answer(completion: str, *, think_opened: bool = False) -> str | None:
    """The final answer in a completion, None where there is none. The order is in the module's text."""
    found = extract(completion, think_opened=think_opened)
    return None if found is None else found.text


def extract(completion: str, *, think_opened: bool = False) -> Extraction | None:
    """As :func:`extract_answer`, with the kind of mark that decided."""
    text = strip_thinking(completion, think_opened=think_opened)
    if text is None:
        return None
    text = _CHATTER.sub("", text)
    marked = _marked(text)
    if marked is not None:
        return marked if _has_content(marked.text) else None
    if not text.strip():
        return None
    stated = without_questions(text)
    if stated == text and is_bare(text) and _has_content(text):
        return Extraction(text.strip(), "bare")
    return _last_value(stated)


def tagged_answer(text: str) -> str | None:
    """The content of the last closed ``<answer>`` tag, whatever other marks there are; None if none."""
    found = _ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def strip_thinking(completion: str, *, think_opened: bool = False) -> str | None:
    """The text after the last ``</think>``; None if thinking was opened and not closed."""
    _head, closed, tail = completion.rpartition("</think>")
    rest = tail if closed else completion
    if "<think>" in rest or (think_opened and not closed):
        return None
    return rest


def last_boxed(text: str) -> str | None:
    """The content of the last closed ``\\boxed{...}`` (braces balanced); ``\\boxed 7`` gives "7"; None if none."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def last_number(text: str) -> str | None:
    """The last number as written, with sign, currency, separators, fraction and percent or degree sign."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    number = match.group(0)
    unit = _UNIT_AFTER.match(text, match.end())
    return number.strip().rstrip(",") + (unit.group(0) if unit else "")


def is_bare(text: str) -> bool:
    """Whether a text is nothing but an answer: one short paragraph without a sentence of prose."""
    text = text.strip()
    if not text or len(text) > _MAX_BARE or "\n\n" in text:
        return False
    prose = re.sub(r"\\(?:text|textbf|mathrm|mbox|textnormal|operatorname)\s*\{[^{}]*\}", " ", text)
    prose = re.sub(r"\$[^$]*\$|\\\[.*?\\\]|\\\(.*?\\\)", " ", prose, flags=re.DOTALL)
    prose = re.sub(r"\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}|\\[a-zA-Z]+", " ", prose)
    # "Paolo: 18, Qing: 14" and "Maximum = 2" are labelled values
    prose = re.sub(r"(?:(?<=^)|(?<=[,;]))\s*[A-Za-z]+\s*[:=]", " ", prose)
    if "$" in text and re.match(r"[^$]*[A-Za-z]{3,}[^$]*\$", re.sub(r"\\[a-zA-Z]+|\{[^{}]*\}", " ", text)):
        return False
    words = [w for w in re.findall(r"[A-Za-z]{2,}", prose) if len(w) > 2 or w.lower() in _SHORT_WORDS]
    has_math = bool(re.search(r"[\d=\\$^]", text))
    if has_math and any(word.lower() in _SENTENCE_WORDS for word in words):
        return False
    return len(words) <= (2 if has_math else 8)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the outermost closed boxes, in order."""
    boxes = []
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        position = match.end()
        if position < len(text) and text[position] == "{":
            end = closing_brace(text, position)
            if end is None:
                continue
            boxes.append((match.start(), end + 1, text[position + 1 : end]))
            position = end + 1
        elif (word := re.match(r"[^\s$\\{}.,]+", text[position:])) is not None:
            boxes.append((match.start(), position + word.end(), word.group(0)))
            position += word.end()
    return boxes


def closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at ``opening``; escaped braces do not count; None if none."""
    depth = 0
    position = opening
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
        position += 1
    return None


def _marked(text: str) -> Extraction | None:
    boxes = _boxes(text)
    if not boxes and _BOX.search(text):
        # cut off in the middle of its answer
        return Extraction("", "boxed")
    if boxes and not _restated(text[boxes[-1][1] :]):
        return Extraction(_join_boxes(text, boxes), "boxed")
    for kind, pattern in (("answer tag", _ANSWER_TAG), ("hashes", _HASHES)):
        found = pattern.findall(text)
        if found:
            inner = found[-1].strip()
            return Extraction(inner, kind)
    text = without_questions(text)
    matches = list(_PHRASE.finditer(text))
    if matches:
        stated = _statement(text[matches[-1].end() :])
        if _has_content(stated):
            return Extraction(stated, "phrase")
    return None


def _restated(text: str) -> bool:
    """Whether a "final answer" with a value follows."""
    text = without_questions(text)
    match = _FINAL.search(text)
    return match is not None and re.search(r"[\d\\]", _statement(text[match.end() :])) is not None


def _join_boxes(text: str, boxes: list[tuple[int, int, str]]) -> str:
    contents = [boxes[-1][2]]
    start = boxes[-1][0]
    for box_start, box_end, content in reversed(boxes[:-1]):
        if _GAP.fullmatch(text, box_end, start) is None:
            break
        contents.insert(0, content)
        start = box_start
    return ", ".join(content.strip() for content in contents)


def _statement(text: str) -> str:
    """What "the answer is" introduces: a formula, or the rest of the sentence; of a long one its last number."""
    text = text.lstrip(" *:\t\n")
    formula = _MATH.match(text)
    if formula is not None:
        inner = next(g for g in formula.groups() if g).strip()
        unit = _UNIT_AFTER.match(text, formula.end())
        return inner + (unit.group(0) if unit else "")
    sentence = re.split(r"\.(?=\s|$)|\n", text, maxsplit=1)[0].strip().strip("*").strip()
    # "the largest $n$ is 34"
    sentence = re.split(r"\b(?:is|are|equals)\b(?=\s*[^\s])", sentence)[-1].strip()
    if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+|\{[^{}]*\}", " ", sentence))) <= 4:
        return sentence
    value = _last_value(sentence)
    return sentence if value is None else value.text


def _last_value(text: str) -> Extraction | None:
    """The last formula, or the last number where one is written after it (or there is no formula)."""
    formula = None
    for match in _MATH.finditer(text):
        if _has_content(match.group(0)):
            formula = match
    if formula is not None and last_number(text[formula.end() :]) is None:
        inner = next(group for group in formula.groups() if group)
        unit = _UNIT_AFTER.match(text, formula.end())
        return Extraction(inner.strip() + (unit.group(0) if unit else ""), "formula")
    number = last_number(text)
    return None if number is None else Extraction(number, "number")


def _has_content(text: str) -> bool:
    return bool(re.search(r"[^\W_]|\\\{\s*\\\}|\\infty|\\emptyset|\\varnothing|[∞∅①-⑳]", text))
