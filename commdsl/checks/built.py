"""C590, C591, C594, C595: no kernel runs this yet.

Assumes what `resolve` found legal, and C414. Does not judge: what the language has and its laws accept is still to be
built. A Plan has one role that computes, which waits for nothing and writes memory that is the rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.ir.schedules import Schedule, Step, Task, Yield
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.machine.carriers import ANOTHER, DEFAULT, names
from commdsl.program.memory import Transport


def unbuilt_schedule(schedule: Schedule) -> Iterator[Diagnostic]:
    """One message, for the first `yield` with a body in a schedule that has tasks, too."""
    called = [step for step in schedule.steps if isinstance(step, Yield) and step.name is not None]
    if called and any(isinstance(step, Task) for step in schedule.steps):
        label = Label(called[0].span, f"`{called[0].name}` is called between launches")
        help = "a task runs within one: leave one of them out"
        yield Diagnostic("C590", "a yield with a body beside a task is not built yet", label, help=help)


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
    elif len(lengths.axes) > schedule.tuning.carrier.length_axes:
        what, help = f"by `protocol {schedule.tuning.carrier.name}`", ANOTHER
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
    """Report C594 once: rounding in flight takes a carrier that rounds, ranks of one node, and one launch."""
    first = next((one for one in schedule.statements if one.cast), None)
    if first is None:
        return
    others = [step for step in schedule.steps if not isinstance(step, Step)]
    carrier = schedule.tuning.carrier
    what, help = "", ""
    if others or schedule.has_products or schedule.rowwise:
        what, help = "beside what is computed", "leave out `as`, or what computes"
    elif not carrier.rounds:
        what, help = f"by `protocol {carrier.name}`", f"tune `protocol {DEFAULT.name}`, or leave it out"
    elif transport is Transport.NVSHMEM:
        what, help = "to ranks that NVSHMEM alone reaches", "leave out `as`"
    if what:
        yield Diagnostic("C594", f"no kernel rounds {what}", Label(first.span, "rounded on its way"), help=help)


def tasks_without_kernel(schedule: Schedule, transport: Transport) -> Iterator[Diagnostic]:
    """One message, for the first task that cannot be run."""
    tasks = [step for step in schedule.steps if isinstance(step, Task)]
    for number, task in enumerate(tasks):
        why = _of_machine(schedule, transport) or _of_task(schedule, task, tasks[:number])
        if why is not None:
            what, help = why
            yield Diagnostic("C591", "no kernel runs this task", Label(task.span, what), help=help)
            return


def _of_machine(schedule: Schedule, transport: Transport) -> tuple[str, str] | None:
    carrier, able = schedule.tuning.carrier, " or ".join(names(lambda one: one.waits_for_tasks))
    if transport is not Transport.PEER:
        return "it runs beside moves through peer pointers, not NVSHMEM", "leave COMMDSL_TRANSPORT as it is"
    if not carrier.waits_for_tasks:
        help = f"write `protocol {able}` in `tune`, or nothing"
        return f"it runs beside moves of protocol {able}, not {carrier.name}", help
    if not any(moves.kind is MoveKind.REDUCE for moves in schedule.statements):
        return "nothing here reduces, and a kernel has its element type from a reduction", "reduce what it makes"
    return None


def _of_task(schedule: Schedule, task: Task, before: list[Task]) -> tuple[str, str] | None:
    buffers = schedule.buffers
    moved = {moves.dest_buffer for moves in schedule.statements}
    moved |= {buffer for step in schedule.steps if isinstance(step, Yield) for buffer in step.writes}
    if task.tiles:
        return "its tiles are what a lane moves in a round", "leave `tiles` out, and write `tile` in `tune`"
    if before and before[0].role != task.role:
        return f"another task runs on `{before[0].role}`", f"write `on {before[0].role}`"
    for buffer in task.reads:
        if buffer in moved:
            return f"it reads `{buffers[buffer].name}`, which is sent here", "compute from what the caller gives"
    for buffer in task.writes:
        name = buffers[buffer].name
        if buffers[buffer].kind is not BufferKind.SCRATCH:
            return f"it writes `{name}`, which the caller sees", "write a scratch buffer, and copy it"
        if buffer in moved or any(buffer in other.writes for other in before):
            return f"it writes `{name}`, which is written elsewhere too", "write a scratch buffer of its own"
    return None
