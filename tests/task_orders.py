"""A second opinion on the order of tasks and launches: a call is run with one phase held back for ever.

Written from the meaning of counters, by simulation; shares no code with `program.proof.hosted`, which asks a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from commdsl.program.launches import Launch, Return
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.tasks import Counter, Over, Ready, Stored, Task
from commdsl.program.visited import host_order, launches, tasks


@dataclass
class Reached:
    """The progress of a call while one phase is held back."""

    opened: set[int] = field(default_factory=set)  # launches whose peers may write
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    reading: set[tuple[int, int]] = field(default_factory=set)  # products, by task and number
    storing: set[int] = field(default_factory=set)  # tasks that may write
    stored: set[int] = field(default_factory=set)
    returned: bool = False


def run(plan: Plan, held: tuple[str, int] | None = None, *, workers: int | None = None) -> Reached:
    """Return the progress of a call in which `held`, a launch or a task by number, is never over. `workers`: 1, or as
    many as there are tasks.
    """
    found, every, ahead = Reached(), tasks(plan), launches(plan)
    order, at = host_order(plan), 0
    while True:
        before = (at, len(found.opened), len(found.reading), len(found.storing), len(found.stored), len(found.begun))
        if at < len(order):
            number, is_end = order[at]
            launch = ahead[number]
            if is_end:
                if held != ("launch", number):
                    found.ended.add(number)
                    at += 1
            elif found.stored >= {*range(launch.opens)}:
                found.opened.add(number)
                if found.stored >= {*range(launch.after)}:
                    found.begun.add(number)
                    at += 1
        for number, task in enumerate(every):
            if workers == 1 and not found.stored >= {*range(number)}:
                break
            _go_on(found, number, task, held)
        after = (at, len(found.opened), len(found.reading), len(found.storing), len(found.stored), len(found.begun))
        if after == before:
            break
    (last,) = (phase for phase in plan.phases if isinstance(phase, Return))
    found.returned = found.stored >= {*range(len(every))} and (last.after == 0 or last.after - 1 in found.ended)
    return found


def _go_on(found: Reached, number: int, task: Task, held: tuple[str, int] | None) -> None:
    for at, product in enumerate(task.products):
        if _are_there(found, product.waits):
            found.reading.add((number, at))
    if (number, 0) in found.reading and _are_there(found, task.waits):
        found.storing.add(number)
    is_ready = task.push is None or task.push in found.opened
    all_read = all((number, at) in found.reading for at in range(len(task.products)))
    if all_read and is_ready and number in found.storing and held != ("task", number):
        found.stored.add(number)


def _are_there(found: Reached, counters: Sequence[Counter]) -> bool:
    for one in counters:
        match one:
            case Over(launch):
                is_there = launch in found.ended
            case Ready(launch):
                is_there = launch in found.opened
            case Stored(task):
                is_there = task in found.stored
        if not is_there:
            return False
    return True


def hangs(plan: Plan) -> bool:
    """Return whether some call does not end, with any number of workers."""
    return any(not run(plan, workers=workers).returned for workers in (1, None))


def wrong_orders(plan: Plan) -> Iterator[str]:
    """Yield pairs of a phase and one that may touch the same memory before the first, which the schedule has earlier,
    is over.
    """
    phases = [("launch", at, one) for at, one in enumerate(launches(plan))]
    phases += [("task", at, one) for at, one in enumerate(tasks(plan))]
    for kind, number, phase in phases:
        reached = run(plan, (kind, number))
        for other_kind, other_number, other in phases:
            if other is phase:
                continue
            for kept, writes, when, starts in _accesses(other_kind, other_number, other, reached):
                earlier = [one for one in _accesses(kind, number, phase, Reached()) if one[0] == kept and one[2] < when]
                if starts and any(writes or also for _, also, *_ in earlier):
                    yield f"{other_kind} {other_number} touches {kept.name} {kept.copy} before {kind} {number} is over"
        if reached.returned:
            yield f"the call returns before {kind} {number} is over"
    for number, task in enumerate(tasks(plan)):
        if _reads_what_it_writes(task):
            yield f"task {number} reads what it writes"
        if task.push is not None and task.push in run(plan, ("task", number)).ended:
            yield f"launch {task.push} ends before task {number} has pushed"


def _reads_what_it_writes(task: Task) -> bool:
    return any(kept in task.writes for product in task.products for kept in product.reads[:2]) or (
        task.copy is not None and task.copy == task.result
    )


def _accesses(kind: str, number: int, phase: Launch | Task, reached: Reached) -> Iterator[tuple[Kept, bool, int, bool]]:
    """Each memory that a phase touches, whether it writes, where the schedule has it, and whether that begins."""
    if isinstance(phase, Launch):
        for kept in phase.reads:
            yield kept, False, phase.turn, number in reached.begun
        for kept in phase.writes:
            yield kept, True, phase.turn, number in (reached.opened if kept in phase.lands else reached.begun)
        return
    for at, product in enumerate(phase.products):
        for kept in product.reads[:2]:
            yield kept, False, product.turn, (number, at) in reached.reading
        for kept in product.sums:
            if kept != phase.result:
                yield kept, False, product.turn, number in reached.storing
        for kept in filter(None, (product.operand(product.step.epilogue.residual),)):
            yield kept, False, product.turn, number in reached.storing
        for kept in filter(None, (product.operand(product.step.epilogue.bias),)):
            yield kept, False, product.turn, (number, at) in reached.reading
    for kept in phase.writes:
        yield kept, True, phase.turn, number in reached.storing
