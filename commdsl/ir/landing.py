"""Turns a schedule with yields into the buffers that peers may put straight into: nothing else holds what travels.

Assumes a resolved schedule. Does not say which chunks of them are put there in which launch; `lower` does.

They are what visits, and is gone after the call, or is handed on: a result lies in memory that its caller keeps. Of a
schedule that multiplies they are such results of a peer's, too, which are copied there when all is over: copies within
a GPU are made by its SMs, and beside products few are left. What is combined on its way is combined from memory of its
own, so no buffer of sums is one of them.
"""

from __future__ import annotations

from commdsl.ir.classes import joining
from commdsl.ir.products import added
from commdsl.ir.schedules import Schedule, Yield
from commdsl.language.kinds import BufferKind, MoveKind


def landing(schedule: Schedule) -> frozenset[str]:
    """Their names, whether or not the schedule is tuned so; none where it cannot stop at yields."""
    if not schedule.stops:
        return frozenset()
    stops = (step for step in schedule.steps if isinstance(step, Yield))
    handed_over = {number for step in stops for number in (*step.reads, *step.writes)}
    handed_over |= {number for product in schedule.products for number in product}
    moves, within = list(joining(schedule)), added(schedule)
    handed_over |= {one.source_buffer for one in moves if one.span in within}
    put = {one.dest_buffer for one in moves if (one.source_rank[:, 0] != one.dest_rank).any()}
    combines = (one for one in moves if one.kind is MoveKind.REDUCE and one.span not in within)
    combined = {one.dest_buffer for one in combines}
    copied = {one.source_buffer for one in moves}
    passing = handed_over | copied
    returned = put - passing if schedule.has_products else set[int]()
    of = {BufferKind.SCRATCH: passing, BufferKind.INOUT: passing, BufferKind.OUTPUT: returned}
    lands = put - combined
    return frozenset(
        buffer.name for number, buffer in enumerate(schedule.buffers) if number in lands & of.get(buffer.kind, set())
    )
