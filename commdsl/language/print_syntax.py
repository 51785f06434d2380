"""Turns expressions, references and the heads of statements into their one-line text.

Assumes a node the parser made. Does not know lines, indentation or comments; `format` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, assert_never

from commdsl.language import syntax
from commdsl.language.kinds import MoveKind

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
    match node.place:
        case None:
            return node.buffer.text + indices
        case syntax.All():
            return f"{node.buffer.text}{indices} @ all"
        case syntax.Unary() | syntax.Binary() as place if _grouped(place, node):
            return f"{node.buffer.text}{indices} @ ({expr(place)})"
        case place:
            return f"{node.buffer.text}{indices} @ {arithmetic(place)}"


def binder(node: syntax.Binder) -> str:
    return node.name.text if node.domain is None else f"{node.name.text} in {domain(node.domain)}"


def binders(nodes: Iterable[syntax.Binder]) -> str:
    return ", ".join(binder(node) for node in nodes)


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


# --- statements and entries of one line -------------------------------------------------------------------------------

Line: TypeAlias = (
    syntax.BufferDecl
    | syntax.NamedContract
    | syntax.RotationContract
    | syntax.CyclesDecl
    | syntax.GroupDecl
    | syntax.Let
    | syntax.Do
    | syntax.Move
    | syntax.Yield
    | syntax.Visit
    | syntax.Compute
    | syntax.On
    | syntax.TuneEntry
    | syntax.Clause
    | syntax.Use
    | syntax.FnDecl
)


def line(node: Line) -> str:
    """The text of a node that has no block."""
    match node:
        case syntax.BufferDecl(kind, name, dims, lengths, element, like):
            extents = ", ".join(expr(dim.size) + (" blocks" if dim.blocks else "") for dim in dims)
            unit = f" of {lengths.table.text}[{', '.join(axis.value for axis in lengths.axes)}]" if lengths else ""
            unit += (f" {element.text}" if element else "") + (f" like {like.text}" if like else "")
            return f"{kind.value} {name.text}{f'[{extents}]' if dims else ''}{unit}"
        case syntax.NamedContract():
            return _named_contract(node)
        case syntax.RotationContract():
            return _rotation(node)
        case syntax.CyclesDecl(name, value):
            return f"cycles {name.text} = {_cycles(value)}"
        case syntax.Let(name, value):
            return f"let {name.text} = {expr(value)}"
        case syntax.GroupDecl(name, runs, stride, axis):
            words = (f" in runs of {expr(runs)}" if runs else "") + (f" by stride {expr(stride)}" if stride else "")
            words += f" along {axis.text}" if axis else ""
            return f"group {name.text} = ranks{words}"
        case syntax.Do():
            return _do(node)
        case syntax.Move(MoveKind.REDUCE, origin, dest, syntax.Ref() as factor):
            return f"reduce matmul({source(origin)}, {ref(factor)}) -> {ref(dest)}"
        case syntax.Move(_, origin, dest, syntax.Ref() as factor):
            return f"compute matmul({source(origin)}, {ref(factor)} -> {ref(dest)})"
        case syntax.Move(kind, origin, dest):
            return f"{kind.value} {source(origin)} -> {ref(dest)}{combining(node.operation)}{cast(node.cast)}"
        case syntax.Yield(buffer):
            return f"yield {buffer.text}"
        case syntax.Visit(function, passed):
            return f"yield {function.text}({passing(passed)})"
        case syntax.Compute(function, passed, tiles, role):
            cut = f" tiles {' x '.join(str(tile.value) for tile in tiles)}" if tiles else ""
            return f"compute {function.text}({passing(passed)}){cut}{f' on {role.text}' if role else ''}"
        case syntax.On(role):
            return f"on {role.text}"
        case syntax.TuneEntry(key, value):
            return f"{key.text} {quantity(value) if isinstance(value, syntax.Quantity) else arithmetic(value)}"
        case syntax.Clause(dest, origin, operation):
            return f"{ref(dest)} == {source(origin) if operation is None else f'{operation}({source(origin)})'}"
        case syntax.Use(path):
            return f'use "{path}"'
        case syntax.FnDecl(name, params, body):
            return f"fn {name.text}({', '.join(param.text for param in params)}) = {choice(body)}"
        case _:
            assert_never(node)


def _do(node: syntax.Do) -> str:
    acting = f"each {node.rank.text} " if node.rank else ""
    reads, writes = (", ".join(map(_part, parts)) for parts in (node.reads, node.writes))
    over = f" over {node.group.text}" if node.group else ""
    settings = ", ".join(f"{one.name.text} = {expr(one.value)}" for one in node.settings)
    given = f"{reads} -> {writes}" if writes else reads
    ending = combining(node.operation) + (f" with {settings}" if settings else "")
    return f"{acting}do {node.schedule.text}({given}){over}{ending}"


def _part(node: syntax.Part) -> str:
    return f"({ref(node.ref)}{for_binders(node.binders)})" if node.binders else ref(node.ref)


def passing(node: syntax.Passing) -> str:
    reads, writes = (", ".join(name.text for name in names) for names in (node.reads, node.writes))
    return f"{reads} -> {writes}" if writes else reads


def for_binders(bound: tuple[syntax.Binder, ...]) -> str:
    return f" for {binders(bound)}" if bound else ""


def _named_contract(node: syntax.NamedContract) -> str:
    inside = node.source.text
    if node.dest is not None:
        inside += f" -> {node.dest.text}"
    if node.root is not None:
        inside += f", {expr(node.root)}"
    text = f"ensure {node.name.text}({inside})"
    if node.mapping is not None:
        text += f" {node.mapping[0].text} -> {expr(node.mapping[1])}"
    return text + combining(node.operation) + rounding(node.rounding)


def _rotation(node: syntax.RotationContract) -> str:
    pairs = (one.source.text + (f" -> {one.dest.text}" if one.dest else "") for one in node.buffers)
    text = f"ensure rotation({', '.join(pairs)})"
    if node.back:
        text += f" back {', '.join(name.text for name in node.back)}"
    if node.condition is not None:
        text += f" each {binders(node.condition.binders)}{where(node.condition.where)}"
    return text


def _cycles(node: syntax.CycleLiteral | syntax.CycleGenerator) -> str:
    match node:
        case syntax.CycleGenerator(name, given):
            return f"{name.text}({arguments(given)})" if given else name.text
        case syntax.CycleLiteral(is_open, cycles):
            return ("open " if is_open else "") + " ".join(map(cycle, cycles))
        case _:
            assert_never(node)


def cycle(node: syntax.ListedCycle) -> str:
    plain = (syntax.Int, syntax.Name)
    ranks = " ".join(expr(rank) if isinstance(rank, plain) else f"({expr(rank)})" for rank in node.ranks)
    return f"({ranks}{for_binders(node.binders)})"


# --- the heads of blocks ----------------------------------------------------------------------------------------------

Block: TypeAlias = (
    syntax.ScheduleDecl | syntax.GeneralContract | syntax.For | syntax.Pipeline | syntax.Arm | syntax.Each | syntax.Tune
)


def head(node: Block) -> str:
    """What stands before the opening brace."""
    match node:
        case syntax.ScheduleDecl():
            return f"schedule {node.name.text}{params(node.params)} for {node.ranks.text} ranks{where(node.where)}"
        case syntax.GeneralContract(bound, condition):
            return f"ensure each {binders(bound)}{where(condition)}{rounding(node.rounding)}"
        case syntax.For(name, values, _):
            return f"for {name.text} in {domain(values)}"
        case syntax.Pipeline(name, values, _):
            return f"pipeline {name.text} in {domain(values)}"
        case syntax.Arm(condition, _):
            return f"if {expr(condition)}"
        case syntax.Each(bound, condition, _):
            return f"each {binders(bound)}{where(condition)}"
        case syntax.Tune():
            return "tune"
        case _:
            assert_never(node)


def params(nodes: Iterable[syntax.Param]) -> str:
    """`(G = gpus, K)`, nothing where there are none."""
    written = ", ".join(map(_param, nodes))
    return f"({written})" if written else ""


def _param(param: syntax.Param) -> str:
    return param.name.text if param.default is None else f"{param.name.text} = {expr(param.default)}"
