"""Turns copies of what a rank has just made, or read, into further destinations of the operation that made or read it.

Assumes every cell has one writer and rows sorted by rank, then phase. Does not change what is stored where, nor the
order of operands: a value that is stored twice is the same bits twice.

A ring's step is then one pass, "reduce, then forward at once": operands in, the next rank's cell and the caller's
tensor out. What is brought forward to an earlier phase is a copy out of a cell that nobody else writes, into a cell
that nobody else writes or a tensor that nobody reads; but where the tensor returned may be the tensor given, not before
the last read of what was given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.lower.hazards import Index
from commdsl.program.lower.rows import Rows, begins, gather, nth, nth_of_equals, taken, turns
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import CELL, MOST_DESTS, OpKind

Mask = NDArray[np.bool_]
NOBODY = -1


def fuse(rows: Rows, tensors: tuple[Tensor, ...], num_ranks: int, *, reduces_remotely: bool) -> Rows:
    """The same stores in fewer passes. `reduces_remotely`: a reduction may store to a peer's cell."""
    if not len(rows.rank):
        return rows
    maker = makers(rows, num_ranks)
    earliest = _earliest(rows, tensors)
    leader = _forwarded(rows, maker, earliest, reduces_remotely)
    leader = _shared(rows, leader, earliest)
    return _rebuild(rows, leader, _dead(rows, leader, maker))


def makers(rows: Rows, num_ranks: int) -> Ints:
    """For each source the row that wrote it, NOBODY for a tensor."""
    writes = np.flatnonzero(rows.dest_space == CELL)
    reads = np.flatnonzero(rows.source_space == CELL)
    maker = np.full(len(rows.source_space), NOBODY, np.int32)
    is_cell = np.zeros(int(rows.dest_index[writes].max(initial=0)) + 1, np.bool_)
    is_cell[rows.dest_index[writes]] = True
    number, width = np.cumsum(is_cell) - 1, int(is_cell.sum())
    key = rows.dest_rank[writes] * np.int64(width) + number[rows.dest_index[writes]]
    wanted = rows.source_rank[reads] * np.int64(width) + number[rows.source_index[reads]]
    if num_ranks * width <= 16 * len(rows.rank) + (1 << 20):
        table = np.full(num_ranks * width, NOBODY, np.int32)
        table[key] = writes
        maker[reads] = table[wanted]
    else:
        order = np.argsort(key)
        maker[reads] = writes[order[np.searchsorted(key[order], wanted)]]
    return maker


@dataclass(frozen=True, eq=False)
class _Earliest:
    """For each row the last other one that reads what its destination may overwrite, NOBODY if there is none; and the
    phase of the last but this one.
    """

    row: Ints
    phase: Ints
    phase_before: Ints


def _earliest(rows: Rows, tensors: tuple[Tensor, ...]) -> _Earliest:
    last, before = (np.full(len(rows.rank), NOBODY, np.int32) for _ in range(2))
    given = {tensor.name: space for space, tensor in enumerate(tensors) if tensor.access is Rights.READ}
    for space, tensor in enumerate(tensors):
        twin = given.get(tensor.name)
        if tensor.access is Rights.READ or twin is None or tensor.lands:
            continue
        chunks = tensor.blocks * tensor.cut
        reads = np.flatnonzero(rows.source_space == twin)
        reads = reads[rows.dest_space[rows.of_source[reads]] != space]  # what stays where it is overwrites itself
        writes = np.flatnonzero(rows.dest_space == space)
        for found in (last, before):
            table = np.full((int(rows.rank.max()) + 1) * chunks, NOBODY, np.int32)
            place, reader = rows.source_rank[reads] * chunks + rows.source_index[reads], rows.of_source[reads]
            table[place] = reader  # the last one stays
            found[writes] = table[rows.dest_rank[writes] * chunks + rows.dest_index[writes]]
            reads = reads[table[place] != reader]
    return _Earliest(last, *(np.where(found >= 0, rows.phase[found], NOBODY) for found in (last, before)))


def _may_join(rows: Rows, earliest: _Earliest, row: Index, leader: Index) -> Mask:
    """Whether each row's tensor may be written as early as in the phase of `leader`."""
    phase = np.where(earliest.row[row] == leader, earliest.phase_before[row], earliest.phase[row])
    may: Mask = phase < rows.phase[leader]
    return may


def _forwarded(rows: Rows, maker: Ints, earliest: _Earliest, reduces_remotely: bool) -> Ints:
    """For each row its leader, itself if it stays: copies of a cell that the rank itself wrote join the writer."""
    number = np.arange(len(rows.rank), dtype=np.int32)
    first = rows.source_begin[:-1]
    wrote = maker[first]
    own = (rows.kind == OpKind.COPY) & (wrote >= 0) & (rows.rank[wrote] == rows.rank)
    if not reduces_remotely:
        own &= (rows.dest_rank == rows.rank) | (rows.kind[wrote] == OpKind.COPY)
    own &= (rows.dest_space != CELL) | (rows.dest_rank != rows.rank)  # a cell of one's own is for others to read
    row = np.flatnonzero(own)
    row = row[_may_join(rows, earliest, row, wrote[row])]
    row = row[np.argsort(wrote[row], kind="stable")]
    leader = number.copy()
    joining, read = (np.bincount(of, minlength=len(number)) for of in (wrote[row], maker[maker >= 0]))
    keeps_cell = (joining < read) | (joining > MOST_DESTS)  # of what does not join, somebody reads it there
    few = row[nth_of_equals(wrote[row]) < MOST_DESTS - keeps_cell[wrote[row]]]
    leader[few] = wrote[few]
    return leader


def _shared(rows: Rows, leader: Ints, earliest: _Earliest) -> Ints:
    """Copies of one source join the first of their phase; copies to the caller's tensor the first of all."""
    stays = np.ones(len(leader), np.bool_)
    stays[leader[leader != np.arange(len(leader))]] = False  # a leader already: its group has its dests
    row = np.flatnonzero((rows.kind == OpKind.COPY) & (leader == np.arange(len(leader))) & stays)
    if not len(row):
        return leader
    first = rows.source_begin[row]
    space, rank, index = rows.source_space[first], rows.source_rank[first], rows.source_index[first]
    key = (rank.astype(np.int64) * (int(space.max()) + 2) + (space + 1)) * (int(index.max()) + 1) + index
    order = np.lexsort((row, key))
    row, key = row[order], key[order]
    starts = np.ones(len(row), np.bool_)
    starts[1:] = key[1:] != key[:-1]
    opening = row[np.maximum.accumulate(np.where(starts, np.arange(len(row)), 0))]  # the first reader of the source
    home = rows.dest_space[row] != CELL
    joins = home & _may_join(rows, earliest, row, opening)
    phase = np.where(joins, rows.phase[opening], rows.phase[row])
    again = np.lexsort((row, phase, key))
    row, key, phase = row[again], key[again], phase[again]
    starts = np.ones(len(row), np.bool_)
    starts[1:] = (key[1:] != key[:-1]) | (phase[1:] != phase[:-1])
    starts |= nth(starts) % MOST_DESTS == 0
    leader = leader.copy()
    leader[row] = row[np.maximum.accumulate(np.where(starts, np.arange(len(row)), 0))]
    return leader


def _dead(rows: Rows, leader: Ints, maker: Ints) -> Mask:
    """Writers of cells that nobody reads any more, as all who read have joined them."""
    number = np.arange(len(leader))
    joined_maker = np.zeros(len(leader), np.bool_)
    joined_maker[leader[leader != number]] = True
    of_source = rows.of_source
    still = np.zeros(len(leader), np.bool_)
    reads = (maker >= 0) & (leader[of_source] != maker)
    # A row that has joined another than its source's writer stands for no read of its own: its leader reads the same.
    still[maker[reads]] = True
    own_cell = (rows.dest_space == CELL) & (rows.dest_rank == rows.rank)
    dead: Mask = own_cell & joined_maker & ~still
    return dead


def _rebuild(rows: Rows, leader: Ints, dead: Mask) -> Rows:
    """Rows in groups: joined ones behind their leader; where the leader's own store is dead, the next one leads."""
    keep = np.flatnonzero(~dead)
    order = keep[np.lexsort((keep, leader[keep]))].astype(np.int32)
    heads = np.ones(len(order), np.bool_)
    heads[1:] = leader[order][1:] != leader[order][:-1]
    of = leader[order]
    count = np.where(heads, np.diff(rows.source_begin)[of], np.int32(0))
    flat = gather(rows.source_begin[:-1], count, of)
    rank, phase = rows.rank[of], rows.phase[of]
    return replace(
        rows,
        begin=begins(np.bincount(rank, minlength=len(rows.begin) - 1)),
        rank=rank,
        phase=_dense(phase),
        turn=turns(rank, phase),
        kind=taken(rows.kind, of),
        cut=taken(rows.cut, of),
        piece=taken(rows.piece, of),
        length=taken(rows.length, of),
        dest_space=taken(rows.dest_space, order),
        dest_rank=taken(rows.dest_rank, order),
        dest_index=taken(rows.dest_index, order),
        dest_form=taken(rows.dest_form, order),
        whole=taken(rows.whole, of),
        joined=(~heads).astype(np.int32),
        origin=taken(rows.origin, order),
        source_begin=begins(count),
        source_space=taken(rows.source_space, flat),
        source_rank=taken(rows.source_rank, flat),
        source_index=taken(rows.source_index, flat),
        source_weight=taken(rows.source_weight, flat),
        source_form=taken(rows.source_form, flat),
    )


def _dense(phase: Ints) -> Ints:
    """Phases without gaps: those whose copies have all joined earlier ones are gone."""
    used = np.zeros(int(phase.max(initial=-1)) + 1, np.bool_)
    used[phase] = True
    return (np.cumsum(used, dtype=np.int32) - 1)[phase].astype(np.int32)
