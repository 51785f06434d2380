"""Turns a dispatch into a Plan: how many lanes there are, and the phases of a call in order.

Assumes legal numbers. Does not know where rows go: that is in the tables (`tiles`). What a phase needs of other ranks'
phases follows from what it touches; `synchronized` puts it in between.

A rank enters when the kernels before are over on its stream, so nobody overwrites rows that are still read; it leaves
when all rows are there. Every rank tells every peer in every call, also when it sends no row: so calls need no barrier
in between. The first lane alone waits for all lanes of all ranks, and the other lanes for it: if all looked at every
lane's counter, the memory would be busy with that.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.ir.dispatches import Dispatch, Put
from commdsl.program.agree import all_heard
from commdsl.program.memory import Counters, Home, Rows, Transport, Words
from commdsl.program.phases import Actor, Finish, Host, Meet, Push, PushStraight, Ranks, Read, Routed, Tell
from commdsl.program.plan import Plan, Role

LANES = 128
THREADS = 512
TILE_BYTES = {
    Transport.PEER: 8192,
    Transport.NVSHMEM: 64 * 1024,  # a put is a message, which has a price however short it is
}


def lower_dispatch(dispatch: Dispatch, transport: Transport = Transport.PEER) -> Plan:
    """Its launch: one block on each SM it may use, with the threads and tiles that it is tuned to.

    To a rank that is far every run is a message: over NVSHMEM all rows wait, packed in long runs, whatever the tuning
    says, and the rank that owns them finishes them. The phases are the same, in the same order.
    """
    names = [tensor.name for tensor in dispatch.tensors]
    given, results, waiting = (
        tuple(Rows(name, home) for name in names) for home in (Home.GIVEN, Home.RESULT, Home.WAITING)
    )
    far = transport is Transport.NVSHMEM
    packed = dispatch.put is Put.PACKED or far
    push = Push(
        given,
        waiting,
        tuple(dispatch.routes[tensor.route].many for tensor in dispatch.tensors),
        packed,
        "packed: to a far rank every run is a message" if far and dispatch.put is not Put.PACKED else "",
    )
    straight = None if packed else PushStraight(given, results)
    phases = tuple(synchronized(push, straight, Finish(waiting, results, straight)))
    # What the caller writes before: inputs, and outputs of which the table leaves rows out. After: the results are
    # read, and may be what the next call sends, or writes over.
    return plan_of(dispatch, dispatch.name, phases, given + results, transport)


def plan_of(
    dispatch: Dispatch,
    name: str,
    phases: tuple[Routed, ...],
    rows: tuple[Rows, ...],
    transport: Transport = Transport.PEER,
) -> Plan:
    """One launch of a dispatch, whose caller writes `rows` before it, and uses them behind it."""
    tuned = dispatch.tuning
    role = [last - first for roles in dispatch.roles for name, first, last in roles.roles if name == dispatch.role]
    lanes = tuned.sms or min(LANES, role[0] if role else dispatch.topology.num_sms)
    comm = Role(dispatch.role or "comm", lanes, lanes, tuned.threads or THREADS, phases)
    caller = Role("caller", 0, 0, 0, (Host("prepare", rows, False), Host("use", rows, True)))
    return Plan(
        name,
        dispatch.num_ranks,
        (),
        dispatch.topology.name,
        "dispatch",
        (caller, comm),
        tuned.tile_bytes or TILE_BYTES[transport],
        dispatch.span,
        transport,
        agree=all_heard(dispatch.num_ranks),
    )


def synchronized(push: Push, straight: PushStraight | None, finish: Finish) -> Iterator[Routed]:
    """The phases with what orders them: between ranks by what they tell each other, between lanes by the first.

    What waits goes first, so it is finished while the rest crosses. Where the rest is, a call ends when all ranks have
    finished, so what waits may go before its rank has entered: it lies where nobody else writes.
    """
    names = [rows.name for rows in push.given]
    addresses = Words("addresses", ("lanes", *names, *(f"{name} rows" for name in names)))
    sent = Words("sent", ("rows",) * len(names), a_lane=True)
    calls, came, done = Counters("calls", False), Counters("came", True), Counters("done", True)
    complete = Counters("complete", False)
    over = (
        Tell(Actor.LANES, sent, Ranks.ALL),
        Tell(Actor.LANES, done, Ranks.ALL),
        Meet(Actor.FIRST, done, Ranks.ALL),
        Read(Actor.FIRST, sent),
        Tell(Actor.FIRST, calls, Ranks.OWN),
    )
    # Where a peer's results lie, and that its caller is through with what lay there.
    entered = Meet(Actor.LANES, addresses, Ranks.OTHERS)
    yield Read(Actor.LANES, calls)
    yield Tell(Actor.FIRST, addresses, Ranks.OTHERS)
    if straight is None:
        yield from (entered, push, *over)
    else:
        yield from (push, Tell(Actor.LANES, came, Ranks.ALL), entered, straight)
        yield Meet(Actor.FIRST, came, Ranks.ALL, is_spare=True)
    yield Tell(Actor.FIRST, complete, Ranks.OWN)
    yield Meet(Actor.LANES, complete, Ranks.OWN, is_spare=True)
    yield finish
    if straight is not None:
        yield from over
