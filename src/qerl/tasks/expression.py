r"""A strict parser for the formulas that are answers: what it does not know is an error, nothing is dropped.

(A lenient parser is how ``1 - \frac{1}{\mathrm{e}}`` and ``1 + \frac{1}{\mathrm{e}}`` came to be both 1.)

Grammar, loosest first: sums; products (``\cdot``, ``\times``, ``*``, ``/``, juxtaposition); signs; powers; postfix
``!``, ``%``, ``°``; and atoms: numbers, letters with subscripts, constants, ``\frac``, ``\sqrt``, ``\binom``,
functions, brackets, ``|x|``, floor and ceiling. A number followed by a fraction of numbers is a mixed number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from qerl.tasks.tokens import OPENING, FormulaError, Token

CONSTANTS = frozenset({"pi", "e", "i", "infty"})
_FUNCTIONS_TEXT = "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp"
FUNCTIONS = frozenset(_FUNCTIONS_TEXT.split())
_GREEK_TEXT = (
    r"\alpha \beta \gamma \delta \epsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu \xi \rho "
    r"\sigma \tau \upsilon \phi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma \Phi "
    r"\Psi \Omega \ell \hbar"
)
_GREEK = frozenset(_GREEK_TEXT.split())
# things that no calculation is done with: number sets, cardinals, marks; equal names are equal
_OPAQUE = frozenset(
    [r"\setR", r"\setZ", r"\setN", r"\setQ", r"\setC", r"\setF", r"\aleph", r"\top", r"\perp", r"\triangle"]
)
# letters that name a function when a bracket follows
_UNKNOWN_FUNCTIONS = frozenset("fghFGH")
_TIMES = frozenset({"*", r"\cdot", r"\times"})
# limits that keep recursion over a tree within Python's own
_MAX_DEPTH = 60
_MAX_NODES_IN_ROW = 200


@dataclass(frozen=True, slots=True)
class Node:
    """``op`` with arguments; leaves: ("number", value=Fraction), ("symbol", name), ("constant", name).

    Other ops: add, mul, div, pow, neg, pm, mp (their unary forms), call (name = function), root (x, n), binom,
    factorial, abs, floor, ceil, percent, degree. ``literal`` is how a number was written.
    """

    op: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction | None = None
    literal: str = ""


def parse_expression(tokens: list[Token]) -> Node:
    """The tree of a formula.

    Raises:
        FormulaError: Anything that is not one expression of the grammar.
    """
    parser = _Parser(tokens)
    node = parser.sum(0)
    if parser.position != len(tokens):
        raise FormulaError(f"unexpected {tokens[parser.position].text!r}")
    return node


def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols."""
    if node.op == "symbol":
        return frozenset({node.name})
    return frozenset().union(*(symbols(arg) for arg in node.args)) if node.args else frozenset()


def contains(node: Node, *ops: str) -> bool:
    """Whether an operation (or the constant of that name) occurs in a tree."""
    return node.op in ops or (node.op == "constant" and node.name in ops) or any(contains(a, *ops) for a in node.args)


def calculates(node: Node) -> bool:
    """Whether a formula leaves a calculation to the reader: a sum, product or nested quotient of plain numbers.

    One number is no calculation, in whatever form: signs, a fraction, a mixed number, scientific notation, percent.
    Powers, roots and functions are forms of exact numbers too, and symbols make a formula.
    """
    if node.op in ("neg", "percent", "degree"):
        return calculates(node.args[0])
    if node.op == "div":
        return not all(arg.op in ("number", "neg") and not calculates(arg) for arg in node.args) and _numeric(node)
    if node.op == "add":
        whole, rest = node.args[0], node.args[-1]
        is_fraction = rest.op == "div" and all(arg.op == "number" for arg in rest.args)
        proper = is_fraction and rest.args[0].value < rest.args[1].value
        mixed = len(node.args) == 2 and whole.op == "number" and whole.value.denominator == 1 and proper
        return _numeric(node) and not mixed
    return node.op == "mul" and _numeric(node)


def _numeric(node: Node) -> bool:
    """Whether a tree holds nothing but numbers and the four operations."""
    return node.op == "number" or (node.op in ("add", "mul", "div", "neg") and all(_numeric(arg) for arg in node.args))


def number(value: Fraction | int, literal: str = "") -> Node:
    """A number leaf."""
    return Node("number", value=Fraction(value), literal=literal)


def rename(node: Node, old: str, new: str) -> Node:
    """A tree with one symbol renamed."""
    if node.op == "symbol":
        return Node("symbol", name=new) if node.name == old else node
    if not node.args:
        return node
    return replace(node, args=tuple(rename(arg, old, new) for arg in node.args))


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = list(tokens)
        self.position = 0

    def peek(self, offset: int = 0) -> Token | None:
        index = self.position + offset
        return self.tokens[index] if index < len(self.tokens) else None

    def at(self, *texts: str) -> bool:
        token = self.peek()
        return token is not None and token.text in texts

    def take(self, text: str | None = None) -> Token:
        token = self.peek()
        if token is None or (text is not None and token.text != text):
            raise FormulaError(f"expected {text or 'more'}, found {token.text if token else 'the end'}")
        self.position += 1
        return token

    def sum(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise FormulaError(f"nested deeper than {_MAX_DEPTH}")
        node = self.product(depth)
        row = 0
        while self.at("+", "-", r"\pm", r"\mp"):
            row = _count(row)
            sign = self.take().text
            right = self.product(depth)
            node = Node("add", (node, _signed(sign, right)))
        return node

    def product(self, depth: int) -> Node:
        node = self.signed(depth)
        row = 0
        while (token := self.peek()) is not None:
            row = _count(row)
            if token.text in _TIMES:
                self.take()
                node = Node("mul", (node, self.signed(depth)))
            # inside brackets a colon divides; outside it makes a ratio, which is cut before
            elif token.text in ("/", ":"):
                self.take()
                node = Node("div", (node, self.signed(depth)))
            elif self.starts_atom(token):
                previous = self.tokens[self.position - 1]
                if token.kind == "number" and previous.kind == "number":
                    raise FormulaError("two numbers side by side")
                node = Node("mul", (node, self.power(depth)))
            else:
                break
        return node

    def signed(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise FormulaError(f"nested deeper than {_MAX_DEPTH}")
        if self.at("+", "-", r"\pm", r"\mp"):
            return _signed(self.take().text, self.signed(depth + 1))
        return self.power(depth)

    def power(self, depth: int) -> Node:
        node = self.postfix(self.atom(depth))
        if self.at("^"):
            self.take()
            node = self.postfix(Node("pow", (node, self.exponent(depth))))
        return node

    def exponent(self, depth: int) -> Node:
        if self.at("+", "-"):
            return _signed(self.take().text, self.atom(depth + 1))
        return self.script(depth)

    def script(self, depth: int) -> Node:
        """An argument of ``^`` or ``_``: a group, or one number, letter or command."""
        return self.atom(depth + 1, bare=True)

    def fraction_argument(self, depth: int) -> Node:
        """``\\frac34``: an argument without braces is a single digit, letter or command."""
        token = self.peek()
        if token is not None and token.kind == "number" and len(token.text) > 1:
            self.tokens[self.position] = Token("number", token.text[1:], False)
            return number(int(token.text[0]), token.text[0])
        return self.script(depth)

    def postfix(self, node: Node) -> Node:
        row = 0
        while self.at("!", "%", "°", "'"):
            row = _count(row)
            mark = self.take().text
            if mark == "'":
                if node.op == "symbol":
                    node = Node("symbol", name=node.name + "'")
                    continue
                raise FormulaError("unexpected '")
            node = Node({"!": "factorial", "%": "percent", "°": "degree"}[mark], (node,))
            if mark == "°":
                node = self.minutes(node)
        return node

    def minutes(self, degrees: Node) -> Node:
        """``60° 42'`` and ``60° 42' 10''`` as one angle in degrees."""
        total, part = degrees.args[0], 60
        while (token := self.peek()) is not None and token.kind == "number" and part <= 3600:
            after = self.peek(1)
            if after is None or after.text != "'":
                break
            self.position += 2
            if part == 3600:
                self.take("'")
            total = Node("add", (total, Node("div", (number(Fraction(token.text)), number(part)))))
            part *= 60
        return Node("degree", (total,))

    def starts_atom(self, token: Token) -> bool:
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "command":
            name = token.text[1:]
            return (
                token.text in _GREEK
                or token.text in _OPAQUE
                or name in FUNCTIONS
                or name in CONSTANTS
                or token.text in (r"\frac", r"\sqrt", r"\binom", r"\lfloor", r"\lceil")
            )
        return token.text in ("(", "[", "{")

    def atom(self, depth: int, bare: bool = False) -> Node:
        if depth > _MAX_DEPTH:
            raise FormulaError(f"nested deeper than {_MAX_DEPTH}")
        token = self.take()
        if token.kind == "number":
            node = number(Fraction(token.text), token.text)
            return node if bare else self.mixed(node, depth)
        if token.kind == "letter" or token.text in _GREEK or token.text in _OPAQUE:
            return self.symbol(token, bare)
        if token.text in ("(", "[", "{"):
            node = self.sum(depth + 1)
            self.take(OPENING[token.text])
            return node
        if token.text == "|":
            node = self.sum(depth + 1)
            self.take("|")
            return Node("abs", (node,))
        if token.text in (r"\lfloor", r"\lceil"):
            node = self.sum(depth + 1)
            self.take(OPENING[token.text])
            return Node("floor" if token.text == r"\lfloor" else "ceil", (node,))
        return self.command(token, depth)

    def command(self, token: Token, depth: int) -> Node:
        if token.text == r"\frac":
            top = self.fraction_argument(depth)
            return Node("div", (top, self.fraction_argument(depth)))
        if token.text == r"\binom":
            top = self.fraction_argument(depth)
            return Node("binom", (top, self.fraction_argument(depth)))
        if token.text == r"\sqrt":
            order = number(2)
            if self.at("["):
                self.take()
                order = self.sum(depth + 1)
                self.take("]")
            return Node("root", (self.fraction_argument(depth), order))
        name = token.text[1:]
        if name in CONSTANTS:
            return Node("constant", name=name)
        if name in FUNCTIONS:
            return self.call(name, depth)
        raise FormulaError(f"unknown {token.text!r}")

    def symbol(self, token: Token, bare: bool) -> Node:
        name = token.text.removeprefix("\\")
        if not bare and self.at("_"):
            self.take()
            name = f"{name}_{self.subscript()}"
        elif not bare and name not in ("e", "i") and self.number_attached():
            name = f"{name}_{self.take().text}"
        if name[0] in _UNKNOWN_FUNCTIONS and token.kind == "letter" and self.at("("):
            return Node("symbol", name=f"{name}({self.argument_text()})")
        if name in ("e", "i"):
            return Node("constant", name=name)
        return Node("symbol", name=name)

    def number_attached(self) -> bool:
        """``y1``: a number right after a letter is its index, nobody writes a product so."""
        token = self.peek()
        return token is not None and token.kind == "number" and not token.spaced and token.text.isdigit()

    def argument_text(self) -> str:
        """``f(-3)``: a value of an unknown function is known by its argument only."""
        depth, parts = 0, []
        while True:
            token = self.take()
            depth += (token.text == "(") - (token.text == ")")
            if depth == 0:
                return "".join(parts)
            if parts or token.text != "(" or depth > 1:
                parts.append(token.text)

    def subscript(self) -> str:
        if not self.at("{"):
            return self.take().text.removeprefix("\\")
        depth, parts = 0, []
        while True:
            token = self.take()
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return "".join(parts)
            if token.text not in "{}":
                parts.append(token.text.removeprefix("\\"))

    def mixed(self, whole: Node, depth: int) -> Node:
        """``1\\frac{1}{2}`` and ``1 1/2``: a whole number and a fraction of whole numbers after it are added."""
        if "." in whole.literal:
            return whole
        start = self.position
        if self.at(r"\frac"):
            fraction = self.atom(depth + 1)
            if all(arg.op == "number" for arg in fraction.args) and not self.at("^"):
                return Node("add", (whole, fraction))
            self.position = start
            return whole
        top, bar, bottom = self.peek(), self.peek(1), self.peek(2)
        if top and bar and bottom and top.kind == bottom.kind == "number" and bar.text == "/" and top.spaced:
            self.position += 3
            if int(Fraction(bottom.text)) > 0:
                return Node("add", (whole, Node("div", (number(Fraction(top.text)), number(Fraction(bottom.text))))))
        self.position = start
        return whole

    def call(self, name: str, depth: int) -> Node:
        exponent = base = None
        while self.at("^", "_"):
            if self.take().text == "^":
                exponent = self.exponent(depth)
            else:
                base = self.script(depth)
        argument = self.postfix(self.atom(depth + 1)) if self.at("(", "{", "[", "|") else self.juxtaposed(depth)
        if name == "log" and base is not None:
            node = Node("div", (Node("call", (argument,), "ln"), Node("call", (base,), "ln")))
        elif base is not None:
            raise FormulaError(f"a subscript on \\{name}")
        else:
            node = Node("call", (argument,), name)
        if exponent is None:
            return node
        if exponent.op == "neg" and exponent.args[0].value == 1 and name in ("sin", "cos", "tan", "cot"):
            return Node("call", (argument,), "arc" + name)
        return Node("pow", (node, exponent))

    def juxtaposed(self, depth: int) -> Node:
        """The argument of a function without brackets: factors up to the next sign, product sign or function."""
        if self.at("-", "+"):
            return _signed(self.take().text, self.juxtaposed(depth + 1))
        node = self.power(depth + 1)
        while (token := self.peek()) is not None:
            if token.text == "/" and node.op in ("number", "symbol", "constant", "mul"):
                self.take()
                node = Node("div", (node, self.power(depth + 1)))
            elif self.starts_atom(token) and token.text[1:] not in FUNCTIONS and token.text != "(":
                node = Node("mul", (node, self.power(depth + 1)))
            else:
                break
        return node


def _count(row: int) -> int:
    if row >= _MAX_NODES_IN_ROW:
        raise FormulaError(f"more than {_MAX_NODES_IN_ROW} operations in a row")
    return row + 1


def _signed(sign: str, node: Node) -> Node:
    if sign == "+":
        return node
    return Node({"-": "neg", r"\pm": "pm", r"\mp": "mp"}[sign], (node,))
