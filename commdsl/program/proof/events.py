"""Turns a Plan whose phases are proved by region into the steps of a call, and these into events thread by thread.

Assumes the phases of one role on SMs and those of its caller. Does not judge them (`regions` does) and knows no
routing: which rows go where is data, which region a lane may touch is not.

Logical threads are the lanes of a rank and its stream, the caller's kernels around the call. A region is one memory of
one rank; in it a rank has a segment of its own, with one writer. Lanes share a segment out between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.moves import Moves
from commdsl.program.phases import Actor, Host, Meet, Ranks, Routed, Tell, Touch, is_same_region, name_of, touches
from commdsl.program.plan import Plan

Bits = NDArray[np.bool_]

STREAM = -1
"""The role of a stream among the threads of a rank, beside those of lanes, their numbers."""

LANES = 3
"""A first lane, and two others that are alike: as many as meet in one hazard."""


@dataclass(frozen=True, slots=True)
class Wait:
    """For what other threads tell in a step of the same call, or of one before."""

    step: str
    of: Actor
    ranks: Ranks
    calls_back: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What its threads do in one call at this place of their program: wait, then touch, then tell.

    What is `given` is the order of a stream; it is no flag, and nothing to judge. What is `spare` a lane other than the
    first leaves out when it has nothing to finish.
    """

    name: str
    by: Actor
    touches: tuple[Touch, ...] = ()
    wait: Wait | None = None
    tells: Ranks | None = None
    given: bool = False
    spare: bool = False


def steps(plan: Plan) -> tuple[Step, ...]:
    """A call, as every rank makes it: what its caller does before, the launch, what the caller does behind it."""
    caller = [phase for role in plan.roles if role.is_caller for phase in role.phases if isinstance(phase, Host)]
    before = [phase for phase in caller if not phase.is_after]
    lanes = [phase for phase in plan.comm.phases if not isinstance(phase, Moves)]
    own = Ranks.OWN
    return (
        *(_step(phase, lanes) for phase in before),
        Step("begin", Actor.LANES, wait=Wait(before[-1].name, Actor.CALLER, own), given=True),
        *(_step(phase, lanes) for phase in lanes),
        Step("end", Actor.LANES, tells=own, given=True),
        *(_step(phase, lanes) for phase in caller if phase.is_after),
    )


def _step(phase: Routed, lanes: list[Routed]) -> Step:
    name, done = name_of(phase), _regions(phase)
    match phase:
        case Host():
            wait = Wait("end", Actor.LANES, Ranks.OWN) if phase.is_after else None
            return Step(phase.name, phase.by, done, wait, None if phase.is_after else Ranks.OWN, given=True)
        case Tell():
            is_awaited = any(isinstance(other, Meet) and other.what == phase.what for other in lanes)
            return Step(name, phase.by, done, tells=phase.to if is_awaited else None)
        case Meet():
            return Step(name, phase.by, done, next(_told(phase, lanes), None), spare=phase.is_spare)
        case _:
            return Step(name, phase.by, done, spare=getattr(phase, "is_spare", False))


def _regions(phase: Routed) -> tuple[Touch, ...]:
    """What a phase touches; memories that may be the same bytes are one region."""
    found: list[Touch] = []
    for touch in touches(phase):
        if not any(is_same_region(touch.memory, other.memory) and touch.where == other.where for other in found):
            found.append(touch)
    return tuple(found)


def _told(meet: Meet, lanes: list[Routed]) -> Iterator[Wait]:
    """Whom a wait is for: whoever tells what it waits for."""
    for phase in lanes:
        if isinstance(phase, Tell) and phase.what == meet.what:
            yield Wait(name_of(phase), phase.by, meet.of, meet.calls_back)


@dataclass(frozen=True, eq=False)
class Events:
    """A protocol on so many ranks, thread by thread: S steps, T threads: on each rank its stream, then its lanes."""

    steps: tuple[Step, ...]
    num_ranks: int
    rank: Ints  # (T,)
    role: Ints  # (T,): STREAM, or the number of the lane
    acts: Bits  # (S, T)
    waits: Bits  # (S, T, T): thread t waits for thread u
    awaited: Ints  # (S,): for what it tells in which step; meaningless where there are no waits
    tells: Bits  # (S, T, num_ranks): thread t tells the rank


def events(steps: tuple[Step, ...], num_ranks: int, lanes: int = LANES) -> Events:
    """The protocol on each thread. No thread waits for itself."""
    rank = np.repeat(np.arange(num_ranks, dtype=np.int32), lanes + 1)
    role = np.tile(np.arange(STREAM, lanes, dtype=np.int32), num_ranks)
    number = {step.name: index for index, step in enumerate(steps)}
    shape = (len(steps), len(rank))
    acts, waits = np.zeros(shape, np.bool_), np.zeros((*shape, len(rank)), np.bool_)
    tells, awaited = np.zeros((*shape, num_ranks), np.bool_), np.zeros(len(steps), np.int32)
    alone = np.eye(len(rank), dtype=np.bool_)
    for index, step in enumerate(steps):
        acts[index] = is_one(role, step.by)
        if step.wait is not None:
            waits[index] = is_among(rank, rank, step.wait.ranks) & is_one(role, step.wait.of) & ~alone
            waits[index] &= acts[index][:, None]
            awaited[index] = number[step.wait.step]
        if step.tells is not None:
            tells[index] = is_among(rank, np.arange(num_ranks, dtype=np.int32), step.tells) & acts[index][:, None]
    return Events(steps, num_ranks, rank, role, acts, waits, awaited, tells)


def is_one(role: Ints, actor: Actor) -> Bits:
    """(len(role),): whether the threads in these roles are meant."""
    found: Bits
    match actor:
        case Actor.CALLER:
            found = role == STREAM
        case Actor.FIRST:
            found = role == 0
        case Actor.LANES:
            found = role != STREAM
        case never:
            assert_never(never)
    return found


def is_among(of: Ints, ranks: Ints, which: Ranks) -> Bits:
    """(len(of), len(ranks)): whether the second is one of `which` for the first."""
    same: Bits = of[:, None] == ranks
    match which:
        case Ranks.OWN:
            return same
        case Ranks.OTHERS:
            return ~same
        case Ranks.ALL:
            return np.ones_like(same)
        case never:
            assert_never(never)
