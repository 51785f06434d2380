"""A second opinion on a small Plan: every pair of accesses, reachability by sets, more rounds than the proof looks at.

Turns a Plan into the codes of all laws it breaks (C203, C201, C202, C205, C206, C207, C212). Assumes a few dozen
operations.
An event is a group of operations in a round, named by its first; it reads and writes as one.
Written for clarity, and shares nothing with the proof it judges.
"""

from __future__ import annotations

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, product

import numpy as np
from plans import changed

from commdsl.program.memory import Rights
from commdsl.program.moves import CELL
from commdsl.program.plan import Plan


def broken_laws(plan: Plan, extra_rounds: int = 2) -> set[str]:
    """Codes of the laws broken within rotation + 1 + extra_rounds rounds."""
    ops, rounds = plan.moves.ops, plan.moves.rotation + 1 + extra_rounds
    rank_of = [r for r in range(plan.num_ranks) for _ in range(ops.rank_begin[r], ops.rank_begin[r + 1])]
    raised: dict[tuple[int, int], list[int]] = {}
    for op in range(ops.num_ops):
        for peer in ops.signal_peer[ops.signal_begin[op] : ops.signal_begin[op + 1]]:
            raised.setdefault((rank_of[op], int(peer)), []).append(_leader(plan, op))
    edges: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for number in range(rounds):
        for op in _leaders(plan):
            rank = rank_of[op]
            before = edges.setdefault((number, op), set())
            if op > ops.rank_begin[rank]:
                before.add((number, _leader(plan, op - 1)))
            elif number:
                before.add((number - 1, _leader(plan, int(ops.rank_begin[rank + 1]) - 1)))
            for wait in range(ops.wait_begin[op], ops.wait_begin[op + 1]):
                signals = raised.get((int(ops.wait_peer[wait]), rank), [])
                if ops.wait_ordinal[wait] > len(signals):
                    return {"C203"}
                since = number - int(ops.wait_rounds_back[wait])
                if since >= 0:
                    before.add((since, signals[ops.wait_ordinal[wait] - 1]))
    past = _pasts(edges)
    if past is None:
        return {"C201"}
    found = _conflicts(plan, rank_of, rounds, past) | _undefined(plan, rounds, past)
    return found | _outside(plan, rank_of, past)


def _leaders(plan: Plan) -> list[int]:
    return [op for op in range(plan.moves.ops.num_ops) if not plan.moves.ops.joined[op]]


def _leader(plan: Plan, op: int) -> int:
    """The first operation of the group."""
    while plan.moves.ops.joined[op]:
        op -= 1
    return op


def _group(plan: Plan, leader: int) -> range:
    end = leader + 1
    while end < plan.moves.ops.num_ops and plan.moves.ops.joined[end]:
        end += 1
    return range(leader, end)


def _pasts(edges: dict[tuple[int, int], set[tuple[int, int]]]) -> dict[tuple[int, int], set[tuple[int, int]]] | None:
    """Everything before each event; None if the events cannot all happen."""
    past: dict[tuple[int, int], set[tuple[int, int]]] = {}
    left = dict(edges)
    while left:
        ready = [event for event, before in left.items() if all(other in past for other in before)]
        if not ready:
            return None
        for event in ready:
            past[event] = set().union(*(past[other] | {other} for other in left.pop(event)))
    return past


def _touched(plan: Plan, op: int) -> list[tuple[tuple[int, int, int], bool]]:
    """The locations a group accesses, and whether it writes them."""
    ops = plan.moves.ops
    sources = range(ops.source_begin[op], ops.source_begin[op + 1])
    return [
        ((int(ops.dest_space[i]), int(ops.dest_rank[i]), int(ops.dest_index[i])), True) for i in _group(plan, op)
    ] + [((int(ops.source_space[i]), int(ops.source_rank[i]), int(ops.source_index[i])), False) for i in sources]


def _barriers(plan: Plan, rounds: int, rank: int) -> dict[tuple[int, int], int]:
    """Block barriers of the rank before each event's body."""
    ops, count, before = plan.moves.ops, 0, {}
    for number in range(rounds):
        for op in range(ops.rank_begin[rank], ops.rank_begin[rank + 1]):
            if not ops.joined[op]:
                count += bool(ops.barrier[op]) or ops.wait_begin[op] < ops.wait_begin[op + 1]
                before[number, op] = int(count)
            count += bool(ops.signal_begin[op] < ops.signal_begin[op + 1])
    return before


def _conflicts(plan: Plan, rank_of: list[int], rounds: int, past: dict) -> set[str]:
    found: set[str] = set()
    barriers = {}
    for rank in range(plan.num_ranks):
        barriers |= _barriers(plan, rounds, rank)
    by_place: dict[tuple, list[tuple[tuple[int, int], bool]]] = {}
    for number, op in past:
        for location, writes in _touched(plan, op):
            # A tensor's tile is another one in every round; a cell comes back with its copy.
            turn = number % plan.moves.rotation if location[0] == CELL else number
            by_place.setdefault((location, turn), []).append(((number, op), writes))
    for users in by_place.values():
        for (one, one_writes), (two, two_writes) in combinations(users, 2):
            if one == two or not (one_writes or two_writes):
                continue
            if rank_of[one[1]] == rank_of[two[1]]:
                if barriers[one] == barriers[two]:
                    found.add("C206")
            elif one not in past[two] and two not in past[one]:
                found.add("C202" if one[0] == two[0] else "C205")
            elif (one in past[two]) != (one[0] < two[0]) and one[0] != two[0]:
                found.add("C205")
    return found


def _undefined(plan: Plan, rounds: int, past: dict) -> set[str]:
    writers: dict[tuple, list[tuple[int, int]]] = {}
    for number, op in past:
        for location, writes in _touched(plan, op):
            if writes:
                writers.setdefault((location, number), []).append((number, op))
    for number, op in past:
        for location, writes in _touched(plan, op):
            written = location[0] == CELL or plan.moves.tensors[location[0]].access is Rights.WRITE
            before = [event for event in writers.get((location, number), []) if event in past[number, op]]
            if written and not writes and not before:
                return {"C207"}
    return set()


def _outside(plan: Plan, rank_of: list[int], past: dict) -> set[str]:
    """A write to another rank's tensor that no access of the owner comes before, or behind, in the same round."""
    users: dict[tuple, list[tuple[int, int]]] = {}
    for number, op in past:
        for location, _ in _touched(plan, op):
            if location[0] != CELL and rank_of[op] == location[1]:
                users.setdefault((location, number), []).append((number, op))
    for event in past:
        for location, writes in _touched(plan, event[1]):
            if location[0] == CELL or rank_of[event[1]] == location[1] or not writes:
                continue
            owner = users.get((location, event[0]), [])
            if not (any(one in past[event] for one in owner) and any(event in past[one] for one in owner)):
                return {"C212"}
    return set()


def without_wait(plan: Plan, wait: int) -> Plan:
    """The Plan with one wait left out."""
    ops = plan.moves.ops
    begin = ops.wait_begin - (ops.wait_begin > wait).astype(np.int32)
    columns = {
        name: np.delete(getattr(ops, name), wait)
        for name in ("wait_peer", "wait_ordinal", "wait_rounds_back", "wait_reason")
    }
    return changed(plan, ops=replace(ops, wait_begin=begin, **columns))


def has_idle_flag(plan: Plan) -> bool:
    """Some wait could be left out, or some signal is not waited for."""
    ops = plan.moves.ops
    if any(not broken_laws(without_wait(plan, wait)) & {"C202", "C205"} for wait in range(len(ops.wait_peer))):
        return True
    rank_of = np.repeat(np.arange(plan.num_ranks), np.diff(ops.rank_begin))
    waiter = np.repeat(rank_of, np.diff(ops.wait_begin))
    heard = set(zip(ops.wait_peer.tolist(), waiter.tolist(), ops.wait_ordinal.tolist(), strict=True))
    return len(heard) < len(ops.signal_peer)


# --- where data carries its flag --------------------------------------------------------------------------------------

Event = tuple[object, ...]


def broken_packet_laws(plan: Plan, extra_rounds: int = 2) -> set[str]:
    """The same for a Plan whose data carries its flag: two threads a lane, the second idle in any of the rounds.

    What a thread knows follows from its own words, from credits, and from the barrier of its lane after every round.
    """
    ops = plan.moves.ops
    rank_of = [r for r in range(plan.num_ranks) for _ in range(ops.rank_begin[r], ops.rank_begin[r + 1])]
    writers: dict[tuple[int, int], int] = {}
    for op in range(ops.num_ops):
        if ops.dest_space[op] == CELL:
            cell = int(ops.dest_rank[op]), int(ops.dest_index[op])
            if cell in writers:
                return {"C209"}
            writers[cell] = _leader(plan, op)
    rounds = plan.moves.rotation + 1 + extra_rounds
    found: set[str] = set()
    for busy in product((1, 2), repeat=rounds):
        edges = _thread_edges(plan, rank_of, writers, busy)
        if edges is None:
            return {"C203"}
        past = _past_bits(edges)
        if past is None:
            return {"C201"}
        found |= _reused(plan, rank_of, writers, busy, past)
    return found


def _thread_edges(
    plan: Plan, rank_of: list[int], writers: dict[tuple[int, int], int], busy: tuple[int, ...]
) -> dict[Event, set[Event]] | None:
    """What must be before each event: a thread's group in a round, or a meeting of a lane's threads around one."""
    ops = plan.moves.ops
    raised: dict[tuple[int, int], list[int]] = {}
    for op in range(ops.num_ops):
        for peer in ops.signal_peer[ops.signal_begin[op] : ops.signal_begin[op + 1]]:
            raised.setdefault((rank_of[op], int(peer)), []).append(_leader(plan, op))
    edges: dict[Event, set[Event]] = {}
    last: dict[tuple[int, int], Event | None] = {(rank, t): None for rank in range(plan.num_ranks) for t in (0, 1)}

    def meet(name: Event, rank: int) -> None:
        edges[name] = {event for event in (last[rank, 0], last[rank, 1]) if event is not None}
        last[rank, 0] = last[rank, 1] = name

    for number, threads in enumerate(busy):
        for op in _leaders(plan):
            rank = rank_of[op]
            waits = range(ops.wait_begin[op], ops.wait_begin[op + 1])
            if waits:
                meet(("waits", number, op), rank)
            for wait in waits:
                signals = raised.get((int(ops.wait_peer[wait]), rank), [])
                if ops.wait_ordinal[wait] > len(signals):
                    return None
                since = number - int(ops.wait_rounds_back[wait])
                if since >= 0:
                    edges["waits", number, op].add(("signals", since, signals[ops.wait_ordinal[wait] - 1]))
            for thread in (0, 1):
                event: Event = (number, op, thread)
                previous = last[rank, thread]
                edges[event] = set() if previous is None else {previous}
                last[rank, thread] = event
                if thread < threads:
                    for (space, owner, index), writes in _touched(plan, op):
                        if space == CELL and not writes and (owner, index) in writers:
                            edges[event].add((number, writers[owner, index], thread))
            group = _group(plan, op)
            if ops.signal_begin[group[-1] + 1] > ops.signal_begin[op]:
                meet(("signals", number, op), rank)
        for rank in range(plan.num_ranks):
            meet(("round", number, rank), rank)
    return edges


def _past_bits(edges: dict[Event, set[Event]]) -> dict[Event, tuple[int, int]] | None:
    """For each event its own bit and the bits of all before it; None if they cannot all happen."""
    past: dict[Event, tuple[int, int]] = {}
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError:
        return None
    for place, event in enumerate(order):
        before = 0
        for other in edges[event]:
            bit, earlier = past[other]
            before |= bit | earlier
        past[event] = 1 << place, before
    return past


def _reused(
    plan: Plan,
    rank_of: list[int],
    writers: dict[tuple[int, int], int],
    busy: tuple[int, ...],
    past: dict[Event, tuple[int, int]],
) -> set[str]:
    """Words of a cell that are written again before they were read, or read and never written."""
    found = set()
    for op in _leaders(plan):
        for (space, owner, index), writes in _touched(plan, op):
            if space != CELL or writes:
                continue
            writer = writers.get((owner, index))
            if writer is None:
                return {"C207"}
            if rank_of[writer] == rank_of[op] and writer > op:
                found.add("C207")
            for number in range(len(busy) - plan.moves.rotation):
                for thread in range(min(busy[number], busy[number + plan.moves.rotation])):
                    _, before = past[number + plan.moves.rotation, writer, thread]
                    if not past[number, op, thread][0] & before:
                        found.add("C205")
    return found
