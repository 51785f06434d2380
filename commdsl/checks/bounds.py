"""C301: every rank and chunk index a step names exists.

Assumes the schedule was resolved, which held its contracts to the same. Runs before all other laws, which use the
numbers as indices. Does not look at values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from commdsl.checks.locations import Located, statement_key
from commdsl.ir.bounds import Outside, outside
from commdsl.ir.schedules import Schedule, Statement, Step
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic

OUT_OF_BOUNDS = "C301"


def out_of_bounds(located: Located) -> Iterator[Diagnostic]:
    """One message per statement, for the first loop iteration in which it leaves its buffer or the ranks."""
    told: set[tuple[str, int, int]] = set()
    for step in located.schedule.steps:
        if not isinstance(step, Step):
            continue
        for moves in step.moves:
            if statement_key(moves.span) in told:
                continue
            fault = first_outside(moves, located.schedule)
            if fault is not None:
                told.add(statement_key(moves.span))
                who = f"rank {int(moves.actor[fault.row])}{bindings_text(step.bindings)}"
                yield fault.diagnostic(moves.span, who)


def first_outside(moves: Statement, schedule: Schedule) -> Outside | None:
    source, dest = (schedule.buffers[buffer] for buffer in (moves.source_buffer, moves.dest_buffer))
    ranks = schedule.num_ranks
    found = outside(dest, ranks, moves.dest_rank, moves.dest_chunk) or outside(
        source, ranks, moves.source_rank, moves.source_chunk, moves.source_valid
    )
    if found is None and moves.factor is not None and moves.factor_chunk is not None:
        found = outside(schedule.buffers[moves.factor], ranks, moves.actor, moves.factor_chunk)
    return found


def without(schedule: Schedule, spans: set[tuple[str, int, int]]) -> Schedule:
    """The schedule without these statements, for what is wrong with the others by themselves."""
    steps = [
        replace(step, moves=tuple(moves for moves in step.moves if statement_key(moves.span) not in spans))
        if isinstance(step, Step)
        else step
        for step in schedule.steps
    ]
    return replace(schedule, steps=tuple(steps))
