"""Turns cells that are written once each into as few as are used in turn, numbered from 0 on every rank for itself.

Assumes rows as `fuse` leaves them: every cell has one writer and is read in later phases, or by nobody but its phase's
end. Does not decide when a cell may be written again; `ordering` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from commdsl.ir.schedules import Ints
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
    while True:
        dest[in_cell] = _shared(rows.dest_index[in_cell], num_slots, depth)
        if one_write_each or _disjoint(rows, in_cell, from_cell, dest):
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


def _disjoint(rows: Rows, in_cell: Index, from_cell: Index, dest: Ints) -> bool:
    """Whether every version that shares a cell is written in a later phase than the one before was last used in."""
    writes = np.flatnonzero(in_cell)
    if not len(writes):
        return True
    key = rows.dest_rank[writes].astype(np.int64) * (int(rows.dest_index[writes].max()) + 1) + rows.dest_index[writes]
    by_key = np.argsort(key)
    key = key[by_key]
    last = rows.phase[writes][by_key].copy()
    width = int(rows.dest_index[writes].max()) + 1
    reads = rows.source_rank[from_cell].astype(np.int64) * width + rows.source_index[from_cell]
    np.maximum.at(last, np.searchsorted(key, reads), rows.phase[rows.of_source[from_cell]])
    writes = writes[by_key]
    first = rows.phase[writes]
    cell = rows.dest_rank[writes].astype(np.int64) * (int(dest[writes].max()) + 1) + dest[writes]
    order = np.lexsort((first, cell))
    same = cell[order][1:] == cell[order][:-1]
    return bool((first[order][1:] > last[order][:-1])[same].all())
