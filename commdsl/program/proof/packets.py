"""Turns a Plan whose data carries its flags into what is wrong with them.

Assumes a Plan that `verify` passed. Shares nothing with the pass that placed the cells: it sees tables only. Does not
judge the flags that data stands for (`rounds`); `synchronization` does.

That data is there tells apart rounds, nothing else, so a cell is written at most once a round (C209). The first word of
lane 0 has the digest of the call in place of most bits of the number; it is sent in every round, so it is told apart
from the one of `rotation` rounds before (C209). A cell comes round again `rotation` rounds later. Then other threads
may be the only ones at work, as a short call moves fewer words: what holds between rounds has to hold for blocks. A
block has left round n when any of its threads is seen in round n + 1. So who writes a peer's cells must have heard,
within the last round before it does so, from that peer's part in it, or wait for a credit, which is raised by the whole
block (C209).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.language.diagnostics import Diagnostic
from commdsl.program.moves import CELL, Moves
from commdsl.program.proof import messages
from commdsl.program.proof.clocks import NONE, clocks
from commdsl.program.proof.flags import timeline
from commdsl.program.proof.rounds import Round

NUMBERS = 1 << 15
"""Rounds that differ in the 16 bits beside the digest of a call: numbers are odd."""


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


def reuse(found: Round) -> Iterator[Diagnostic]:
    """Cells written again before the reader's block has left the round, and credits that nothing needs."""
    moves, brought, heard = found.moves, found.brought, heard_in_a_round(found)
    ops, num_ranks = moves.ops, moves.num_ranks
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


def heard_in_a_round(found: Round) -> NDArray[np.bool_]:
    """[a, b]: in every round rank a hears of rank b's part in it before the round is over for a."""
    events, shape, num_ranks = found.events, found.shape, found.moves.num_ranks
    ranks = np.arange(num_ranks, dtype=np.int32)
    heard = np.zeros((num_ranks, num_ranks), np.bool_)
    for table in clocks(events, found.order, shape, 1, NONE):
        if shape is not None:
            end = table.known[int(events.rows_per_round[0])]
            heard[:] = end[shape.torus.distance(ranks[None, :], ranks[:, None])] > 0
        else:
            end = table.known[table.begin[:-1] + events.rows_per_round]
            heard[:, table.first_column : table.first_column + end.shape[1]] = end > 0
    return heard
