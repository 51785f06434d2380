"""C640 to C642: phases that are proved by region let no accesses race and no rank wait for ever, and have no idle wait.

Assumes steps (`events`). Does not know tables: a hazard between rows is one between the regions that they may be in, so
the proof holds for every table that obeys the laws of routes.

Calls follow each other, joined only by each rank's stream. A hazard within a call is judged there, every other one
between a call and the next: `clocks` says why that decides. Exact for every number of lanes: `events` says why. Exact
for every number of ranks: a hazard is between two ranks at the memory of a third, and the flags among some ranks are
the same whoever else is there; so of more than MOST ranks MOST are proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commdsl.language.diagnostics import Diagnostic
from commdsl.language.source import Span
from commdsl.program.memory import Rows
from commdsl.program.phases import Ranks
from commdsl.program.plan import Plan
from commdsl.program.proof import region_messages as messages
from commdsl.program.proof.clocks import Run, run
from commdsl.program.proof.events import Events, events, steps
from commdsl.program.proof.order import Hazards, Longs, idle_wait, judge, knows
from commdsl.program.proof.timeline import Bits, Pattern, pattern
from commdsl.program.touches import Touch, region

MOST = 8

NEXT = 1
"""Calls until the same memory is used again."""


def order_of_regions(plan: Plan) -> Iterator[Diagnostic]:
    """The first broken law of the phases of a Plan, on its ranks: as one launch, then as two where it may be two.

    Where some ranks make one launch and others two, nothing is new: two are the same phases in the same order, told and
    awaited alike. What orders one launch orders those, and they only wait for more, of their own rank.
    """
    found = next(prove(events(steps(plan), min(plan.num_ranks, MOST)), plan.span), None)
    if found is None and plan.halves is not None:
        two = events(steps(plan, plan.halves), min(plan.num_ranks, MOST))
        found = next(prove(two, plan.span, and_idle=False), None)  # the stream orders more, and one launch has the wait
    if found is not None:
        yield found


def prove(found: Events, span: Span, *, and_idle: bool = True) -> Iterator[Diagnostic]:
    """The first broken law: C641, C640, C642 (unless told)."""
    timeline = found.timeline
    if not found.told.all():
        yield messages.silent(found, span)
        return
    shape = pattern(timeline)
    order = run(timeline, shape)
    if order.stuck:
        yield messages.stuck(found, order, span)
        return
    pairs = hazards(found, 1 if shape is not None else found.num_ranks)
    verdict = judge(timeline, order, shape, pairs.of_two, NEXT)
    if len(verdict.unordered) or pairs.backwards.any():
        yield messages.race(found, _worst_race(found, order, shape), span)
        return
    idle = _idle(found, order, shape, pairs.of_two, verdict.needed) if and_idle else None
    if idle is not None:
        yield messages.idle(found, idle, span)


# --- hazards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Meetings:
    """Accesses of one region that two actors, or one, make in a call or in one call and the next."""

    accesses: tuple[tuple[Touch, Touch], ...]
    which: Longs  # (n,): into `accesses`
    pairs: Hazards
    is_own: Bits  # (n,): of one actor; its order is that of its steps

    @property
    def of_two(self) -> Hazards:
        return self.pairs.take(~self.is_own)

    @property
    def backwards(self) -> Bits:
        """An actor's own, that it makes in the wrong order."""
        found: Bits = self.is_own & ~self.pairs.across & (self.pairs.first > self.pairs.second)
        return found


def hazards(found: Events, num_seconds: int) -> Meetings:
    """Every pair of accesses whose second is by one of the first ranks; if all are alike, rank 0 stands for them."""
    all_accesses = [(at, touch) for at, step in enumerate(found.steps) for touch in step.touches]
    by_region: dict[object, list[tuple[int, Touch]]] = {}
    for access in all_accesses:
        by_region.setdefault(region(access[1].memory), []).append(access)
    met = [
        (i, j, one, other)
        for i, one in all_accesses
        for j, other in by_region[region(one.memory)]
        if one.writes or other.writes
    ]
    step = np.array([pair[:2] for pair in met], np.int64).reshape(-1, 2)
    near, far = np.array([_meets(one, other) for _, _, one, other in met], np.bool_).reshape(-1, 2).T
    across = np.array([one.turn >= other.turn for _, _, one, other in met], np.bool_)
    num_ranks, length = found.num_ranks, len(found.steps)
    same = np.arange(num_ranks)[:, None] == np.arange(num_seconds)
    ranks = np.where(same, near[:, None, None], far[:, None, None])
    acts = found.acts[step]  # (pairs, 2, roles)
    meet = acts[:, 0, :, None, None, None] & acts[:, 1, None, :, None, None] & ranks[:, None, None]
    which, first_role, second_role, first_rank, second_rank = np.nonzero(meet)
    first, second = first_role * num_ranks + first_rank, second_role * num_ranks + second_rank
    pairs = Hazards(
        (first * length + step[which, 0]).astype(np.int32),
        (second * length + step[which, 1]).astype(np.int32),
        across[which],
    )
    return Meetings(tuple((one, other) for _, _, one, other in met), which, pairs, first == second)


def _meets(one: Touch, other: Touch) -> tuple[bool, bool]:
    """Whether two actors of one rank touch one segment of one region, and whether two of two ranks do."""
    match one.on, other.on:
        case Ranks.OWN, Ranks.OWN:
            return True, False
        case (Ranks.OWN, Ranks.OTHERS) | (Ranks.OTHERS, Ranks.OWN):
            return False, True
        case (Ranks.OWN, _) | (_, Ranks.OWN):
            return True, True
        case _:
            return True, isinstance(one.memory, Rows) and Ranks.OTHERS not in (one.on, other.on)


def _worst_race(found: Events, order: Run, shape: Pattern | None) -> messages.Race:
    """Of all that are not in order: rather of two ranks, then the earliest."""
    timeline, met = found.timeline, hazards(found, found.num_ranks)
    own, two = np.flatnonzero(met.backwards), np.flatnonzero(~met.is_own)
    verdict = judge(timeline, order, shape, met.of_two, NEXT)
    rows = np.concatenate((own, two[verdict.unordered]))
    known = np.concatenate((timeline.local[met.pairs.second[own]] + 1, verdict.known))
    first, second, across = met.pairs.first[rows], met.pairs.second[rows], met.pairs.across[rows]
    near = found.rank_of(timeline.actor[first]) == found.rank_of(timeline.actor[second])
    by = tuple(found.place_of(timeline.actor[op]) for op in (second, first))
    keys = (*by, met.which[rows], timeline.local[first], timeline.local[second], across, near)
    worst = int(np.lexsort(keys)[0])
    one, other, calls = int(first[worst]), int(second[worst]), int(across[worst])
    actors = int(timeline.actor[one]), int(timeline.actor[other])
    later = knows(timeline, order, one, 0, actors[1]) > calls * len(found.steps) + int(timeline.local[other])
    return messages.Race(
        steps=(int(timeline.local[one]), int(timeline.local[other])),
        accesses=met.accesses[int(met.which[rows[worst]])],
        actors=actors,
        second_call=calls,
        known=int(known[worst]),
        is_backwards=actors[0] == actors[1] or later,
    )


def _idle(found: Events, order: Run, shape: Pattern | None, pairs: Hazards, needed: Bits) -> int | None:
    """A wait that orders nothing. Where ranks are alike, what one rank's wait is needed for, every rank's is."""
    timeline = found.timeline
    if shape is not None:
        needed[shape.wait] = needed[shape.wait].any(axis=0)
        if timeline.given is not None and (needed | timeline.given).all():
            return None
        pairs = hazards(found, found.num_ranks).of_two
    return idle_wait(timeline, order, shape, pairs, NEXT, needed)
