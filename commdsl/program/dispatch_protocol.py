"""Turns a number of ranks into the protocol of a dispatch as data: what every lane does in a call, in order, what it
waits for, whom it tells, what it reads and writes.

Assumes that the kernel does what is said here: templates/include/commdsl/dispatch.cuh is the same in C++. Does not
judge the protocol (`checks.dispatch_protocol` does) and knows no table: which rows go where is data, which region a
lane may touch is not.

Logical threads are the lanes of a rank and its stream, the caller's kernels around the call. A region is the memory of
one kind on one rank. In it a rank has a segment of its own, with one writer: the rows that it sends there. Lanes share
a segment out between them. In one call segments are disjoint, which the laws of routes prove; from call to call another
plan may put them anywhere, so then every access of a region meets every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints

Bits = NDArray[np.bool_]

STREAM = -1
"""The role of a stream among the threads of a rank, beside those of lanes, their numbers."""

LANES = 3
"""A first lane, and two others that are alike: as many as meet in one hazard."""


class Actor(Enum):
    """Which threads of a rank."""

    STREAM = "the stream"
    FIRST = "lane 0"
    LANES = "every lane"


class Ranks(Enum):
    """Which ranks, for one of them."""

    OWN = "its own"
    OTHERS = "all others"
    ALL = "all"


class Space(Enum):
    """The kinds of regions."""

    TENSORS = "the tensors"  # inputs and outputs; a result may be what a later call reads, and its memory reused
    WAITING = "the waiting room"
    GREETINGS = "the greetings"
    COUNTS = "the row counts"
    CALLS = "the call number"

    @property
    def is_routed(self) -> bool:
        """Whether a rank's segment may lie elsewhere in the next call."""
        return self in (Space.TENSORS, Space.WAITING)


@dataclass(frozen=True, slots=True)
class Access:
    """Reads or writes a region on some ranks: writes go to the writer's segment, reads and what is OWN to all of it.

    Of two accesses in one call the one with the lower `turn` comes first; those of one turn touch different bytes.
    """

    space: Space
    on: Ranks
    writes: bool
    turn: int


@dataclass(frozen=True, slots=True)
class Wait:
    """For what other threads tell in a step of the same call, or of one before."""

    step: str
    of: Actor
    ranks: Ranks
    calls_back: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What its threads do in one call at this place of their program: wait, then access, then tell.

    What is `given` is the order of a stream; it is no flag, and nothing to judge. What is `spare` a lane other than the
    first leaves out when it has nothing to finish.
    """

    name: str
    by: Actor
    accesses: tuple[Access, ...] = ()
    wait: Wait | None = None
    tells: Ranks | None = None
    given: bool = False
    spare: bool = False


def protocol() -> tuple[Step, ...]:
    """A call, as every rank makes it, between what its caller does."""
    own = Ranks.OWN
    return (
        # What the caller writes before: inputs, and outputs of which the table leaves rows out.
        Step("prepare", Actor.STREAM, (Access(Space.TENSORS, own, True, 0),), tells=own, given=True),
        Step(
            "begin",
            Actor.LANES,
            (Access(Space.CALLS, own, False, 0),),
            Wait("prepare", Actor.STREAM, own),
            given=True,
        ),
        *_kernel(),
        Step("end", Actor.LANES, tells=own, given=True),
        # What the caller does after: the results are read, and may be what the next call sends, or writes over.
        Step(
            "use",
            Actor.STREAM,
            (Access(Space.TENSORS, own, False, 2),),
            Wait("end", Actor.LANES, own),
            given=True,
        ),
    )


def _kernel() -> tuple[Step, ...]:
    own, others, everyone = Ranks.OWN, Ranks.OTHERS, Ranks.ALL
    return (
        Step("announce", Actor.FIRST, (Access(Space.GREETINGS, others, True, 0),), tells=others),
        Step(
            "meet",
            Actor.LANES,
            (Access(Space.GREETINGS, own, False, 1),),
            Wait("announce", Actor.FIRST, others),
        ),
        Step(
            "push",
            Actor.LANES,
            (
                Access(Space.TENSORS, own, False, 1),
                Access(Space.TENSORS, everyone, True, 1),
                Access(Space.WAITING, everyone, True, 0),
            ),
        ),
        Step("tell", Actor.LANES, (Access(Space.COUNTS, everyone, True, 0),), tells=everyone),
        Step("await", Actor.FIRST, (), Wait("tell", Actor.LANES, everyone)),
        Step("leave", Actor.FIRST, (Access(Space.COUNTS, own, False, 1), Access(Space.CALLS, own, True, 1)), tells=own),
        Step("learn", Actor.LANES, (), Wait("leave", Actor.FIRST, own), spare=True),
        Step(
            "finish",
            Actor.LANES,
            (Access(Space.WAITING, own, False, 1), Access(Space.TENSORS, own, True, 1)),
            spare=True,
        ),
    )


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
        case Actor.STREAM:
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
