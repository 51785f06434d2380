"""What a rank tells all others of every call, and what it holds them to: the role that agrees, beside those that move.

Assumes what `lower` has found of a Plan's moves, or that every rank hears all. Does not touch what
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
