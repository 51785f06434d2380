"""Finds the mistakes of `do` that need no numbers: what is called is there, may be called, and does not call itself.

Assumes the names in sight. Does not look at ranks, extents or parameters' values; `calls` and `parameters` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeAlias

from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.ir.resolve.move_rules import check_operation
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.language.source import Span

Schedules: TypeAlias = Mapping[str, syn.ScheduleDecl]
"""Those of the files by name."""

READ, WRITTEN = (BufferKind.INPUT, BufferKind.INOUT), (BufferKind.OUTPUT,)
"""The kinds of buffers that are given in front of the arrow of a call, and behind it."""

MOST_DEEP = 8
"""Schedules that call each other."""


def check_call(rules: ExpressionRules, do: syn.Do, schedules: Schedules) -> None:
    """C107 and C126, and every name in what is given."""
    if do.group is not None:
        symbol = rules.look_up(do.group, (Kind.GROUP,))
        rules.unless(symbol.kind if symbol else None, (Kind.GROUP,), "a group of ranks", do.group.span)
    check_operation(rules, do.operation)
    for part in (*do.reads, *do.writes):
        _check_part(rules, do, part)
    seen = set[str]()
    for setting in do.settings:
        rules.expect(setting.value, Kind.NUMBER)
        if setting.name.text in seen:
            what = f"`{setting.name.text}` is given twice"
            rules.faults.report("C102", what, setting.name.span, "a second time here")
        seen.add(setting.name.text)
    called = schedules.get(do.schedule.text)
    if called is None:
        help = nearest(do.schedule.text, schedules) or 'bring its file in: `use "collectives/allreduce_ring.comm"`'
        what = f"no schedule is called `{do.schedule.text}`"
        rules.faults.report("C107", what, do.schedule.span, "not known", help=help)
        return
    _check_given(rules.faults, do, called)
    _check_combines(rules.faults, do, called, schedules)
    why = _why_not(called)
    if why is not None:
        reason, span = why
        what = f"`{called.name.text}` cannot be called: it {reason}"
        rules.faults.report(
            "C126", what, do.schedule.span, "only what moves or multiplies is called", secondary=(Label(span),)
        )


def _check_part(rules: ExpressionRules, do: syn.Do, part: syn.Part) -> None:
    """Ranges are the same on every rank and for every other name, so none of these is in their sight."""
    for binder in part.binders:
        with rules.block():
            rules.bind(binder.name, binder.domain)
    with rules.block():
        for name in (*([do.rank] if do.rank else []), *(binder.name for binder in part.binders)):
            rules.declare(name, Kind.NUMBER)
            rules.used.add(name.span)
        if do.rank is None:
            _check_ranks(rules, do, part.ref)
        rules.ref(part.ref)


def _check_ranks(rules: ExpressionRules, do: syn.Do, ref: syn.Ref) -> None:
    """No rank has a name here: one that nothing else resembles may be meant so."""
    names = {name.text: name for name in syn.nodes(ref.indices) if isinstance(name, syn.Name)}
    for text, name in names.items():
        if text not in rules.scope and not get_close_matches(text, rules.scope):
            help = f"name the acting rank: `each {text} do {do.schedule.text}(...)`"
            rules.faults.report("C101", f"`{text}` is not known", name.span, "no such name here", help=help)


def _check_given(faults: Faults, do: syn.Do, called: syn.ScheduleDecl) -> None:
    """Report C107 where no values of parameters make the buffers as many as those given."""
    buffers = [one for one in called.body if isinstance(one, syn.BufferDecl)]
    reads, writes = ([one for one in buffers if one.kind in kinds] for kinds in (READ, WRITTEN))
    if not (_fit(reads, len(do.reads)) and _fit(writes, len(do.writes))):
        report_given(faults, do, [_form(one) for one in reads], [_form(one) for one in writes])


def _fit(taken: Sequence[syn.BufferDecl], given: int) -> bool:
    """Whether so many can be given: a buffer under a condition may be absent."""
    return sum(one.where is None for one in taken) <= given <= len(taken)


def _form(decl: syn.BufferDecl) -> str:
    return decl.name.text + ("" if decl.where is None else f" where {decl.where.span.text}")


def report_given(faults: Faults, do: syn.Do, reads: Sequence[str], writes: Sequence[str], note: str = "") -> None:
    """Report C107: a call gives other buffers than those that the called schedule takes, by their names; `note`: the
    values of parameters with which it takes these.
    """
    name = do.schedule.text
    form = ", ".join(reads) + (f" -> {', '.join(writes)}" if writes else "")
    label = f"{len(do.reads)} to read, {len(do.writes)} to write{note}"
    faults.report("C107", f"`{name}` takes other buffers", do.span, label, help=f"give it `{name}({form})`")


def _check_combines(faults: Faults, do: syn.Do, called: syn.ScheduleDecl, schedules: Schedules) -> None:
    """C129: it says how, and nothing there is combined as the one who calls says."""
    if do.operation is not None and not _leaves_open(called, schedules, MOST_DEEP):
        what = f"`{called.name.text}` combines nothing that it leaves open"
        faults.report("C129", what, do.operation.span, "changes nothing", help="leave `by` out")


def _leaves_open(called: syn.ScheduleDecl, schedules: Schedules, depth: int) -> bool:
    """Whether it, or what it calls, reduces without a word on how."""
    moves = (one for one in syn.walk(called.body) if isinstance(one, syn.Each))
    inside = (one for each in moves for one in syn.walk(each.body) if isinstance(one, syn.Move))
    if any(one.kind is MoveKind.REDUCE and one.factor is None and one.operation is None for one in inside):
        return True
    calls = (schedules.get(one.schedule.text) for one in _calls(called) if one.operation is None and depth)
    return any(_leaves_open(one, schedules, depth - 1) for one in calls if one is not None)


def _why_not(called: syn.ScheduleDecl) -> tuple[str, Span] | None:
    """Return what a schedule does that no other can do in its place, and where: first what it computes."""
    for statement in sorted(syn.walk(called.body), key=lambda one: isinstance(one, syn.BufferDecl)):
        match statement:
            case syn.Yield() | syn.Visit():
                return "yields", statement.span
            case syn.Compute(function):
                return f"computes `{function.text}`", statement.span
            case syn.BufferDecl(element=element, like=like, lengths=lengths) if element or like or lengths:
                return "says types or lengths", statement.span
            case _:
                pass
    return None


def called_by(decl: syn.ScheduleDecl, schedules: Schedules, faults: Faults) -> tuple[syn.ScheduleDecl, ...]:
    """Every schedule that one calls, or that those call; C125 and C011 where that has no end, or a far one."""
    heights = dict[str, int]()

    def look(one: syn.ScheduleDecl, path: tuple[str, ...]) -> None:
        for do in _calls(one):
            name = do.schedule.text
            if name in path:
                way = " -> ".join((*path[path.index(name) :], name))
                faults.report("C125", f"`{name}` calls itself", do.schedule.span, way)
            elif name in schedules and name not in heights and len(path) <= MOST_DEEP:
                look(schedules[name], (*path, name))
        heights[one.name.text] = 1 + max((heights.get(do.schedule.text, 0) for do in _calls(one)), default=0)
        if max(heights[one.name.text], len(path)) > MOST_DEEP:
            label = f"more than {MOST_DEEP} schedules that call each other"
            faults.report("C011", "blocks or expressions nest too deeply", one.name.span, label)

    look(decl, (decl.name.text,))
    return tuple(schedules[name] for name in heights if name != decl.name.text)


def _calls(decl: syn.ScheduleDecl) -> Iterator[syn.Do]:
    return (statement for statement in syn.walk(decl.body) if isinstance(statement, syn.Do))
