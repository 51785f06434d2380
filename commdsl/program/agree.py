"""What a rank tells all others of every call, and what it holds them to: the role that agrees, beside those that move.

Assumes a Plan's moves, or that every rank hears all. Does not touch what
other roles do: the desk is its own (`desk`). That nobody waits for more than without it is a law (`proof.agreement`).

One block of every rank, where data does not carry the call (`Plan.lanes_tell`): it *tells* the number of the call and a
digest of all that has to be the same, then *meets* what the others tell. Of the ranks that a rank hears in the call
anyway it meets the word of this very call; of all others that of `behind` calls before, so that a word is read before
it is written again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.language.records import dataclass
from commdsl.program.desk import SLOTS
from commdsl.program.moves import CELL, Moves, Ops
from commdsl.program.phases import Ranks

BEHIND = SLOTS - 2
"""A word may be written again when the next call begins: by then the peer has read it in a call that it has told of."""

AGREEING_BLOCKS = 1

Mask = NDArray[np.bool_]

Numbers = NDArray[np.intp]
"""Of operations, of states, or of pairs of them."""

NOBODY = -1
"""Where no operation brings what one waits for."""


@dataclass(frozen=True, eq=False)
class Agree:
    """The role that agrees: `heard[r, q]` says whether rank r meets what rank q tells of the very same call."""

    heard: Mask
    tells: Ranks = Ranks.ALL  # itself as well: what it told is what it holds others to, calls later
    behind: int = BEHIND

    def __str__(self) -> str:
        return f"{self.told}; {self.met}"

    @property
    def told(self) -> str:
        return f"tell the call to {self.tells.value}"

    @property
    def met(self) -> str:
        return f"meet the call of {self._heard()}, and of the others that of {self.behind} calls before"

    def _heard(self) -> str:
        """As by all ranks alike, where it is."""
        ranks = len(self.heard)
        others = self.heard | np.eye(ranks, dtype=np.bool_)
        if others.all():
            return Ranks.OTHERS.value
        return f"whom it waits for ({int(self.heard.sum(axis=1).max(initial=0))} at most)"


def all_heard(num_ranks: int) -> Agree:
    """Where every rank meets all others in a call, as it does before and behind rows."""
    return Agree(~np.eye(num_ranks, dtype=np.bool_))


def none_heard(num_ranks: int) -> Agree:
    """Where a call is several launches, each with a role of its own."""
    return Agree(np.zeros((num_ranks, num_ranks), np.bool_))


def heard_by(moves: Moves) -> Agree:
    """Whom a rank hears in a round, also through others: by signals of it, and by data that carries its flag."""
    begin, source, target = _states(moves)  # a rank goes from state to state, all ranks at once as far as they come
    rank = np.repeat(np.arange(moves.num_ranks), np.diff(begin))
    first = np.searchsorted(target, np.arange(begin[-1] + 1))
    now = begin[:-1].copy()
    width = -(-moves.num_ranks // 64) * 64  # a bit for each rank that is heard, in whole words
    known = np.zeros((begin[-1], width // 64), np.uint64)
    known[now] = np.packbits(np.eye(moves.num_ranks, width, dtype=np.bool_), axis=1).view(np.uint64)
    everybody = np.bitwise_or.reduce(known[now])
    while (known[now] != everybody).any():  # who hears all hears nobody new: a ring's second half tells nothing
        ahead = now[now + 1 < begin[1:]] + 1
        pair, part = _into(first, ahead)
        ready = ahead[np.logical_and.reduceat(source[pair] <= now[rank[source[pair]]], part)]
        if not len(ready):
            break
        pair, part = _into(first, ready)
        known[ready] = known[ready - 1] | np.bitwise_or.reduceat(known[source[pair]], part)
        now[rank[ready]] = ready
    heard = np.unpackbits(known[now].view(np.uint8), axis=1, count=moves.num_ranks).astype(np.bool_)
    np.fill_diagonal(heard, val=False)
    return Agree(heard)


def _into(first: Numbers, states: Numbers) -> tuple[Numbers, Numbers]:
    """The pairs that lead to any of these states, those of one beside each other, and where those of each begin."""
    count = first[states + 1] - first[states]
    part = np.cumsum(count) - count
    return np.repeat(first[states] - part, count) + np.arange(count.sum()), part


def _states(moves: Moves) -> tuple[Numbers, Numbers, Numbers]:
    """A round as states of what a rank has heard: one before it waits for anybody, one more with each operation that
    does. Where those of each rank begin, and pairs of them: the second, by which they are sorted, takes the first.
    """
    ops = moves.ops
    source, target = _brought(moves)
    waits = np.zeros(ops.num_ops, np.bool_)
    waits[target] = True
    begin = np.searchsorted(np.flatnonzero(waits), ops.rank_begin) + np.arange(moves.num_ranks + 1)
    state = np.cumsum(waits, dtype=np.intp) + ops.actor  # of its rank, when an operation is done
    # What nobody brings takes itself, so it never comes: whether a round ends is for the proofs to say.
    return begin, np.where(source == NOBODY, state[target], state[source]), state[target]


def _brought(moves: Moves) -> tuple[Numbers, Numbers]:
    """Pairs of operations, sorted by the second, which waits in its round for what the first brings."""
    ops = moves.ops
    pairs = [_signalled(ops, moves.num_ranks)]
    if moves.protocol.carries_flags:
        pairs.append(_written(moves))
    source, target = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = np.argsort(target, kind="stable")
    return source[order], target[order]


def _signalled(ops: Ops, num_ranks: int) -> tuple[Numbers, Numbers]:
    """Who raises the signals that are awaited in their round, and who waits; not those of a rank's own tiles."""
    rank, number = ops.actor.astype(np.intp), np.arange(ops.num_ops)
    raises = np.repeat(number, np.diff(ops.signal_begin))
    pair = rank[raises] * num_ranks + ops.signal_peer
    order = np.argsort(pair, kind="stable")  # each pair's in program order, as they are counted
    here = (ops.wait_rounds_back == 0) & (ops.wait_peer < num_ranks)
    waits = np.repeat(number, np.diff(ops.wait_begin))[here]
    wanted = ops.wait_peer[here] * num_ranks + rank[waits]
    place = np.searchsorted(pair[order], wanted) + ops.wait_ordinal[here] - 1
    is_raised = place < np.searchsorted(pair[order], wanted, side="right")
    source = np.full(len(waits), NOBODY)
    source[is_raised] = raises[order[place[is_raised]]]
    return source, waits


def _written(moves: Moves) -> tuple[Numbers, Numbers]:
    """Who writes the cells that are read, and who reads them, each of its own rank's."""
    ops = moves.ops
    writes, reads = np.flatnonzero(ops.dest_space == CELL), np.flatnonzero(ops.source_space == CELL)
    writer = np.full((moves.num_ranks, moves.num_cells), NOBODY)
    writer[ops.dest_rank[writes], ops.dest_index[writes]] = writes
    reader = np.repeat(np.arange(ops.num_ops), np.diff(ops.source_begin))[reads]
    return writer[ops.actor[reader], ops.source_index[reads]], reader
