"""C301: every rank and chunk index a schedule names exists.

Assumes the schedule was resolved. Runs before all other laws, which use the numbers as indices. Does not look at
values.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, bindings_text, statement_key
from commdsl.ir.schedules import Buffer, Statement, Step
from commdsl.language.diagnostics import Diagnostic, Label


def out_of_bounds(located: Located) -> Iterator[Diagnostic]:
    """One message per statement and side, for the first loop iteration in which it leaves its buffer or the ranks."""
    schedule = located.schedule
    told: set[tuple[str, int, int]] = set()
    for step in schedule.steps:
        if not isinstance(step, Step):
            continue
        for moves in step.moves:
            if statement_key(moves.span) in told:
                continue
            fault = _first_fault(moves, schedule.buffers, schedule.num_ranks)
            if fault is not None:
                told.add(statement_key(moves.span))
                yield _diagnostic(moves, step, fault)


def _first_fault(moves: Statement, buffers: tuple[Buffer, ...], num_ranks: int) -> tuple[int, str, str] | None:
    """The row, what is wrong, and what there is; None when all is in bounds."""
    source, dest = buffers[moves.source_buffer], buffers[moves.dest_buffer]
    sides = (
        (moves.dest_chunk[:, None], dest.num_chunks, dest, None),
        (moves.source_chunk, source.num_chunks, source, moves.source_valid),
        (moves.dest_rank[:, None], num_ranks, None, None),
        (moves.source_rank, num_ranks, None, moves.source_valid),
    )
    for index, limit, buffer, valid in sides:
        found = _first_outside(index, limit, valid)
        if found is not None:
            row, value = found
            if buffer is None:
                return row, f"rank {value}", f"the ranks are 0 ..< {num_ranks}"
            return row, _chunk_text(buffer, value), f"it is declared `{_extents_text(buffer)}`"
    return None


def _chunk_text(buffer: Buffer, chunk: int) -> str:
    """Of several indices the front end keeps only that one is outside, as a negative chunk."""
    return f"a chunk of `{buffer.name}`" if len(buffer.dims) > 1 and chunk < 0 else f"`{buffer.name}[{chunk}]`"


def _extents_text(buffer: Buffer) -> str:
    return buffer.name + (f"[{', '.join(map(str, buffer.dims))}]" if buffer.dims else "")


def _first_outside(index: NDArray[np.int32], limit: int, valid: NDArray[np.bool_] | None) -> tuple[int, int] | None:
    if index.size == 0 or (int(index.min()) >= 0 and int(index.max()) < limit):
        return None
    outside = (index < 0) | (index >= limit)
    if valid is not None:
        outside &= valid
    where = np.argwhere(outside)
    return None if len(where) == 0 else (int(where[0, 0]), int(index[tuple(where[0])]))


def _diagnostic(moves: Statement, step: Step, fault: tuple[int, str, str]) -> Diagnostic:
    row, what, there_is = fault
    where = f"rank {int(moves.actor[row])}{bindings_text(step.bindings)}"
    return Diagnostic(
        "C301",
        "an index out of range",
        Label(moves.span, f"{where}: {what} does not exist"),
        notes=(there_is,),
        help="wrap the index with `%`, or leave the case out with `where`",
    )
