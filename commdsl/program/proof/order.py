"""Turns a Timeline and pairs of operations that must come in one order into those that do not, and into idle waits.

Assumes that every wait has a signal and that the run was not stuck. Does not know why a pair must be in order: two
accesses of one cell (`hazards`) or of one region (`regions`) are the same here.

Two rounds decide: a pair within a round is judged in round 0; one across rounds between round 0 and the next round in
which the two can meet, `rotation` later. See `clocks` for why what holds between them holds between all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.proof.clocks import NONE, Run, clocks
from commdsl.program.proof.timeline import Bits, Pattern, Timeline

Longs = NDArray[np.int64]

SLICE = 1 << 20
"""Pairs looked at at once; it bounds memory."""


@dataclass(frozen=True, eq=False)
class Hazards:
    """Row i: operation `second[i]` must come after operation `first[i]`, another one or the same some rounds later."""

    first: Ints
    second: Ints
    across: Bits  # `second` is meant in the next round in which the two touch the same memory

    def take(self, rows: Bits) -> Hazards:
        return Hazards(self.first[rows], self.second[rows], self.across[rows])


@dataclass(frozen=True, eq=False)
class Verdict:
    """Which pairs are not in order, and which waits order a pair that nothing else orders."""

    unordered: Longs  # rows of the Hazards
    known: Ints  # beside each, how many operations of the first's actor the second's knows done
    needed: Bits  # (num_waits,)


def judge(
    events: Timeline, order: Run, shape: Pattern | None, pairs: Hazards, rotation: int, dropped: int = NONE
) -> Verdict:
    """Compares every pair of operations of two actors with the clocks. `dropped`: see `clocks`."""
    needed = np.zeros(len(events.wait_op), np.bool_)
    unordered: list[Longs] = [np.zeros(0, np.int64)]
    knows: list[Ints] = [np.zeros(0, np.int32)]
    if not len(pairs.first):
        return Verdict(unordered[0], knows[0], needed)
    num_ranks, alone = np.int32(events.num_ranks), events.num_roles == 1
    for table in clocks(events, order, shape, rotation + 1, dropped):
        width = table.known.shape[1]
        known, otherwise, teller = table.known.reshape(-1), table.otherwise.reshape(-1), table.teller.reshape(-1)
        for start in range(0, len(pairs.first), SLICE):
            pair = np.arange(start, min(start + SLICE, len(pairs.first)))
            first, second = pairs.first[pair], pairs.second[pair]
            a, b = events.actor[first], events.actor[second]
            if shape is not None:
                column = shape.torus.distance(a % num_ranks, b % num_ranks)
                if not alone:
                    column += a // num_ranks * num_ranks
            else:
                column = a - np.int32(table.first_column)
                inside = np.flatnonzero((column >= 0) & (column < width))
                pair = pair[inside]
                first, second, a, b, column = (x[inside] for x in (first, second, a, b, column))
            row = events.rows_of(events.row[second], b, pairs.across[pair] * rotation)
            if shape is None:
                row += table.begin[b]
            elif not alone:
                row += table.begin[b // num_ranks]
            row *= width
            row += column
            done = events.local[first] + 1
            ordered = known[row] >= done
            unordered.append(pair[~ordered])
            knows.append(known[row[~ordered]])
            sole = np.flatnonzero(ordered & (otherwise[row] < done))
            by = teller[row[sole]]
            needed[by if shape is None else shape.wait[b[sole] % num_ranks, by]] = True
    return Verdict(np.concatenate(unordered), np.concatenate(knows), needed)


def idle_wait(
    events: Timeline, order: Run, shape: Pattern | None, pairs: Hazards, rotation: int, needed: Bits
) -> int | None:
    """A wait without which everything is in order all the same.

    A wait that alone orders some pair is needed. The others are left out one by one and all is judged again: a pair of
    other actors may still hang on it. With a Pattern, first on all ranks at once, which is cheap.
    """
    if events.given is not None:
        needed = needed | events.given
    if shape is not None:
        idle = ~needed[shape.wait].any(axis=0)
        for place in np.flatnonzero(idle).tolist():
            if not len(judge(events, order, shape, pairs, rotation, place).unordered):
                return int(shape.wait[:, place].min())
    for wait in np.flatnonzero(~needed).tolist():
        if not len(judge(events, order, None, pairs, rotation, wait).unordered):
            return int(wait)
    return None


def knows(events: Timeline, order: Run, op: int, number: int, of: int) -> int:
    """How many operations of another actor are known done at an operation of round `number`, counted through rounds."""
    actor = events.actor[op : op + 1]
    for table in clocks(events, order, None, number + 1, NONE):
        column = of - table.first_column
        if 0 <= column < table.known.shape[1]:
            row = table.begin[actor] + events.rows_of(events.row[op : op + 1], actor, number)
            return int(table.known[row[0], column])
    return 0
