"""Turns the phases of a call by keys into those of two launches: one that sends, and one that waits for what comes.

Assumes nothing of the phases' order. Does not prove anything (`proof.regions` does, as one launch and as two), and does
not decide what a lane knows: the kernel's bodies say which of it the second launch needs.

The cut is where a call waits for what peers send: at the first wait behind the last phase that sends, the push or what
sends on what crossed once per node. So no rank waits for another's second launch. Before it a lane tells its rank's
second launch what it knows of the call, for itself alone: the number of the call among it, which by then the first lane
of the second launch may have advanced.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.program.memory import Words
from commdsl.program.phases import Actor, Meet, Ranks, Read, Routed, Tell

Halves: TypeAlias = tuple[tuple[Routed, ...], tuple[Routed, ...]]


def cut_of(phases: tuple[Routed, ...]) -> int | None:
    """The number of the first phase that waits for what is sent by key; None where there is none."""
    last = max((number for number, phase in enumerate(phases) if phase.sends_by_key), default=len(phases))
    return next((at for at, phase in enumerate(phases) if at > last and isinstance(phase, Meet)), None)


def kept_by(phases: tuple[Routed, ...], num_ranks: int) -> Words | None:
    """What a lane leaves to itself: how many lanes every rank has, and rows; and what is reported when all is done."""
    if cut_of(phases) is None:
        return None
    lanes = tuple(f"lanes {rank}" for rank in range(num_ranks))
    more = next(filter(None, (phase.kept(num_ranks) for phase in phases)), ())
    return Words("kept", (*lanes, *more), a_lane=True, is_own=True)


def halves_of(phases: tuple[Routed, ...], num_ranks: int) -> Halves | None:
    """The phases of each launch, of a call that can be cut."""
    cut, kept = cut_of(phases), kept_by(phases, num_ranks)
    if cut is None or kept is None:
        return None
    return (*phases[:cut], Tell(Actor.LANES, kept, Ranks.OWN)), (Read(Actor.LANES, kept), *phases[cut:])
