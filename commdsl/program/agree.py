"""What a rank tells all others of every call, and what it holds them to: the role that agrees, beside those that move.

Assumes a Plan's moves, or that every rank hears all. Does not touch what
other roles do: the desk is its own (`desk`). That nobody waits for more than without it is a law (`proof.agreement`).

One block of every rank, where data does not carry the call (`Plan.lanes_tell`): it *tells* the number of the call and a
digest of all that has to be the same, then *meets* what the others tell. Of the ranks that a rank hears in the call
anyway it meets the word of this very call; of all others that of `behind` calls before, so that a word is read before
it is written again.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.language.records import dataclass
from commdsl.program.desk import SLOTS
from commdsl.program.moves import CELL, Moves
from commdsl.program.phases import Ranks

BEHIND = SLOTS - 2
"""A word may be written again when the next call begins: by then the peer has read it in a call that it has told of."""

AGREEING_BLOCKS = 1

Mask = NDArray[np.bool_]


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
    ops, ranks = moves.ops, moves.num_ranks
    told: dict[tuple[int, int, int], int] = {}  # by the signal's rank, peer and ordinal: whom that rank had heard
    cells: dict[tuple[int, int], int] = {}
    raised = [[0] * ranks for _ in range(ranks)]
    known = [1 << rank for rank in range(ranks)]
    place = ops.rank_begin[:-1].tolist()
    awaited, read, tells, written = _awaited(moves), _read(moves), _signals(moves), _written(moves)
    goes_on = True
    while goes_on:
        goes_on = False
        for rank in range(ranks):
            while place[rank] < ops.rank_begin[rank + 1]:
                op = place[rank]
                news = [told.get((peer, rank, ordinal)) for peer, ordinal in awaited[op]]
                news += [cells.get((rank, index)) for index in read[op]]
                if None in news:
                    break
                for mask in news:
                    known[rank] |= mask or 0
                for index in written[op]:
                    cells[index] = known[rank]
                for peer in tells[op]:
                    raised[rank][peer] += 1
                    told[rank, peer, raised[rank][peer]] = known[rank]
                place[rank] += 1
                goes_on = True
    heard = np.array([[known[rank] >> peer & 1 for peer in range(ranks)] for rank in range(ranks)], np.bool_)
    np.fill_diagonal(heard, val=False)
    return Agree(heard)


def _by_op(begin: Ints, *columns: list[int]) -> list[list[tuple[int, ...]]]:
    rows = list(zip(*columns, strict=True))
    return [rows[first:last] for first, last in pairwise(begin.tolist())]


def _awaited(moves: Moves) -> list[list[tuple[int, ...]]]:
    """By operation the signals of the same round that it waits for: peer and ordinal; not those of its own tiles."""
    ops = moves.ops
    peers = np.where((ops.wait_rounds_back == 0) & (ops.wait_peer < moves.num_ranks), ops.wait_peer, -1)
    found = _by_op(ops.wait_begin, peers.tolist(), ops.wait_ordinal.tolist())
    return [[wait for wait in waits if wait[0] >= 0] for waits in found]


def _read(moves: Moves) -> list[list[int]]:
    """By operation the cells of its rank that it awaits: none where data carries no flag."""
    ops = moves.ops
    if not moves.protocol.carries_flags:
        return [[] for _ in range(ops.num_ops)]
    found = _by_op(ops.source_begin, ops.source_space.tolist(), ops.source_index.tolist())
    return [[index for space, index in sources if space == CELL] for sources in found]


def _signals(moves: Moves) -> list[list[int]]:
    found = _by_op(moves.ops.signal_begin, moves.ops.signal_peer.tolist())
    return [[peer for (peer,) in peers] for peers in found]


def _written(moves: Moves) -> list[list[tuple[int, int]]]:
    """By operation the cell that it writes, of which rank."""
    ops = moves.ops
    rows = zip(ops.dest_space.tolist(), ops.dest_rank.tolist(), ops.dest_index.tolist(), strict=True)
    return [[(rank, index)] if space == CELL else [] for space, rank, index in rows]
