"""Turns a static Plan into mutants: an operation, wait, signal, count, memory or table entry dropped or changed.

Assumes a right Plan. What data goes where is changed by `plan_mutants`; here it is everything else. Does not judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
from brute_force import without_wait
from plan_mutants import CHANGES
from plans import changed

from commdsl.ir.lengths import Lengths
from commdsl.ir.schedules import Cast
from commdsl.language.kinds import Axis
from commdsl.machine.carriers import CARRIERS
from commdsl.program.memory import Rights
from commdsl.program.moves import Form, Moves, Ops, Reason
from commdsl.program.plan import Plan

Mutation = Callable[[Random, Plan], Plan | None]

PER_SOURCE = ("source_space", "source_rank", "source_index", "source_weight")
PER_WAIT = ("wait_peer", "wait_ordinal", "wait_rounds_back", "wait_reason")
BEGINS = {"source_begin": PER_SOURCE, "wait_begin": PER_WAIT, "signal_begin": ("signal_peer",)}
FLAT = {"rank_begin", *BEGINS, *PER_SOURCE, *PER_WAIT, "signal_peer"}


def counted(plan: Plan, **columns: np.ndarray) -> Plan:
    """The Plan with other tables, and the counts of signals that go with them."""
    ops = replace(plan.moves.ops, **columns)
    return changed(plan, ops=ops, signals_per_round=_counts(ops, plan.num_ranks))


def _counts(ops: Ops, num_ranks: int) -> np.ndarray:
    rank = np.repeat(np.arange(num_ranks), np.diff(ops.rank_begin))
    raiser = np.repeat(rank, np.diff(ops.signal_begin))
    found = np.bincount(raiser * num_ranks + ops.signal_peer, minlength=num_ranks * num_ranks)
    return found.astype(np.int32).reshape(num_ranks, num_ranks)


def taken(plan: Plan, order: list[int]) -> Plan:
    """The Plan of these operations, in this order, those of a rank together."""
    ops, of = plan.moves.ops, np.array(order, np.int64)
    rank = np.repeat(np.arange(plan.num_ranks), np.diff(ops.rank_begin))[of]
    tables = {name: getattr(ops, name)[of] for name in Ops.__dataclass_fields__ if name not in FLAT}
    tables["rank_begin"] = np.searchsorted(rank, np.arange(plan.num_ranks + 1)).astype(np.int32)
    for begin, flat in BEGINS.items():
        starts = getattr(ops, begin)
        rows = [row for op in order for row in range(starts[op], starts[op + 1])]
        tables[begin] = np.concatenate(([0], np.cumsum(np.diff(starts)[of]))).astype(np.int32)
        tables |= {name: getattr(ops, name)[np.array(rows, np.int64)] for name in flat}
    return counted(plan, **tables)


def _dropped(random: Random, plan: Plan) -> Plan:
    order = list(range(plan.moves.ops.num_ops))
    del order[random.randrange(len(order))]
    return taken(plan, order)


def _doubled(random: Random, plan: Plan) -> Plan:
    order = list(range(plan.moves.ops.num_ops))
    at = random.randrange(len(order))
    return taken(plan, [*order[:at], at, *order[at:]])


def _moved(random: Random, plan: Plan) -> Plan | None:
    """An operation elsewhere among those of its rank."""
    begin = plan.moves.ops.rank_begin
    rank = random.randrange(plan.num_ranks)
    first, last = int(begin[rank]), int(begin[rank + 1])
    if last - first < 2:
        return None
    one, other = random.sample(range(first, last), 2)
    order = list(range(plan.moves.ops.num_ops))
    order.insert(other, order.pop(one))
    return taken(plan, order)


def _wait_dropped(random: Random, plan: Plan) -> Plan | None:
    count = len(plan.moves.ops.wait_peer)
    return without_wait(plan, random.randrange(count)) if count else None


def _wait_added(random: Random, plan: Plan) -> Plan | None:
    ops = plan.moves.ops
    if not len(ops.wait_peer):
        return None
    op, like = random.randrange(ops.num_ops), random.randrange(len(ops.wait_peer))
    at = int(ops.wait_begin[op + 1])
    columns = {name: np.insert(getattr(ops, name), at, getattr(ops, name)[like]) for name in PER_WAIT}
    begin = ops.wait_begin + (np.arange(ops.num_ops + 1) > op)
    return counted(plan, wait_begin=begin.astype(np.int32), **columns)


def _signal_dropped(random: Random, plan: Plan) -> Plan | None:
    ops = plan.moves.ops
    if not len(ops.signal_peer):
        return None
    at = random.randrange(len(ops.signal_peer))
    begin = ops.signal_begin - (ops.signal_begin > at)
    return counted(plan, signal_begin=begin.astype(np.int32), signal_peer=np.delete(ops.signal_peer, at))


def _signal_added(random: Random, plan: Plan) -> Plan:
    ops = plan.moves.ops
    op = random.randrange(ops.num_ops)
    begin = ops.signal_begin + (np.arange(ops.num_ops + 1) > op)
    peers = np.insert(ops.signal_peer, int(ops.signal_begin[op + 1]), random.randrange(plan.num_ranks))
    return counted(plan, signal_begin=begin.astype(np.int32), signal_peer=peers.astype(np.int32))


def _entry(column: str, choices: Callable[[Random, Plan, int], int]) -> Mutation:
    """One entry of a table, which becomes what is chosen for the value that it has."""

    def change(random: Random, plan: Plan) -> Plan | None:
        table = getattr(plan.moves.ops, column).copy()
        if not len(table):
            return None
        at = random.randrange(len(table))
        table[at] = choices(random, plan, int(table[at]))
        return counted(plan, **{column: table})

    return change


def _near(random: Random, _plan: Plan, value: int) -> int:
    return value + random.choice((-1, 1))


def _rank(random: Random, plan: Plan, value: int) -> int:
    return (value + random.randrange(1, plan.num_ranks)) % plan.num_ranks


def _begin(column: str) -> Mutation:
    """A row that goes to the operation, or to the rank, before or after its own."""

    def change(random: Random, plan: Plan) -> Plan | None:
        table = getattr(plan.moves.ops, column).copy()
        inner = [at for at in range(1, len(table) - 1) if 0 < table[at] < table[-1]]
        if not inner:
            return None
        table[random.choice(inner)] += random.choice((-1, 1))
        if (np.diff(table) < 0).any():
            return changed(plan, ops=replace(plan.moves.ops, **{column: table}))
        return counted(plan, **{column: table})

    return change


def _count(random: Random, plan: Plan) -> Plan:
    """A count of signals that is not that of the tables."""
    counts = plan.moves.signals_per_round.copy()
    counts[random.randrange(plan.num_ranks), random.randrange(plan.num_ranks)] += random.choice((-1, 1))
    return changed(plan, signals_per_round=counts)


def _scalar(random: Random, plan: Plan) -> Plan:
    """A number of the whole: where it is also the role's, the role has it or not."""
    moves = plan.moves
    numbers = {
        "num_cells": moves.num_cells + random.choice((-1, 1)),
        "rotation": moves.rotation + random.choice((-1, 1)),
        "lanes": moves.lanes * 2,
        "sms": moves.sms + random.choice((-1, 1)),
        "threads": moves.threads + random.choice((-32, 16, 32)),
        "tile_bytes": moves.tile_bytes + random.choice((-16, 8, 16)),
        "has_reduction": not moves.has_reduction,
        "carrier": random.choice([one for one in CARRIERS if one != moves.carrier]),
    }
    name = random.choice(list(numbers))
    if name in ("lanes", "sms", "threads") and random.random() < 0.5:
        (role,) = plan.roles
        return replace(plan, roles=(replace(role, phases=(replace(moves, **{name: numbers[name]}),)),))
    return changed(plan, **{name: numbers[name]})


OTHER_LENGTHS = tuple(Lengths("n", axes) for axes in ((Axis.RANK,), (Axis.BLOCK,), (Axis.RANK, Axis.BLOCK)))


def _tensor(random: Random, plan: Plan) -> Plan:
    """A tensor dropped, renamed, of another shape or access."""
    tensors = list(plan.moves.tensors)
    at = random.randrange(len(tensors))
    one = tensors[at]
    other = Rights.WRITE if one.access is Rights.READ else Rights.READ
    kinds = {
        "blocks": replace(one, blocks=one.blocks + random.choice((-1, 1))),
        "cut": replace(one, cut=one.cut + random.choice((-1, 1))),
        "access": replace(one, access=other),
        "name": replace(one, name=f"{one.name}_"),
        "is_yield": replace(one, is_yield=not one.is_yield),
        "lands": replace(one, lands=not one.lands),
        "is_sum": replace(one, is_sum=not one.is_sum),
        "lengths": replace(one, lengths=random.choice([None, *OTHER_LENGTHS])),
    }
    what = random.choice([*kinds, "dropped", "exchanged"])
    if what == "dropped":
        del tensors[at]
    elif what == "exchanged":
        tensors.insert(0, tensors.pop())
    else:
        tensors[at] = kinds[what]
    return changed(plan, tensors=tuple(tensors))


def _casts(random: Random, plan: Plan) -> Plan | None:
    """An operand in another form, or all of them travel as something else."""
    casts = plan.moves.casts
    if casts is None:
        return None
    side = random.choice(["dest", "source", "cast"])
    if side == "cast":
        others = [cast for cast in OTHER_CASTS if cast != casts.cast]
        return changed(plan, casts=replace(casts, cast=random.choice(others)))
    forms = getattr(casts, side).copy()
    at = random.randrange(len(forms))
    forms[at] = (forms[at] + random.randrange(1, len(Form))) % len(Form)
    return changed(plan, casts=replace(casts, **{side: forms}))


OTHER_CASTS = (Cast("float8", 16), Cast("float8", 32), Cast("bfloat16"), Cast("float16"))


def _alias(random: Random, plan: Plan) -> Plan:
    """A buffer that may no longer be one memory, or may be."""
    name = random.choice(plan.moves.tensors).name
    safe = set(plan.moves.alias_safe) ^ {name}
    return changed(plan, alias_safe=tuple(sorted(safe)))


def _of_tables(name: str) -> Mutation:
    def change(random: Random, plan: Plan) -> Plan | None:
        tables = CHANGES[name](random, plan)
        return None if tables is None else changed(plan, ops=replace(plan.moves.ops, **tables))

    return change


MUTATIONS: dict[str, Mutation] = {
    "operation dropped": _dropped,
    "operation doubled": _doubled,
    "operation moved": _moved,
    "wait dropped": _wait_dropped,
    "wait added": _wait_added,
    "signal dropped": _signal_dropped,
    "signal added": _signal_added,
    "wait_peer": _entry("wait_peer", _rank),
    "wait_ordinal": _entry("wait_ordinal", _near),
    "wait_rounds_back": _entry("wait_rounds_back", lambda random, _, value: value + random.choice((-1, 1, 1, 2))),
    "wait_reason": _entry("wait_reason", lambda random, _, value: (value + random.choice((1, 2))) % len(Reason)),
    "signal_peer": _entry("signal_peer", _rank),
    "barrier": _entry("barrier", lambda *given: 1 - given[-1]),
    "cut": _entry("cut", _near),
    "piece": _entry("piece", _near),
    "length": _entry("length", _near),
    "origin": _entry("origin", _near),
    **{name: _begin(name) for name in ("rank_begin", *BEGINS)},
    "count of signals": _count,
    "number": _scalar,
    "tensor": _tensor,
    "alias_safe": _alias,
    "casts": _casts,
    **{name: _of_tables(name) for name in CHANGES},
}
"""With `plan_mutants` every column of Ops, and every field of Moves but its name and origins."""


def mutants(plan: Plan, random: Random, times: int) -> Iterator[tuple[str, Plan]]:
    """What was changed, and the Plan with that change; those that a Plan has no place for are left out."""
    for name, mutation in MUTATIONS.items():
        for _ in range(times):
            found = mutation(random, plan)
            if found is not None:
                yield name, found


def without_waits(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The Plan without each of its waits."""
    for wait in range(len(plan.moves.ops.wait_peer)):
        yield f"wait {wait} dropped", without_wait(plan, wait)


__all__ = ["MUTATIONS", "Moves", "mutants", "without_waits"]
