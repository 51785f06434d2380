"""Turns the statements of all phases, each for many ranks at once, into rows: one operation of one rank each.

Assumes operands were placed. Does not order anything across ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.moves import OpKind


@dataclass(frozen=True, eq=False)
class Rows:
    """Operations sorted by rank, then phase, then program order. Those of one phase need nothing of each other.

    Columns as in `plan.Ops`; `turn` counts within rank and phase, `begin` is where each rank's rows start.
    A joined row stands after its leader, in its phase, and has no sources.
    """

    begin: Ints
    rank: Ints
    phase: Ints
    turn: Ints
    kind: Ints
    cut: Ints
    piece: Ints
    length: Ints
    dest_space: Ints
    dest_rank: Ints
    dest_index: Ints
    dest_form: Ints
    whole: Ints
    joined: Ints
    origin: Ints
    source_begin: Ints
    source_space: Ints
    source_rank: Ints
    source_index: Ints
    source_weight: Ints
    source_form: Ints

    @property
    def number(self) -> Ints:
        """Of each row within its rank."""
        return (np.arange(len(self.rank), dtype=np.int32) - self.begin[self.rank]).astype(np.int32, copy=False)

    @property
    def leaders(self) -> Ints:
        """The first row of every group; the others are joined to it."""
        return np.flatnonzero(self.joined == 0).astype(np.int32)

    @property
    def group(self) -> Ints:
        """The number of each row's group, through all ranks."""
        return (np.cumsum(self.joined == 0, dtype=np.int32) - 1).astype(np.int32, copy=False)

    @property
    def of_source(self) -> Ints:
        """The row of each source."""
        return np.repeat(np.arange(len(self.rank), dtype=np.int32), np.diff(self.source_begin))


SizeClass: TypeAlias = tuple[Ints, Ints, Ints]
"""Of chunks: into how many their blocks are cut, which pieces they are, and which lengths their blocks have."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one statement, sources rectangular: (n, k) with a mask."""

    rank: Ints
    kind: OpKind
    size_class: SizeClass
    dest: tuple[Ints, Ints, Ints]  # space, rank, index
    source: tuple[Ints, Ints, Ints]
    valid: NDArray[np.bool_] | None
    origin: int
    weight: Ints | None = None  # (n, k) of a reduction; None: 1
    whole: Ints | None = None
    dest_form: Ints | None = None  # None: as it is
    source_form: Ints | None = None  # (n, k)

    def take(self, chosen: NDArray[np.bool_]) -> Batch:
        """Some of the rows."""
        if chosen.all():
            return self
        return replace(
            self,
            rank=self.rank[chosen],
            size_class=(self.size_class[0][chosen], self.size_class[1][chosen], self.size_class[2][chosen]),
            dest=(self.dest[0][chosen], self.dest[1][chosen], self.dest[2][chosen]),
            source=(self.source[0][chosen], self.source[1][chosen], self.source[2][chosen]),
            valid=None if self.valid is None else self.valid[chosen],
            weight=None if self.weight is None else self.weight[chosen],
            whole=None if self.whole is None else self.whole[chosen],
            dest_form=None if self.dest_form is None else self.dest_form[chosen],
            source_form=None if self.source_form is None else self.source_form[chosen],
        )


def assemble(phases: list[list[Batch]], num_ranks: int) -> Rows:
    """Joins all statements; in a phase each rank starts with the peer after it, so that not all turn to one."""
    phases = [phase for phase in ([b for b in batches if len(b.rank)] for batches in phases) if phase]
    batches = [batch for phase in phases for batch in phase]
    lengths = [len(batch.rank) for batch in batches]
    phase = np.repeat([number for number, group in enumerate(phases) for _ in group], lengths).astype(np.int32)
    rank = np.concatenate([batch.rank for batch in batches]) if batches else np.zeros(0, np.int32)
    order = _in_order(batches, phase, rank, num_ranks)
    columns = [_columns(batch) for batch in batches]
    count = np.concatenate([np.zeros(0, np.int32), *(counts for counts, _ in columns)])
    counts = count[order]
    flat = gather(np.cumsum(count, dtype=np.int32) - count, counts, order)
    rank, phase = rank[order], phase[order]

    def joined(parts: list[Ints]) -> Ints:
        return taken(np.concatenate([np.zeros(0, np.int32), *parts]), order).astype(np.int32, copy=False)

    def sources(part: int) -> Ints:
        return taken(np.concatenate([np.zeros(0, np.int32), *(flat_parts[part] for _, flat_parts in columns)]), flat)

    return Rows(
        begin=begins(np.bincount(rank, minlength=num_ranks)),
        rank=rank,
        phase=phase,
        turn=turns(rank, phase),
        kind=np.repeat(np.array([int(batch.kind) for batch in batches], np.int32), lengths)[order],
        cut=joined([batch.size_class[0] for batch in batches]),
        piece=joined([batch.size_class[1] for batch in batches]),
        length=joined([batch.size_class[2] for batch in batches]),
        dest_space=joined([batch.dest[0] for batch in batches]),
        dest_rank=joined([batch.dest[1] for batch in batches]),
        dest_index=joined([batch.dest[2] for batch in batches]),
        dest_form=joined([np.zeros(len(b.rank), np.int32) if b.dest_form is None else b.dest_form for b in batches]),
        whole=joined([np.ones(len(b.rank), np.int32) if b.whole is None else b.whole for b in batches]),
        joined=np.zeros(len(order), np.int32),
        origin=np.repeat(np.array([batch.origin for batch in batches], np.int32), lengths)[order],
        source_begin=begins(counts),
        source_space=sources(0),
        source_rank=sources(1),
        source_index=sources(2),
        source_weight=sources(3),
        source_form=sources(4),
    )


def taken(column: Ints, order: NDArray[np.integer[Any]]) -> Ints:
    """Entries of a column in this order, no more than it has. Many have one everywhere, and stay as they are."""
    is_one = len(order) > 0 and bool((column == column[0]).all())
    found: Ints = column[: len(order)] if is_one else column[order]
    return found


def begins(counts: NDArray[np.integer[Any]]) -> Ints:
    """Where each of some variable-length parts starts, and the end of the last."""
    bounds = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _in_order(batches: list[Batch], phase: Ints, rank: Ints, num_ranks: int) -> NDArray[np.intp]:
    """By rank, then phase, then how far on the peer is; what touches no peer comes last."""
    peer = np.concatenate([np.zeros(0, np.int32), *(_peer(batch) for batch in batches)])
    ahead = peer - rank
    distance = np.where(ahead > 0, ahead, ahead + np.int32(num_ranks))
    return np.lexsort(tuple(narrow(key) for key in (distance, phase, rank)))


def narrow(key: Ints) -> NDArray[np.integer[Any]]:
    """As 16 bits where it fits: numpy sorts such keys in linear time."""
    return key.astype(np.int16) if key.max(initial=0) < 2**15 else key


def turns(rank: Ints, phase: Ints) -> Ints:
    """The place of each within its rank and phase."""
    starts = np.ones(len(rank), np.bool_)
    starts[1:] = (rank[1:] != rank[:-1]) | (phase[1:] != phase[:-1])
    return nth(starts)


def nth(starts: NDArray[np.bool_]) -> Ints:
    """The place of each within its run, given where runs start."""
    first = np.nonzero(starts)[0].astype(np.int32)
    lengths = np.diff(np.append(first, len(starts)))
    return np.arange(len(starts), dtype=np.int32) - np.repeat(first, lengths)


def nth_of_equals(values: NDArray[np.integer[Any]]) -> Ints:
    """For values of which equal ones stand together, the place of each among its equals."""
    starts = np.ones(len(values), np.bool_)
    starts[1:] = values[1:] != values[:-1]
    return nth(starts)


def _columns(batch: Batch) -> tuple[Ints, list[Ints]]:
    """Sources of a batch as counts a row and flat columns."""
    rows, width = batch.source[0].shape
    weight = np.broadcast_to(np.int32(1), (rows, width)) if batch.weight is None else batch.weight
    form = np.broadcast_to(np.int32(0), (rows, width)) if batch.source_form is None else batch.source_form
    parts = (*batch.source, weight, form)
    if batch.valid is None:
        return np.full(rows, width, np.int32), [np.ascontiguousarray(part).ravel() for part in parts]
    return batch.valid.sum(axis=1).astype(np.int32), [part[batch.valid] for part in parts]


def _peer(batch: Batch) -> Ints:
    """The other rank of each row, itself where there is none: the destination's, else the first source's elsewhere."""
    far = batch.source[1] != batch.rank[:, None]
    if batch.valid is not None:
        far = far & batch.valid
    first = np.where(far.any(axis=1), batch.source[1][np.arange(len(batch.rank)), far.argmax(axis=1)], batch.rank)
    return np.where(batch.dest[1] != batch.rank, batch.dest[1], first)


def gather(begin: Ints, count: Ints, order: NDArray[np.integer[Any]]) -> Ints:
    """The flat positions of variable-length rows taken in a new order; `count` is in the new order."""
    ends = np.cumsum(count, dtype=np.int32)
    return np.repeat(begin[order] - (ends - count), count) + np.arange(
        int(ends[-1]) if len(ends) else 0, dtype=np.int32
    )
