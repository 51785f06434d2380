"""Turns contracts into what has to move: values, the ranks that contribute to them and those that want them.

Assumes resolved contracts. A value that follows from others is not counted with them. Does not know machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.marks import mark
from commdsl.ir.schedules import Schedule
from commdsl.language.records import dataclass

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Demand:
    """Distinct values: (value, rank) pairs that contribute and that want, and the size of each value in blocks."""

    num_ranks: int
    num_values: int
    size: Floats
    source_value: Longs
    source_rank: Longs
    dest_value: Longs
    dest_rank: Longs

    def grouped(self, group_of: Longs) -> Demand:
        return Demand(
            int(group_of.max(initial=-1)) + 1,
            self.num_values,
            self.size,
            *_distinct(self.source_value, group_of[self.source_rank]),
            *_distinct(self.dest_value, group_of[self.dest_rank]),
        )

    @property
    def reversed(self) -> Demand:
        ends = self.dest_value, self.dest_rank, self.source_value, self.source_rank
        return Demand(self.num_ranks, self.num_values, self.size, *ends)

    @cached_property
    def source_of(self) -> Longs | None:
        """The only source of each value that is counted, -1 of others; None where one has several."""
        counts = np.bincount(self.source_value, minlength=self.num_values)
        if counts.max(initial=0) != 1:
            return None
        found = np.full(self.num_values, -1, np.int64)
        found[self.source_value] = self.source_rank
        return found

    @property
    def spread(self) -> tuple[Floats, NDArray[np.bool_]] | None:
        """How much each rank gives, and which ranks want all of it, if that is what has to move."""
        source = self.source_of
        if source is None:
            return None
        counted = source >= 0
        wants = np.zeros(self.num_ranks, np.bool_)
        wants[self.dest_rank] = True
        others = self.dest_rank != source[self.dest_value]
        reached = np.bincount(self.dest_value[others], minlength=self.num_values)
        if (reached != wants.sum() - wants[source])[counted].any():
            return None
        weights = np.zeros(self.num_ranks)
        np.add.at(weights, source[counted], self.size[counted])
        return weights, wants

    @property
    def flows(self) -> Flows | None:
        """From each source to each destination; None where a value has several sources. What one rank has for single
        others is one flow.
        """
        source = self.source_of
        if source is None:
            return None
        away = (self.dest_rank != source[self.dest_value]) & (source[self.dest_value] >= 0)
        wanted = np.zeros((self.num_values, self.num_ranks), np.bool_)
        wanted[self.dest_value[away], self.dest_rank[away]] = True
        is_single = wanted.sum(axis=1) == 1
        rows = np.concatenate([source[:, None], is_single[:, None], wanted & ~is_single[:, None]], axis=1)
        kinds, kind = np.unique(rows[wanted.any(axis=1)], axis=0, return_inverse=True)
        amounts = np.zeros((len(kinds), self.num_ranks))  # of each kind, what each destination wants
        moved = np.flatnonzero(wanted.any(axis=1))
        np.add.at(amounts, kind.ravel(), wanted[moved] * self.size[moved, None])
        left: list[Floats] = []
        value: list[int] = []
        for number, (start, single, *_) in enumerate(kinds.tolist()):
            ends = [amounts[number]] if single else list(np.diag(amounts[number])[amounts[number] > 0])
            for end in ends:
                left.append(end - np.eye(self.num_ranks)[start] * end.sum())
                value.append(number)
        return Flows(np.array(left).reshape(len(left), self.num_ranks), np.array(value, np.int64))

    @property
    def is_of_all(self) -> bool:
        """Whether every rank contributes to every value, and wants it."""
        count = self.num_values * self.num_ranks
        return self.num_ranks > 1 and len(self.source_value) == len(self.dest_value) == count > 0


@dataclass(frozen=True, eq=False)
class Flows:
    """`left[f, r]`: what flow f leaves at rank r, negative where it starts. Flows of one `value` are copies of it, and
    cross a wire once.
    """

    left: Floats
    value: Longs

    @property
    def size(self) -> int:
        return len(self.value) + len(np.unique(self.value))


def _distinct(values: Longs, ranks: Longs) -> tuple[Longs, Longs]:
    width = int(ranks.max(initial=0)) + 1
    keys = values * width + ranks
    if int(keys.max(initial=0)) <= 16 * len(keys):  # dense: marking is faster than sorting
        present = np.zeros(int(keys.max(initial=0)) + 1, dtype=np.bool_)
        present[keys] = True
        keys = np.flatnonzero(present)
    else:
        keys = np.sort(keys)
        keys = keys[np.append(True, keys[1:] != keys[:-1])]
    return keys // width, keys % width


def together(demands: list[Demand]) -> Demand:
    """Of values that have nothing in common, all of them."""
    first = np.cumsum([0, *(one.num_values for one in demands)])
    ends = [
        np.concatenate([getattr(one, name) + shift for one, shift in zip(demands, shifts, strict=True)])
        for name, shifts in (
            ("source_value", first[:-1]),
            ("source_rank", np.zeros_like(first[:-1])),
            ("dest_value", first[:-1]),
            ("dest_rank", np.zeros_like(first[:-1])),
        )
    ]
    return Demand(demands[0].num_ranks, int(first[-1]), np.concatenate([one.size for one in demands]), *ends)


def all_demands(schedule: Schedule) -> Iterator[Demand]:
    """Those of every contract by itself, then those together that start from different buffers."""
    apart: list[Demand] = []
    for _, contracts in groupby(sorted(schedule.contracts, key=_source), key=_source):
        found = [list(demands_of(schedule, contract)) for contract in contracts]
        yield from (one for several in found for one in several)
        if len(found) == len(found[0]) == 1:
            apart += found[0]
    if len(apart) > 1:
        yield together(apart)


def _source(contract: Contract) -> int:
    return contract.source_buffer


def demands_of(schedule: Schedule, contract: Contract) -> Iterator[Demand]:
    """Each by itself is a part of what the contract wants, of values none of which follows from the others."""
    buffer = schedule.buffers[contract.source_buffer]
    if contract.rotation is not None:
        yield _rotating(schedule, contract.rotation)
        return
    chosen, kind = _distinct_values(contract, buffer.num_chunks)
    sources = contract.source_rank[chosen].astype(np.int64)
    valid = np.ones(sources.shape, np.bool_) if contract.source_valid is None else contract.source_valid[chosen]
    number = np.broadcast_to(np.arange(len(chosen))[:, None], sources.shape)
    value = kind[contract.value]
    for counted in _unshared(sources * buffer.num_chunks + contract.source_chunk[chosen], valid):
        there, rows = valid & counted[:, None], counted[value]
        yield Demand(
            schedule.num_ranks,
            len(chosen),
            np.full(len(chosen), 1 / buffer.cut),
            *_distinct(number[there].astype(np.int64), sources[there]),
            *_distinct(value[rows], contract.dest_rank[rows].astype(np.int64)),
        )


def _rotating(schedule: Schedule, rotation: Rotation) -> Demand:
    """Every piece of every buffer that rotates is a value, wanted by those it visits; what they write about a piece of
    one that comes back is a sum of theirs, wanted by its owner.
    """
    buffer, ranks = schedule.buffers[rotation.sources[0]], schedule.num_ranks
    pieces = np.arange(ranks * buffer.num_chunks, dtype=np.int64)
    visits = np.ones((ranks, len(pieces)), np.bool_) if rotation.visits is None else rotation.visits.reshape(ranks, -1)
    theirs, owners = np.nonzero(visits.T), (pieces, pieces // buffer.num_chunks)
    ways = [(owners, theirs) for _ in rotation.sources] + [(theirs, owners) for _ in rotation.back]
    ends = []
    for side in (0, 1):
        values = [number * len(pieces) + way[side][0] for number, way in enumerate(ways)]
        ends += [np.concatenate(values), np.concatenate([way[side][1] for way in ways])]
    count = len(ways) * len(pieces)
    return Demand(ranks, count, np.full(count, 1 / buffer.cut), *ends)


def _unshared(ids: Longs, valid: NDArray[np.bool_]) -> Iterator[NDArray[np.bool_]]:
    """The values to count: all if no two share a contribution; else the copies, and, the largest first, those that
    share none with what was taken before.
    """
    if np.bincount(ids[valid]).max(initial=0) <= 1:
        yield np.ones(len(ids), dtype=np.bool_)
        return
    sizes = valid.sum(axis=1)
    if (sizes == 1).any():
        yield np.asarray(sizes == 1)
    taken, chosen = np.zeros(int(ids.max(initial=0)) + 1, np.bool_), np.zeros(len(ids), np.bool_)
    for row in np.argsort(-sizes, kind="stable").tolist():
        mine = ids[row, valid[row]]
        if not taken[mine].any():
            taken[mine] = chosen[row] = True
    yield chosen


def _distinct_values(contract: Contract, num_chunks: int) -> tuple[Longs, Longs]:
    """Return the first value of each kind, in order, and the kind of each value: values with the same contributions
    are of one kind.
    """
    ids = contract.source_rank.astype(np.int64) * num_chunks + contract.source_chunk
    marks = mark(ids.astype(np.uint64))
    if contract.source_valid is not None:
        marks = np.where(contract.source_valid, marks, np.uint64(0))
    _, first, inverse = np.unique(marks.sum(axis=1, dtype=np.uint64), return_index=True, return_inverse=True)
    order = np.argsort(first)  # marks differ in every process, and what follows must not
    return first[order].astype(np.int64), np.argsort(order)[inverse.ravel()]
