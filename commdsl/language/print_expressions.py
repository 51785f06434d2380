"""Turns expressions, references and what follows them in a line into text.

Assumes a node the parser made. Does not know what they stand in; `print_syntax` and those beside it do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from commdsl.language import syntax

# Loosest first, as in the grammar. Comparisons do not chain, so neither side may be one.
_LEVELS = (
    ("or",),
    ("and",),
    ("not",),
    ("==", "!=", "<", "<=", ">", ">="),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("unary -",),
    ("**",),
)
_LEVEL = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators}
_COMPARISON = _LEVEL["=="]
_NEGATION = _LEVEL["unary -"]
_POWER = _LEVEL["**"]
_ATOM = len(_LEVELS)

GAP = "   "  # between entries that share a line


# --- expressions ------------------------------------------------------------------------------------------------------


def expr(node: syntax.Expr) -> str:
    """An expression. Parentheses around an operand stay where they were written; others stand only where needed."""
    match node:
        case syntax.Int(value):
            return str(value)
        case syntax.Name(text):
            return text
        case syntax.Unary("not", operand):
            return f"not {_operand(operand, node, _LEVEL['not'])}"
        case syntax.Unary(operator, operand):
            return operator + _operand(operand, node, _NEGATION)
        case syntax.Binary(operator, left, right):
            left_least, right_least = _least(operator)
            return f"{_operand(left, node, left_least)} {operator} {_operand(right, node, right_least)}"
        case syntax.Call(function, given):
            return f"{function.text}({arguments(given)})"
        case syntax.Method(owner, method, given):
            return f"{expr(owner)}.{method}({arguments(given)})"
        case syntax.Table(entries):
            return f"[{arguments(entries)}]"
        case syntax.Index(of, index):
            return f"{expr(of)}[{choice(index)}]"
        case syntax.Choice():
            return f"({choice(node)})"
        case _:
            assert_never(node)


def choice(node: syntax.Expr) -> str:
    """An expression where a choice needs no parentheses."""
    match node:
        case syntax.Choice(then, condition, otherwise):
            return f"{expr(then)} if {expr(condition)} else {choice(otherwise)}"
        case _:
            return expr(node)


def arguments(nodes: Iterable[syntax.Expr]) -> str:
    return ", ".join(choice(node) for node in nodes)


def _least(operator: str) -> tuple[int, int]:
    """How tightly the operands of a binary operator must bind to stand without parentheses."""
    level = _LEVEL[operator]
    if level == _COMPARISON:
        return level + 1, level + 1
    if level == _POWER:  # to the right: 2 ** -3 ** 2 is 2 ** (-(3 ** 2))
        return _ATOM, _NEGATION
    return level, level + 1


def _operand(node: syntax.Expr, parent: syntax.Expr, least: int) -> str:
    match node:
        case syntax.Unary(operator, _):
            level = _LEVEL["not"] if operator == "not" else _NEGATION
        case syntax.Binary(operator, _, _):
            level = _LEVEL[operator]
        case _:
            return expr(node)
    return f"({expr(node)})" if level < least or _grouped(node, parent) else expr(node)


def _grouped(node: syntax.Expr, parent: syntax.Node) -> bool:
    """Whether the writer put the operand in parentheses; spans leave out those around the node itself."""
    text = node.span.source.text
    before = text[parent.span.start : node.span.start].rstrip()
    after = text[node.span.end : parent.span.end].lstrip()
    return before.endswith("(") and after.startswith(")")


def arithmetic(node: syntax.Expr) -> str:
    """An expression where the grammar takes no comparison without parentheses: ranks, ends of ranges, counts."""
    match node:
        case syntax.Binary(operator, _, _) if _LEVEL[operator] <= _COMPARISON:
            return f"({expr(node)})"
        case syntax.Unary("not", _):
            return f"({expr(node)})"
        case _:
            return expr(node)


def interval(node: syntax.Range) -> str:
    return f"{arithmetic(node.first)} ..< {arithmetic(node.last)}"


def domain(node: syntax.Range | syntax.Name) -> str:
    return node.text if isinstance(node, syntax.Name) else interval(node)


def quantity(node: syntax.Quantity) -> str:
    return f"{node.written} {node.unit}"


# --- references -------------------------------------------------------------------------------------------------------


def ref(node: syntax.Ref) -> str:
    indices = f"[{arguments(node.indices)}]" if node.indices else ""
    return f"{node.buffer.text}{indices}{_at(node.place, node)}"


def _at(place: syntax.Expr | syntax.All | None, node: syntax.Node) -> str:
    """The rank of a reference or a term, to follow it."""
    match place:
        case None:
            return ""
        case syntax.All():
            return " @ all"
        case syntax.Unary() | syntax.Binary() if _grouped(place, node):
            return f" @ ({expr(place)})"
        case _:
            return f" @ {arithmetic(place)}"


def clause_term(node: syntax.Term) -> str:
    """A term as all that a clause says: what it ends with needs no parentheses."""
    if isinstance(node, syntax.Finished) and node.place is None:
        return term(node.of) + epilogue(node.epilogue)
    return term(node)


def term(node: syntax.Term) -> str:
    match node:
        case syntax.Ref():
            return ref(node)
        case syntax.Application(function, operands, result, place):
            chosen = "" if result is None else f"[{result.value}]"
            return f"{function.text}({', '.join(map(term, operands))}){chosen}{_at(place, node)}"
        case syntax.Combined(operation, parts, place):
            return f"{operation}({', '.join(map(term, parts))}){_at(place, node)}"
        case syntax.Listed(of, bound, condition):
            return f"{term(of)} for {binder(bound)}" + ("" if condition is None else f" if {expr(condition)}")
        case syntax.Finished(of, endings, place):
            return f"({term(of)}{epilogue(endings)}){_at(place, node)}"
        case _:
            assert_never(node)


def epilogue(nodes: Iterable[syntax.Ending]) -> str:
    """` with bias b, gelu`; nothing where there are no endings."""
    said = ", ".join(f"{one.name.text}{f' {ref(one.ref)}' if one.ref else ''}{where(one.where)}" for one in nodes)
    return f" with {said}" if said else ""


def binder(node: syntax.Binder) -> str:
    return node.name.text if node.domain is None else f"{node.name.text} in {domain(node.domain)}"


def binders(nodes: Iterable[syntax.Binder]) -> str:
    return ", ".join(binder(node) for node in nodes)


def for_binders(bound: tuple[syntax.Binder, ...]) -> str:
    return f" for {binders(bound)}" if bound else ""


def source(node: syntax.Source_) -> str:
    text = ref(node.ref)
    if node.binder is not None:
        text += f" for {binder(node.binder)}"
    if node.condition is not None:
        text += f" if {expr(node.condition)}"
    return text


def cast(node: syntax.Cast | None) -> str:
    if node is None:
        return ""
    stretch = "" if node.stretch is None else f" by {arithmetic(node.stretch)}"
    return f" as {node.element.text}{stretch}"


def combining(operation: syntax.Name | None) -> str:
    return "" if operation is None else f" by {operation.text}"


def rounding(node: syntax.Rounding | None) -> str:
    return "" if node is None else f" rounded({node.element.text}, {arithmetic(node.times)})"


def where(condition: syntax.Expr | None) -> str:
    return "" if condition is None else f" where {expr(condition)}"
