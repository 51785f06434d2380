"""Turns cells that are written once each into as few as are used in turn, numbered from 0 on every rank for itself.

Assumes rows as `fuse` leaves them: every cell has one writer and is read in later phases, or by nobody but its phase's
end. Does not decide when a cell may be written again; `ordering` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from commdsl.ir.schedules import Ints
from commdsl.program.lower.fuse import NOBODY, makers
from commdsl.program.lower.hazards import Index
from commdsl.program.lower.rows import Rows
from commdsl.program.moves import CELL

DEPTH = 4  # cells a chunk uses in turn: more than two, so that the credit for a reuse is seldom waited for


def allocate(rows: Rows, num_slots: int, *, one_write_each: bool) -> tuple[Rows, int]:
    """Rows with real cells, and their number. A cell is `turn * num_slots + slot`: turns share memory DEPTH apart.

    `one_write_each`: no cell is written twice in a round, as its data carries the round's number and nothing else.
    """
    in_cell, from_cell = rows.dest_space == CELL, rows.source_space == CELL
    dest, source = rows.dest_index.copy(), rows.source_index.copy()
    depth = int(dest[in_cell].max(initial=-1)) // num_slots + 1 if one_write_each else DEPTH
    until = None if one_write_each else _last_used(rows)
    while True:
        dest[in_cell] = _shared(rows.dest_index[in_cell], num_slots, depth)
        if until is None or _disjoint(rows, np.flatnonzero(in_cell), dest, until):
            break
        depth *= 2
    source[from_cell] = _shared(rows.source_index[from_cell], num_slots, depth)
    read, written = _numbered(
        (rows.source_rank[from_cell], source[from_cell]), (rows.dest_rank[in_cell], dest[in_cell])
    )
    dest[in_cell], source[from_cell] = written, read
    return replace(rows, dest_index=dest, source_index=source), int(written.max(initial=-1)) + 1


def _numbered(read: tuple[Ints, Ints], written: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Cells (rank, cell) by their number on their rank, in the order in which it reads them first.

    So ranks that do the same with other chunks use the same numbers, and no rank has memory for what others use.
    """
    owner, cell = (np.concatenate(parts) for parts in zip(read, written, strict=True))
    width = int(cell.max(initial=0)) + 1
    found, first, place = np.unique(owner.astype(np.int64) * width + cell, return_index=True, return_inverse=True)
    order = np.lexsort((first, found // width))
    ranks = (found // width)[order]
    number = np.empty(len(found), np.int32)
    number[order] = np.arange(len(found)) - np.searchsorted(ranks, ranks)
    return number[place[: len(read[0])]], number[place[len(read[0]) :]]


def _shared(cell: Ints, num_slots: int, depth: int) -> Ints:
    turn, slot = np.divmod(cell, np.int32(num_slots))
    return (slot * np.int32(depth) + turn % np.int32(depth)).astype(np.int32)


def _last_used(rows: Rows) -> Ints:
    """The phase in which what each row writes is last read, its own where nobody does."""
    maker = makers(rows, len(rows.begin) - 1)
    reads = np.flatnonzero(maker != NOBODY)
    last = rows.phase.copy()
    np.maximum.at(last, maker[reads], rows.phase[rows.of_source[reads]])
    return last


def _disjoint(rows: Rows, writes: Index, dest: Ints, until: Ints) -> bool:
    """Whether every version that shares a cell is written in a later phase than the one before was last used in."""
    cell = rows.dest_rank[writes] * np.int64(dest[writes].max(initial=0) + 1) + dest[writes]
    order = np.lexsort((rows.phase[writes], cell))
    writes, cell = writes[order], cell[order]
    same = cell[1:] == cell[:-1]
    return bool((rows.phase[writes[1:]] > until[writes[:-1]])[same].all())
