"""Turns a Plan of routed phases into mutants: a phase, wait, word, memory or role dropped or changed.

Assumes a right Plan. Every single change there is, then two at random at once. Does not run any; `is_refused` says
whether one is not even to be run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from itertools import combinations
from random import Random

from commdsl.checks import check_routed
from commdsl.language.diagnostics import InternalError
from commdsl.program.memory import Counters, Home, Memory, Rows, Words
from commdsl.program.phases import Host, Meet, Tell
from commdsl.program.plan import Phase, Plan, Role, memory_of
from commdsl.program.verify import verify

Phases = tuple[Phase, ...]

TOGETHER = 10
"""Second changes that are tried after one first."""


def is_refused(plan: Plan) -> bool:
    """By what a Plan has to be, or by what is proved of it."""
    try:
        verify(plan)
    except InternalError:
        return True
    return bool(check_routed(plan))


def mutants(plan: Plan, random: Random, pairs: int) -> Iterator[tuple[str, Plan]]:
    """What was changed, and the Plan with that change, or with two."""
    singles = list(single(plan))
    yield from singles
    for _ in range(pairs // TOGETHER):
        what, once = random.choice(singles)
        again = list(single(once))
        for other, twice in random.sample(again, min(TOGETHER, len(again))):
            yield f"{what}; {other}", twice


def single(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every change of one thing."""
    for number, role in enumerate(plan.roles):
        for what, changed in _roles(role):
            yield (
                f"{role.name}: {what}",
                replace(plan, roles=(*plan.roles[:number], *changed, *plan.roles[number + 1 :])),
            )
    for memory in plan.memory:
        for what, other in _memories(memory):
            yield f"everywhere {what}", _with_memory(plan, memory, other)
    yield "tiles are longer", replace(plan, tile_bytes=plan.tile_bytes * 2)


def without_waits(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The Plan without each phase that waits."""
    caller, comm = plan.roles
    for at, phase in enumerate(comm.phases):
        if isinstance(phase, Meet):
            left = replace(comm, phases=comm.phases[:at] + comm.phases[at + 1 :])
            yield f"{phase.what.name} is not met", replace(plan, roles=(caller, left))


def _roles(role: Role) -> Iterator[tuple[str, tuple[Role, ...]]]:
    yield "dropped", ()
    if not role.is_caller:
        yield "one lane more", (replace(role, lanes=role.lanes + 1),)
        yield "one SM less", (replace(role, sms=role.sms - 1),)
        yield "more threads", (replace(role, threads=role.threads * 2),)
    for what, phases in _sequences(role.phases):
        yield what, (replace(role, phases=phases),)


def _sequences(phases: Phases) -> Iterator[tuple[str, Phases]]:
    for at, phase in enumerate(phases):
        rest = phases[:at] + phases[at + 1 :]
        yield f"{_name(phase)} dropped", rest
        yield f"{_name(phase)} doubled", (*phases[:at], phase, *phases[at:])
        for to in range(len(phases)):
            if to != at:
                yield f"{_name(phase)} in place {to}", (*rest[:to], phase, *rest[to:])
        for what, other in _phases(phase, phases):
            yield f"{_name(phase)}: {what}", (*phases[:at], other, *phases[at + 1 :])
    for first, second in combinations(range(len(phases)), 2):
        if second - first > 1:  # neighbours are exchanged above
            changed = list(phases)
            changed[first], changed[second] = phases[second], phases[first]
            yield f"{_name(phases[first])} and {_name(phases[second])} exchanged", tuple(changed)


def _name(phase: Phase) -> str:
    what = getattr(phase, "what", None)
    return f"{type(phase).__name__} {what.name}" if what is not None else getattr(phase, "name", type(phase).__name__)


def _phases(phase: Phase, others: Phases) -> Iterator[tuple[str, Phase]]:
    """Each column of a phase as something else."""
    for column in (field.name for field in fields(phase)):
        value = getattr(phase, column)
        for what, other in _values(value, others, is_host=isinstance(phase, Host)):
            yield f"{column} {what}", replace(phase, **{column: other})


def _values(value: object, others: Phases, is_host: bool) -> Iterator[tuple[str, object]]:
    match value:
        case bool():
            yield f"is {not value}", not value
        case int():
            yield from ((f"is {other}", other) for other in (value + 1, value + 2, value - 1))
        case Enum():
            yield from ((f"is {other.name}", other) for other in type(value) if other is not value)
        case Words() | Counters():
            known = [one.what for one in others if isinstance(one, Tell | Meet)]
            yield from ((f"is {other.name}", other) for other in dict.fromkeys(known) if other != value)
            yield from _memories(value)
        case Rows():
            yield from _memories(value)
            yield from (
                (f"is {one.name} ({one.home.value})", one) for one in dict.fromkeys(_rows(others)) if one != value
            )
        case tuple():
            for at, one in enumerate(value):
                yield f"without number {at}", value[:at] + value[at + 1 :]
                yield f"with number {at} twice", (*value[:at], one, *value[at:])
                if at:
                    yield f"{at} first", (one, *value[:at], *value[at + 1 :])
                changes = _memories(one) if isinstance(one, Rows) else _values(one, others, is_host)
                yield from ((f"number {at} {what}", (*value[:at], new, *value[at + 1 :])) for what, new in changes)


def _rows(phases: Phases) -> Iterator[Rows]:
    """All that some phase touches."""
    for phase in phases:
        yield from (memory for memory in memory_of(phase) if isinstance(memory, Rows))


def _memories(memory: Memory) -> Iterator[tuple[str, Memory]]:
    """Another memory of its kind, or of the other."""
    match memory:
        case Rows(name, home):
            yield from ((f"{name} ({home.value}) is {to.value}", Rows(name, to)) for to in Home if to is not home)
            yield f"{name} ({home.value}) is another", Rows(f"{name}_", home)
        case Words(name, values, a_lane):
            yield f"{name} has {'one slot' if a_lane else 'a slot a lane'}", replace(memory, a_lane=not a_lane)
            yield f"{name} says less", replace(memory, values=values[:-1])
            yield f"{name} says more", replace(memory, values=(*values, "more"))
            yield f"{name} counts", Counters(name, a_lane)
        case Counters(name, is_shared):
            yield f"{name} is {'its own' if is_shared else 'shared'}", Counters(name, not is_shared)
            yield f"{name} has values", Words(name, ("number",), is_shared)
        case _:
            pass


def _with_memory(plan: Plan, memory: Memory, other: Memory) -> Plan:
    """One memory as another wherever it stands."""

    def put(phase: Phase) -> Phase:
        if memory not in memory_of(phase):
            return phase
        columns = {}
        for field in fields(phase):
            value = getattr(phase, field.name)
            if value == memory:
                columns[field.name] = other
            elif isinstance(value, tuple):
                columns[field.name] = tuple(other if one == memory else one for one in value)
        return replace(phase, **columns)

    return replace(plan, roles=tuple(replace(role, phases=tuple(map(put, role.phases))) for role in plan.roles))
