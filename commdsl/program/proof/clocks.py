"""Turns a Plan's waits and signals into the order they guarantee: one greedy run, then vector clocks.

Assumes a Plan that `verify` passed and whose every wait has a signal to wait for. Does not look at data:
`checks.hazards` does.

Counters only grow and have one writer, so a wait for the T-th signal of a peer is ordered after that signal and all
before it on the peer, and after nothing else. Hence every maximal run executes the same operations, and one decides
deadlock. Rounds repeat the same operations and waits look back only: a cycle of waits, if there is one, lies within one
round, and order found between rounds 0 and d holds between n and n + d too (a later round has the same joins and more).

A clock is what a rank knows done: known[a] operations of rank a, counted through the rounds. It changes only where a
rank waits, so there is one row per waiting operation and round. Beside it stand the wait that told (`teller`) and what
the rank would know from its other waits alone (`otherwise`): the difference is what that wait is good for.

When every rank waits and signals as rank 0 does with all ranks shifted, so are the clocks: one rank's rows, indexed by
the distance to the other rank, are all of them (a join is a rotation of the row). If not, rows are kept for every rank;
columns do not depend on each other and are made in blocks that fit in memory. Both are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.moves import Moves

NONE = -1
"""No wait, no teller."""

BLOCK_ENTRIES = 1 << 24
"""Entries of a clock table made at once; it bounds memory, not what is proved."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """One round of every rank: where each operation stands, and which operation of the peer ends each wait."""

    num_ranks: int
    rank_begin: Ints  # (num_ranks + 1,)
    actor: Ints  # (num_ops,): the rank
    local: Ints  # (num_ops,): its number on that rank
    joins: Ints  # (num_ops,): waiting operations of the rank up to and including this one
    joins_per_round: Ints  # (num_ranks,)
    wait_op: Ints  # (num_waits,): global operation that waits
    wait_peer: Ints
    wait_signal: Ints  # (num_waits,): local number, on the peer, of the operation that raises the signal
    wait_rounds_back: Ints
    awaited: NDArray[np.bool_]  # (num_signals,): some wait is for it

    @property
    def lengths(self) -> Ints:
        """Operations of each rank in a round."""
        return np.diff(self.rank_begin)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The waits of rank 0, of which every other rank's are the shift, by operation, then distance of the peer."""

    wait_local: Ints  # (m,)
    distance: Ints  # (m,): (peer - rank) % num_ranks
    signal: Ints
    rounds_back: Ints
    wait: Ints  # (num_ranks, m): which wait of the Plan it is on each rank


@dataclass(frozen=True, eq=False)
class Run:
    """The greedy run of one round: what must come first is in an earlier batch, or earlier on the same rank.

    A rank waits at most once in a batch. If `stuck`, it ended early: `done[r]` operations of rank r were executed.
    """

    batch: Ints  # (num_ops,)
    done: Ints
    stuck: bool


@dataclass(frozen=True, eq=False)
class Clocks:
    """Rows of clocks for the ranks first_column .. in columns, or for distances if `shifted`."""

    known: Ints
    otherwise: Ints
    teller: Ints  # number of the wait, or of its place in the Pattern if `shifted`
    first_column: int
    shifted: bool


def signal_owners(moves: Moves) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The signals sorted by (raiser, peer), then program order; and where each pair begins."""
    ops, num_ranks = moves.ops, moves.num_ranks
    raiser = np.repeat(_actors(moves), np.diff(ops.signal_begin))
    pair = raiser.astype(np.int64) * num_ranks + ops.signal_peer
    begin = np.concatenate(([0], np.cumsum(np.bincount(pair, minlength=num_ranks * num_ranks))))
    if (pair[1:] >= pair[:-1]).all():  # as in a ring, where every rank has one peer to signal
        return np.arange(len(pair)), begin
    # Sorting (pair, place) packed in one word is several times faster than a stable argsort.
    pair *= max(len(pair), 1)
    pair += np.arange(len(pair))
    pair.sort()
    return pair % max(len(pair), 1), begin


def timeline(moves: Moves) -> Timeline:
    ops, num_ranks = moves.ops, moves.num_ranks
    actor = _actors(moves)
    local = np.arange(ops.num_ops, dtype=np.int32) - ops.rank_begin[actor]
    signals, begin = signal_owners(moves)
    signal_op = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.signal_begin))
    num_waits = np.diff(ops.wait_begin)
    wait_op = np.repeat(np.arange(ops.num_ops, dtype=np.int32), num_waits)
    at = begin[ops.wait_peer.astype(np.int64) * num_ranks + actor[wait_op]] + (ops.wait_ordinal - 1)
    awaited = np.zeros(len(signal_op), np.bool_)
    awaited[signals[at]] = True
    total = np.concatenate(([0], np.cumsum(num_waits > 0, dtype=np.int32))).astype(np.int32)
    starts = total[ops.rank_begin]
    return Timeline(
        num_ranks=num_ranks,
        rank_begin=ops.rank_begin,
        actor=actor,
        local=local,
        joins=total[1:] - starts[actor],
        joins_per_round=np.diff(starts),
        wait_op=wait_op,
        wait_peer=ops.wait_peer,
        wait_signal=local[signal_op[signals[at]]],
        wait_rounds_back=ops.wait_rounds_back,
        awaited=awaited,
    )


def _actors(moves: Moves) -> Ints:
    return np.repeat(np.arange(moves.num_ranks, dtype=np.int32), np.diff(moves.ops.rank_begin))


def pattern(events: Timeline) -> Pattern | None:
    """The one rank that stands for all, if every rank waits as rank 0 does with the ranks shifted."""
    num_ranks, lengths = events.num_ranks, events.lengths
    counts = np.bincount(events.actor[events.wait_op], minlength=num_ranks)
    if (lengths != lengths[0]).any() or (counts != counts[0]).any():
        return None
    shape = (num_ranks, int(counts[0]))
    local = events.local[events.wait_op].reshape(shape)
    ranks = np.arange(num_ranks, dtype=np.int32)[:, None]
    distance = (events.wait_peer.reshape(shape) - ranks) % np.int32(num_ranks)
    tables = [local, distance, events.wait_signal.reshape(shape), events.wait_rounds_back.reshape(shape)]
    place = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    if (distance != distance[0]).any():  # perhaps only the order of one operation's waits differs
        place = np.argsort(local.astype(np.int64) * num_ranks + distance, axis=1, kind="stable").astype(np.int32)
        tables = [np.take_along_axis(table, place, axis=1) for table in tables]
    if any((table != table[0]).any() for table in tables):
        return None
    wait_local, distances, signal, rounds_back = (table[0].copy() for table in tables)
    return Pattern(wait_local, distances, signal, rounds_back, wait=ranks * np.int32(shape[1]) + place)


def run(events: Timeline, shape: Pattern | None) -> Run:
    """Executes one round greedily: every rank goes on until it waits for what is not done yet."""
    if shape is None:
        return _run_ranks(events)
    # All ranks advance in step, so a wait is over in time iff its signal stands earlier in the program.
    late = shape.wait_local[(shape.rounds_back == 0) & (shape.signal >= shape.wait_local)]
    reached = int(late.min()) if len(late) else int(events.lengths[0])
    done = np.full(events.num_ranks, reached, np.int32)
    return Run(batch=events.local, done=done, stuck=bool(len(late)))


def _run_ranks(events: Timeline) -> Run:
    """In batches: all ranks whose next waiting operation is ready run on to the one after it."""
    waiting, first_wait = np.unique(events.wait_op, return_index=True)
    wait_end = np.append(first_wait[1:], len(events.wait_op))
    here = events.wait_rounds_back == 0
    begin = np.searchsorted(waiting, events.rank_begin).astype(np.int64)
    cursor, end = begin[:-1].copy(), begin[1:]
    stops = np.append(events.local[waiting], 0).astype(np.int32)
    done = np.where(cursor < end, stops[cursor], events.lengths).astype(np.int32)
    batch = np.zeros(len(waiting), np.int32)
    number = 0
    while len(ranks := np.flatnonzero(cursor < end)):
        number += 1
        at = cursor[ranks]
        counts = wait_end[at] - first_wait[at]
        offsets = np.cumsum(counts) - counts
        waits = np.repeat(first_wait[at] - offsets, counts) + np.arange(counts.sum())
        over = ~here[waits] | (done[events.wait_peer[waits]] > events.wait_signal[waits])
        ready = np.logical_and.reduceat(over, offsets)
        if not ready.any():
            break
        batch[at[ready]] = number
        ranks = ranks[ready]
        cursor[ranks] += 1
        done[ranks] = np.where(cursor[ranks] < end[ranks], stops[cursor[ranks]], events.lengths[ranks])
    stuck = bool((cursor < end).any())
    # The batch of an operation is that of the last waiting operation up to it; within a batch, program order.
    place = begin[events.actor] + events.joins - 1
    return Run(np.where(events.joins > 0, np.append(batch, 0)[place], 0).astype(np.int32), done, stuck)


def clocks(events: Timeline, order: Run, shape: Pattern | None, rounds: int, dropped: int) -> Iterator[Clocks]:
    """Vector clocks of `rounds` rounds, in blocks of columns that together are all ranks (one block if shifted).

    `dropped` is a teller (see Clocks) to leave out, to see what it is good for; shifted, on every rank at once.
    """
    if shape is not None:
        yield _shifted_clocks(events, shape, rounds, dropped)
        return
    rows = int((events.joins_per_round * rounds + 1).sum())
    width = min(max(BLOCK_ENTRIES // rows, 1), events.num_ranks)
    for first in range(0, events.num_ranks, width):
        yield _rank_clocks(events, order, rounds, dropped, first, min(width, events.num_ranks - first))


def _shifted_clocks(events: Timeline, shape: Pattern, rounds: int, dropped: int) -> Clocks:
    num_ranks, length, per_round = events.num_ranks, int(events.lengths[0]), int(events.joins_per_round[0])
    known = np.zeros((1 + rounds * per_round, num_ranks), np.int32)
    otherwise = np.zeros_like(known)
    teller = np.full_like(known, NONE)
    joins = events.joins[:length].tolist()
    columns = (shape.wait_local, shape.distance, shape.signal, shape.rounds_back)
    waits = list(zip(*(column.tolist() for column in columns), strict=True))
    for number in range(rounds):
        row, previous = number * per_round, -1
        for place, (local, distance, signal, back) in enumerate(waits):
            if local != previous:
                row, previous = row + 1, local
                known[row], otherwise[row], teller[row] = known[row - 1], otherwise[row - 1], teller[row - 1]
            if back > number or place == dropped:
                continue
            peer = known[(number - back) * per_round + joins[signal]]
            told = np.concatenate((peer[-distance:], peer[:-distance]))
            told[distance] = (number - back) * length + signal + 1
            _tell(known[row], otherwise[row], teller[row], told, place)
    return Clocks(known, otherwise, teller, 0, shifted=True)


def _tell(known: Ints, otherwise: Ints, teller: Ints, told: Ints, wait: int | Ints) -> None:
    """Joins what one wait tells into the rows, in place."""
    news = told > known
    # What is known without the wait that tells most: the lesser of the two, unless both are the same wait's.
    rest = np.where(news, known, told)
    np.maximum(otherwise, rest, out=otherwise, where=teller != wait)
    np.copyto(known, told, where=news)
    np.copyto(teller, wait, where=news)


def row_begin(events: Timeline, rounds: int) -> NDArray[np.int64]:
    """Where the rows of each rank begin in clocks that are not shifted: one of zeros, then one per join."""
    sizes = events.joins_per_round.astype(np.int64) * rounds + 1
    return np.cumsum(sizes) - sizes


def _rank_clocks(events: Timeline, order: Run, rounds: int, dropped: int, first: int, width: int) -> Clocks:
    begin, lengths = row_begin(events, rounds), events.lengths
    num_rows = int(begin[-1] + events.joins_per_round[-1] * rounds + 1)
    known = np.zeros((num_rows, width), np.int32)
    otherwise = np.zeros_like(known)
    teller = np.full_like(known, NONE)
    active = np.arange(len(events.wait_op)) != dropped
    owner = events.actor[events.wait_op]
    base = begin[owner] + events.joins[events.wait_op]
    signal_op = events.rank_begin[events.wait_peer] + events.wait_signal
    peer_base = begin[events.wait_peer] + events.joins[signal_op]
    batches = list(_batches(events, order))
    for number in range(rounds):
        for opening, waits in batches:
            row = base[waits] + number * events.joins_per_round[owner[waits]]
            if opening:
                known[row], otherwise[row], teller[row] = known[row - 1], otherwise[row - 1], teller[row - 1]
            since = number - events.wait_rounds_back[waits]
            acts = active[waits] & (since >= 0)
            if not acts.any():
                continue
            waits, row, since = waits[acts], row[acts], since[acts]
            peer = events.wait_peer[waits]
            told = known[peer_base[waits] + since * events.joins_per_round[peer]]
            inside = np.flatnonzero((peer >= first) & (peer < first + width))
            progress = since * lengths[peer] + events.wait_signal[waits] + 1
            told[inside, peer[inside] - first] = progress[inside]
            rows = known[row], otherwise[row], teller[row]
            _tell(*rows, told, waits[:, None].astype(np.int32))
            known[row], otherwise[row], teller[row] = rows
    return Clocks(known, otherwise, teller, first, shifted=False)


def _batches(events: Timeline, order: Run) -> Iterator[tuple[bool, NDArray[np.int64]]]:
    """Waits that can be joined at once, in an order the run admits: of one batch, the i-th wait of each operation.

    True beside the first waits of their operations.
    """
    opening = np.concatenate(([True], events.wait_op[1:] != events.wait_op[:-1]))
    place = np.arange(len(events.wait_op))
    slot = place - np.maximum.accumulate(np.where(opening, place, 0))
    keys = order.batch[events.wait_op].astype(np.int64) * (int(slot.max(initial=0)) + 1) + slot
    sequence = np.argsort(keys, kind="stable")
    keys = keys[sequence]
    for waits in np.split(sequence, np.flatnonzero(np.diff(keys)) + 1):
        if len(waits):
            yield bool(slot[waits[0]] == 0), waits
