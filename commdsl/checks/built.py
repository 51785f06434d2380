"""C590, C592, C594, C595: no kernel runs this yet.

Assumes what `resolve` found legal. Does not judge: what the language has and its laws accept is still to be built.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.checks.locations import Located, LocatedStep
from commdsl.ir.schedules import Schedule, Step, Task, Yield
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import BufferKind
from commdsl.program.memory import Transport


def unbuilt_schedule(schedule: Schedule) -> Iterator[Diagnostic]:
    """One message, for the first `yield` with a body in a schedule that has tasks, too."""
    if not any(isinstance(step, Task) for step in schedule.steps):
        return
    for step in schedule.steps:
        match step:
            case Yield(name=str(function)):
                label, help = (
                    f"`{function}` is called between launches",
                    "a task runs within one: leave one of them out",
                )
                what = "a yield with a body beside a task is not built yet"
                yield Diagnostic("C590", what, Label(step.span, label), help=help)
                return
            case Step() | Yield() | Task():
                pass


def unbuilt_products(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yield C592, one message: a product of what another one made, or a sum with what an activation made."""
    if not schedule.has_products:
        return
    located = Located(schedule)
    made, activated = np.zeros(located.size, np.bool_), np.zeros(located.size, np.bool_)
    for step in located.steps:
        results = []
        for moves in step.moves if isinstance(step, LocatedStep) else ():
            is_product, ends = moves.given is not None, moves.moves.epilogue.activation is not None
            chained = moves.reads[made[moves.reads]] if is_product else moves.dest[:0]
            added = moves.dest[activated[moves.dest]] if moves.moves.accumulate else moves.dest[:0]
            for places, what in (
                (chained, "what another product made"),
                (added, "added to, and an activation made it"),
            ):
                if len(places):
                    label, help = f"{located.name(int(places[0]))} is {what}", "call another schedule with this result"
                    yield Diagnostic("C592", "no kernel runs this product", Label(moves.moves.span, label), help=help)
                    return
            of = made[moves.sources].any(axis=1), activated[moves.sources].any(axis=1)
            results.append((moves.dest, is_product | of[0], (is_product & ends) | of[1]))
        for dest, product, activation in results:
            made[dest], activated[dest] = product, activation


def unbuilt_lengths(schedule: Schedule) -> Iterator[Diagnostic]:
    """C595, one message: blocks of lengths of their own are moved and reduced, in one launch, and no more."""
    lengths = schedule.lengths
    if lengths is None:
        return
    first = next(one for one in schedule.buffers if one.lengths == lengths)
    what, help, of_pairs = "", "", len(lengths.axes) == 2
    if any(not isinstance(step, Step) for step in schedule.steps) or schedule.has_products or schedule.rowwise:
        what, help = "beside what is computed", "leave out the lengths, or what computes"
    elif schedule.cast is not None:
        what, help = "in another element type", "leave out `as`"
    elif schedule.tuning.protocol == "engine" or (of_pairs and schedule.tuning.protocol in ("packet", "line")):
        what, help = f"by `protocol {schedule.tuning.protocol}`", "tune another protocol, as `bulk`"
    elif of_pairs and not _all_meet(schedule):
        what, help = "unless all ranks meet", "send to every rank what is for it, however long that may be"
    elif any(one.lengths is None and one.kind is not BufferKind.SCRATCH for one in schedule.buffers):
        what, help = "beside equal ones", "look up the lengths of every buffer"
    if what:
        label = f"`{lengths}` is known when a call is made"
        yield Diagnostic(
            "C595", f"no kernel moves blocks of unequal length {what}", Label(first.span, label), help=help
        )


def _all_meet(schedule: Schedule) -> bool:
    """Whether every rank moves something of every other one's: from what comes it learns how many rounds there are."""
    met = np.eye(schedule.num_ranks, dtype=np.bool_)
    for moves in schedule.statements:
        met[moves.dest_rank[:, None], moves.source_rank] |= True if moves.source_valid is None else moves.source_valid
    return bool(met.all())


def unbuilt_casts(schedule: Schedule, transport: Transport) -> Iterator[Diagnostic]:
    """C594, one message: what travels in another element type does so by `bulk`, within a node, in one launch."""
    first = next((one for one in schedule.statements if one.cast), None)
    if first is None:
        return
    others = [step for step in schedule.steps if not isinstance(step, Step)]
    protocol = schedule.tuning.protocol or "bulk"
    what, help = "", ""
    if others or schedule.has_products or schedule.rowwise:
        what, help = "beside what is computed", "leave out `as`, or what computes"
    elif protocol != "bulk":
        what, help = f"by `protocol {protocol}`", "tune `protocol bulk`, or leave it out"
    elif transport is Transport.NVSHMEM:
        what, help = "to ranks that NVSHMEM alone reaches", "leave out `as`"
    if what:
        yield Diagnostic("C594", f"no kernel rounds {what}", Label(first.span, "rounded on its way"), help=help)
