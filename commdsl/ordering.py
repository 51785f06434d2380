"""Turns phases of operations into a total program per rank and the flags that order what ranks do to each other's cells.

Assumes that hazards lie between phases only, never within one. Does not prove the result; `checks.synchronization` does,
on the Plan and without this module.

Every access to a cell that must follow an access by another rank becomes an edge from that operation to this one. An edge
becomes a flag only if the waiting rank does not know already, through flags it has seen, that the other operation is over.
All edges point to an earlier phase, so no wait can be part of a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commdsl.clocks import Clocks, FullClocks, RotatingClocks
from commdsl.ir import Ints
from commdsl.placement import Placed, Rows
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
    """Copies of the cells that rounds use in turn, and the edges that need a flag; `op` counts rank after rank."""

    rotation: int
    waits: Edges


@dataclass(frozen=True, eq=False)
class Program:
    """Where each row stands in its rank's program."""

    rank: Ints
    phase: Ints
    number: Ints  # within its rank's program
    turn: Ints  # within its rank and phase
    length: Ints  # operations per rank

    @property
    def begin(self) -> Ints:
        """(num_ranks + 1,): where each rank's operations start when ranks are laid end to end."""
        return np.concatenate([[0], np.cumsum(self.length)]).astype(np.int32)

    @property
    def place(self) -> Ints:
        """Where each row goes when ranks are laid end to end."""
        return self.begin[self.rank] + self.number

    @property
    def first(self) -> list[int]:
        """First row of each phase, and the number of rows."""
        last = int(self.phase[-1]) if len(self.phase) else -1
        bounds: list[int] = np.searchsorted(self.phase, np.arange(last + 2)).tolist()
        return bounds


def program(rank: Ints, phase: Ints, num_ranks: int) -> Program:
    """Numbers rows that are sorted by phase, then rank, then program order."""
    by_rank = np.argsort(rank, kind="stable")
    length = np.bincount(rank, minlength=num_ranks)
    number = np.empty(len(rank), np.int32)
    number[by_rank] = np.arange(len(rank)) - np.repeat(np.cumsum(length) - length, length)
    place = np.arange(len(rank))
    starts = np.ones(len(rank), np.bool_)
    starts[1:] = (rank[1:] != rank[:-1]) | (phase[1:] != phase[:-1])
    turn = place - np.maximum.accumulate(np.where(starts, place, 0))
    return Program(rank, phase, number, turn.astype(np.int32), length.astype(np.int32))


@dataclass(frozen=True, eq=False)
class _Accesses:
    """Reads or writes of cells, by row: the rank that does it, and the cell (owner * num_cells + cell)."""

    row: Ints
    rank: Ints
    key: Ints


@dataclass(frozen=True, eq=False)
class _Problem:
    """What is to be ordered: a program and what it touches. `turned`: rank 0 stands for all, see `_quotient`."""

    steps: Program
    reads: _Accesses
    writes: _Accesses
    num_keys: int
    clocks: Clocks
    turned: bool


class _Cells:
    """The last accesses of every cell of every rank (private to this pass)."""

    def __init__(self, size: int) -> None:
        self.write_rank, self.write_number = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.read_rank, self.read_number = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.readers: dict[int, dict[int, int]] = {}  # where read_rank is MANY
        self.first_rank, self.first_op = np.full(size, -1, np.int32), np.full(size, -1, np.int32)

    def reads(self, key: Ints, op: Ints, rank: Ints, number: Ints) -> list[Edges]:
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
        return [edges]

    def writes(self, key: Ints, op: Ints, rank: Ints, number: Ints) -> list[Edges]:
        """Edges of writes after reads and after writes; notes the writer and forgets the readers."""
        edges = self.last_users(key, op, rank)
        new = self.write_rank[key] == -1
        self.first_rank[key[new]], self.first_op[key[new]] = rank[new], op[new]
        for k in key[self.read_rank[key] == MANY].tolist():
            del self.readers[k]
        self.read_rank[key] = -1
        self.write_rank[key], self.write_number[key] = rank, number
        return edges

    def last_users(self, key: Ints, op: Ints, rank: Ints) -> list[Edges]:
        """Edges from the last readers of each cell, or from the last writer where nobody has read it since."""
        reader, writer = self.read_rank[key], self.write_rank[key]
        one = (reader >= 0) & (reader != rank)
        unread = (reader == -1) & (writer >= 0) & (writer != rank)
        edges = [
            _edges(op[one], rank[one], reader[one], self.read_number[key[one]], Reason.WRITE_AFTER_READ),
            _edges(op[unread], rank[unread], writer[unread], self.write_number[key[unread]], Reason.WRITE_AFTER_WRITE),
        ]
        several = np.nonzero(reader == MANY)[0].tolist()
        rows = [(op[i], rank[i], q, n) for i in several for q, n in self.readers[int(key[i])].items() if q != rank[i]]
        if rows:
            columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)]
            edges.append(_edges(columns[0], columns[1], columns[2], columns[3], Reason.WRITE_AFTER_READ))
        return edges


def _edges(op: Ints, rank: Ints, peer: Ints, number: Ints, reason: Reason) -> Edges:
    table = np.zeros((6, len(op)), np.int32)
    table[0], table[1], table[2], table[3], table[4] = op, rank, peer, number, int(reason)
    return Edges(table)


def _joined(parts: list[Edges]) -> Edges:
    return Edges(np.concatenate([np.zeros((6, 0), np.int32), *(edges.table for edges in parts)], axis=1))


def _whole(rows: Rows, steps: Program, num_ranks: int, num_cells: int) -> _Problem:
    """Every rank's operations."""
    row = np.repeat(np.arange(len(rows.rank), dtype=np.int32), np.diff(rows.source_begin))
    read, write = rows.source_space == CELL, rows.dest_space == CELL
    read_key = rows.source_rank[read].astype(np.int64) * num_cells + rows.source_index[read]
    write_key = rows.dest_rank[write].astype(np.int64) * num_cells + rows.dest_index[write]
    return _Problem(
        steps=steps,
        reads=_Accesses(row[read], rows.rank[row[read]], read_key),
        writes=_Accesses(np.nonzero(write)[0].astype(np.int32), rows.rank[write], write_key),
        num_keys=num_ranks * num_cells,
        clocks=FullClocks(num_ranks),
        turned=False,
    )


def _quotient(rows: Rows, steps: Program, num_ranks: int, num_cells: int) -> _Problem | None:
    """Rank 0's operations, if every rank does the same up to rotation: most schedules, and all that large ones can be.

    Turned by -o, rank 0's access to a cell of rank o is an access by rank -o to a cell of rank 0, namely the cell that rank
    -o touches at this place of its program. So the cells of rank 0 alone see every kind of access.
    """
    if len(set(steps.length.tolist())) != 1:
        return None
    num_ops = int(steps.length[0])
    by_rank = np.argsort(steps.rank, kind="stable")
    counts = np.diff(rows.source_begin)
    width = counts.reshape(-1)[by_rank].reshape(num_ranks, num_ops)
    flat = _of_rank(rows.source_begin, counts, by_rank)
    if not _same(steps.phase[by_rank].reshape(num_ranks, num_ops)) or not _same(width):
        return None
    row = np.repeat(np.arange(num_ops, dtype=np.int32), width[0])
    following = np.full(num_cells, -1, np.int32)  # the cell that the next rank touches instead: one for reads and writes
    write = _turned(rows.dest_space[by_rank], rows.dest_rank[by_rank], rows.dest_index[by_rank], num_ranks, following)
    read = _turned(rows.source_space[flat], rows.source_rank[flat], rows.source_index[flat], num_ranks, following)
    if write is None or read is None:
        return None
    chosen = by_rank[:num_ops]
    own = Program(steps.rank[chosen], steps.phase[chosen], steps.number[chosen], steps.turn[chosen], steps.length[:1])
    return _Problem(
        steps=own,
        reads=_Accesses(row[read[0]], read[1], read[2]),
        writes=_Accesses(write[0], write[1], write[2]),
        num_keys=num_cells,
        clocks=RotatingClocks(num_ranks),
        turned=True,
    )


def _of_rank(begin: Ints, counts: Ints, order: Ints) -> Ints:
    """The flat positions of variable-length rows in a new order."""
    lengths = counts[order]
    return np.repeat(begin[:-1][order] - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(begin[-1]))


def _same(table: Ints) -> bool:
    return bool((table == table[0]).all())


def _turned(
    space: Ints, owner: Ints, index: Ints, num_ranks: int, following: Ints
) -> tuple[Ints, Ints, Ints] | None:
    """Rank 0's accesses to cells as (place, turned rank, cell of rank 0), or None where ranks differ; fills `following`."""
    space, owner, index = (part.reshape(num_ranks, -1) for part in (space, owner, index))
    distance = (owner - np.arange(num_ranks, dtype=np.int32)[:, None]) % num_ranks
    if not _same(space == CELL):
        return None
    place = np.nonzero(space[0] == CELL)[0].astype(np.int32)
    if not _same(distance[:, place]):
        return None
    cells = index[:, place]
    instead = np.roll(cells, -1, axis=0)
    known = following[cells]
    following[cells] = np.where(known >= 0, known, instead)
    if not (following[cells] == instead).all():
        return None
    turned = -distance[0, place] % num_ranks
    return place, turned, cells[turned, np.arange(len(place))].astype(np.int64)


def _hazards(problem: _Problem, cells: _Cells) -> list[Edges]:
    """The edges within one round, by phase."""
    steps, first = problem.steps, problem.steps.first
    reads, writes = np.searchsorted(problem.reads.row, first), np.searchsorted(problem.writes.row, first)
    found = []
    for phase in range(len(first) - 1):
        parts = []
        for accesses, bounds, take in ((problem.reads, reads, cells.reads), (problem.writes, writes, cells.writes)):
            here = slice(bounds[phase], bounds[phase + 1])
            if here.start < here.stop:
                row = accesses.row[here]
                parts += take(accesses.key[here], row, accesses.rank[here], steps.number[row])
        found.append(_from_rank_0(_joined(parts), problem))
    return found


def _from_rank_0(edges: Edges, problem: _Problem) -> Edges:
    """Edges between turned ranks as rank 0 sees them."""
    if problem.turned and len(edges):
        edges.table[2] = (edges.peer - edges.rank) % problem.clocks.num_ranks
        edges.table[1] = 0
    return edges


class _Run:
    """One greedy run of the program, round after round (private to this pass)."""

    def __init__(self, problem: _Problem) -> None:
        self.steps = problem.steps
        self.turned = problem.turned
        self.clocks = problem.clocks
        self.rounds = 0
        self._start = self.steps.begin
        self._phases = np.empty(len(self.steps.phase), np.int32)  # by rank, then number
        self._phases[self.steps.place] = self.steps.phase
        first = self.steps.first
        self._batches = [_by_turn(lo, self.steps.turn[lo:hi]) for lo, hi in zip(first[:-1], first[1:], strict=True)]

    def copy(self) -> _Run:
        twin = _Run.__new__(_Run)
        twin.__dict__ |= self.__dict__ | {"clocks": self.clocks.copy()}
        return twin

    def round(self, per_phase: list[Edges]) -> Edges:
        """Runs one more round, joining along the edges; returns those that told the waiting rank something new."""
        steps, news = self.steps, []
        for batches, edges in zip(self._batches, per_phase, strict=True):
            wanted = self._sorted(edges)
            bounds = np.searchsorted(steps.turn[wanted.op], np.arange(len(batches) + 1)).tolist() if len(wanted) else None
            for turn, batch in enumerate(batches):
                if bounds and bounds[turn] < bounds[turn + 1]:
                    news += self._join(Edges(wanted.table[:, bounds[turn] : bounds[turn + 1]]))
                rank = steps.rank[batch]
                self.clocks.finish(rank, self.rounds * steps.length[rank] + steps.number[batch])
        self.rounds += 1
        return _joined(news)

    def _program_of(self, peer: Ints) -> Ints:
        """The rank whose program tells what `peer` does: rank 0's where it stands for all."""
        return np.zeros_like(peer) if self.turned else peer

    def _absolute(self, edges: Edges) -> Ints:
        """The awaited operations numbered through all rounds; negative before the first call."""
        return (self.rounds - edges.back) * self.steps.length[self._program_of(edges.peer)] + edges.number

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
        if len(edges) == 1:
            return edges
        awaited = self._phases[self._start[self._program_of(edges.peer)] + edges.number]
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


def _by_turn(first: int, turn: Ints) -> list[Ints]:
    """The rows that run at once, one a rank."""
    order = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[order], np.arange(1, int(turn.max()) + 1))
    return np.split(first + order.astype(np.int32), bounds)


def _by_phase(edges: Edges, steps: Program) -> list[Edges]:
    phase = steps.phase[edges.op]
    order = np.argsort(phase, kind="stable")
    bounds = np.searchsorted(phase[order], np.arange(len(steps.first)))
    return [edges.take(order[lo:hi]) for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)]


def _reuse(cells: _Cells, problem: _Problem, rounds_back: int) -> Edges:
    """Edges from the last users of every cell to its first writer, `rounds_back` rounds later."""
    key = np.nonzero(cells.first_op >= 0)[0]
    edges = _joined(cells.last_users(key, cells.first_op[key], cells.first_rank[key]))
    edges.table[5] = rounds_back
    return _from_rank_0(edges, problem)


def order(placed: Placed, steps: Program, num_ranks: int) -> Ordered:
    """The flags: within a round, then between a round and the next that uses its cells.

    One copy of the cells if the flags within a round already keep rounds apart; else two copies, which lets a rank be a
    round ahead, and the flags still missing then.
    """
    problem = _quotient(placed.rows, steps, num_ranks, placed.num_cells)
    if problem is None:
        problem = _whole(placed.rows, steps, num_ranks, placed.num_cells)
    cells = _Cells(problem.num_keys)
    run = _Run(problem)
    within = run.round(_hazards(problem, cells))
    for rotation in (1, 2):
        trial = run.copy()
        edges = _by_phase(_joined([within, _reuse(cells, problem, rotation)]), problem.steps)
        for _ in range(rotation):
            news = trial.round(edges)
        across = news.take(np.nonzero(news.back > 0)[0])
        needed = _joined([within, across])
        if not len(across):
            break
    return Ordered(rotation, _spread(needed, num_ranks, int(steps.length[0])) if problem.turned else _placed(needed, steps))


def _placed(edges: Edges, steps: Program) -> Edges:
    edges.table[0] = steps.place[edges.op]
    return edges


def _spread(edges: Edges, num_ranks: int, num_ops: int) -> Edges:
    """Rank 0's edges turned to every rank."""
    rank = np.repeat(np.arange(num_ranks, dtype=np.int32), len(edges))
    table = np.tile(edges.table, num_ranks)
    table[0] += rank * num_ops
    table[1] = rank
    table[2] = (table[2] + rank) % num_ranks
    return Edges(table)
