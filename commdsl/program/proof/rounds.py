"""Turns Moves into one round of them, as every proof looks at it: who awaits what, and in which order a round goes.

Assumes Moves that `verify` passed. Shares nothing with the pass that placed the cells: it sees tables only. Does not
judge: before anybody asks for `events`, `synchronization` has said that every wait has a signal.

Where data carries its flags a read of a cell waits until the cell's own data is there. A flag orders the reader's
thread after the writer's, word by word: thread i of a lane moves word i of every operation, so within a round each
thread is a lane of its own, and the Moves with a flag for every such read have to pass the laws of flags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.moves import CELL, Moves, Reason
from commdsl.program.proof.clocks import Run, run
from commdsl.program.proof.flags import Flags, timeline
from commdsl.program.proof.timeline import Pattern, pattern


@dataclass(frozen=True, eq=False)
class Round:
    """Found when a proof first asks for it, and kept for the others."""

    moves: Moves

    @cached_property
    def brought(self) -> Deliveries:
        """What data tells, where it carries its flags."""
        return deliveries(self.moves)

    @cached_property
    def flagged(self) -> Moves:
        """With a flag for all that is awaited."""
        return flagged(self.moves, self.brought) if self.moves.carrier.has_flags_in_data else self.moves

    @cached_property
    def events(self) -> Flags:
        return timeline(self.flagged)

    @cached_property
    def shape(self) -> Pattern | None:
        return pattern(self.events)

    @cached_property
    def order(self) -> Run:
        return run(self.events, self.shape)


@dataclass(frozen=True, eq=False)
class Deliveries:
    """Reads of what another rank wrote into a cell: groups by their first operation."""

    writer: Ints  # the operation that writes
    reader: Ints  # the first of the group that reads
    source: Ints  # rank of the writer
    target: Ints  # rank of the reader


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
