"""Turns what a grammar rule is made of into a class of `syntax`, one function per rule.

Assumes what the grammar accepts, children in the order of the rule, None for an optional part left out. Does not
judge meaning; the one thing it refuses is a number that no 64-bit integer holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from commdsl.language import kinds, syntax
from commdsl.language.diagnostics import CommError, Diagnostic, Label
from commdsl.language.parser import build_calls, build_contracts, build_dispatches, build_machines
from commdsl.language.source import Span

MAX_INT = 2**63 - 1
MAX_DIGITS = len(str(MAX_INT))

# What is on the parser's stack has no type; the grammar says what each rule's children are, and types begin below.
Made: TypeAlias = Any
Children: TypeAlias = Sequence[Made]


# --- tokens -----------------------------------------------------------------------------------------------------------


def _int(span: Span, text: str) -> syntax.Int:
    if len(text) >= MAX_DIGITS:
        _check_size(span, text)
    return syntax.Int(int(text), span=span)


def _check_size(span: Span, text: str) -> None:
    digits = text.partition(".")[0].lstrip("0")
    if len(digits) > MAX_DIGITS or int(digits or "0") > MAX_INT:
        label = Label(span, f"at most {MAX_INT}")
        help = "numbers are 64-bit integers"
        raise CommError((Diagnostic("C014", "a number does not fit in 64 bits", label, help=help),))


TOKENS: Mapping[str, Callable[[Span, str], Made]] = {
    "NAME": lambda span, text: syntax.Name(text, span=span),
    "INT": _int,
    "ELEMENT": lambda span, text: syntax.Name(text, span=span),
}


# --- rules ------------------------------------------------------------------------------------------------------------


def _tuple(span: Span, parts: Children) -> Made:
    return tuple(parts)


def _block(span: Span, parts: Children) -> Made:
    """The statements; a part that is two of them, one after the other."""
    return tuple(one for part in parts for one in (part if isinstance(part, tuple) else (part,)))


def _only(span: Span, parts: Children) -> Made:
    return parts[0]


def _use(span: Span, parts: Children) -> syntax.Use:
    return syntax.Use(parts[0][1:-1], span=span)


def _schedule_decl(span: Span, parts: Children) -> syntax.ScheduleDecl:
    name, params, ranks, where, body = parts
    return syntax.ScheduleDecl(name, params or (), ranks, where, body, span=span)


def _param(span: Span, parts: Children) -> syntax.Param:
    return syntax.Param(*parts, span=span)


def _buffer_decl(span: Span, parts: Children) -> syntax.BufferDecl:
    kind, name, dims, lengths, element, like, where = parts
    return syntax.BufferDecl(kinds.BufferKind(kind), name, dims or (), lengths, element, like, where, span=span)


def _lengths(span: Span, parts: Children) -> syntax.Lengths:
    table, *axes = parts
    return syntax.Lengths(table, tuple(kinds.Axis(axis) for axis in axes if axis is not None), span=span)


def _dim(span: Span, parts: Children) -> syntax.Dim:
    size, blocks = parts
    return syntax.Dim(size, blocks is not None, span=span)


def _cycles_decl(span: Span, parts: Children) -> syntax.CyclesDecl:
    return syntax.CyclesDecl(*parts, span=span)


def _cycle_literal(span: Span, parts: Children) -> syntax.CycleLiteral:
    is_open, *cycles = parts
    return syntax.CycleLiteral(is_open is not None, tuple(cycles), span=span)


def _cycle(span: Span, parts: Children) -> syntax.ListedCycle:
    *ranks, binders = parts
    return syntax.ListedCycle(tuple(ranks), binders or (), span=span)


def _cycle_generator(span: Span, parts: Children) -> syntax.CycleGenerator:
    name, arguments = parts
    return syntax.CycleGenerator(name, arguments or (), span=span)


def _let(span: Span, parts: Children) -> syntax.Let:
    return syntax.Let(*parts, span=span)


def _for(span: Span, parts: Children) -> syntax.For:
    return syntax.For(*parts, span=span)


def _pipeline(span: Span, parts: Children) -> syntax.Pipeline:
    return syntax.Pipeline(*parts, span=span)


def _if(span: Span, parts: Children) -> syntax.If:
    *arms, otherwise = parts
    return syntax.If(tuple(arms), otherwise or (), span=span)


def _arm(span: Span, parts: Children) -> syntax.Arm:
    return syntax.Arm(*parts, span=span)


def _each(span: Span, parts: Children) -> syntax.Each:
    return syntax.Each(*parts, span=span)


def _move(span: Span, parts: Children) -> syntax.Move:
    kind, source, dest, cast = parts
    return syntax.Move(kinds.MoveKind(kind), source, dest, None, cast, span=span)


def _reduction(span: Span, parts: Children) -> syntax.Move:
    kind, source, dest, operation, cast = parts
    return syntax.Move(kinds.MoveKind(kind), source, dest, None, cast, operation, span=span)


def _cast(span: Span, parts: Children) -> syntax.Cast:
    return syntax.Cast(*parts, span=span)


def _matmul(span: Span, parts: Children) -> syntax.Move:
    word, _, rows, factor, dest, epilogue = parts  # the first are the words `compute matmul`, or `reduce matmul`
    source = syntax.Source_(rows, None, None, span=rows.span)
    kind = kinds.MoveKind.REDUCE if word == kinds.MoveKind.REDUCE.value else kinds.MoveKind.MATMUL
    return syntax.Move(kind, source, dest, factor, epilogue=epilogue or (), span=span)


def _ending(span: Span, parts: Children) -> syntax.Ending:
    return syntax.Ending(*parts, span=span)


def _source(span: Span, parts: Children) -> syntax.Source_:
    return syntax.Source_(*parts, span=span)


def _ref(span: Span, parts: Children) -> syntax.Ref:
    buffer, indices, place = parts
    return syntax.Ref(buffer, indices or (), place, span=span)


def _all(span: Span, parts: Children) -> syntax.All:
    return syntax.All(span=span)


def _binder(span: Span, parts: Children) -> syntax.Binder:
    return syntax.Binder(*parts, span=span)


def _range(span: Span, parts: Children) -> syntax.Range:
    return syntax.Range(*parts, span=span)


def _yield(span: Span, parts: Children) -> syntax.Yield:
    return syntax.Yield(parts[0], span=span)


def _visit(span: Span, parts: Children) -> syntax.Visit:
    return syntax.Visit(*parts, span=span)


def _compute(span: Span, parts: Children) -> syntax.Compute:
    _, function, passing, tiles, role = parts  # the first is the word `compute`
    return syntax.Compute(function, passing, tiles or (), role, span=span)


def _passing(span: Span, parts: Children) -> syntax.Passing:
    reads, writes = parts
    return syntax.Passing(reads, writes or (), span=span)


def _tiles(span: Span, parts: Children) -> Made:
    return tuple(part for part in parts if part is not None)


def _role_name(span: Span, parts: Children) -> syntax.Name:
    (name,) = parts
    return syntax.Name(name, span=span) if isinstance(name, str) else name  # `compute`, a keyword elsewhere


def _on(span: Span, parts: Children) -> syntax.On:
    return syntax.On(parts[0], span=span)


def _tune(span: Span, parts: Children) -> syntax.Tune:
    return syntax.Tune(tuple(parts), span=span)


def _tune_entry(span: Span, parts: Children) -> syntax.TuneEntry:
    key, value = parts
    if isinstance(key, str):  # `sms`, a keyword elsewhere
        key = syntax.Name(key, span=Span(span.source, span.start, span.start + len(key)))
    return syntax.TuneEntry(key, value, span=span)


_RATE_PREFIX = {"": 1e0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZE_PREFIX = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TIME_DIVISOR = {"": 1e0, "m": 1e3, "u": 1e6, "n": 1e9, "p": 1e12}


def _quantity(span: Span, parts: Children) -> syntax.Quantity:
    number, unit = parts
    written = number if isinstance(number, str) else number.span.text
    _check_size(span, written)
    if unit.endswith("B/s"):
        value = float(written) * _RATE_PREFIX[unit.removesuffix("B/s")]
    elif unit.endswith("B"):
        value = float(written) * _SIZE_PREFIX[unit.removesuffix("B")]
    else:
        # One rounding: 0.7 us is the float nearest to 7e-7.
        value = float(written) / _TIME_DIVISOR[unit.removesuffix("s")]
    assert math.isfinite(value)
    return syntax.Quantity(value, unit, written, span=span)


def _unary(span: Span, parts: Children) -> syntax.Unary:
    return syntax.Unary(*parts, span=span)


def _binary(span: Span, parts: Children) -> syntax.Binary:
    left, operator, right = parts
    return syntax.Binary(operator, left, right, span=span)


def _call(span: Span, parts: Children) -> syntax.Call:
    name, arguments = parts
    return syntax.Call(name, arguments or (), span=span)


def _method(span: Span, parts: Children) -> syntax.Method:
    owner, name, arguments = parts
    return syntax.Method(owner, name.text, arguments or (), span=span)


def _index(span: Span, parts: Children) -> syntax.Index:
    return syntax.Index(*parts, span=span)


def _table(span: Span, parts: Children) -> syntax.Table:
    return syntax.Table(*parts, span=span)


def _choice(span: Span, parts: Children) -> syntax.Choice:
    return syntax.Choice(*parts, span=span)


def _fn_decl(span: Span, parts: Children) -> syntax.FnDecl:
    return syntax.FnDecl(*parts, span=span)


RULES: Mapping[str, Callable[[Span, Children], Made]] = {
    "use": _use,
    "schedule_decl": _schedule_decl,
    "params": _tuple,
    "param": _param,
    "block": _block,
    "buffer_decl": _buffer_decl,
    "lengths": _lengths,
    "dims": _tuple,
    "dim": _dim,
    "mapping": _tuple,
    "clauses": _tuple,
    "cycles_decl": _cycles_decl,
    "cycle_literal": _cycle_literal,
    "cycle": _cycle,
    "cycle_generator": _cycle_generator,
    "let": _let,
    "for": _for,
    "pipeline": _pipeline,
    "if": _if,
    "arm": _arm,
    "each": _each,
    "move": _move,
    "reduction": _reduction,
    "combining": _only,
    "cast": _cast,
    "one_source": lambda span, parts: syntax.Source_(parts[0], span=span),
    "source": _source,
    "ref": _ref,
    "all": _all,
    "binders": _tuple,
    "binder": _binder,
    "range": _range,
    "yield": _yield,
    "visit": _visit,
    "compute": _compute,
    "matmul": _matmul,
    "epilogue": _tuple,
    "ending": _ending,
    "passing": _passing,
    "handed": _passing,
    "tiles": _tiles,
    "role_name": _role_name,
    "on": _on,
    "tune": _tune,
    "tune_entry": _tune_entry,
    "quantity": _quantity,
    "rate": _quantity,
    "time": _quantity,
    "parenthesised": _only,
    "unary": _unary,
    "binary": _binary,
    "call": _call,
    "method": _method,
    "index": _index,
    "table": _table,
    "choice": _choice,
    "fn_decl": _fn_decl,
    "arguments": _tuple,
    **build_calls.RULES,
    **build_contracts.RULES,
    **build_dispatches.RULES,
    **build_machines.RULES,
}
