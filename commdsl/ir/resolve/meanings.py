"""Turns parsed files into what each name of the first one stands for, and what it is worth: for editors.

Assumes nothing of the files: where there are faults, what the rules saw up to them is told all the same. Does not
report: the walks are those that find mistakes, and what they find is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TypeAlias

from commdsl.ir.resolve.call_rules import Schedules
from commdsl.ir.resolve.evaluate import Cycles, Functions, Group, Table, Value
from commdsl.ir.resolve.expressions import Looked
from commdsl.ir.resolve.faults import Faults, Poisoned, Spent
from commdsl.ir.resolve.names import ScheduleRules
from commdsl.ir.resolve.plan_rules import PlanRules
from commdsl.ir.resolve.resolver import Resolver
from commdsl.ir.schedules import Buffer
from commdsl.language import syntax as syn
from commdsl.language.source import Span

Meanings: TypeAlias = Mapping[Span, Span]
"""Of the place of a name, the place where what it stands for is declared."""

Scoped: TypeAlias = syn.ScheduleDecl | syn.PlanDecl


def meanings(files: tuple[syn.File, ...], functions: Functions, schedules: Schedules) -> Meanings:
    """Of every name that the first file uses. What no file declares, such as `gpus`, has none."""
    roles = _roles(files)
    elsewhere = {name: function.span for name, function in functions.items()}
    found = dict[Span, Span]()
    for item in files[0].items:
        if isinstance(item, Scoped):
            for one in looked(item, functions, schedules, tuple(roles)):
                if one.symbol is not None and one.symbol.span is not None:
                    found[one.name.span] = one.symbol.span
        else:
            parts = item.entries if isinstance(item, syn.TopologyDecl) else (item,)
            axes = [axis.name for part in parts if isinstance(part, syn.AxesEntry) for axis in part.axes]
            for part in parts:
                found |= _by_text(part, elsewhere, axes)
        for node in syn.nodes(item):
            match node:
                case syn.Do(schedule=name) if name.text in schedules:
                    found[name.span] = schedules[name.text].name.span
                case syn.On(role=name) | syn.Compute(role=syn.Name() as name) if name.text in roles:
                    found[name.span] = roles[name.text]
                case _:
                    pass
    return {use: declared for use, declared in found.items() if use != declared}


def looked(decl: Scoped, functions: Functions, schedules: Schedules, roles: tuple[str, ...]) -> tuple[Looked, ...]:
    """Every name of a declaration that is looked up, with what is in sight there."""
    rules: ScheduleRules | PlanRules
    if isinstance(decl, syn.ScheduleDecl):
        rules = ScheduleRules(Faults(), functions, schedules, roles)
        rules.schedule(decl)
    else:
        rules = PlanRules(Faults(), functions)
        rules.plan(decl)
    return tuple(rules.looked)


def _roles(files: tuple[syn.File, ...]) -> dict[str, Span]:
    decls = (item for file in files for item in file.items if isinstance(item, syn.RolesDecl))
    return {role.name.text: role.name.span for decl in decls for role in decl.roles}


def _by_text(item: syn.Node, elsewhere: Mapping[str, Span], axes: Sequence[syn.Name]) -> Iterator[tuple[Span, Span]]:
    """Where a name means one thing throughout: that of its binder, else an axis, else the first of its text; a function
    called.
    """
    inside = tuple(syn.nodes(item))
    names = tuple(node for node in inside if isinstance(node, syn.Name))
    called = {node.function.span for node in inside if isinstance(node, syn.Call)}
    declared = dict[str, Span]()
    for name in chain((node.name for node in inside if isinstance(node, syn.Binder)), axes, names):
        if name.span not in called:
            declared.setdefault(name.text, name.span)
    for name in names:
        where = elsewhere if name.span in called else declared
        if name.text in where:
            yield name.span, where[name.text]


# --- what they are worth ----------------------------------------------------------------------------------------------


def values(resolver: Resolver) -> dict[Span, str]:
    """In words, what a schedule's own declarations are for its number of ranks, by the places of their names."""
    with suppress(Poisoned, Spent):
        resolver.declarations({}, ())
    decl = resolver.decl
    found = dict[Span, str]()
    for name in _declared(decl):
        value: Value | Buffer | None = resolver.buffers.get(name.text, resolver.scope.get(name.text))
        words = _words(value)
        if words:
            found[name.span] = words
    return found


def _declared(decl: syn.ScheduleDecl) -> Iterable[syn.Name]:
    yield decl.ranks
    yield from (param.name for param in decl.params)
    for statement in decl.body:
        if isinstance(statement, syn.Let | syn.BufferDecl | syn.CyclesDecl | syn.GroupDecl):
            yield statement.name


def _words(value: Value | Buffer | None) -> str:
    match value:
        case int():
            return str(value)
        case Table(entries):
            return f"[{', '.join(map(str, entries))}]"
        case Cycles(declared):
            count, length = declared.orders.shape
            return f"{count} cycles of {length} ranks"
        case Group(ranks):
            count, length = ranks.shape
            return f"{count} groups of {length} ranks"
        case Buffer():
            return f"{value.blocks} blocks of {value.cut} chunks" if value.blocks > 1 else f"{value.cut} chunks"
        case _:
            return ""
