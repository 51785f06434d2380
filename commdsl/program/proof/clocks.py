"""Turns a Timeline into the order that its waits guarantee: one greedy run, then vector clocks.

Assumes that every wait has a signal to wait for. Does not look at data: `hazards` and `regions` do.

Counters only grow and have one writer, so a wait for the T-th signal of an actor is ordered after that signal and all
before it on that actor, and after nothing else. Hence every maximal run executes the same operations, and one decides
deadlock. Rounds repeat the same operations and waits look back only: a cycle of waits, if there is one, lies within one
round, and order found between rounds 0 and d holds between n and n + d too (a later round has the same joins and more).

A clock is what an actor knows done: known[a] operations of actor a, counted through the rounds. It changes only where
the actor waits, so there is one row per waiting operation and round. Beside it stand the wait that told (`teller`) and
what would be known from the other waits alone (`otherwise`): the difference is what that wait is good for.

When every rank waits and signals as rank 0 does with all ranks turned (around a ring, or along the axes of a torus), so
are the clocks: the rows of one rank's actors, indexed by role and by the turn to the other rank, are all of them (a
join turns the row). If not, rows are kept for every actor; columns do not depend on each other and are made in blocks
that fit in memory. Both are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.proof.timeline import Pattern, Timeline

NONE = -1
"""No wait, no teller."""

BLOCK_ENTRIES = 1 << 24
"""Entries of a clock table made at once; it bounds memory, not what is proved."""


@dataclass(frozen=True, eq=False)
class Run:
    """The greedy run of one round: what must come first is in an earlier batch, or earlier of the same actor.

    An actor waits at most once in a batch. If `stuck`, it ended early: `done[a]` operations of actor a were executed.
    """

    batch: Ints  # (num_ops,)
    done: Ints
    stuck: bool


@dataclass(frozen=True, eq=False)
class Clocks:
    """Rows of clocks for the actors first_column .. in columns, or for a role's turns, role by role, with a Pattern.

    The rows of an actor, or of a role, begin at begin[it].
    """

    known: Ints
    otherwise: Ints
    teller: Ints  # number of the wait, or of its place in the Pattern, if there is one
    begin: NDArray[np.int64]
    first_column: int


def run(events: Timeline, shape: Pattern | None) -> Run:
    """Executes one round greedily: every actor goes on until it waits for what is not done yet."""
    if shape is None:
        return _run_actors(events)
    num_ranks = events.num_ranks
    if events.num_roles > 1:  # all ranks advance in step, so one rank's actors are all there is to run
        found = _run_actors(_one_rank(events, shape))
        batches = np.split(found.batch, np.cumsum(events.lengths[::num_ranks])[:-1])
        batch = np.concatenate([np.tile(one, num_ranks) for one in batches])
        return Run(batch, np.repeat(found.done, num_ranks), found.stuck)
    # With one role a wait is over in time iff its signal stands earlier in the program.
    late = shape.local[(shape.rounds_back == 0) & (shape.signal >= shape.local)]
    reached = int(late.min()) if len(late) else int(events.lengths[0])
    done = np.full(num_ranks, reached, np.int32)
    return Run(batch=events.local, done=done, stuck=bool(len(late)))


def _one_rank(events: Timeline, shape: Pattern) -> Timeline:
    """The actors of a rank, which wait for each other where they wait for any rank's."""
    lengths = events.lengths[:: events.num_ranks]
    begin = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    role = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    local = np.arange(len(role), dtype=np.int32) - begin[role]
    return Timeline(
        num_ranks=1,
        begin=begin,
        actor=role,
        local=local,
        row=events.row[events.begin[role * events.num_ranks] + local],
        rows_per_round=events.rows_per_round[:: events.num_ranks],
        wait_op=begin[shape.role] + shape.local,
        wait_peer=shape.peer_role,
        wait_signal=shape.signal,
        wait_rounds_back=shape.rounds_back,
    )


def _run_actors(events: Timeline) -> Run:
    """In batches: all actors whose next waiting operation is ready run on to the one after it."""
    waiting, first_wait = np.unique(events.wait_op, return_index=True)
    wait_end = np.append(first_wait[1:], len(events.wait_op))
    here = events.wait_rounds_back == 0
    begin = np.searchsorted(waiting, events.begin).astype(np.int64)
    cursor, end = begin[:-1].copy(), begin[1:]
    stops = np.append(events.local[waiting], 0).astype(np.int32)
    done = np.where(cursor < end, stops[cursor], events.lengths).astype(np.int32)
    batch = np.zeros(len(waiting), np.int32)
    number = 0
    while len(actors := np.flatnonzero(cursor < end)):
        number += 1
        at = cursor[actors]
        counts = wait_end[at] - first_wait[at]
        offsets = np.cumsum(counts) - counts
        waits = np.repeat(first_wait[at] - offsets, counts) + np.arange(counts.sum())
        over = ~here[waits] | (done[events.wait_peer[waits]] > events.wait_signal[waits])
        ready = np.logical_and.reduceat(over, offsets)
        if not ready.any():
            break
        batch[at[ready]] = number
        actors = actors[ready]
        cursor[actors] += 1
        done[actors] = np.where(cursor[actors] < end[actors], stops[cursor[actors]], events.lengths[actors])
    stuck = bool((cursor < end).any())
    # The batch of an operation is that of the actor's last waiting operation up to it; in a batch, program order.
    place = np.cumsum(np.bincount(waiting, minlength=len(events.actor)))
    waited = place > begin[events.actor]
    return Run(np.where(waited, np.append(batch, 0)[place - 1], 0).astype(np.int32), done, stuck)


def chain(events: Timeline, order: Run, actor: int) -> list[tuple[int, int]]:
    """From a stuck actor to the one it waits for, until one comes again: the operations that wait, and their waits."""
    found: list[tuple[int, int]] = []
    met: set[int] = set()
    while actor not in met:
        met.add(actor)
        op = int(events.begin[actor] + order.done[actor])
        waits = np.arange(*np.searchsorted(events.wait_op, (op, op + 1)))
        missing = events.wait_signal[waits] >= order.done[events.wait_peer[waits]]
        wait = int(waits[np.argmax(missing & (events.wait_rounds_back[waits] == 0))])
        found.append((op, wait))
        actor = int(events.wait_peer[wait])
    return found


def clocks(events: Timeline, order: Run, shape: Pattern | None, rounds: int, dropped: int) -> Iterator[Clocks]:
    """Vector clocks of `rounds` rounds, in blocks of columns that together are all actors (one block with a Pattern).

    `dropped` is a teller (see Clocks) to leave out, to see what it is good for; with a Pattern on every rank at once.
    """
    if shape is not None:
        yield _turned_clocks(events, order, shape, rounds, dropped)
        return
    begin = _row_begin(events.rows_per_round, rounds)
    width = min(max(BLOCK_ENTRIES // int(begin[-1]), 1), len(events.lengths))
    for first in range(0, len(events.lengths), width):
        yield _actor_clocks(events, order, begin, rounds, dropped, first, min(width, len(events.lengths) - first))


def _row_begin(per_round: Ints, rounds: int) -> NDArray[np.int64]:
    """Where the rows of each begin, one of zeros, then one a waiting operation; and the end of the last."""
    return np.concatenate(([0], np.cumsum(per_round.astype(np.int64) * rounds + 1)))


def _turned_clocks(events: Timeline, order: Run, shape: Pattern, rounds: int, dropped: int) -> Clocks:
    num_ranks = events.num_ranks
    per_round, lengths = (of[::num_ranks].tolist() for of in (events.rows_per_round, events.lengths))
    first = _row_begin(events.rows_per_round[::num_ranks], rounds)
    begin = first.tolist()
    known = np.zeros((begin[-1], events.num_roles, num_ranks), np.int32)
    otherwise = np.zeros_like(known)
    teller = np.full_like(known, NONE)
    waits = _turned_waits(events, order, shape)
    seen_from = {distance: shape.torus.seen_from(distance) for distance in np.unique(shape.distance).tolist()}
    for number in range(rounds):
        previous = NONE
        for place, role, row, since, peer, distance, back, signal, told_row, tells_own in waits:
            row += begin[role] + number * per_round[role]
            if row != previous:
                before = begin[role] + max(since + number * per_round[role], 0)
                known[row], otherwise[row], teller[row] = known[before], otherwise[before], teller[before]
                previous = row
            if back > number or place == dropped:
                continue
            if tells_own:
                told = np.zeros_like(known[row])
            else:
                of = known[begin[peer] + max(told_row + (number - back) * per_round[peer], 0)]
                told = of[:, seen_from[distance]]
            told[peer, distance] = (number - back) * lengths[peer] + signal + 1
            _tell(known[row], otherwise[row], teller[row], told, place)
    flat = (-1, events.num_roles * num_ranks)
    return Clocks(known.reshape(flat), otherwise.reshape(flat), teller.reshape(flat), first, 0)


def _turned_waits(events: Timeline, order: Run, shape: Pattern) -> list[tuple[int, ...]]:
    """The waits in an order that the run admits: each its place, what waits, what it awaits, and the rows of both."""
    num_ranks = events.num_ranks
    first = events.begin[:-1][::num_ranks]
    op = first[shape.role] + shape.local
    row, told = events.row[op], events.row[first[shape.peer_role] + shape.signal]
    since = row - 1 if events.since is None else shape.since
    own = np.zeros_like(op) if events.tells_own is None else events.tells_own[::num_ranks][shape.peer_role]
    columns = (shape.role, row, since, shape.peer_role, shape.distance, shape.rounds_back, shape.signal, told, own)
    waits = list(zip(range(len(op)), *(column.tolist() for column in columns), strict=True))
    if events.num_roles == 1:
        return waits
    return [waits[place] for place in np.argsort(order.batch[op], kind="stable").tolist()]


def _tell(known: Ints, otherwise: Ints, teller: Ints, told: Ints, wait: int | Ints) -> None:
    """Joins what one wait tells into the rows, in place."""
    news = told > known
    # What is known without the wait that tells most: the lesser of the two, unless both are the same wait's.
    rest = np.where(news, known, told)
    np.maximum(otherwise, rest, out=otherwise, where=teller != wait)
    np.copyto(known, told, where=news)
    np.copyto(teller, wait, where=news)


def _actor_clocks(
    events: Timeline, order: Run, begin: NDArray[np.int64], rounds: int, dropped: int, first: int, width: int
) -> Clocks:
    lengths = events.lengths
    known = np.zeros((int(begin[-1]), width), np.int32)
    otherwise = np.zeros_like(known)
    teller = np.full_like(known, NONE)
    active = np.arange(len(events.wait_op)) != dropped
    owner = events.actor[events.wait_op]
    base, per_round = begin[owner] + events.row[events.wait_op], events.rows_per_round[owner]
    peer_row = events.row[events.begin[events.wait_peer] + events.wait_signal]
    peer_base = begin[events.wait_peer]
    batches = list(_batches(events, order))
    for number in range(rounds):
        for opening, waits in batches:
            row = base[waits] + number * per_round[waits]
            if opening:
                before = row - 1
                if events.since is not None:
                    before = begin[owner[waits]] + events.rows_of(events.since[waits], owner[waits], number)
                known[row], otherwise[row], teller[row] = known[before], otherwise[before], teller[before]
            when = number - events.wait_rounds_back[waits]
            acts = active[waits] & (when >= 0)
            if not acts.any():
                continue
            waits, row, when = waits[acts], row[acts], when[acts]
            peer = events.wait_peer[waits]
            told = known[peer_base[waits] + events.rows_of(peer_row[waits], peer, when)]
            if events.tells_own is not None:
                told[events.tells_own[peer]] = 0
            inside = np.flatnonzero((peer >= first) & (peer < first + width))
            progress = when * lengths[peer] + events.wait_signal[waits] + 1
            told[inside, peer[inside] - first] = progress[inside]
            rows = known[row], otherwise[row], teller[row]
            _tell(*rows, told, waits[:, None].astype(np.int32))
            known[row], otherwise[row], teller[row] = rows
    return Clocks(known, otherwise, teller, begin, first)


def _batches(events: Timeline, order: Run) -> Iterator[tuple[bool, NDArray[np.int64]]]:
    """Waits that can be joined at once, in an order the run admits: of one batch, the i-th wait of each operation.

    True beside the first waits of their operations.
    """
    opening = np.concatenate(([True], events.wait_op[1:] != events.wait_op[:-1]))[: len(events.wait_op)]
    place = np.arange(len(events.wait_op))
    slot = place - np.maximum.accumulate(np.where(opening, place, 0))
    keys = order.batch[events.wait_op].astype(np.int64) * (int(slot.max(initial=0)) + 1) + slot
    sequence = np.argsort(keys, kind="stable")
    keys = keys[sequence]
    for waits in np.split(sequence, np.flatnonzero(np.diff(keys)) + 1):
        if len(waits):
            yield bool(slot[waits[0]] == 0), waits
