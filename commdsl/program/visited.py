"""Turns a Plan with visits into what is started, in order, and into the Plans of its launches, each of them once.

Assumes a Plan of `lower_visits`. Does not start anything. Of a launch, a kernel's text, its arguments and its heap are
those of a Plan with nothing but its moves, so whatever builds and runs such a Plan builds and runs launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commdsl.ir.products import Part
from commdsl.language.diagnostics import InternalError
from commdsl.program.launches import Between, Launch, Return, Visit, touches
from commdsl.program.memory import Kept
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan
from commdsl.program.tasks import Task, Tasks

TURNS = 2
"""Launches of the same moves that may be under way at once: each has flags of its own."""


def launches(plan: Plan) -> tuple[Launch, ...]:
    return tuple(phase for phase in plan.phases if isinstance(phase, Launch))


def visits(plan: Plan) -> tuple[Visit | Task | Return, ...]:
    """The caller's phases, and in place of `Tasks` each of its tasks."""
    found: list[Visit | Task | Return] = []
    for phase in plan.phases:
        match phase:
            case Tasks(rows):
                found += rows
            case Visit() | Return():
                found.append(phase)
    return tuple(found)


def tasks(plan: Plan) -> tuple[Task, ...]:
    return tuple(phase for phase in visits(plan) if isinstance(phase, Task))


def kept_by(plan: Plan) -> Iterator[Kept]:
    """The copies of buffers that launches and then visits read and write, each as often as they do."""
    for phase in (*launches(plan), *visits(plan)):
        yield from (touch.memory for touch in touches(phase) if isinstance(touch.memory, Kept))


def started(plan: Plan) -> tuple[tuple[int, Between], ...]:
    """All phases with their numbers in their roles, in the order in which a rank's host starts them.

    A launch is started as soon as what it comes after is: it travels while the caller's function still starts its work.
    """
    ahead, beside = launches(plan), visits(plan)
    found: list[tuple[int, Between]] = []
    launched = visited = 0
    while launched < len(ahead) or visited < len(beside):
        if launched < len(ahead) and ahead[launched].after <= visited:
            found.append((launched, ahead[launched]))
            launched += 1
        elif visited < len(beside) and beside[visited].after <= launched:
            found.append((visited, beside[visited]))
            visited += 1
        else:
            raise InternalError(f"launch {launched} and visit {visited} of `{plan.name}` wait for each other")
    return tuple(found)


def ended(plan: Plan) -> tuple[int, ...]:
    """Of each phase in the order of `started`, how many launches have ended before it is started.

    A launch of the copy engine begins while those before it still move what it does not touch: peers say that they are
    ready, and its copies stand behind theirs. It waits for phases of the caller's on the stream on which launches end;
    so those end first that these come after. All ranks begin and end launches in this one order, and what a step of it
    waits for, on any rank, stands before it or is the same step: nobody waits in a circle.
    """
    ahead, beside = launches(plan), visits(plan)
    found, over = list[int](), 0
    for number, phase in started(plan):
        if isinstance(phase, Launch):
            over = max(
                over, number - _under_way(ahead[:number], phase), *(one.after for one in beside[: phase.after]), 0
            )
        else:
            over = max(over, phase.after)
        found.append(over)
    return tuple(found)


def host_order(plan: Plan) -> tuple[tuple[int, bool], ...]:
    """What goes on the stream beside the caller's, in order: the number of a launch, and whether it ends or begins."""
    found, over = list[tuple[int, bool]](), 0
    for (number, phase), before in zip(started(plan), ended(plan), strict=True):
        found += ((launch, True) for launch in range(over, before))
        over = before
        if isinstance(phase, Launch):
            found.append((number, False))
    return (*found, *((launch, True) for launch in range(over, len(launches(plan)))))


def turns(plan: Plan) -> tuple[int, ...]:
    """Of each launch, which flags of its moves it has: others than one before it that is still under way."""
    over = [over for (_, phase), over in zip(started(plan), ended(plan), strict=True) if isinstance(phase, Launch)]
    found, last = list[int](), dict[Moves, int]()
    for number, launch in enumerate(launches(plan)):
        before = last.get(launch.moves, -1)
        found.append((found[before] + 1) % TURNS if before >= over[number] else 0)
        last[launch.moves] = number
    return tuple(found)


def _under_way(before: Sequence[Launch], launch: Launch) -> int:
    """How many of the launches before one may still be, as far as it goes for what they touch."""
    last = before[1 - TURNS :]
    free = (not meets(one, launch.reads, launch.writes) and one.is_split for one in reversed(last))
    return next((at for at, is_free in enumerate(free) if not is_free), len(last)) if launch.is_split else 0


def meets(launch: Launch, reads: Sequence[Kept], writes: Sequence[Kept]) -> bool:
    """Whether it writes what these are, or reads what is written."""
    return bool({*launch.writes} & {*reads, *writes} or {*launch.reads} & {*writes})


def segments(plan: Plan) -> tuple[Moves, ...]:
    """What is launched, each once."""
    return tuple(dict.fromkeys(launch.moves for launch in launches(plan)))


def landing(plan: Plan, parts: Sequence[Part] = ()) -> list[Kept]:
    """The copies of buffers that peers put to: they lie in symmetric memory, in this order. Parts of one tensor lie one
    behind another, as products read them.
    """
    found = dict.fromkeys(kept for launch in launches(plan) for kept in launch.lands)
    order = {part.name: number for number, part in enumerate(parts)}
    of = {part.name: next(at for at, one in enumerate(parts) if one.of == part.of) for part in parts}
    return sorted(found, key=lambda kept: (of.get(kept.name, 0), kept.copy, order.get(kept.name, 0)))


def moved(plan: Plan) -> frozenset[str]:
    """The buffers that launches read or write."""
    return frozenset(kept.name for launch in launches(plan) for kept in (*launch.reads, *launch.writes))


def only_multiplied(plan: Plan, parts: Sequence[Part]) -> frozenset[str]:
    """Of what is cut into parts, or whole, what nothing but products reads, and what is the rows, or the factor, of
    all of them: they have one kernel, which reads an operand in one way.
    """
    of = {part.name: part.of for part in parts}
    reads = [product.reads for task in tasks(plan) for product in task.products]
    operands = ({of.get(one[number].name, one[number].name) for one in reads} for number in range(2))
    alone = {name for names in operands if len(names) == 1 for name in names}
    return frozenset(alone - {of.get(name, name) for name in moved(plan)})


def plan_of(plan: Plan, moves: Moves) -> Plan:
    """A launch as a Plan of its own."""
    return plan.launched[moves]
