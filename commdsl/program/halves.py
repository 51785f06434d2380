"""Turns the phases of a call by keys into those of two launches: one that sends, and one that waits for what comes.

Assumes nothing of the phases' order. Does not prove anything (`proof.regions` does, as one launch and as two), and does
not decide what a lane knows: the kernel's bodies say which of it the second launch needs.

The cut is where a call waits for what peers send: at the first wait behind the push. Before it a lane tells its rank's
second launch what it knows of the call, for itself alone: the number of the call among it, which by then the first lane
of the second launch may have advanced.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.program.memory import Rows, Words
from commdsl.program.phases import Actor, Meet, PushAgain, PushBack, PushByKey, Ranks, Read, Routed, Tell

Halves: TypeAlias = tuple[tuple[Routed, ...], tuple[Routed, ...]]


def cut_of(phases: tuple[Routed, ...]) -> int | None:
    """The number of the first phase that waits for what is pushed by key; None where there is none."""
    pushed = False
    for number, phase in enumerate(phases):
        if pushed and isinstance(phase, Meet):
            return number
        pushed = pushed or isinstance(phase, PushByKey | PushAgain | PushBack)
    return None


def kept_by(phases: tuple[Routed, ...], num_ranks: int) -> Words | None:
    """What a lane leaves to itself: how many lanes every rank has, and what is reported when all is done."""
    if cut_of(phases) is None:
        return None
    lanes = tuple(f"lanes {rank}" for rank in range(num_ranks))
    for phase in phases:
        match phase:
            case PushByKey():
                more = *(f"room {rank}" for rank in range(num_ranks)), *(f"comes {rank}" for rank in range(num_ranks))
                forwards = _of_forwarding(phase.crossing, phase.to, num_ranks)
                return Words("kept", (*lanes, *more, "bad", *forwards), a_lane=True, is_own=True)
            case PushAgain():
                rooms = tuple(f"room {rank}" for rank in range(num_ranks)) if phase.crossing else ()
                forwards = _of_forwarding(phase.crossing, (phase.to,), num_ranks)
                return Words("kept", (*lanes, *rooms, *forwards), a_lane=True, is_own=True)
            case PushBack():
                rows = tuple(f"rows {rank}" for rank in range(num_ranks)) if phase.crossing else ()
                return Words("kept", (*lanes, "bad", "apart", *rows), a_lane=True, is_own=True)
            case _:
                pass
    return Words("kept", lanes, a_lane=True, is_own=True)


def _of_forwarding(crossing: Rows | None, to: tuple[Rows, ...], num_ranks: int) -> tuple[str, ...]:
    """What the second launch forwards by: how many rows each rank has, and where each has its results."""
    if crossing is None:
        return ()
    ranks = range(num_ranks)
    return *(f"rows {rank}" for rank in ranks), *(f"{rows.name} of {rank}" for rank in ranks for rows in to)


def halves_of(phases: tuple[Routed, ...], num_ranks: int) -> Halves | None:
    """The phases of each launch, of a call that can be cut."""
    cut, kept = cut_of(phases), kept_by(phases, num_ranks)
    if cut is None or kept is None:
        return None
    return (*phases[:cut], Tell(Actor.LANES, kept, Ranks.OWN)), (Read(Actor.LANES, kept), *phases[cut:])
