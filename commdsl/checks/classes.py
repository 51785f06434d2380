"""C320 to C322: what a buffer is made of is known, and the same for all that moves join.

Assumes indices in bounds. Does not know what the caller gives: whether that is of the types declared, and of equal
blocks where moves join it, is asked of every call.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.checks.locations import Located
from commdsl.ir.classes import Joined, Unit, joining, sums, units
from commdsl.ir.schedules import Buffer, Schedule, Yield
from commdsl.language.diagnostics import Diagnostic, Label


def mixed_types(located: Located) -> Iterator[Diagnostic]:
    """C320, one message for two types that the same moves join."""
    schedule = located.schedule
    joined, apart = Joined(len(schedule.buffers)), sums(schedule)
    typed = {number: buffer for number, buffer in enumerate(schedule.buffers) if buffer.element is not None}
    for moves in (one for one in joining(schedule) if (one.source_buffer, one.dest_buffer) not in apart):
        ends = joined.first(moves.source_buffer), joined.first(moves.dest_buffer)
        one, other = (typed.get(end) for end in ends)
        joined.join(*ends)
        if one is not None and other is not None and one.element != other.element:
            yield Diagnostic(
                "C320",
                f"a move from {one.element} to {other.element}",
                Label(moves.span, "bytes arrive as they are"),
                (_declared(one), _declared(other)),
                help="declare one type; the function that a `yield` calls can write the other from it",
            )
        known = one or other
        if known is not None:
            typed[joined.first(ends[0])] = known


def _declared(buffer: Buffer) -> Label:
    return Label(buffer.span, f"`{buffer.name}` is {buffer.element}")


def own_units(located: Located) -> Iterator[Diagnostic]:
    """C321, for the first buffer that has a type or a length of its own where nothing can."""
    schedule = located.schedule
    if schedule.has_own_units:
        return
    for buffer in schedule.buffers:
        if buffer.element is not None or buffer.like is not None:
            what = f"`{buffer.name}` has {'a type' if buffer.element else 'a length'} of its own"
            label = "here all tensors are as the first"
            help = "leave it out, or let a `yield` call a function: `yield attend(x -> y)`"
            yield Diagnostic("C321", what, Label(buffer.span, label), help=help)
            return


def unknown_units(located: Located) -> Iterator[Diagnostic]:
    """C322, for every buffer that a yield or a product names and that is as long as nobody says."""
    schedule = located.schedule
    known = units(schedule)
    for number in _handed(schedule) if schedule.stops else ():  # beside a task none is built yet
        buffer = schedule.buffers[number]
        if known[buffer.name] is None:
            what = f"nothing says how long the blocks of `{buffer.name}` are"
            label = "no move joins it to what the caller gives, which may differ in length"
            if schedule.has_products:
                label = "no size fits all products: a side of it would be twice as long as itself"
            help = f"name one that is as long: `{buffer.name} like {_first_given(known)}`"
            yield Diagnostic("C322", what, Label(buffer.span, label), help=help)


def _handed(schedule: Schedule) -> list[int]:
    yields = [step for step in schedule.steps if isinstance(step, Yield)]
    handed = {buffer for step in yields for buffer in (*step.reads, *step.writes)}
    return sorted(handed | {buffer for product in schedule.products for buffer in product})


def _first_given(known: dict[str, Unit | None]) -> str:
    sizes = (unit.size for unit in known.values() if unit is not None)
    return next(sizes, "x")
