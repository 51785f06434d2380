"""Turns phases of operations into a total program per rank and the flags that order what ranks do to each other's cells.

Assumes that hazards lie between phases only, never within one. Does not prove the result; `checks.synchronization` does,
on the Plan and without this module.

Every access to a cell that must follow an access by another rank becomes an edge from that operation to this one. An edge
becomes a flag only if the waiting rank does not know already, through flags it has seen, that the other operation is over.
All edges point to an earlier phase, so no wait can be part of a cycle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commdsl.clocks import Clocks
from commdsl.ir import Ints
from commdsl.placement import Phase, Placed
from commdsl.plan import CELL, Reason

MANY = -2  # several ranks have read the cell since it was written; they stand in a table beside


@dataclass(frozen=True, eq=False, slots=True)
class Edges:
    """Operation `op` (numbered through all phases) on `rank` must follow operation `number` of `peer`, `back` rounds ago.

    One int32 array (6, n), as edges are taken and joined far more often than read.
    """

    table: Ints

    op = property(lambda self: self.table[0])
    rank = property(lambda self: self.table[1])
    peer = property(lambda self: self.table[2])
    number = property(lambda self: self.table[3])
    reason = property(lambda self: self.table[4])
    back = property(lambda self: self.table[5])

    def __len__(self) -> int:
        return self.table.shape[1]

    def take(self, index: Ints) -> Edges:
        return Edges(self.table[:, index])


@dataclass(frozen=True, eq=False)
class Ordered:
    """Copies of the cells that rounds use in turn, and the edges that need a flag."""

    rotation: int
    waits: Edges


@dataclass(frozen=True, eq=False)
class Program:
    """The phases joined: where each operation stands in its rank's program."""

    first: tuple[int, ...]  # first operation of each phase
    rank: Ints
    number: Ints  # within its rank's program
    turn: Ints  # within its rank and phase
    phase: Ints
    length: Ints  # operations per rank
    batches: tuple[tuple[Ints, ...], ...]  # per phase and turn: the operations that run at once, one a rank


def program(phases: tuple[Phase, ...], num_ranks: int) -> Program:
    done = np.zeros(num_ranks, np.int32)
    numbers, turns = [], []
    for phase in phases:
        counts = np.bincount(phase.rank, minlength=num_ranks)
        turn = np.arange(len(phase.rank)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers.append(done[phase.rank] + turn)
        turns.append(turn)
        done = done + counts
    lengths = [len(phase.rank) for phase in phases]
    first = tuple(np.cumsum([0, *lengths]).tolist())
    return Program(
        first=first,
        rank=np.concatenate([phase.rank for phase in phases]),
        number=np.concatenate(numbers).astype(np.int32),
        turn=np.concatenate(turns).astype(np.int32),
        phase=np.repeat(np.arange(len(phases)), lengths).astype(np.int32),
        length=done.astype(np.int32),
        batches=tuple(tuple(_by_turn(start, turn)) for start, turn in zip(first, turns, strict=False)),
    )


def _by_turn(first: int, turn: Ints) -> list[Ints]:
    order = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[order], np.arange(1, int(turn.max()) + 1))
    return np.split(first + order.astype(np.int32), bounds)


class _Cells:
    """The last accesses of every cell of every rank (private to this pass)."""

    def __init__(self, num_ranks: int, num_cells: int) -> None:
        size = num_ranks * num_cells
        self.num_cells = num_cells
        self.write_rank, self.write_number = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.read_rank, self.read_number = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.readers: dict[int, dict[int, int]] = {}  # where read_rank is MANY
        self.first_rank, self.first_op = np.full(size, -1, np.int32), np.full(size, -1, np.int32)

    def reads(self, key: Ints, op: Ints, rank: Ints, number: Ints) -> Edges:
        """Edges of reads after writes; notes the readers."""
        writer = self.write_rank[key]
        far = (writer != rank) & (writer >= 0)
        edges = _edges(op[far], rank[far], writer[far], self.write_number[key[far]], Reason.READ_AFTER_WRITE)
        order = np.lexsort((number, rank, key))
        key, rank, number = key[order], rank[order], number[order]
        last = np.ones(len(key), np.bool_)
        last[:-1] = (key[1:] != key[:-1]) | (rank[1:] != rank[:-1])
        key, rank, number = key[last], rank[last], number[last]
        shared = np.zeros(len(key), np.bool_)
        shared[1:] |= key[1:] == key[:-1]
        shared[:-1] |= key[1:] == key[:-1]
        shared |= (self.read_rank[key] != -1) & (self.read_rank[key] != rank)
        for k, b, i in zip(key[shared].tolist(), rank[shared].tolist(), number[shared].tolist(), strict=True):
            if self.read_rank[k] != MANY:
                self.readers[k] = {} if self.read_rank[k] == -1 else {int(self.read_rank[k]): int(self.read_number[k])}
                self.read_rank[k] = MANY
            self.readers[k][b] = i
        self.read_rank[key[~shared]], self.read_number[key[~shared]] = rank[~shared], number[~shared]
        return edges

    def writes(self, key: Ints, op: Ints, rank: Ints, number: Ints) -> list[Edges]:
        """Edges of writes after reads and after writes; notes the writer and forgets the readers."""
        edges = list(self.last_users(key, op, rank))
        new = self.write_rank[key] == -1
        self.first_rank[key[new]], self.first_op[key[new]] = rank[new], op[new]
        for k in key[self.read_rank[key] == MANY].tolist():
            del self.readers[k]
        self.read_rank[key] = -1
        self.write_rank[key], self.write_number[key] = rank, number
        return edges

    def last_users(self, key: Ints, op: Ints, rank: Ints) -> Iterator[Edges]:
        """Edges from the last readers of each cell, or from the last writer where nobody has read it since."""
        reader = self.read_rank[key]
        one = (reader >= 0) & (reader != rank)
        yield _edges(op[one], rank[one], reader[one], self.read_number[key[one]], Reason.WRITE_AFTER_READ)
        several = np.nonzero(reader == MANY)[0].tolist()
        rows = [(op[i], rank[i], q, n) for i in several for q, n in self.readers[int(key[i])].items() if q != rank[i]]
        if rows:
            columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)]
            yield _edges(columns[0], columns[1], columns[2], columns[3], Reason.WRITE_AFTER_READ)
        writer = self.write_rank[key]
        unread = (reader == -1) & (writer >= 0) & (writer != rank)
        yield _edges(op[unread], rank[unread], writer[unread], self.write_number[key[unread]], Reason.WRITE_AFTER_WRITE)


def _edges(op: Ints, rank: Ints, peer: Ints, number: Ints, reason: Reason) -> Edges:
    table = np.zeros((6, len(op)), np.int32)
    table[0], table[1], table[2], table[3], table[4] = op, rank, peer, number, int(reason)
    return Edges(table)


def _joined(parts: list[Edges]) -> Edges:
    return Edges(np.concatenate([np.zeros((6, 0), np.int32), *(edges.table for edges in parts)], axis=1))


def _accesses(phase: Phase) -> tuple[tuple[Ints, Ints, Ints], tuple[Ints, Ints, Ints]]:
    """Reads and writes of cells: row of the phase, rank that owns the cell, cell."""
    row = np.repeat(np.arange(len(phase.rank)), np.diff(phase.source_begin))
    read = phase.source_space == CELL
    write = phase.dest_space == CELL
    return (
        (row[read], phase.source_rank[read], phase.source_index[read]),
        (np.nonzero(write)[0], phase.dest_rank[write], phase.dest_index[write]),
    )


def _hazards(phases: tuple[Phase, ...], steps: Program, cells: _Cells) -> list[Edges]:
    """The edges within one round, by phase."""
    found = []
    for first, phase in zip(steps.first, phases, strict=False):
        (read_row, read_owner, read_cell), (write_row, write_owner, write_cell) = _accesses(phase)
        parts = []
        for row, owner, cell, take in (
            (read_row, read_owner, read_cell, cells.reads),
            (write_row, write_owner, write_cell, cells.writes),
        ):
            key = owner.astype(np.int64) * cells.num_cells + cell
            edges = take(key, (first + row).astype(np.int32), phase.rank[row], steps.number[first + row])
            parts += edges if isinstance(edges, list) else [edges]
        found.append(_joined(parts))
    return found


class _Run:
    """One greedy run of the program, round after round (private to this pass)."""

    def __init__(self, steps: Program, num_ranks: int) -> None:
        self.steps = steps
        self.clocks = Clocks(num_ranks)
        self.rounds = 0
        self._start = np.concatenate([[0], np.cumsum(steps.length)]).astype(np.int32)
        self._phases = np.empty(len(steps.phase), np.int32)  # by rank, then number
        self._phases[self._start[steps.rank] + steps.number] = steps.phase

    def copy(self) -> _Run:
        twin = _Run.__new__(_Run)
        twin.__dict__ |= self.__dict__ | {"clocks": self.clocks.copy()}
        return twin

    def round(self, per_phase: list[Edges]) -> Edges:
        """Runs one more round, joining along the edges; returns those that told the waiting rank something new."""
        steps, news = self.steps, []
        for phase, edges in enumerate(per_phase):
            wanted = self._sorted(edges)
            turn_of_edge = steps.turn[wanted.op]
            for turn, batch in enumerate(steps.batches[phase]):
                lo, hi = np.searchsorted(turn_of_edge, (turn, turn + 1))
                if hi > lo:
                    news += self._join(Edges(wanted.table[:, lo:hi]))
                rank = steps.rank[batch]
                self.clocks.finish(rank, self.rounds * steps.length[rank] + steps.number[batch])
        self.rounds += 1
        return _joined(news)

    def _absolute(self, edges: Edges) -> Ints:
        """The awaited operations numbered through all rounds; negative before the first call."""
        return (self.rounds - edges.back) * self.steps.length[edges.peer] + edges.number

    def _unknown(self, edges: Edges) -> Ints:
        """Indices of the edges whose waiting rank does not know yet that the awaited operation is over."""
        absolute = self._absolute(edges)
        return np.nonzero((absolute >= 0) & ~self.clocks.knows(edges.rank, edges.peer, absolute))[0]

    def _sorted(self, edges: Edges) -> Edges:
        """Edges still unknown by turn and op, the one from the latest phase first: only a later one can imply another."""
        if len(edges):
            edges = edges.take(self._unknown(edges))
        if not len(edges):
            return edges
        awaited = self._phases[self._start[edges.peer] + edges.number]
        order = np.lexsort((edges.peer, -edges.number, -awaited, edges.back, edges.op, self.steps.turn[edges.op]))
        return edges.take(order)

    def _join(self, edges: Edges) -> list[Edges]:
        """Joins op by op at once, edge by edge in turn."""
        place = _nth(edges.op)
        news = []
        for nth in range(int(place.max()) + 1):
            some = edges.take(np.nonzero(place == nth)[0])
            some = some.take(self._unknown(some))
            if len(some):
                self.clocks.join(some.rank, some.peer, self._absolute(some))
                news.append(some)
        return news


def _nth(values: Ints) -> Ints:
    """For grouped values, the place of each within its group."""
    place = np.arange(len(values))
    start = np.concatenate([[True], values[1:] != values[:-1]])
    return place - np.maximum.accumulate(np.where(start, place, 0))


def _by_phase(edges: Edges, steps: Program) -> list[Edges]:
    phase = steps.phase[edges.op]
    order = np.argsort(phase, kind="stable")
    bounds = np.searchsorted(phase[order], np.arange(len(steps.first)))
    return [edges.take(order[lo:hi]) for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)]


def _reuse(cells: _Cells, rounds_back: int) -> Edges:
    """Edges from the last users of every cell to its first writer, `rounds_back` rounds later."""
    key = np.nonzero(cells.first_op >= 0)[0]
    edges = _joined(list(cells.last_users(key, cells.first_op[key], cells.first_rank[key])))
    edges.table[5] = rounds_back
    return edges


def order(placed: Placed, steps: Program, num_ranks: int) -> Ordered:
    """The flags: within a round, then between a round and the next that uses its cells.

    One copy of the cells if the flags within a round already keep rounds apart; else two copies, which lets a rank be a
    round ahead, and the flags still missing then.
    """
    cells = _Cells(num_ranks, placed.num_cells)
    run = _Run(steps, num_ranks)
    within = run.round(_hazards(placed.phases, steps, cells))
    for rotation in (1, 2):
        trial, needed = run.copy(), within
        edges = _by_phase(_joined([within, _reuse(cells, rotation)]), steps)
        for _ in range(rotation):
            news = trial.round(edges)
        across = news.take(np.nonzero(news.back > 0)[0])
        needed = _joined([within, across])
        if not len(across):
            break
    return Ordered(rotation, needed)
