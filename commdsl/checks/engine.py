"""C510: what the copy engine carries out does not combine.

Where a yield calls a function, what moves is several launches: those that combine take SMs, and the engine the rest, if
there is any. Assumes nothing. Does not judge other settings of `tune`: `resolve.tuning` does, where they are written.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.checks.locations import Located, statement_key
from commdsl.ir.classes import classes, joining
from commdsl.ir.products import added
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import MoveKind


def combining_engine(located: Located) -> Iterator[Diagnostic]:
    """One message per statement."""
    schedule = located.schedule
    if schedule.tuning.protocol != "engine" or (schedule.has_bodies and _has_launches_that_only_move(schedule)):
        return
    told: set[tuple[str, int, int]] = set()
    within = added(schedule)
    for _, _, moves in located.statements():
        key = statement_key(moves.moves.span)
        if moves.moves.kind is MoveKind.REDUCE and key not in told and key[1:] not in within:
            told.add(key)
            yield Diagnostic(
                "C510",
                "the copy engine moves, it does not combine",
                Label(moves.moves.span, "this combines"),
                help=f"tune another protocol for `{schedule.name}`, as `bulk`",
            )


def _has_launches_that_only_move(schedule: Schedule) -> bool:
    """Buffers that no move joins are launched apart."""
    class_of = classes(schedule)
    moved = {class_of[moves.dest_buffer]: False for moves in joining(schedule)}
    for moves in joining(schedule):
        moved[class_of[moves.dest_buffer]] |= moves.kind is MoveKind.REDUCE
    return not all(moved.values())
