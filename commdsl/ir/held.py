"""Turns a schedule into what each yield hands over: of every chunk, from which rank's which chunk it came.

Assumes a schedule that passed the checks up to where its indices are right. Does not ask whether that is what a
contract wants; `checks.rotations` does.

A yield hands over what is *fresh*: what was written, or given, since the last yield that handed its buffer over. What
came before is there still, maybe, and visits nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints, Schedule, Statement, Step, Yield
from commdsl.language.kinds import GIVEN
from commdsl.language.records import dataclass

Origins: TypeAlias = NDArray[np.int64]
"""Of chunks the place that the caller gave their content in: rank * chunks of a rank + first of the buffer + chunk, or
NOTHING."""

NOTHING = -1
"""A chunk that nobody wrote, that a function made, or that combines several."""


@dataclass(frozen=True, eq=False)
class Held:
    """What one yield hands over. `origin[b]`: int32 (ranks, chunks, 2), the rank and the chunk in the buffer there that
    the content of each chunk of `reads[b]` was given in; -1, -1 where it is not fresh or not a given chunk.
    """

    name: str | None  # of the caller's function
    reads: tuple[str, ...]
    origin: tuple[Ints, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Handed:
    """As Held, before it is cut into rank and chunk: arrays (ranks, chunks) for each buffer that the yield reads."""

    index: int  # among the steps
    step: Yield
    origins: tuple[Origins, ...]
    fresh: tuple[NDArray[np.bool_], ...]


def held(schedule: Schedule) -> tuple[Held, ...]:
    """One for each yield, in order."""
    first = first_chunks(schedule)
    names = [buffer.name for buffer in schedule.buffers]
    found = []
    for one in handed(schedule):
        tables: list[Ints] = []
        for fresh, origins in zip(one.fresh, one.origins, strict=True):
            table = _split(np.where(fresh, origins, NOTHING), first)
            # What rotates together has one table.
            tables.append(next((same for same in tables if np.array_equal(same, table)), table))
        reads, writes = (tuple(names[buffer] for buffer in buffers) for buffers in (one.step.reads, one.step.writes))
        found.append(Held(one.step.name, reads, tuple(tables), writes))
    return tuple(found)


def _split(origins: Origins, first: Origins) -> Ints:
    rank, place = np.divmod(origins, first[-1])
    chunk = place - first[np.searchsorted(first, place, side="right") - 1]
    split = np.stack((rank, chunk), axis=-1).astype(np.int32)
    split[origins == NOTHING] = -1
    return split


def first_chunks(schedule: Schedule) -> Origins:
    """Where each buffer begins among the chunks of a rank, and behind the last their number."""
    counts = [buffer.num_chunks for buffer in schedule.buffers]
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def handed(schedule: Schedule) -> Iterator[Handed]:
    """Runs the schedule on origins, all ranks at once; stops at each yield."""
    first = first_chunks(schedule)
    shape = (schedule.num_ranks, int(first[-1]))
    fresh = np.zeros(shape, np.bool_)
    for number, declared in enumerate(schedule.buffers):
        if declared.kind in GIVEN:
            fresh[:, first[number] : first[number + 1]] = True
    origins = np.where(fresh, np.arange(fresh.size).reshape(shape), NOTHING)
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Step):
            _move(step, first, origins.reshape(-1), fresh.reshape(-1))
            continue
        if isinstance(step, Yield):
            parts = [slice(first[buffer], first[buffer + 1]) for buffer in step.reads]
            now = tuple(origins[:, part].copy() for part in parts)
            yield Handed(index, step, now, tuple(fresh[:, part].copy() for part in parts))
            for part in parts:
                fresh[:, part] = False
        for buffer in step.writes:
            origins[:, first[buffer] : first[buffer + 1]] = NOTHING
            fresh[:, first[buffer] : first[buffer + 1]] = True


def _move(step: Step, first: Origins, origins: Origins, fresh: NDArray[np.bool_]) -> None:
    """All moves of a step; reads before writes. `origins` and `fresh` are flat views."""
    made = [
        (place(first, moves.dest_buffer, moves.dest_rank, moves.dest_chunk), _origins(moves, first, origins))
        for moves in step.moves
        if len(moves.actor)
    ]
    for places, new in made:
        origins[places] = new
        fresh[places] = True


def _origins(moves: Statement, first: Origins, origins: Origins) -> Origins:
    """Of what each row writes: that of its source, where it has one alone."""
    if moves.accumulate:
        return np.full(len(moves.actor), NOTHING)
    places = place(first, moves.source_buffer, moves.source_rank, moves.source_chunk)
    if places.shape[1] == 1 and moves.source_valid is None:
        return origins[places[:, 0]]
    valid = np.ones(places.shape, np.bool_) if moves.source_valid is None else moves.source_valid
    chosen = places[np.arange(len(places)), valid.argmax(axis=1)]
    return np.where(valid.sum(axis=1) == 1, origins[chosen], NOTHING)


def place(first: Origins, buffer: int, rank: NDArray[np.integer], chunk: NDArray[np.integer]) -> Origins:
    """As in Origins."""
    places: Origins = rank.astype(np.int64) * first[-1] + (first[buffer] + chunk)
    return places
