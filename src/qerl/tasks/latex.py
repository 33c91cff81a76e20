r"""One spelling for the many ways in which models and data sets write the same answer.

``normalize`` maps LaTeX, Unicode and plain text to a small vocabulary that :mod:`qerl.tasks.tokens` reads:
``\frac``, ``\sqrt``, ``<=``, ``!=``, ``°``, ``\and`` and ``\or`` (separators of a list), and so on. It changes
spelling only: what a formula means is decided by the parser.
"""

from __future__ import annotations

import re
import unicodedata

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r" \times ", "·": r" \cdot ", "⋅": r" \cdot ", "÷": r" \div ",
        "∗": "*", "≤": "<=", "≥": ">=", "⩽": "<=", "⩾": ">=", "≠": "!=", "∞": r" \infty ", "π": r" \pi ",
        "√": r" \sqrt ", "∪": r" \cup ", "∩": r" \cap ", "∈": r" \in ", "≈": r" \approx ", "°": r"^\circ ",
        "º": r"^\circ ", "⁄": "/", "∅": r" \emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
        "θ": r" \theta ", "α": r" \alpha ", "β": r" \beta ", "γ": r" \gamma ", "φ": r" \phi ", "±": r" \pm ",
        "∀": r" \forall ", "’": "'", "′": "'", "“": '"', "”": '"', "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "€": "", "£": "", "¥": "",
    }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

# a backslash sequence of a JSON or Python string that was read as an escape: form feed + "rac" was \frac
_ESCAPES = (
    (re.compile(r"\x0c(?=rac|box)"), r"\\f"),
    (re.compile(r"\t(?=ext|imes|frac|heta|an\b|o\b|au\b)"), r"\\t"),
    (re.compile(r"\x08(?=oxed|egin|inom|eta|ar\b)"), r"\\b"),
    (re.compile(r"\r(?=ight|ho\b)"), r"\\r"),
)
_TEXT_COMMANDS = r"text|textnormal|textrm|textbf|textit|mbox|mathrm|mathbf|mathit|mathsf|rm|bf|operatorname"
_TEXT = re.compile(r"\\(?:" + _TEXT_COMMANDS + r")\s*\*?\s*\{([^{}]*)\}")
# "cm" and the exponent of "cm^2"
_TEXT_POWER = re.compile(_TEXT.pattern + r"(?:\s*\^\s*\{?[23]\}?)?")
_FUNCTIONS_TEXT = "arcsin arccos arctan arccot sinh cosh tanh coth sin cos tan cot sec csc ln log lg exp sqrt"
_FUNCTIONS = _FUNCTIONS_TEXT.split()
_SPACES = re.compile(
    r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|displaystyle|textstyle|limits|nolimits|par|noindent|hfill|enspace|thinspace)"
    r"(?![a-zA-Z])|\\[hv]space\*?\s*\{[^{}]*\}|\\(?:label|tag)\s*\{[^{}]*\}"
)
_SIZES = re.compile(r"\\(?:left|right|middle|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg)(?![a-zA-Z])\s*\.?")
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:leqslant|leqq|leq|le)(?![a-zA-Z])", "<="),
        (r"\\(?:geqslant|geqq|geq|ge)(?![a-zA-Z])", ">="),
        (r"\\lt(?![a-zA-Z])|&lt;", "<"),
        (r"\\gt(?![a-zA-Z])|&gt;", ">"),
        (r"\\(?:neq|ne)(?![a-zA-Z])|\\not\s*=|=/=|<>", "!="),
        (r"=<|⩽", "<="),
        (r"\\(?:infin|infinity)(?![a-zA-Z])|(?<![\\a-zA-Z])inf(?:inity|ty)?(?![a-zA-Z{])", r"\\infty"),
        (r"\\(?:cupdot|bigcup)(?![a-zA-Z])", r"\\cup"),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])", r"\\approx"),
        (r"(?:\^\s*)?\{?\\(?:textcirc|degree|textdegree)(?![a-zA-Z])\}?", r"^\\circ"),
        (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
        (r"(?<=\d)\s*\bdeg(?:ree)?s?\b", "°"),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"\\[%]|\bper\s?cent\b|\bpct\b", "%"),
        (r"\\(?:div)(?![a-zA-Z])", "/"),
        (r"\\ast(?![a-zA-Z])|\*\*", lambda m: "^" if m[0] == "**" else "*"),
        (r"\\var(phi|epsilon|theta|rho)(?![a-zA-Z])", r"\\\1"),
        (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\set\1 "),
        (r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:\\(?:text|mathrm|rm|textrm)\s*\{?)?\s*(?:st|nd|rd|th)\b(?:\s*\}){0,2}", ""),
    )
)  # fmt: skip
_LOCAL = re.compile(
    r"\\text\s*\{\s*(?:and\s+)?for (?:all|any|every|each|some)[^{}]*\}"
    r"\s*[a-zA-Z]\s*(?:\\in\s*\\set[A-Z]\w*|[<>]=?\s*\d+)?(?=\s*(?:,|;|\\text|\\and|\\or))"
)
_TAIL = re.compile(
    r"[,\s]*(?:\\text\s*\{\s*)?\(?\s*(?:\bwhere\b|\bfor (?:all|any|every|each|some|integers?|positive|real|"
    r"nonnegative|\$|\\|[a-zA-Z]\b)|\bwith [a-zA-Z$\\]|\bsuch that\b|\bwhenever\b|\bas required\b).*$",
    re.DOTALL,
)
_INTEGER_TAIL = re.compile(r"[,;]?\s*\(?\s*[a-zA-Z]\s*\\in\s*\\set[ZNQ]\b.*$", re.DOTALL)


def normalize(text: str) -> str:
    """The same answer in the small vocabulary of the module's text; never raises, "" for nothing."""
    text = _repair(text)
    text = _unicode(text)
    text = re.sub(r"<sup>(.*?)</sup>", r"^{\1}", text)
    text = re.sub(r"<sub>(.*?)</sub>", r"_{\1}", text)
    text = re.sub(r"</?[a-z]+\s*/?>", " ", text)
    text = re.sub(r"\\\$", "", text)
    text = re.sub(r"\\\(|\\\)|\\\[(?!\d+(?:pt|em|ex|mm)\])|(?<!\\)\\\]|\$", " ", text)
    text = re.sub(r"(?<=\d)\s*(?:\{\s*,\s*\}|\\,|,\s*\\!|\\!)\s*(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[hv]?phantom\s*\{[^{}]*\}", "", text)
    text = text.replace(r"\!", "").replace("{,}", ",")
    text = _SIZES.sub(" ", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\\(?:mathbb)\s*\{", r"\\mathbb{", text)
    text = re.sub(r"\\(?:textsf|emph|underline|overline|textsc)\s*(?=\{)", r"\\text", text)
    text = re.sub(r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}", text)
    text = re.sub(r"\\text\s*\{\s*\{([^{}]*)\}\s*\}", r"\\text{\1}", text)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = _unwrap_names(text)
    return _trim(text)


def split_text(text: str) -> tuple[str, list[str], str]:
    r"""Formula, words and qualifier of a normalized text.

    ``\text{...}`` is cut out (words); "and" and "or" in it separate items; words with numbers in them stay unless
    they are the whole text. The qualifier is what follows "where", "for all", "such that" and the like.
    """
    whole = _TEXT.fullmatch(text)
    if whole is not None and len(whole[1].split()) >= 3:
        return "", [whole[1].strip()], ""
    text = _LOCAL.sub(" ", text)
    head = _TAIL.sub("", text)
    # a qualifier cannot be the whole answer
    head = head if head.strip() else text
    shorter = _INTEGER_TAIL.sub("", head)
    head = shorter if re.search(r"[\w)]", shorter) else head
    words: list[str] = []

    def cut(match: re.Match[str]) -> str:
        inner = match[1].strip()
        if any(char.isdigit() for char in inner):
            return f" {inner} "
        joint = re.search(r"\b(and|or)\b", inner)
        if inner:
            words.append(inner)
        return rf" \{joint[1]} " if joint else (" , " if inner in (",", ";") else " ")

    formula = _TEXT_POWER.sub(cut, head)
    formula = re.sub(r"(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])", r" \\\1 ", formula)
    return _trim(formula), words, text.removeprefix(head)


def as_text(text: str) -> str:
    """A text answer reduced for comparison: lower case, no markup, punctuation, articles or outer brackets."""
    text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"\\(?:" + _TEXT_COMMANDS + r")(?![a-zA-Z])|[{}$]|\\[,;:! ]", " ", text)
    text = re.sub(r"^\s*\(\s*([A-Za-z])\s*\)\s*$", r"\1", text)
    text = text.casefold().strip(" .,;:!\"'")
    text = re.sub(r"[\"',;:!?.]+(?=\s|$)|(?<=\s)[\"']+", " ", text)
    words = text.split()
    return " ".join(words if len(words) == 1 else [word for word in words if word not in ("the", "a", "an")])


def _repair(text: str) -> str:
    for pattern, new in _ESCAPES:
        text = pattern.sub(new, text)
    if not re.search(r"\\begin\s*\{", text):
        # doubled backslashes of an answer that was escaped twice; in a matrix they end rows
        text = re.sub(r"\\\\(?=[a-zA-Z{}$%(\[)\],])", r"\\", text)
    return text


def _unicode(text: str) -> str:
    text = re.sub(r"[①-⑳]", lambda m: f" {ord(m[0]) - ord('①') + 1} ,", text).rstrip(" ,")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
    text = text.translate(_UNICODE)
    return unicodedata.normalize("NFKC", text) if not text.isascii() else text


def _unwrap_names(text: str) -> str:
    """``\\mathrm{e}`` and ``\\text{sin}`` are a letter and a function; other text keeps its wrapper as ``\\text``."""

    def unwrap(match: re.Match[str]) -> str:
        inner = match[1].strip()
        if inner in _FUNCTIONS:
            return rf"\{inner} "
        if len(inner) == 1 or re.fullmatch(r"[\d.,/+-]+", inner):
            return f" {inner} "
        return rf"\text{{{match[1]}}}"

    text = re.sub(r"_\s*\{?\s*\\(?:" + _TEXT_COMMANDS + r")\s*\{([^{}]*)\}\s*\}?", r"_{\1}", text)
    return _TEXT.sub(unwrap, text)


def _trim(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    previous = None
    while previous != text:
        previous = text
        text = text.strip(" ,;").removesuffix("\\").strip()
        if text.endswith(".") and not text.endswith("..."):
            text = text[:-1]
        text = re.sub(r"\.(?=\s*[)\]]$)", "", text)
    return text
