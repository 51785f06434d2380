"""Turns a schedule into the value of every chunk that the caller gets back: what its Plan must compute.

Assumes a schedule that passed the checks. Does not know cells, flags or protocols, and shares nothing with `lower`:
every step reads everything it reads, then writes everything it writes, all rows of a statement at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.functions import ELEMENTWISE
from commdsl.ir.schedules import Schedule, Statement, Step, Task, Yield
from commdsl.language.kinds import GIVEN, RETURNED
from commdsl.program.memory import Rights, Tensor
from commdsl.program.proof.values import (
    UNWRITTEN,
    Book,
    Column,
    Mask,
    Values,
    combined,
    computed,
    given,
    rounded,
)

State: TypeAlias = tuple[list[Values], list[Mask]]
"""What each buffer holds, and which of its chunks are what a cast left."""

Results: TypeAlias = dict[Tensor, Values]
"""By tensor that is written: (num_ranks, chunks), UNWRITTEN where nothing was written."""


def tensors_given(schedule: Schedule) -> dict[Tensor, int]:
    """The user memory that is read, and of which buffer it is."""
    buffers = enumerate(schedule.buffers)
    return {
        Tensor(b.name, Rights.READ, b.blocks, b.cut, lengths=b.lengths): number
        for number, b in buffers
        if b.kind in GIVEN
    }


def tensors_made(schedule: Schedule) -> set[Tensor]:
    """The memory that tasks write: a rank's own, for one call."""
    written = {number for step in schedule.steps if isinstance(step, Task) for number in step.writes}
    buffers = (schedule.buffers[number] for number in written)
    return {Tensor(b.name, Rights.OWN, b.blocks, b.cut) for b in buffers}


def meant(schedule: Schedule, book: Book | None = None) -> Results:
    """Runs the schedule on values."""
    shown: list[Values] = []
    held = start(schedule)
    for _, step in states(schedule, held, book):
        if step.name is None:
            shown.append(held[step.buffer].reshape(schedule.num_ranks, -1).copy())
    return returned(schedule, held) | _stacked(schedule, shown)


def start(schedule: Schedule) -> list[Values]:
    """What each buffer holds before the first step."""
    ranks = schedule.num_ranks
    return [
        given(schedule, number) if buffer.kind in GIVEN else np.full(ranks * buffer.num_chunks, UNWRITTEN)
        for number, buffer in enumerate(schedule.buffers)
    ]


def states(schedule: Schedule, held: list[Values], book: Book | None = None) -> Iterator[tuple[int, Yield]]:
    """Runs all steps on `held`, which changes; stops at each yield, before what the caller computes is there."""
    is_cast = [np.zeros(len(values), np.bool_) for values in held]
    for number, step in enumerate(schedule.steps):
        match step:
            case Step():
                made = [_made(schedule, (held, is_cast), moves, book) for moves in step.moves if len(moves.actor)]
                for buffer, places, values, left in made:
                    held[buffer][places], is_cast[buffer][places] = values, left
            case Yield():
                yield number, step
                for buffer in step.writes:
                    held[buffer] = computed(schedule, number, buffer)
                    is_cast[buffer][:] = False
            case Task():
                columns: list[Column] = [(held[number], None) for number in step.reads]
                operation = ELEMENTWISE[step.function].operation
                values = combined(columns, operation)
                if book is not None:
                    book.note(values, tuple(columns), function=operation)
                for number in step.writes:
                    held[number] = values.copy()
                    is_cast[number][:] = False
            case _:
                assert_never(step)


def returned(schedule: Schedule, held: list[Values]) -> Results:
    """What the caller gets back but yields."""
    return {
        Tensor(b.name, Rights.WRITE, b.blocks, b.cut, lengths=b.lengths): held[number].reshape(schedule.num_ranks, -1)
        for number, b in enumerate(schedule.buffers)
        if b.kind in RETURNED
    }


def _stacked(schedule: Schedule, shown: list[Values]) -> Results:
    """All yields are one tensor."""
    buffers = [schedule.buffers[step.buffer] for step in schedule.steps if isinstance(step, Yield)]
    if not buffers:
        return {}
    blocks = sum(buffer.blocks for buffer in buffers)
    return {Tensor("yields", Rights.WRITE, blocks, buffers[0].cut, is_yield=True): np.concatenate(shown, axis=1)}


def _made(
    schedule: Schedule, state: State, moves: Statement, book: Book | None
) -> tuple[int, NDArray[np.int64], Values, Mask]:
    """What a statement writes, where, and whether it is what a cast left, from what there is before its step."""
    dest = _places(schedule, moves.dest_buffer, moves.dest_rank, moves.dest_chunk)
    columns, left = _operands(schedule, state, moves, dest, book), np.zeros(len(dest), np.bool_)
    if moves.copies:
        source = _places(schedule, moves.source_buffer, moves.source_rank[:, 0], moves.source_chunk[:, 0])
        left = state[1][moves.source_buffer].take(source) | (moves.cast is not None)
    if book is None:
        return moves.dest_buffer, dest, combined(columns, moves.operation), left
    noted = tuple(columns)
    made = combined(noted, moves.operation)
    book.note(made, noted, function=moves.operation)
    return moves.dest_buffer, dest, made, left


def _operands(
    schedule: Schedule, state: State, moves: Statement, dest: NDArray[np.int64], book: Book | None
) -> Iterator[Column]:
    """One column at a time: a list over all ranks is as wide as there are ranks."""
    held, is_cast = state
    if moves.accumulate:
        yield held[moves.dest_buffer].take(dest), None
    for column in range(moves.source_rank.shape[1]):
        rank, chunk = moves.source_rank[:, column], moves.source_chunk[:, column]
        valid = None if moves.source_valid is None else moves.source_valid[:, column]
        if valid is not None:  # what a condition leaves out may lie anywhere
            rank, chunk = np.where(valid, rank, 0), np.where(valid, chunk, 0)
        places = _places(schedule, moves.source_buffer, rank, chunk)
        values = held[moves.source_buffer].take(places)
        if moves.cast is not None:
            values = rounded(values, ~is_cast[moves.source_buffer].take(places), moves.cast, book)
        yield values, valid


def _places(schedule: Schedule, buffer: int, rank: NDArray[np.int32], chunk: NDArray[np.int32]) -> NDArray[np.int64]:
    return rank * np.int64(schedule.buffers[buffer].num_chunks) + chunk
