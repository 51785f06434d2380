"""Turns placed rows into what has to be ordered: programs, phase by phase, and the cells they touch.

Assumes rows sorted by rank. Does not look for hazards. Where every rank does the same, turned around a ring or along
the axes of a torus, rank 0 stands for all: that is most schedules, and all that large ones can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.lower.clocks import Clocks, FullClocks, TurningClocks
from commdsl.program.lower.hazards import Index
from commdsl.program.lower.rows import Rows, begins, turns
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import CELL, OpKind
from commdsl.program.torus import Torus, alike_along


@dataclass(frozen=True, eq=False)
class Program:
    """Groups of operations sorted by phase, then rank, then program order, and where each stands in its rank's program.

    A group waits, acts and signals as one operation: here and in `ordering` it is called one.
    """

    rank: Ints
    phase: Ints
    number: Ints  # within its rank's program
    turn: Ints  # within its rank and phase
    length: Ints  # operations per rank
    until: Ints  # the number of the operation that is awaited in its stead

    @property
    def first(self) -> Ints:
        """First operation of each phase, and the number of operations."""
        last = int(self.phase[-1]) if len(self.phase) else -1
        return np.searchsorted(self.phase, np.arange(last + 2)).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Uses:
    """Reads or writes in program order: the operation, the rank that does it, the place as one number."""

    op: Ints
    rank: Ints
    key: Index


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be ordered. `group` maps operations to the rows' groups. `torus`: the operations are rank 0's and
    stand for all, turned along it.
    """

    program: Program
    group: Ints
    reads: Uses
    writes: Uses
    num_keys: int
    clocks: Clocks
    torus: Torus | None
    lasting: Index  # keys of the places that the next rounds use again: the cells


MOST_KNOWN = 1 << 28
"""Numbers that say what ranks know of each other behind each operation of a round: some gigabytes, while flags are
derived.
"""


def most_groups(num_ranks: int) -> int:
    """Operations of all ranks that can be followed, where one does not stand for all."""
    return MOST_KNOWN // num_ranks


def pose(rows: Rows, num_actors: int, num_cells: int, tensors: tuple[Tensor, ...]) -> Problem:
    """Rank 0's operations if they stand for all, else everybody's. Tiles have programs beside those of the ranks."""
    if any(tensor.access is Rights.OWN for tensor in tensors):
        return _whole(rows, num_actors, num_cells, tensors)
    return _quotient(rows, num_actors, num_cells, tensors) or _whole(rows, num_actors, num_cells, tensors)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Columns of `Rows`, one entry a group."""

    rank: Ints
    phase: Ints
    turn: Ints
    number: Ints
    length: Ints  # groups per rank
    until: Ints


def _groups(rows: Rows, tensors: tuple[Tensor, ...]) -> _Groups:
    leaders = rows.leaders
    rank, phase = rows.rank[leaders], rows.phase[leaders]
    length = np.bincount(rank, minlength=len(rows.begin) - 1).astype(np.int32)
    number = np.arange(len(leaders), dtype=np.int32) - begins(length)[rank]
    until = _until(rows, phase, number, tensors) if any(tensor.lands for tensor in tensors) else number
    return _Groups(rank, phase, turns(rank, phase), number, length, until)


def _until(rows: Rows, phase: Ints, number: Ints, tensors: tuple[Tensor, ...]) -> Ints:
    """What lands is awaited all at once: the last chunk that a rank opens, the last that it puts in a phase.

    A launch ends when all is there, and one flag is cheaper than many.
    """
    lands = np.array([tensor.lands for tensor in tensors] + [False])[rows.dest_space]
    holds = rows.kind == OpKind.HOLD
    waited = lands & (~holds | (np.diff(rows.source_begin) == 0))
    leaders = rows.leaders
    some = np.flatnonzero(np.logical_and.reduceat(waited, leaders))
    rank, width = rows.rank[leaders][some].astype(np.int64), int(phase.max(initial=0)) + 1
    _, of = np.unique((rank * width + phase[some]) * 2 + holds[leaders][some], return_inverse=True)
    last = np.zeros(len(some), np.int32)
    np.maximum.at(last, of, number[some])
    until = number.copy()
    until[some] = last[of]
    return until


def _program(groups: _Groups, of: Index, length: Ints) -> Program:
    return Program(
        rank=groups.rank[of],
        phase=groups.phase[of],
        number=groups.number[of],
        turn=groups.turn[of],
        length=length,
        until=groups.until[of],
    )


def _first_places(num_cells: int, tensors: tuple[Tensor, ...]) -> tuple[Ints, int]:
    """By space, the first of a rank's places: cells, then what tiles write and what peers put to; -1 for what only the
    rank's lanes touch. The last entry is CELL's. And how many places a rank has.
    """
    first, size = np.full(len(tensors) + 1, -1, np.int32), num_cells
    first[CELL] = 0
    for space, tensor in enumerate(tensors):
        if tensor.access is Rights.OWN or tensor.lands:
            first[space], size = size, size + tensor.blocks * tensor.cut
    return first, size


def _whole(rows: Rows, num_ranks: int, num_cells: int, tensors: tuple[Tensor, ...]) -> Problem:
    groups, of_row = _groups(rows, tensors), rows.group
    order = np.lexsort((groups.number, groups.rank, groups.phase)).astype(np.int32)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    op = place[of_row]
    first, width = _first_places(num_cells, tensors)

    def accesses(of: Index, space: Ints, owner: Ints, index: Ints) -> Uses:
        order = np.argsort(op[of], kind="stable")
        key = (owner.astype(np.int64) * width + first[space] + index)[order]
        return Uses(op[of][order], rows.rank[of][order], key)

    read, write = first[rows.source_space] >= 0, first[rows.dest_space] >= 0
    keys = np.arange(num_ranks * width)
    return Problem(
        program=_program(groups, order, groups.length),
        group=order,
        reads=accesses(rows.of_source[read], rows.source_space[read], rows.source_rank[read], rows.source_index[read]),
        writes=accesses(np.nonzero(write)[0], rows.dest_space[write], rows.dest_rank[write], rows.dest_index[write]),
        num_keys=len(keys),
        clocks=FullClocks(num_ranks),
        torus=None,
        lasting=keys[keys % max(width, 1) < num_cells],
    )


def _quotient(rows: Rows, num_ranks: int, num_cells: int, tensors: tuple[Tensor, ...]) -> Problem | None:
    """Turned back by o, rank 0's access to a place of rank o is an access by rank -o to a place of rank 0: the one that
    rank -o touches at this place of its program. So the places of rank 0 alone see every kind of access.
    """
    first, size = _first_places(num_cells, tensors)
    length, groups = np.diff(rows.begin), _groups(rows, tensors)
    if not _same(length) or not _same(groups.length):
        return None
    width = np.diff(rows.source_begin).reshape(num_ranks, -1)
    joined = rows.joined.reshape(num_ranks, -1)
    if not _same(rows.phase.reshape(num_ranks, -1)) or not _same(width) or not _same(joined):
        return None
    writes = _by_rank(first[rows.dest_space], rows.dest_rank, rows.dest_index, num_ranks)
    reads = _by_rank(first[rows.source_space], rows.source_rank, rows.source_index, num_ranks)
    if writes is None or reads is None:
        return None
    accesses = (writes, reads)
    along = alike_along(num_ranks, lambda torus, ranks: torus if _turn_alike(accesses, torus, ranks) else None)
    torus = next((torus for torus in along if _follow_alike(accesses, torus, size)), None)
    if torus is None:
        return None
    group = rows.group[: int(length[0])]
    return Problem(
        program=_program(groups, np.arange(int(groups.length[0])), groups.length[:1]),
        group=np.arange(int(groups.length[0]), dtype=np.int32),
        reads=reads.of_rank_0(np.repeat(group, width[0]), torus),
        writes=writes.of_rank_0(group, torus),
        num_keys=size,
        clocks=TurningClocks(torus),
        torus=torus,
        lasting=np.arange(num_cells),
    )


def _same(table: Ints | NDArray[np.bool_]) -> bool:
    return bool((table == table[0]).all())


@dataclass(frozen=True, eq=False)
class _Accesses:
    """What every rank touches at the same places of its program: these `rows` of rank 0's, (num_ranks, n) beside."""

    rows: Ints
    owner: Ints
    place: Ints

    def of_rank_0(self, op: Ints, torus: Torus) -> Uses:
        """The accesses of rank 0's places, by whichever rank. `op`: of each row of rank 0's."""
        zero = np.zeros_like(self.owner[0])
        rank = torus.distance(zero, self.owner[0])
        return Uses(op[self.rows], rank, self.place[rank, np.arange(len(self.rows))].astype(np.int64))


def _by_rank(first: Ints, owner: Ints, index: Ints, num_ranks: int) -> _Accesses | None:
    """None where ranks differ. `first`: of the space of each, -1 where an access is of no interest."""
    first, owner, index = (part.reshape(num_ranks, -1) for part in (first, owner, index))
    if not _same(first >= 0):
        return None
    rows = np.nonzero(first[0] >= 0)[0].astype(np.int32)
    return _Accesses(rows, owner[:, rows], (first + index)[:, rows])


def _turn_alike(accesses: tuple[_Accesses, ...], torus: Torus, ranks: Ints) -> bool:
    """Whether these ranks touch as the first of them does what lies as far away."""
    return all(_same(torus.distance(one.owner[ranks], ranks[:, None])) for one in accesses)


def _follow_alike(accesses: tuple[_Accesses, ...], torus: Torus, num_places: int) -> bool:
    """Whether, for a turn by one along each axis, a place is followed by one place, whoever touches it."""
    every = np.arange(torus.num_ranks, dtype=np.int32)
    for step in torus.steps:
        following, there = np.empty(num_places, np.int32), torus.turned(every, step)
        for one in accesses:
            following[one.place] = one.place[there]
        if not all((following[one.place] == one.place[there]).all() for one in accesses):
            return False
    return True
