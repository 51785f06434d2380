"""A second opinion on the protocol of a dispatch: one machine at a time, with so many lanes in each call, by sets.

Turns a protocol's steps and a setting into whether its calls end, and in order. Assumes a few ranks. Written for
clarity, and shares nothing with the proof it judges: that is of all settings at once, this of the one at hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, product

from commdsl.program.memory import Home, Memory, Rows
from commdsl.program.phases import Actor, Ranks
from commdsl.program.proof.events import Step

CALLS = 3

Thread = tuple[int, str, int]
"""Rank, "stream" or "lane", number of the lane."""

Event = tuple[int, int, Thread]
"""Call, step, thread."""


@dataclass(frozen=True)
class Setting:
    """Lanes of each rank in each call, and those of them, by rank, call and number, that have nothing to finish: the
    first only where no rank has.
    """

    lanes: tuple[tuple[int, ...], ...]  # by call, then by rank
    idle: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def num_ranks(self) -> int:
        return len(self.lanes[0])


def settings(num_ranks: int, most: int, count: int, seed: int) -> Iterator[Setting]:
    """The fewest lanes, the most, all busy, the first alone and none; then any."""
    dice = random.Random(seed)
    for lanes in (1, most):
        for first, busy in ((True, True), (True, False), (False, False)):
            yield _setting([[lanes] * num_ranks] * CALLS, lambda first=first: first, lambda busy=busy: busy)
    for _ in range(count):
        drawn = [[dice.randint(1, most) for _ in range(num_ranks)] for _ in range(CALLS)]
        yield _setting(drawn, lambda: dice.random() < 0.8, lambda: dice.random() < 0.5)


def _setting(lanes: list[list[int]], first: Callable[[], bool], busy: Callable[[], bool]) -> Setting:
    """`first`: whether the first lanes of a call are busy; `busy`: whether another is, where these are."""
    idle: set[tuple[int, int, int]] = set()
    for call, row in enumerate(lanes):
        some = first()
        for rank, number in enumerate(row):
            idle |= {(rank, call, lane) for lane in range(number) if not some or (lane and not busy())}
    return Setting(tuple(map(tuple, lanes)), frozenset(idle))


Dropped = frozenset[tuple[int, Thread, Thread]]
"""Waits that are left out: step, who waits, whom for."""


def is_broken(steps: tuple[Step, ...], setting: Setting, dropped: Dropped = frozenset()) -> bool:
    """Whether some call does not end, or two accesses come in no order or in the wrong one."""
    edges = _edges(steps, setting, dropped)
    if edges is None:
        return True
    past: dict[Event, tuple[int, int]] = {}
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError:
        return True
    for place, event in enumerate(order):
        before = 0
        for other in edges[event]:
            before |= past[other][0] | past[other][1]
        past[event] = 1 << place, before
    return any(
        not past[first][0] & past[second][1] for users in _users(steps, setting) for first, second in _in_turn(users)
    )


def _threads(setting: Setting, call: int, by: Actor) -> list[Thread]:
    match by:
        case Actor.CALLER:
            return [(rank, "stream", 0) for rank in range(setting.num_ranks)]
        case Actor.FIRST:
            return [(rank, "lane", 0) for rank in range(setting.num_ranks)]
        case Actor.LANES:
            return [
                (rank, "lane", lane) for rank in range(setting.num_ranks) for lane in range(setting.lanes[call][rank])
            ]


def _ranks(of: int, which: Ranks, num_ranks: int) -> set[int]:
    if which is Ranks.OWN:
        return {of}
    everyone = set(range(num_ranks))
    return everyone if which is Ranks.ALL else everyone - {of}


def _events(steps: tuple[Step, ...], setting: Setting) -> Iterator[Event]:
    for call in range(CALLS):
        for at, step in enumerate(steps):
            for thread in _threads(setting, call, step.by):
                rank, _, lane = thread
                if not (step.spare and (rank, call, lane) in setting.idle):
                    yield call, at, thread


def _edges(steps: tuple[Step, ...], setting: Setting, dropped: Dropped) -> dict[Event, set[Event]] | None:
    """What must be before each event; None where somebody waits for what he is never told."""
    number = {step.name: at for at, step in enumerate(steps)}
    happens = set(_events(steps, setting))
    edges: dict[Event, set[Event]] = {event: set() for event in happens}
    last: dict[Thread, Event] = {}
    for event in sorted(happens):
        call, at, thread = event
        if thread in last:
            edges[event].add(last[thread])
        last[thread] = event
        wait = steps[at].wait
        if wait is None or call < wait.calls_back:
            continue
        since, source = call - wait.calls_back, number[wait.step]
        for peer in _threads(setting, since, wait.of):
            if peer == thread or (at, thread, peer) in dropped:
                continue
            if peer[0] not in _ranks(thread[0], wait.ranks, setting.num_ranks):
                continue
            told = steps[source].tells
            cause = since, source, peer
            if cause not in happens or told is None or thread[0] not in _ranks(peer[0], told, setting.num_ranks):
                return None
            edges[event].add(cause)
    return edges


@dataclass(frozen=True)
class User:
    """One access of one segment, or of all of a region where `segment` is None."""

    event: Event
    segment: int | None
    writes: bool
    turn: int
    moves: bool  # segments lie elsewhere in other calls


def _users(steps: tuple[Step, ...], setting: Setting) -> list[list[User]]:
    """Who touches each region."""
    found: dict[tuple[str, int], list[User]] = {}
    for event in sorted(_events(steps, setting)):
        rank = event[2][0]
        for access in steps[event[1]].touches:
            segment = None if access.on is Ranks.OWN else rank
            user = User(event, segment, access.writes, access.turn, isinstance(access.memory, Rows))
            for owner in _ranks(rank, access.on, setting.num_ranks):
                found.setdefault((_region(access.memory), owner), []).append(user)
    return list(found.values())


def _region(memory: Memory) -> str:
    """What may be the same bytes has one name."""
    if not isinstance(memory, Rows):
        return memory.name
    waits = memory.home in (Home.WAITING, Home.CROSSING)
    return f"rows that are {memory.home.value}, wave {memory.wave}" if waits else "the caller's rows"


def _in_turn(users: list[User]) -> Iterator[tuple[Event, Event]]:
    """Which event has to come before which."""
    for one, other in combinations(sorted(users, key=lambda user: (user.event[0], user.turn)), 2):
        if not (one.writes or other.writes):
            continue
        same_call = one.event[0] == other.event[0]
        if same_call and one.turn == other.turn:
            continue
        apart = None not in (one.segment, other.segment) and one.segment != other.segment
        if not apart or (one.moves and not same_call):
            yield one.event, other.event


def single_waits(steps: tuple[Step, ...], num_ranks: int, lanes: int) -> Iterator[tuple[int, Thread, Thread]]:
    """Every wait of one thread for one other, but those of the streams' own order."""
    setting = Setting(((lanes,) * num_ranks,) * CALLS)
    for at, step in enumerate(steps):
        if step.wait is not None and not step.given:
            pairs = product(_threads(setting, 0, step.by), _threads(setting, 0, step.wait.of))
            for thread, peer in pairs:
                if thread != peer and peer[0] in _ranks(thread[0], step.wait.ranks, num_ranks):
                    yield at, thread, peer
