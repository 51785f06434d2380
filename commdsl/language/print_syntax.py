"""Turns the lines of schedules, and the heads of their blocks, into their text.

Assumes a node the parser made. Does not know indentation or comments; `format` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, assert_never

from commdsl.language import syntax
from commdsl.language.kinds import MoveKind
from commdsl.language.print_expressions import (
    arguments,
    arithmetic,
    binders,
    cast,
    choice,
    clause_term,
    combining,
    domain,
    epilogue,
    expr,
    for_binders,
    quantity,
    ref,
    rounding,
    source,
    where,
)

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
        case syntax.BufferDecl(kind, name, dims, lengths, element, like, condition):
            extents = ", ".join(expr(dim.size) + (" blocks" if dim.blocks else "") for dim in dims)
            unit = f" of {lengths.table.text}[{', '.join(axis.value for axis in lengths.axes)}]" if lengths else ""
            unit += (f" {element.text}" if element else "") + (f" like {like.text}" if like else "")
            return f"{kind.value} {name.text}{f'[{extents}]' if dims else ''}{unit}{where(condition)}"
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
            return f"reduce matmul({source(origin)}, {ref(factor)}) -> {ref(dest)}{epilogue(node.epilogue)}"
        case syntax.Move(_, origin, dest, syntax.Ref() as factor):
            return f"compute matmul({source(origin)}, {ref(factor)} -> {ref(dest)}){epilogue(node.epilogue)}"
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
        case syntax.Clause(dests, of):
            return f"{', '.join(map(ref, dests))} == {clause_term(of)}"
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
