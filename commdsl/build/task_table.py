"""Turns the tasks of one launch, in order, into the tables that the kernel has of them.

Assumes the structures of matmul_worker.cuh. Does not know sizes, nor which of its pieces a block takes (`matmul`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from commdsl.ir.functions import GATED

NOWHERE = 0xFFFF
_PLACE = struct.Struct("<2H")
_WAIT = struct.Struct("<2I")
_SOURCE = struct.Struct("<6H4x")
_TASK = struct.Struct("<I2H4H6H2h3H10x")
_ACTIVATIONS = {None: 0, "gelu": 1, GATED: 2}


class Place(NamedTuple):
    """One of the matrices that a map of the launch describes."""

    map: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class WordWait:
    """A wait for a word of the call: until it counts all tiles of the task `stored_by`, or, where that is None, until
    it is 1.
    """

    word: int
    stored_by: int | None = None


@dataclass(frozen=True, slots=True)
class SourceRow:
    """Rows and the factor that multiplies them, and the words awaited before either is read."""

    rows: Place
    factor: Place
    waits: tuple[WordWait, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task of a launch: the sum of products of its sources, to `result`; None: to its `pushes` alone.

    `added` is added once `waits` are over. Stored tiles are counted in the word `stored`; None: nobody waits for them.
    The result also goes to each place of `pushes`, when the word `ready` is there. `bias`: a bias of the launch, and
    the row of it. `copy`: where the rows of the first source are copied to.
    """

    sources: tuple[SourceRow, ...]
    result: Place | None
    added: tuple[Place, ...] = ()
    waits: tuple[WordWait, ...] = ()
    stored: int | None = None
    pushes: tuple[Place, ...] = ()
    ready: int | None = None
    copy: Place | None = None
    bias: tuple[int, int] | None = None
    activation: str | None = None


def places(row: TaskRow) -> tuple[Place, ...]:
    """Return all matrices that a task reads and writes."""
    operands = (place for source in row.sources for place in (source.rows, source.factor))
    own = (place for place in (row.result, row.copy) if place is not None)
    return (*operands, *own, *row.added, *row.pushes)


def maps_of(rows: Sequence[TaskRow]) -> int:
    """Return the number of maps that tasks use."""
    return 1 + max(place.map for row in rows for place in places(row))


def biases_of(rows: Sequence[TaskRow]) -> int:
    """Return the number of biases that tasks use, at least one."""
    return 1 + max((row.bias[0] for row in rows if row.bias), default=0)


class Sizes(NamedTuple):
    """Sizes of a task: the columns of its result, the stages of the depth of a source, and the level of its stored
    tiles.
    """

    columns: int
    steps: int
    tiles: int


class TaskTables(NamedTuple):
    """The bytes of the tables of tasks, of their sources, of places, and of waits."""

    tasks: bytes
    sources: bytes
    places: bytes
    waits: bytes


def packed_tasks(rows: Sequence[TaskRow], sizes: Sequence[Sizes]) -> TaskTables:
    """Return the tables of a launch. Equal waits are one range of their table."""
    ranges = dict[tuple[WordWait, ...], int]()
    every = (source.waits for row in rows for source in row.sources)
    for waits in chain(every, (row.waits for row in rows)):
        if waits and waits not in ranges:
            ranges[waits] = sum(map(len, ranges))
    tasks, sources, places = list[bytes](), list[bytes](), list[Place]()
    for row, size in zip(rows, sizes, strict=True):
        result, copy = (one or Place(NOWHERE) for one in (row.result, row.copy))
        added, pushes = len(places), len(places) + len(row.added)
        words = (-1 if word is None else word for word in (row.stored, row.ready))
        ends = (*(row.bias or (NOWHERE, 0)), _ACTIVATIONS[row.activation])
        counts = added, len(row.added), ranges.get(row.waits, 0), len(row.waits), pushes, len(row.pushes)
        tasks.append(_TASK.pack(size.columns, len(sources), size.steps, *result, *copy, *counts, *words, *ends))
        places += (*row.added, *row.pushes)
        for one in row.sources:
            sources.append(_SOURCE.pack(*one.rows, *one.factor, ranges.get(one.waits, 0), len(one.waits)))
    levels = [
        _WAIT.pack(one.word, 1 if one.stored_by is None else sizes[one.stored_by].tiles)
        for waits in ranges
        for one in waits
    ]
    return TaskTables(
        b"".join(tasks), b"".join(sources), b"".join(_PLACE.pack(*one) for one in places), b"".join(levels)
    )
