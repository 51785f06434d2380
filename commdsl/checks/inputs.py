"""C303: nothing writes an `input` buffer.

Assumes nothing. Does not guard `inout` buffers, which are there to be written.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.checks.locations import Located, statement_key
from commdsl.ir.schedules import Buffer
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import BufferKind
from commdsl.language.source import Span


def writes_to_input(located: Located) -> Iterator[Diagnostic]:
    """One message per statement."""
    told: set[tuple[str, int, int]] = set()
    for task in located.tasks():
        for number in task.step.writes:
            buffer = located.schedule.buffers[number]
            key = statement_key(task.step.span)
            if buffer.kind is BufferKind.INPUT and key not in told:
                told.add(key)
                yield _diagnostic(buffer, task.step.span, f"writes all of `{buffer.name}`")
    for _, step, moves in located.statements():
        buffer = located.schedule.buffers[moves.moves.dest_buffer]
        key = statement_key(moves.moves.span)
        if buffer.kind is BufferKind.INPUT and key not in told:
            told.add(key)
            where = f"rank {int(moves.moves.actor[0])}{bindings_text(step.step.bindings)}"
            yield _diagnostic(buffer, moves.moves.span, f"{where}: writes {located.name(int(moves.dest[0]))}")


def _diagnostic(buffer: Buffer, span: Span, what: str) -> Diagnostic:
    return Diagnostic(
        "C303",
        f"a write to the input `{buffer.name}`",
        Label(span, what),
        (Label(buffer.span, "the caller's, read only"),),
        help=f"write to an `output` or a `scratch` buffer, or declare `inout {buffer.name}`",
    )
