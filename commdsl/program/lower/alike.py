"""Turns rows into an order in which every rank does what rank 0 does, turned along a torus, where there is one.

Assumes rows as `fuse` leaves them: every cell has one writer, and rows of a phase, which need nothing of each other,
may come in any order. Does not promise anything: whether all ranks are alike in the end is for `problem` to see.

A schedule over groups hands a node several chunks side by side, and each node has another one to pass on first: ranks
do the same with other chunks, so in another order. Labels tell which groups of rows are each other's: of what a group
does, of where what it reads came from, and of what becomes of what it writes, without the name of a chunk or a rank.
Groups then come in the order in which rank 0 has those of their labels.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.lower.fuse import makers
from commdsl.program.lower.rows import Rows, begins, gather, taken
from commdsl.program.torus import Torus, alike_along

Labels = NDArray[np.uint64]


def alike(rows: Rows, num_ranks: int) -> Rows:
    """The rows as they are where ranks are alike already, or in no order."""
    length = np.diff(rows.begin)
    if len(length) != num_ranks or (length != length[0]).any() or not len(rows.rank):
        return rows
    torus = _torus(rows)
    if torus is None:
        return rows
    order = _order(rows, _labels(rows, torus, makers(rows, num_ranks)))
    return rows if order is None else _taken(rows, order)


def _torus(rows: Rows) -> Torus | None:
    """The first along which all ranks turn to the same peers in every phase; None if in the same order, too."""
    num_ranks = len(rows.begin) - 1
    phase, peer = rows.phase.reshape(num_ranks, -1), rows.dest_rank.reshape(num_ranks, -1)
    if (phase != phase[0]).any():
        return None

    def seen(torus: Torus, ranks: Ints) -> tuple[Torus, Ints] | None:
        distance = torus.distance(peer[ranks], ranks[:, None])
        words = np.sort(phase[ranks].astype(np.int64) * num_ranks + distance, axis=1)
        return (torus, distance) if (words == words[0]).all() else None

    found = next(alike_along(num_ranks, seen), None)
    if found is None:
        return None
    torus, distance = found
    return None if (distance == distance[0]).all() else torus


def _labels(rows: Rows, torus: Torus, maker: Ints) -> Labels:
    """Of each group: what came before it, then what comes behind it."""
    group = rows.group
    leaders, of_source = rows.leaders, rows.of_source
    distance = torus.distance(rows.dest_rank, rows.rank)
    nth = np.arange(len(of_source)) - rows.source_begin[of_source]
    label = _mixed(rows.kind[leaders], rows.phase[leaders])
    np.add.at(label, group, _mixed(rows.dest_space, distance))
    np.add.at(label, group[of_source], _mixed(rows.source_space, nth))
    reads = np.flatnonzero(maker >= 0)
    written, read = group[maker[reads]], group[of_source[reads]]
    way = _mixed(distance[maker[reads]], nth[reads])
    phase = rows.phase[leaders]
    label = _spread(label, written, read, way, phase[read], backwards=False)
    return _spread(label, read, written, way, phase[written], backwards=True)


def _spread(label: Labels, giver: Ints, taker: Ints, way: Labels, phase: Ints, *, backwards: bool) -> Labels:
    """Each taker's label told of its givers', which stand in earlier phases, or in later ones."""
    order = np.argsort(phase, kind="stable")
    bounds = np.searchsorted(phase[order], np.arange(int(phase.max(initial=0)) + 2))
    slices = [order[lo:hi] for lo, hi in pairwise(bounds.tolist())]
    for edges in reversed(slices) if backwards else slices:
        np.add.at(label, taker[edges], _mixed(label[giver[edges]], way[edges]))
    return label


def _order(rows: Rows, label: Labels) -> Ints | None:
    """The groups of all ranks in rank 0's order; None if others have other labels."""
    num_ranks, leaders = len(rows.begin) - 1, rows.leaders
    count = np.bincount(rows.rank[leaders], minlength=num_ranks)
    if (count != count[0]).any():
        return None
    shape = (num_ranks, int(count[0]))
    label, phase = label.reshape(shape), rows.phase[leaders].reshape(shape)
    order = np.lexsort((label, phase), axis=1)
    for table in (label, phase):
        by_label = np.take_along_axis(table, order, axis=1)
        if (by_label != by_label[0]).any():
            return None
    place = np.argsort(order[0])
    first = np.arange(num_ranks, dtype=np.int32)[:, None] * np.int32(shape[1])
    return (first + order[:, place]).ravel().astype(np.int32)


def _taken(rows: Rows, groups: Ints) -> Rows:
    """The groups in another order, within their ranks and phases."""
    leaders = rows.leaders
    sizes = np.diff(np.append(leaders, len(rows.rank)))
    order = gather(leaders, sizes[groups], groups)
    counts = np.diff(rows.source_begin)[order]
    sources = gather(rows.source_begin[:-1], counts, order)
    by_row = {
        one.name: taken(getattr(rows, one.name), sources if one.name.startswith("source_") else order)
        for one in fields(Rows)
        if one.name not in ("begin", "source_begin", "turn")
    }
    return replace(rows, source_begin=begins(counts), **by_row)


def _mixed(one: NDArray[np.generic], other: NDArray[np.generic]) -> Labels:
    """A number for each pair of them: what is equal stays equal, what is not hardly ever becomes it."""
    word = one.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + other.astype(np.uint64)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
