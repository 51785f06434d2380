"""C591: what no kernel computes beside what moves.

Assumes what the laws of schedules found right, C414 among them. Does not judge a task that stands alone in its kind: a
Plan has one role that computes, which waits for nothing and writes memory of its own rank (`program.tile_tasks`).
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.ir.schedules import Schedule, Task, Yield
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.program.memory import Transport


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
    protocol = schedule.tuning.protocol or "bulk"
    if transport is not Transport.PEER:
        return "it runs beside moves through peer pointers, not NVSHMEM", "leave COMMDSL_TRANSPORT as it is"
    if protocol != "bulk":
        return f"it runs beside moves of protocol bulk, not {protocol}", "write `protocol bulk` in `tune`, or nothing"
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
