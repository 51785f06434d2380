"""Turns the edges between operations into flags: as few as order every hazard, within a round and between rounds.

Assumes edges point to earlier phases, so no wait can be part of a cycle. Does not prove the result;
`proof.synchronization` does, on the Plan and without this package.

An edge becomes a flag only if the waiting rank does not know already, through flags it has seen, that the other
operation is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.machine.carriers import Carrier
from commdsl.program.lower.hazards import Cells, Edges, Index, joined
from commdsl.program.lower.problem import Problem, Program
from commdsl.program.lower.rows import nth_of_equals


@dataclass(frozen=True, eq=False)
class Ordered:
    """Copies of the cells that rounds use in turn, and the edges that need a flag; `op` is the rows' group. `heard`: of
    whom each actor hears in a round.
    """

    rotation: int
    waits: Edges
    heard: NDArray[np.bool_]


def order(problem: Problem, num_actors: int, carrier: Carrier) -> Ordered:
    """The flags that a carrier needs."""
    cells = Cells(problem.num_keys)
    run = _Run(problem)
    within = run.round(_hazards(problem, cells))
    if carrier.has_flags_in_data:
        rotation, needed = _credits(problem, cells, run)
    else:
        rotation, needed = _flags(problem, cells, run, within)
    return Ordered(rotation, _for_all(needed, problem, num_actors), run.clocks.heard())


def _flags(problem: Problem, cells: Cells, run: _Run, within: Edges) -> tuple[int, Edges]:
    """The flags: within a round, then between a round and the next that uses its cells.

    One copy of the cells if the flags within a round already keep rounds apart; else two copies, which lets a rank be a
    round ahead, and the flags still missing then.
    """
    for rotation in (1, 2):
        trial = run.copy()
        edges = _by_phase(joined([within, _reuse(cells, problem, rotation)]), problem.program)
        for _ in range(rotation):
            news = trial.round(edges)
        across = news.take(np.nonzero(news.back > 0)[0])
        needed = joined([within, across])
        if not len(across):
            break
    return rotation, needed


def _credits(problem: Problem, cells: Cells, run: _Run) -> tuple[int, Edges]:
    """Where data carries its flag, only what it does not tell: that a peer has read what it was sent two rounds ago.

    The data tells it if, by the end of a round, a rank has heard from all that read its cells, directly or through
    others: who takes part in a round has left the round before.
    """
    rotation = 2
    edges = _reuse(cells, problem, rotation)
    silent = edges.take(np.nonzero(~run.clocks.knows(edges.rank, edges.peer, np.zeros_like(edges.peer)))[0])
    if not len(silent):
        return rotation, silent
    # One credit for each pair of ranks: after the last such read of the peer, before the first such write of the rank.
    pair = silent.rank.astype(np.int64) * problem.clocks.num_ranks + silent.peer
    _, first, group = np.unique(pair, return_index=True, return_inverse=True)
    table = silent.table[:, first].copy()
    op, number = np.full(len(first), np.iinfo(np.int32).max, np.int32), np.full(len(first), -1, np.int32)
    np.minimum.at(op, group, _in_program(problem, silent.op))
    np.maximum.at(number, group, silent.number)
    table[0], table[3] = _from_program(problem, table[1], op), number
    return rotation, Edges(table)


def _in_program(problem: Problem, op: Ints) -> Ints:
    """Operations by their number within their rank's program."""
    number: Ints = problem.program.number[op]
    return number


def _from_program(problem: Problem, rank: Ints, number: Ints) -> Ints:
    """The operation of that number of each rank; rank 0's where it stands for all."""
    program = problem.program
    length = np.concatenate([[0], np.cumsum(program.length)]).astype(np.int32)
    table = np.empty(int(length[-1]), np.int32)
    table[length[program.rank] + program.number] = np.arange(len(program.rank), dtype=np.int32)
    op: Ints = table[length[rank if problem.torus is None else np.zeros_like(rank)] + number]
    return op


def _hazards(problem: Problem, cells: Cells) -> list[Edges]:
    """The edges within one round, by phase."""
    program, first = problem.program, problem.program.first
    reads, writes = np.searchsorted(problem.reads.op, first), np.searchsorted(problem.writes.op, first)
    found = []
    for phase in range(len(first) - 1):
        parts = []
        for accesses, bounds, take in ((problem.reads, reads, cells.reads), (problem.writes, writes, cells.writes)):
            here = slice(bounds[phase], bounds[phase + 1])
            if here.start < here.stop:
                op = accesses.op[here]
                parts += take(accesses.key[here], op, accesses.rank[here], program.until[op])
        found.append(_seen_by_rank_0(joined(parts), problem))
    return found


def _seen_by_rank_0(edges: Edges, problem: Problem) -> Edges:
    """Edges between turned ranks as rank 0 sees them."""
    if problem.torus is not None and len(edges):
        edges.table[2] = problem.torus.distance(edges.peer, edges.rank)
        edges.table[1] = 0
    return edges


class _Run:
    """One greedy run of the program, round after round (private to this pass)."""

    def __init__(self, problem: Problem) -> None:
        self.program = problem.program
        self.turned = problem.torus is not None
        self.clocks = problem.clocks
        self.rounds = 0
        self._start = np.concatenate([[0], np.cumsum(self.program.length)]).astype(np.int32)
        self._phases = np.empty(len(self.program.phase), np.int32)  # by rank, then number
        self._phases[self._start[self.program.rank] + self.program.number] = self.program.phase
        first = self.program.first.tolist()
        self._batches = [_by_turn(lo, self.program.turn[lo:hi]) for lo, hi in pairwise(first)]

    def copy(self) -> _Run:
        twin = _Run.__new__(_Run)
        twin.__dict__ |= self.__dict__ | {"clocks": self.clocks.copy()}
        return twin

    def round(self, per_phase: list[Edges]) -> Edges:
        """Runs one more round, joining along the edges; returns those that told the waiting rank something new."""
        program, news = self.program, []
        for batches, edges in zip(self._batches, per_phase, strict=True):
            wanted = self._sorted(edges)
            bounds = (
                np.searchsorted(program.turn[wanted.op], np.arange(len(batches) + 1)).tolist() if len(wanted) else None
            )
            for turn, batch in enumerate(batches):
                if bounds and bounds[turn] < bounds[turn + 1]:
                    news += self._join(Edges(wanted.table[:, bounds[turn] : bounds[turn + 1]]))
                rank = program.rank[batch]
                self.clocks.finish(rank, self.rounds * program.length[rank] + program.number[batch])
        self.rounds += 1
        return joined(news)

    def _program_of(self, peer: Ints) -> Ints:
        """The rank whose program tells what `peer` does: rank 0's where it stands for all."""
        return np.zeros_like(peer) if self.turned else peer

    def _absolute(self, edges: Edges) -> Ints:
        """The awaited operations numbered through all rounds; negative before the first call."""
        absolute: Ints = (self.rounds - edges.back) * self.program.length[self._program_of(edges.peer)] + edges.number
        return absolute

    def _unknown(self, edges: Edges) -> Index:
        """Indices of the edges whose waiting rank does not know yet that the awaited operation is over."""
        absolute = self._absolute(edges)
        return np.nonzero((absolute >= 0) & ~self.clocks.knows(edges.rank, edges.peer, absolute))[0]

    def _sorted(self, edges: Edges) -> Edges:
        """Edges still unknown by turn and op, the latest awaited phase first: only a later one can imply another."""
        if len(edges):
            edges = edges.take(self._unknown(edges))
        if len(edges) < 2:
            return edges
        awaited = self._phases[self._start[self._program_of(edges.peer)] + edges.number]
        order = np.lexsort((edges.peer, -edges.number, -awaited, edges.back, edges.op, self.program.turn[edges.op]))
        return edges.take(order)

    def _join(self, edges: Edges) -> list[Edges]:
        """Joins op by op at once, edge by edge in turn."""
        place = nth_of_equals(edges.op) if len(edges) > 1 else np.zeros(1, np.int32)
        news = []
        for turn in range(int(place.max()) + 1):
            some = edges.take(np.nonzero(place == turn)[0])
            some = some.take(self._unknown(some))
            if len(some):
                self.clocks.join(some.rank, some.peer, self._absolute(some))
                news.append(some)
        return news


def _by_turn(first: int, turn: Ints) -> list[Ints]:
    """The rows that run at once, one a rank."""
    order = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[order], np.arange(1, int(turn.max()) + 1))
    return np.split(first + order.astype(np.int32), bounds)


def _by_phase(edges: Edges, program: Program) -> list[Edges]:
    phase = program.phase[edges.op]
    order = np.argsort(phase, kind="stable")
    bounds = np.searchsorted(phase[order], np.arange(len(program.first)))
    return [edges.take(order[lo:hi]) for lo, hi in pairwise(bounds)]


def _reuse(cells: Cells, problem: Problem, rounds_back: int) -> Edges:
    """Edges from the last users of every cell to its first writer, `rounds_back` rounds later."""
    key = problem.lasting[cells.first_op[problem.lasting] >= 0]
    edges = joined(cells.last_users(key, cells.first_op[key], cells.first_rank[key]))
    edges.table[5] = rounds_back
    return _seen_by_rank_0(edges, problem)


def _for_all(edges: Edges, problem: Problem, num_ranks: int) -> Edges:
    """Edges between groups of rows; rank 0's turned to every rank where they stand for all."""
    if problem.torus is None:
        edges.table[0] = problem.group[edges.op]
        return edges
    rank = np.repeat(np.arange(num_ranks, dtype=np.int32), len(edges))
    table = np.tile(edges.table, num_ranks)
    table[0] += rank * len(problem.group)
    table[1] = rank
    table[2] = problem.torus.turned(table[2], rank)
    return Edges(table)
