"""Turns a Plan whose data carries its flags into what is wrong with them, and into the Plan with flags it stands for.

Assumes a Plan that `verify` passed. Shares nothing with the pass that placed the cells: it sees tables only. Does not
judge the flags it adds; `synchronization` does.

A read of a cell waits until the cell's own data is there. That tells apart rounds, nothing else, so a cell is written
at most once a round (C209). The first word of lane 0 has the digest of the call in place of most bits of the number; it
is sent in every round, so it is told apart from the one of `rotation` rounds before (C209). A flag orders the reader's
thread after the writer's, word by word: thread i of a lane moves word i of every operation, so within a round each
thread is a lane of its own, and the Plan with a flag for every such read has to pass the laws of flags. A cell comes
round again `rotation` rounds later. Then other threads may be the only ones at work, as a short call moves fewer words:
what holds between rounds has to hold for blocks. A block has left round n when any of its threads is seen in round n +
1. So who writes a peer's cells must have heard, within the last round before it does so, from that peer's part in it,
or wait for a credit, which is raised by the whole block (C209).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.language.diagnostics import Diagnostic
from commdsl.program.moves import CELL, Moves, Reason
from commdsl.program.proof import messages
from commdsl.program.proof.clocks import NONE, clocks, run
from commdsl.program.proof.flags import timeline
from commdsl.program.proof.timeline import pattern

Longs = NDArray[np.int64]

NUMBERS = 1 << 15
"""Rounds that differ in the 16 bits beside the digest of a call: numbers are odd."""


@dataclass(frozen=True, eq=False)
class Deliveries:
    """Reads of what another rank wrote into a cell: groups by their first operation."""

    writer: Ints  # the operation that writes
    reader: Ints  # the first of the group that reads
    source: Ints  # rank of the writer
    target: Ints  # rank of the reader


def written_twice(moves: Moves) -> Iterator[Diagnostic]:
    """A cell that two operations write in a round."""
    ops = moves.ops
    writes = np.flatnonzero(ops.dest_space == CELL)
    key = ops.dest_rank[writes].astype(np.int64) * max(moves.num_cells, 1) + ops.dest_index[writes]
    order = np.argsort(key, kind="stable")
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    if len(again):
        yield messages.written_twice(moves, int(writes[order][again[0]]), int(writes[order][again[0] + 1]))


def told_apart(moves: Moves) -> Iterator[Diagnostic]:
    """A place's first word has few bits for the number. It is sent in every operation of every round, so what it
    replaces is exactly `rotation` rounds old.
    """
    writes = np.flatnonzero(moves.ops.dest_space == CELL)
    if moves.rotation % NUMBERS == 0 and len(writes):
        yield messages.mistaken(moves, int(writes[0]), NUMBERS)


def deliveries(moves: Moves) -> Deliveries:
    ops = moves.ops
    writes = np.flatnonzero(ops.dest_space == CELL)
    width = max(moves.num_cells, 1)
    key = ops.dest_rank[writes].astype(np.int64) * width + ops.dest_index[writes]
    order = np.argsort(key)
    key = key[order]
    reader = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.source_begin))
    reads = np.flatnonzero(ops.source_space == CELL)
    wanted = ops.source_rank[reads].astype(np.int64) * width + ops.source_index[reads]
    at = np.searchsorted(key, wanted)
    known = np.flatnonzero((at < len(key)) & (key[np.minimum(at, len(key) - 1)] == wanted)) if len(key) else at[:0]
    writer, reading = writes[order][at[known]].astype(np.int32), reader[reads[known]]
    actor = ops.actor
    far = np.flatnonzero(actor[writer] != actor[reading])
    writer, reading = writer[far], reading[far]
    return Deliveries(writer, reading, actor[writer], actor[reading])


def flagged(moves: Moves, brought: Deliveries) -> Moves:
    """The Plan in which a flag stands for every delivery, beside the credits it has."""
    ops, events = moves.ops, timeline(moves)
    leader = ops.leader_of
    last = np.append(ops.leaders[1:], ops.num_ops).astype(np.int32) - 1
    group = np.searchsorted(ops.leaders, leader[brought.writer])
    none = np.zeros(len(brought.writer), np.int32)
    signal = ops.rank_begin[events.wait_peer] + events.wait_signal
    waits = (
        np.concatenate((brought.reader, events.wait_op)),
        np.concatenate((brought.source, events.wait_peer)),
        np.concatenate((last[group], signal)),
        np.concatenate((none, events.wait_rounds_back)),
        np.concatenate((none + np.int32(Reason.READ_AFTER_WRITE), ops.wait_reason)),
    )
    return _with_waits(moves, events.actor, *waits)


def _with_waits(moves: Moves, actor: Ints, op: Ints, peer: Ints, signal: Ints, back: Ints, reason: Ints) -> Moves:
    """The Plan with these waits, each for the signal that operation `signal` of `peer` raises, and no others."""
    ops, num_ranks = moves.ops, moves.num_ranks
    raised, of_wait = np.unique(signal.astype(np.int64) * num_ranks + actor[op], return_inverse=True)
    after, to = raised // num_ranks, raised % num_ranks
    pair = actor[after].astype(np.int64) * num_ranks + to
    by_pair = np.argsort(pair, kind="stable")
    begin = np.searchsorted(pair[by_pair], pair[by_pair])
    ordinal = np.empty(len(raised), np.int32)
    ordinal[by_pair] = np.arange(len(raised)) - begin + 1
    order = np.lexsort((peer, op))
    counts = np.bincount(pair, minlength=num_ranks * num_ranks).astype(np.int32).reshape(num_ranks, num_ranks)
    changed = replace(
        ops,
        wait_begin=_begins(op, ops.num_ops),
        wait_peer=peer[order],
        wait_ordinal=ordinal[of_wait][order],
        wait_rounds_back=back[order],
        wait_reason=reason[order],
        signal_begin=_begins(after, ops.num_ops),
        signal_peer=to.astype(np.int32),
        # A place's word is one thread's in every operation: its accesses are in program order, as with barriers.
        barrier=np.ones(ops.num_ops, np.int32),
    )
    return replace(moves, ops=changed, signals_per_round=counts)


def _begins(of: NDArray[np.integer], size: int) -> Ints:
    return np.concatenate(([0], np.cumsum(np.bincount(of, minlength=size)))).astype(np.int32)


def reuse(moves: Moves, brought: Deliveries, with_flags: Moves) -> Iterator[Diagnostic]:
    """Cells written again before the reader's block has left the round, and credits that nothing needs."""
    ops, num_ranks = moves.ops, moves.num_ranks
    heard = heard_in_a_round(with_flags)
    pair = brought.source.astype(np.int64) * num_ranks + brought.target
    pairs, group = np.unique(pair, return_inverse=True)
    source, target = pairs // num_ranks, pairs % num_ranks
    first = np.full(len(pairs), np.iinfo(np.int64).max)
    latest = np.full(len(pairs), -1, np.int64)
    np.minimum.at(first, group, ops.leader_of[brought.writer].astype(np.int64))
    np.maximum.at(latest, group, brought.reader.astype(np.int64))
    events = timeline(moves)
    signal = ops.rank_begin[events.wait_peer] + events.wait_signal
    credit = events.actor[events.wait_op].astype(np.int64) * num_ranks + events.wait_peer
    at = np.minimum(np.searchsorted(pairs, credit), max(len(pairs) - 1, 0))
    serves = np.zeros(len(credit), np.bool_)
    if len(pairs):
        serves = (pairs[at] == credit) & (events.wait_rounds_back <= moves.rotation)
        serves &= (events.wait_op <= first[at]) & (signal >= latest[at])
    credited = np.zeros(len(pairs), np.bool_)
    credited[at[serves]] = True
    silent = ~heard[source, target]
    if moves.rotation < 2 and len(pairs):
        silent = np.ones(len(pairs), np.bool_)
    unsafe = np.flatnonzero(silent & ~credited)
    if len(unsafe):
        yield messages.overwritten(moves, int(first[unsafe[0]]), int(latest[unsafe[0]]), len(unsafe))
        return
    idle = np.flatnonzero(~serves | ~silent[at]) if len(pairs) else np.arange(len(credit))
    if len(idle):
        yield messages.idle_wait(moves, int(idle[0]))
    elif not events.awaited.all():
        yield messages.unheard(moves, int(np.argmin(events.awaited)))


def heard_in_a_round(moves: Moves) -> NDArray[np.bool_]:
    """[a, b]: in every round rank a hears of rank b's part in it before the round is over for a."""
    events = timeline(moves)
    shape = pattern(events)
    order = run(events, shape)
    ranks = np.arange(moves.num_ranks, dtype=np.int32)
    heard = np.zeros((moves.num_ranks, moves.num_ranks), np.bool_)
    for table in clocks(events, order, shape, 1, NONE):
        if shape is not None:
            end = table.known[int(events.rows_per_round[0])]
            heard[:] = end[shape.torus.distance(ranks[None, :], ranks[:, None])] > 0
        else:
            end = table.known[table.begin[:-1] + events.rows_per_round]
            heard[:, table.first_column : table.first_column + end.shape[1]] = end > 0
    return heard
