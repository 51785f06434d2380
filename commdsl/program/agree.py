"""What a rank tells all others of every call, and what it holds them to: the role that agrees, beside those that move.

Assumes a Plan's moves, or that every rank hears all. Touches the desk alone (`desk`), which no other role does, so it
races nobody; that nobody waits for more than it would without is a law of its own (`proof.agreement`).

One block of every rank, whatever the lanes do: it *tells* the number of the call and a digest of all that has to be
the same, then *meets* what the others tell. Of the ranks that a rank hears in the call anyway it meets the word of this
very call; of all others that of `behind` calls before, so that a word is read before it is written again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    """Whose signals of the same round a rank waits for, or whose data it waits for that carries its flag."""
    ops, ranks = moves.ops, moves.num_ranks
    heard = np.zeros((ranks, ranks), np.bool_)
    rank_of = np.repeat(np.arange(ranks), np.diff(ops.rank_begin))
    waiter = np.repeat(rank_of, np.diff(ops.wait_begin))
    now = (ops.wait_rounds_back == 0) & (ops.wait_peer < ranks)
    heard[waiter[now], ops.wait_peer[now]] = True
    if moves.protocol.carries_flags:
        sends = ops.dest_space == CELL
        heard[ops.dest_rank[sends], rank_of[sends]] = True
        np.fill_diagonal(heard, val=False)
    return Agree(heard)
