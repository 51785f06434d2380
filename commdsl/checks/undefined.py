"""C304: no chunk is read that nothing has written.

Assumes indices in bounds. `input` and `inout` chunks hold the caller's data at the start, on every rank; `output` and
`scratch` start undefined. Of a buffer that rotates a yield hands over what is new, so it may be there in part, and on
some ranks only. Does not ask whether the data is the right data; `conservation` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import numpy as np

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask, Locations, statement_key
from commdsl.ir.schedules import Task, Yield
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.language.source import Span


def undefined_reads(located: Located) -> Iterator[Diagnostic]:
    """One message per buffer: what reads its undefined chunks later suffers from the same missing write."""
    defined = located.given()
    told: set[int] = set()
    empty: set[tuple[str, int, int]] = set()
    for step in located.steps:
        if isinstance(step, LocatedTask):
            visiting = located.schedule.visiting(step.step)
            for buffer in step.step.reads:
                places = located.whole(buffer)
                missing = places[~defined[places]]
                if len(missing) and buffer not in told and not (buffer in visiting and defined[places].any()):
                    told.add(buffer)
                    who = _in_loop(step.step.bindings)
                    yield _diagnostic(located, int(missing[0]), step.step.span, who, _verb(step.step))
            defined[step.writes] = True
            continue
        for moves in step.moves:
            if moves.sources.shape[1] != 1 and statement_key(moves.moves.span) not in empty:
                bare = np.flatnonzero((moves.sources == located.nowhere).all(axis=1))
                if len(bare):
                    empty.add(statement_key(moves.moves.span))
                    yield _empty(located, step, moves, int(bare[0]))
            fault = _first_undefined(moves, defined)
            if fault is not None and located.split(fault[0])[1] not in told:
                told.add(located.split(fault[0])[1])
                yield _read(located, step, moves, *fault)
        for moves in step.moves:
            defined[moves.dest] = True


def _first_undefined(moves: LocatedMoves, defined: np.ndarray) -> tuple[int, int, str] | None:
    """The undefined location, the row that reads it, and in which way."""
    readings: list[tuple[Locations, str]] = [(moves.reads, "reads")]
    if moves.moves.accumulate:
        readings.append((moves.dest[:, None], "reduces into"))
    for locations, verb in readings:
        good = defined[locations]
        if not good.all():
            row, column = np.argwhere(~good)[0]
            return int(locations[row, column]), int(row), verb
    return None


def _empty(located: Located, step: LocatedStep, moves: LocatedMoves, row: int) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    return Diagnostic(
        "C304",
        "a reduction of no sources",
        Label(moves.moves.span, f"{who}: nothing to write to {located.name(int(moves.dest[row]))}"),
        help="the condition of the list leaves out every source: leave the rank out with `where`",
    )


def _read(located: Located, step: LocatedStep, moves: LocatedMoves, location: int, row: int, verb: str) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    return _diagnostic(located, location, moves.moves.span, who, verb)


def _verb(step: Yield | Task) -> str:
    match step:
        case Yield(name=None):
            return "yields"
        case Yield(name=function) | Task(function):
            return f"`{function}` reads"
        case _:
            assert_never(step)


def _in_loop(bindings: tuple[tuple[str, int], ...]) -> str:
    return bindings_text(bindings).removeprefix(", ") or "here"


def _diagnostic(located: Located, location: int, span: Span, who: str, verb: str) -> Diagnostic:
    buffer = located.schedule.buffers[located.split(location)[1]]
    if verb == "reduces into":
        mend = f"write {located.chunk_name(location)} first, or reduce a list of sources, which needs no old content"
    elif buffer.kind is BufferKind.OUTPUT:
        mend = "an `output` starts undefined: write it first, or declare it `inout`"
    else:
        mend = f"{MoveKind.COPY.value} or {MoveKind.PUT.value} something into it in an earlier step"
    return Diagnostic(
        "C304",
        f"{located.chunk_name(location)} is read before anything is written to it",
        Label(span, f"{who}: {verb} {located.name(location)}"),
        (Label(buffer.span, "starts undefined"),),
        help=mend,
    )
