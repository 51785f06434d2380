"""Turns a dispatch whose rows go by keys into Plans: one that takes them there, one that brings back what became of
them, and one that brings back a number for each key of a row.

Assumes legal numbers. Does not know a key: which row goes where is data on the device, and the host never reads it.

There, all lanes count all keys of their rank, the first tells every peer the counts, and where results lie; from the
counts of all ranks every lane finds the places of its rows. Rows that go once per rank are copied there, when all have
come, to the places that they have besides. Rows that cross once per node go to one rank there, which forwards them when
all have come. Others go again to the same places without counts (`lower_again`). Back,
every row goes to a place of its own, for its row and key, that waits on its source, or the sum of those of a rank to
the place for its row and rank; when all have come each row is the sum of its places. They have nothing in common but
what their caller hands from one to the other: memory and calls are each Plan's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from commdsl.ir.dispatches import Back, ByKey, Dispatch, Often
from commdsl.language.diagnostics import InternalError
from commdsl.program.arriving import beside, scales
from commdsl.program.lower.routed import plan_of
from commdsl.program.memory import Counters, Home, Rows, Transport, Words
from commdsl.program.phases import (
    Actor,
    AddUp,
    Count,
    Each,
    FillByKey,
    FinishBack,
    Forward,
    Meet,
    PushAgain,
    PushBack,
    PushByKey,
    Ranks,
    Read,
    Routed,
    Tell,
)
from commdsl.program.plan import Plan

SENT = Words("sent", ("rows",), a_lane=True)
ACROSS = Words("across", ("bytes",), a_lane=True)
DONE, CALLS, COMPLETE = Counters("done", True), Counters("calls", False), Counters("complete", False)
CROSSED, ARRIVED = Counters("crossed", True), Counters("arrived", False)

WAVES = 4
"""In which sums come home: one is finished while the next is on its way. The last is finished by itself, and each costs
its lanes a meeting.
"""


def lower_by_key(dispatch: Dispatch, transport: Transport = Transport.PEER) -> Plan:
    """The way there."""
    route = route_of(dispatch)
    names = [tensor.name for tensor in dispatch.tensors]
    given = tuple(Rows(name, Home.GIVEN) for name in names)
    stretches = tuple(tensor.stretch for tensor in dispatch.tensors)
    arriving = (*names, *scales(names, stretches), *beside(route.value, route.often))
    results = tuple(Rows(name, Home.RESULT) for name in arriving)
    keys, value = Rows(route.key, Home.GIVEN), None if route.value is None else Rows(route.value, Home.GIVEN)
    counts, offsets, places = (Rows(name, Home.RESULT) for name in ("counts", "offsets", "places"))
    told = ("lanes", "room", *(rows.name for rows in results), *(f"{route.key} {key}" for key in range(route.num_keys)))
    how = route.often, route.aligned, stretches, route.node, _crossing(route)
    push = PushByKey(given, keys, value, results, counts, offsets, places, *how)
    phases: tuple[Routed, ...] = (
        Read(Actor.LANES, CALLS),
        Count(keys, positions_of(route)),
        *_greeted(push, Words("addresses", (*told, *_rows_of(route))), results),
    )
    if route.often is Often.ONCE:
        at = {rows.name: rows for rows in results[len(push.rows) :]}
        phases += tuple(_filled(FillByKey(push.rows, at["origins"], at["mates"])))
    rows = (*given, keys, *(() if value is None else (value,)), *results, counts, offsets, places)
    return plan_of(dispatch, dispatch.name, phases, rows, transport)


def lower_again(dispatch: Dispatch, transport: Transport = Transport.PEER) -> Plan:
    """The way there of one tensor more, by what a call of the other has left."""
    route = route_of(dispatch)
    given, result = Rows("rows", Home.GIVEN), Rows("rows", Home.RESULT)
    names = (route.key, "places", "origins", "offsets", "counts")
    left = tuple(Rows(name, Home.GIVEN) for name in names)
    keys, places, origins, offsets, counts = left
    how = positions_of(route), route.often, route.aligned, route.node, _crossing(route)
    push = PushAgain(given, keys, places, origins, offsets, counts, result, *how)
    phases: tuple[Routed, ...] = (
        Read(Actor.LANES, CALLS),
        *_greeted(push, Words("addresses", ("lanes", "room", "rows", *_rows_of(route))), (result,)),
    )
    if route.often is Often.ONCE:
        left += (Rows("mates", Home.GIVEN),)
        phases += tuple(_filled(FillByKey((result,), origins, left[-1])))
    return plan_of(dispatch, f"{dispatch.name}_again", phases, (given, *left, result), transport)


def lower_back(dispatch: Dispatch, back: Back, transport: Transport = Transport.PEER) -> Plan:
    """The way back. What is weighed where it is added up is weighed by the values that came there, one a place."""
    (name,) = back.names
    weight = None if back.weight is None else Rows(back.weight, Home.GIVEN)
    if back.once and route_of(dispatch).node:
        return _back(dispatch, "back", name, transport, Each.NODE, mates=Rows("mates", Home.GIVEN), there=weight)
    if back.once:
        return _back(dispatch, "back", name, transport, Each.RANK, mates=Rows("mates", Home.GIVEN), there=weight)
    return _back(dispatch, "back", name, transport, Each.ENTRY, here=weight)


def lower_values(dispatch: Dispatch, transport: Transport = Transport.PEER) -> Plan:
    """The way back of numbers, one for each place, to the keys of the rows that they are of."""
    return _back(dispatch, "values", "values", transport, Each.WORD)


def _back(
    dispatch: Dispatch,
    way: str,
    name: str,
    transport: Transport,
    each: Each,
    mates: Rows | None = None,
    there: Rows | None = None,
    here: Rows | None = None,
) -> Plan:
    """One way back. Weights are applied `there`, where a sum is made, or `here`, where rows of keys came back to."""
    route = route_of(dispatch)
    given, waiting, result = (Rows(name, home) for home in (Home.GIVEN, Home.WAITING, Home.RESULT))
    keys, origins, offsets = (Rows(one, Home.GIVEN) for one in (route.key, "origins", "offsets"))
    push, told = PushBack(given, origins, offsets, waiting, each, mates, there), ("rows sent",) if each.is_sum else ()
    if each is Each.NODE:
        push = replace(push, node=route.node, crossing=_crossing(route), keys=keys)
    done = replace(DONE, waves=WAVES if each is Each.RANK else 1)
    phases = (
        Read(Actor.LANES, CALLS),
        Tell(Actor.FIRST, addresses := Words("addresses", ("lanes", *told)), Ranks.OTHERS),
        Meet(Actor.LANES, addresses, Ranks.OTHERS),
        push,
        *(() if push.crossing is None else _across(push, push.crossing, ())),
        Tell(Actor.LANES, SENT, Ranks.ALL),
        Tell(Actor.LANES, done, Ranks.ALL),
        Meet(Actor.LANES, done, Ranks.ALL),
        FinishBack(waiting, keys, result, positions_of(route), each, here),
        Read(Actor.FIRST, SENT),
        *(() if push.crossing is None else (Read(Actor.FIRST, ACROSS),)),
        Tell(Actor.FIRST, CALLS, Ranks.OWN),
    )
    more = tuple(rows for rows in (mates, there, here) if rows is not None)
    rows = (given, origins, offsets, keys, *more, result)
    return plan_of(dispatch, f"{dispatch.name}_{way}", phases, rows, transport)


def _filled(fill: FillByKey) -> Iterator[Routed]:
    """Rows that have come are copied when all lanes know that all have."""
    yield Tell(Actor.FIRST, COMPLETE, Ranks.OWN)
    yield Meet(Actor.LANES, COMPLETE, Ranks.OWN)
    yield fill


def _greeted(push: PushByKey | PushAgain, addresses: Words, to: tuple[Rows, ...]) -> Iterator[Routed]:
    """Rows go when the peers are in this call, and have arrived when all lanes of all ranks are through. Those that
    cross to another node wait there until all lanes of all ranks have sent theirs; none waits for one that sends on.
    """
    yield Tell(Actor.FIRST, addresses, Ranks.OTHERS)
    yield Meet(Actor.LANES, addresses, Ranks.OTHERS)
    yield push
    yield Tell(Actor.LANES, SENT, Ranks.ALL)
    if push.crossing is not None:
        yield from _across(push, push.crossing, to)
    # Where rows are forwarded the rank's own lanes have met; if nothing of that is filled, they need no more.
    is_met = push.node > 0 and push.often is Often.INDEX
    of = Ranks.OTHERS if is_met else Ranks.ALL
    yield Tell(Actor.LANES, DONE, of)
    yield Meet(Actor.FIRST, DONE, of)
    yield Read(Actor.FIRST, SENT)
    yield Tell(Actor.FIRST, CALLS, Ranks.OWN)


def _across(push: PushByKey | PushAgain | PushBack, crossing: Rows, to: tuple[Rows, ...]) -> Iterator[Routed]:
    """What crossed is sent on when all of it is there. How much it is, is told behind what crosses nodes: there that is
    the push, on the way back the sums of what crossed from rank to rank.
    """
    if not isinstance(push, PushBack):
        yield Tell(Actor.LANES, ACROSS, Ranks.ALL)
    yield Tell(Actor.LANES, CROSSED, Ranks.ALL)
    yield Meet(Actor.FIRST, CROSSED, Ranks.ALL)
    yield Tell(Actor.FIRST, ARRIVED, Ranks.OWN)
    yield Meet(Actor.LANES, ARRIVED, Ranks.OWN)
    if isinstance(push, PushBack):
        assert push.keys is not None
        yield AddUp(crossing, push.keys, push.to)
        yield Tell(Actor.LANES, ACROSS, Ranks.ALL)
    else:
        yield Forward(crossing, to)
        yield Read(Actor.FIRST, ACROSS)


def _crossing(route: ByKey) -> Rows | None:
    """What waits on a rank for the ranks of its node."""
    return Rows("crossing", Home.CROSSING) if route.node else None


def _rows_of(route: ByKey) -> tuple[str, ...]:
    """What is told of rows that cross: how many a rank has, of which each may wait."""
    return ("rows sent",) if route.node else ()


def route_of(dispatch: Dispatch) -> ByKey:
    """The one route of a dispatch by keys."""
    (route,) = dispatch.routes
    if not isinstance(route, ByKey):
        raise InternalError(f"`{dispatch.name}` goes by tables")
    return route


def positions_of(route: ByKey) -> tuple[int, ...]:
    """By key, its place among all, sorted by rank and then by number."""
    order = sorted(range(route.num_keys), key=lambda key: (route.rank_of[key], key))
    return tuple(at for _, at in sorted((key, at) for at, key in enumerate(order)))
