"""Equality of two answers by their shapes. Conventions, each tested in tests/tasks/test_verify.py:

- a bare list is unordered and counts repeats; against a set repeats do not count; against a tuple it is ordered;
- a tuple or interval is ordered, and its brackets count where it may be an interval (two items);
- a name in front (``x = 3``, ``(p, q) = (3, 2)``) may be left out, but two names must agree;
- a degree sign may be left out, and 180 degrees are pi; a percent sign may be left out, and 50% is 1/2;
- a column of a matrix is a tuple; ``a : b`` is a / b; ``a < x < b`` is ``(a, b)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from qerl.tasks import names
from qerl.tasks.equations import expression_of_equation, same_equation
from qerl.tasks.evaluate import same_value
from qerl.tasks.expression import Node, contains, symbols
from qerl.tasks.realset import real_set, same_set
from qerl.tasks.scalars import same_scalar
from qerl.tasks.values import (
    Based,
    Formula,
    Group,
    Matrix,
    Ratio,
    Relation,
    SetBuilder,
    Special,
    Union,
    Value,
)

_MAX_ITEMS = 64


def equal(gold: Value, other: Value) -> bool:
    """Whether two values are equal under the conventions above."""
    gold, other = _expanded(gold), _expanded(other)
    if isinstance(gold, Formula) and isinstance(other, Formula):
        return same_scalar(gold.node, other.node) or _same_general_solution(gold, other)
    if isinstance(gold, Relation) or isinstance(other, Relation):
        return _with_relation(gold, other)
    if isinstance(gold, Group) and isinstance(other, Group):
        return _groups(gold, other) or _sets(gold, other)
    rule = _RULES.get(type(gold), _RULES.get(type(other)))
    if rule is not None and rule(gold, other):
        return True
    return _sets(gold, other)


def _with_relation(gold: Value, other: Value) -> bool:
    if isinstance(gold, Relation) and isinstance(other, Relation):
        return _relations(gold, other)
    if isinstance(gold, Group) and isinstance(other, Relation):
        gold, other = other, gold
    relation, value = (gold, other) if isinstance(gold, Relation) else (other, gold)
    named = names.named_value(relation)
    if named is not None:
        if isinstance(value, Group) and not value.opening and _same_members(relation, value):
            return True
        return equal(named[1], value) if relation is gold else equal(value, named[1])
    if _sets(relation, value) or _symbolic_interval(relation, value):
        return True
    if any(sign != "=" for sign in relation.signs):
        return relation.signs == ("in",) and relation.sides[1] is not None and equal(relation.sides[1], value)
    if _identity(relation):
        return equal(relation.sides[-1], value)
    return isinstance(value, Formula) and expression_of_equation(relation, value.node)


def _identity(relation: Relation) -> bool:
    """Whether an equation only restates its last side.

    ``\\sqrt{4} = 2``, ``(a + 1)(a - 1) = a^2 - 1``, and ``\\lim ... = 1`` with a left side that is not read.
    """
    *heads, last = relation.sides
    if not isinstance(last, Formula):
        return False
    if symbols(last.node):
        return all(head is not None and equal(head, last) for head in heads)
    return all(head is None or (isinstance(head, Formula) and not symbols(head.node)) for head in heads)


def _same_members(relation: Relation, group: Group) -> bool:
    """``(f(n), g(n)) = (n, 1)`` against ``f(n) = n, g(n) = 1``."""
    left, right = relation.sides[0], relation.sides[-1]
    if not isinstance(left, Group) or not isinstance(right, Group) or len(left.items) != len(right.items):
        return False
    members = [names.named_value(item) if isinstance(item, Relation) else None for item in group.items]
    if None in members or len(members) != len(right.items):
        return False
    return all(equal(value, member[1]) for value, member in zip(right.items, members, strict=True))


def _relations(gold: Relation, other: Relation) -> bool:
    if all(sign == "=" for sign in (*gold.signs, *other.signs)):
        mine, theirs = names.named_value(gold), names.named_value(other)
        if mine is not None and theirs is not None and names.same_names(mine[0], theirs[0]):
            return equal(mine[1], names.same_argument(mine[0], *theirs))
        return same_equation(gold, other)
    if gold.signs == other.signs == ("in",) and _sets(gold, other):
        element = gold.sides[0], other.sides[0]
        return gold.texts[0] == other.texts[0] or (None not in element and equal(*element))
    return (_sets(gold, other) and _same_variable(gold, other)) or _chains(gold, other)


def _same_variable(gold: Relation, other: Relation) -> bool:
    def variables(relation: Relation) -> set[str]:
        sides = (side.node for side in relation.sides if isinstance(side, Formula))
        return set().union(*(symbols(side) for side in sides)) - {"infty"}

    return variables(gold) == variables(other)


_REVERSED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def _chains(gold: Relation, other: Relation) -> bool:
    """Chains side by side, or one of them read from the right."""
    if len(gold.sides) != len(other.sides):
        return False
    mine, theirs = _spelled_sides(gold), _spelled_sides(other)
    if gold.signs == other.signs and all(map(_same_side, mine, theirs)):
        return True
    if "in" in (*gold.signs, *other.signs):
        return False
    backwards = tuple(_REVERSED[sign] for sign in reversed(other.signs))
    return gold.signs == backwards and all(map(_same_side, mine, reversed(theirs)))


def _spelled_sides(relation: Relation) -> list[Value | str]:
    """The sides, by their text where the grammar does not read them (``\\forall x``)."""
    return [text if side is None else side for text, side in zip(relation.texts, relation.sides, strict=True)]


def _same_side(gold: Value | str, other: Value | str) -> bool:
    if isinstance(gold, str) or isinstance(other, str):
        return gold == other
    return equal(gold, other)


def _sets(gold: Value, other: Value) -> bool:
    """Equal as sets of reals, where at least one side is an inequality, a union, or a set by its condition."""
    if isinstance(gold, Group) and isinstance(other, Group):
        plain = [not any(isinstance(i, Relation | Union) for i in g.items) for g in (gold, other)]
        if all(plain):
            return False
    left = real_set(gold)
    right = real_set(other) if left is not None else None
    return left is not None and right is not None and same_set(left, right)


def _symbolic_interval(relation: Relation, value: Value) -> bool:
    """``a < x < b`` against ``(a, b)`` with ends that are no numbers."""
    if not isinstance(value, Group) or len(value.items) != 2 or len(relation.signs) != 2:
        return False
    signs, sides = relation.signs, relation.sides
    if all(sign in (">", ">=") for sign in signs):
        signs, sides = tuple(_REVERSED[s] for s in reversed(signs)), tuple(reversed(sides))
    if not all(sign in ("<", "<=") for sign in signs) or sides[0] is None or sides[2] is None:
        return False
    brackets = ("(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]")
    same_brackets = brackets == (value.opening, value.closing)
    return same_brackets and equal(sides[0], value.items[0]) and equal(sides[2], value.items[1])


def _groups(gold: Group, other: Group) -> bool:
    left, right = gold.items, other.items
    if max(len(left), len(right)) > _MAX_ITEMS:
        return False
    kinds = {_kind(gold), _kind(other)}
    if kinds == {"tuple"}:
        same_brackets = (gold.opening, gold.closing) == (other.opening, other.closing)
        if not same_brackets and len(left) == 2:
            return False
        return _in_order(left, right) or _same_family(gold, other)
    if kinds == {"list", "tuple"}:
        bracketed = gold if gold.opening else other
        return (bracketed.opening, bracketed.closing) == ("(", ")") and _in_order(left, right)
    if kinds == {"set", "tuple"}:
        return False
    if "set" in kinds:
        return _covers(left, right) and _covers(right, left)
    return _matched(left, right)


def _kind(group: Group) -> str:
    return "list" if not group.opening else ("set" if group.opening == "{" else "tuple")


def _in_order(left: Sequence[Value], right: Sequence[Value]) -> bool:
    return len(left) == len(right) and all(map(equal, left, right))


def _covers(left: Sequence[Value], right: Sequence[Value]) -> bool:
    return all(any(equal(item, candidate) for candidate in right) for item in left)


def _matched(left: Sequence[Value], right: Sequence[Value]) -> bool:
    """Equal as multisets."""
    if len(left) != len(right):
        return False
    rest = list(right)
    for item in left:
        found = next((i for i, candidate in enumerate(rest) if equal(item, candidate)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _matrix(gold: Value, other: Value) -> bool:
    if isinstance(gold, Matrix) and isinstance(other, Matrix):
        return len(gold.rows) == len(other.rows) and all(map(_in_order, gold.rows, other.rows))
    matrix, value = (gold, other) if isinstance(gold, Matrix) else (other, gold)
    if not isinstance(value, Group) or _kind(value) != "tuple" or value.opening != "(":
        return False
    if len(matrix.rows) == 1:
        return _in_order(matrix.rows[0], value.items)
    return len(matrix.rows[0]) == 1 and _in_order([row[0] for row in matrix.rows], value.items)


def _ratio(gold: Value, other: Value) -> bool:
    if isinstance(gold, Ratio) and isinstance(other, Ratio):
        if gold.text == other.text:
            return True
        if len(gold.parts) != len(other.parts):
            return False
        pairs = [(_quotient(gold, i), _quotient(other, i)) for i in range(1, len(gold.parts))]
    else:
        ratio, value = (gold, other) if isinstance(gold, Ratio) else (other, gold)
        if len(ratio.parts) != 2 or not isinstance(value, Formula):
            return False
        pairs = [(_quotient(ratio, 1), value.node)]
    return all(a is not None and b is not None and same_value(a, b) for a, b in pairs)


def _quotient(ratio: Ratio, index: int) -> Node | None:
    first, part = ratio.parts[0], ratio.parts[index]
    if isinstance(first, Formula) and isinstance(part, Formula):
        return Node("div", (first.node, part.node))
    return None


def _union(gold: Value, other: Value) -> bool:
    if isinstance(gold, Union) and isinstance(other, Union):
        together = gold.op == other.op and len(gold.parts) == len(other.parts)
        compare = _matched if gold.op == "or" else _in_order
        return together and compare(gold.parts, other.parts)
    union, value = (gold, other) if isinstance(gold, Union) else (other, gold)
    # intervals listed with commas, or relations joined by "or"
    bare = isinstance(value, Group) and not value.opening
    return union.op == "or" and bare and _matched(union.parts, value.items)


def _builder(gold: Value, other: Value) -> bool:
    if isinstance(gold, SetBuilder) and isinstance(other, SetBuilder):
        return equal(gold.condition, other.condition)
    builder, value = (gold, other) if isinstance(gold, SetBuilder) else (other, gold)
    return equal(builder.condition, value)


_RULES: dict[type, Callable[[Value, Value], bool]] = {
    Special: lambda gold, other: gold == other,
    Matrix: _matrix,
    Ratio: _ratio,
    Based: lambda gold, other: gold == other,
    SetBuilder: _builder,
    Union: _union,
}


def _same_general_solution(gold: Formula, other: Formula) -> bool:
    """``k \\pi`` and ``n \\pi``: the integer of a general solution may have any name."""
    mine, theirs = symbols(gold.node), symbols(other.node)
    if len(mine) != 1 or len(theirs) != 1 or mine == theirs:
        return False
    (old,), (new,) = theirs, mine
    if not {old, new} <= set("jklmnt") or not contains(gold.node, "pi", "degree"):
        return False
    return same_value(gold.node, names.renamed(other, old, new).node)


def _same_family(gold: Group, other: Group) -> bool:
    """``(3x, 5 - x)`` and ``(3t, 5 - t)``: the parameter of a family of tuples may have any name."""
    mine, theirs = (
        frozenset().union(*(symbols(item.node) for item in group.items if isinstance(item, Formula)))
        for group in (gold, other)
    )
    if len(mine) != 1 or len(theirs) != 1 or mine == theirs:
        return False
    (new,), (old,) = mine, theirs
    return _in_order(gold.items, names.renamed(other, old, new).items)


def _expanded(value: Value) -> Value:
    """Every plus-minus written out as a list, groups of one item opened."""
    if isinstance(value, Formula):
        branches = _branches(value.node)
        return value if len(branches) == 1 else Group("", "", tuple(Formula(node) for node in branches))
    if isinstance(value, Relation) and value.signs[-1:] == ("=",) and isinstance(value.sides[-1], Formula):
        branches = _branches(value.sides[-1].node)
        if len(branches) > 1:
            return Group("", "", tuple(
                Relation((*value.sides[:-1], Formula(node)), value.signs, value.texts) for node in branches
            ))  # fmt: skip
        return value
    if not isinstance(value, Group):
        return value
    if value.opening in ("", "{"):
        items: list[Value] = []
        for item in value.items:
            one = _expanded(item)
            items.extend(one.items if isinstance(one, Group) and not one.opening else (one,))
        if len(items) == 1 and not value.opening:
            return items[0]
        return Group(value.opening, value.closing, tuple(items), value.joint)
    choices = [_branches(item.node) if isinstance(item, Formula) else [None] for item in value.items]
    if all(len(choice) == 1 for choice in choices):
        return value
    tuples = [
        Group(value.opening, value.closing, tuple(
            Formula(node) if node is not None else item for node, item in zip(nodes, value.items, strict=True)
        ))
        for nodes in product(*choices)
    ]  # fmt: skip
    return Group("", "", tuple(tuples))


def _branches(node: Node) -> list[Node]:
    """Both signs of a formula with plus-minus signs (all of them together, minus-plus against them)."""
    if not contains(node, "pm", "mp"):
        return [node]
    return [_choose(node, upper) for upper in (True, False)]


def _choose(node: Node, upper: bool) -> Node:
    args = tuple(_choose(arg, upper) for arg in node.args)
    if node.op in ("pm", "mp"):
        return args[0] if (node.op == "pm") == upper else Node("neg", args)
    return Node(node.op, args, node.name, node.value, node.literal)
