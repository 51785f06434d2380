"""Turns a Plan whose phases are proved by region into the steps of a call, and these into a Timeline of its actors.

Assumes the phases of one role on SMs and those of its caller. Does not judge them (`regions` does) and knows no
routing: which rows go where is data, which region a lane may touch is not.

The actors of a rank are its stream, the caller's kernels around the call, and lanes. A region is one memory of one
rank; in it a rank has a segment of its own, with one writer. Lanes share a segment out between them.

Three lanes stand for any number of them. A call has as many lanes as its caller says, a first one always, and the
others are alike: each waits for the same, tells the same, and touches the same segments. A hazard is between two
actors, so two of them that are not the first are all that can meet. Nor does an order need a third one: what lanes
other than the first learn is not handed on (`tells_own`), as the next call may have fewer; so an order between two
actors leads through streams and first lanes alone, which are there in every call. What is refused with three is wrong
in a call of three.

What a lane learns in a `spare` step is forgotten behind it: a lane that has nothing to finish leaves the step out, and
so may each in any call. A hazard within the step is between lanes that do have something, and they have waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.halves import Halves
from commdsl.program.phases import Actor, Host, Meet, Ranks, Routed, Tell
from commdsl.program.plan import Plan
from commdsl.program.proof.timeline import Bits, Timeline
from commdsl.program.touches import Touch, region
from commdsl.program.waves import in_order

STREAM = -1
"""The role of a stream among the actors of a rank, beside those of lanes, their numbers."""

LANES = 3
"""A first lane, and two others that are alike: as many as meet in one hazard."""

NOTHING = -(1 << 30)
"""A row of before the first call, whatever the call."""


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

    What is `given` is the order of a stream; it is no flag, and nothing to judge. What is `spare` a lane leaves out
    when it has nothing to finish.
    """

    name: str
    by: Actor
    touches: tuple[Touch, ...] = ()
    wait: Wait | None = None
    tells: Ranks | None = None
    given: bool = False
    spare: bool = False


def steps(plan: Plan, halves: Halves | None = None) -> tuple[Step, ...]:
    """A call, as every rank makes it: what its caller does before, the launch, what the caller does behind it. With
    `halves` there are two launches, and between them the caller's stream, where it does not touch the call's memory.
    """
    caller = [phase for role in plan.roles if role.is_caller for phase in role.phases if isinstance(phase, Host)]
    before = [phase for phase in caller if not phase.is_after]
    own = Ranks.OWN
    first, second = ((), in_order(plan.comm.routed)) if halves is None else map(in_order, halves)
    lanes = [*first, *second]
    return (
        *(_step(phase, lanes) for phase in before),
        Step("begin", Actor.LANES, wait=Wait(before[-1].name, Actor.CALLER, own), given=True),
        *(_step(phase, lanes) for phase in first),
        *(() if halves is None else _between()),
        *(_step(phase, lanes) for phase in second),
        Step("end", Actor.LANES, tells=own, given=True),
        *(_step(phase, lanes) for phase in caller if phase.is_after),
    )


BETWEEN = "between"
"""What the caller's stream does between two launches of a call."""


def _between() -> tuple[Step, ...]:
    """The end of the first launch, other work of the caller, the begin of the second."""
    own = Ranks.OWN
    return (
        Step("end of send", Actor.LANES, tells=own, given=True),
        Step(BETWEEN, Actor.CALLER, wait=Wait("end of send", Actor.LANES, own), tells=own, given=True),
        Step("begin of receive", Actor.LANES, wait=Wait(BETWEEN, Actor.CALLER, own), given=True),
    )


def _step(phase: Routed, lanes: list[Routed]) -> Step:
    name, done = phase.name, _regions(phase)
    match phase:
        case Host():
            wait = Wait("end", Actor.LANES, Ranks.OWN) if phase.is_after else None
            return Step(phase.name, phase.by, done, wait, None if phase.is_after else Ranks.OWN, given=True)
        case Tell():
            meets = [other for other in lanes if isinstance(other, Meet) and other.what == phase.what]
            # That a rank may finish is told where it is met.
            spare = phase.to is Ranks.OWN and any(meet.is_spare for meet in meets)
            return Step(name, phase.by, done, tells=phase.to if meets else None, spare=spare)
        case Meet():
            return Step(name, phase.by, done, next(_teller(phase, lanes), None), spare=phase.is_spare)
        case _:
            return Step(name, phase.by, done, spare=getattr(phase, "is_spare", False))


def _regions(phase: Routed) -> tuple[Touch, ...]:
    """What a phase touches; memories that may be the same bytes are one region."""
    found: list[Touch] = []
    for touch in phase.touches:
        if not any(region(touch.memory) == region(other.memory) and touch.where == other.where for other in found):
            found.append(touch)
    return tuple(found)


def _teller(meet: Meet, lanes: list[Routed]) -> Iterator[Wait]:
    """Whom a wait is for: whoever tells what it waits for."""
    for phase in lanes:
        if isinstance(phase, Tell) and phase.what == meet.what:
            yield Wait(phase.name, phase.by, meet.of, meet.calls_back)


@dataclass(frozen=True, eq=False)
class Events:
    """A protocol on so many ranks: its Timeline, in which every actor has all steps, and does those that are its own.

    An actor is a rank's stream, then a lane of it; its operations are the steps.
    """

    steps: tuple[Step, ...]
    timeline: Timeline
    role: Ints  # (num_roles,): STREAM, or the number of the lane
    acts: Bits  # (S, num_roles)
    told: Bits  # (num_waits,): the awaited tells who waits

    @property
    def num_ranks(self) -> int:
        return self.timeline.num_ranks

    def rank_of(self, actors: NDArray[np.integer]) -> NDArray[np.integer]:
        return actors % self.num_ranks

    def place_of(self, actors: NDArray[np.integer]) -> NDArray[np.integer]:
        """For an order in which the actors of one rank stand together."""
        return actors % self.num_ranks * len(self.role) + actors // self.num_ranks


def events(steps: tuple[Step, ...], num_ranks: int, lanes: int = LANES) -> Events:
    """The protocol, actor by actor. None waits for itself."""
    role = np.arange(STREAM, lanes, dtype=np.int32)
    acts = np.stack([is_one(role, step.by) for step in steps])
    wait_op, peer, signal = _waits(steps, acts, role, num_ranks)
    length, count = len(steps), len(role) * num_ranks
    there = np.bincount(wait_op, minlength=count * length).reshape(len(role), num_ranks, length)[:, 0] > 0
    known = [_known(steps, acts[:, number], there[number]) for number in range(len(role))]
    row, since, rows_per_round = (np.array(column, np.int32) for column in zip(*known, strict=True))
    step = wait_op % length
    waits = [Wait("", Actor.LANES, Ranks.OWN) if step.wait is None else step.wait for step in steps]
    timeline = Timeline(
        num_ranks=num_ranks,
        begin=np.arange(count + 1, dtype=np.int32) * np.int32(length),
        actor=np.repeat(np.arange(count, dtype=np.int32), length),
        local=np.tile(np.arange(length, dtype=np.int32), count),
        row=np.repeat(row, num_ranks, axis=0).ravel(),
        rows_per_round=np.repeat(rows_per_round, num_ranks),
        wait_op=wait_op,
        wait_peer=peer,
        wait_signal=signal,
        wait_rounds_back=np.array([wait.calls_back for wait in waits], np.int32)[step],
        since=since[wait_op // length // num_ranks, step],
        tells_own=np.repeat(role > 0, num_ranks),
        given=np.array([step.given for step in steps], np.bool_)[step],
    )
    return Events(steps, timeline, role, acts, _told(steps, acts, timeline))


def _waits(steps: tuple[Step, ...], acts: Bits, role: Ints, num_ranks: int) -> tuple[Ints, Ints, Ints]:
    """Who waits where, for whom, for which step: by operation, then by rank and role of the awaited."""
    number = {step.name: index for index, step in enumerate(steps)}
    ranks = np.arange(num_ranks, dtype=np.int32)
    length = np.int32(len(steps))
    found = [np.zeros((3, 0), np.int32)]
    for index, step in enumerate(steps):
        if step.wait is not None:
            among = is_among(ranks, ranks, step.wait.ranks)
            pairs = acts[index][:, None] & is_one(role, step.wait.of)
            by, of, other, awaited = np.nonzero(pairs[:, None, None, :] & among[None, :, :, None])
            who, peer = by * num_ranks + of, awaited * num_ranks + other
            apart = who != peer
            op, signal = who * length + index, np.full(len(who), number[step.wait.step])
            found.append(np.stack((op, peer, signal))[:, apart].astype(np.int32))
    op, peer, signal = np.concatenate(found, axis=1)
    order = np.argsort(op, kind="stable")
    return op[order], peer[order], signal[order]


def _told(steps: tuple[Step, ...], acts: Bits, timeline: Timeline) -> Bits:
    """Beside each wait whether the awaited acts in that step, and tells the rank that waits."""
    num_ranks, ranks = timeline.num_ranks, np.arange(timeline.num_ranks, dtype=np.int32)
    none = np.zeros((num_ranks, num_ranks), np.bool_)
    tells = np.stack([none if step.tells is None else is_among(ranks, ranks, step.tells) for step in steps])
    peer, waiter = timeline.wait_peer, timeline.actor[timeline.wait_op]
    told: Bits = tells[timeline.wait_signal, peer % num_ranks, waiter % num_ranks]
    told &= acts[timeline.wait_signal, peer // num_ranks]
    return told


def _known(steps: tuple[Step, ...], acts: Bits, waits: Bits) -> tuple[list[int], list[int], int]:
    """For each step which waiting step told what is known there, and what it goes on from; and how many wait.

    What spare steps told is known in spare steps alone, up to the next that waits and is none, or the end of the call.
    A call begins as the last one ended: so it is followed twice, the second time from there.
    """
    always, rows = NOTHING, 0
    for _ in range(2):
        always, rows = _call_before(always, rows), 0
        row, since, lately = [], [], always
        for step, is_own, has_wait in zip(steps, acts.tolist(), waits.tolist(), strict=True):
            is_spare = is_own and step.spare
            since.append(lately if is_spare else always)
            if has_wait:
                rows += 1
                lately, always = rows, always if is_spare else rows
            row.append(lately if is_spare else always)
    return row, since, rows


def _call_before(row: int, rows: int) -> int:
    return row if row == NOTHING else row - rows


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
