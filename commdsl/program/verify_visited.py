"""What a legal Plan with visits is: whose phases they are, in which order, and on which copies of buffers.

Assumes nothing. Does not judge its launches, each of which is a Plan of its own (`verify`), nor any order (`proof`).
"""

from __future__ import annotations

from commdsl.ir.classes import SUM, Unit
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.legal import law as _law
from commdsl.program.memory import Rights
from commdsl.program.plan import Plan
from commdsl.program.tasks import Over, Ready, Stored, Task, Tasks, joins
from commdsl.program.visited import kept_by, launches, tasks, visits


def verify_visited(plan: Plan) -> None:
    """Launches by lanes, visits and one return by the caller; launches are on copies that are like their tensors."""
    between = (*launches(plan), *visits(plan))
    known = tuple(phase for phase in plan.phases if isinstance(phase, Launch | Visit | Tasks | Return))
    _law(known == plan.phases, "between launches there are visits and tasks, and nothing else")
    every = [one.turn for one in between if not isinstance(one, Task)]
    every += [product.turn for task in tasks(plan) for product in task.products]
    _law(len({*every}) == len(every), "two phases have one turn")
    for some in (launches(plan), visits(plan)):
        turns = [one.turn for one in some]
        _law(turns == sorted(turns), "phases of a role are not in the order of their turns")
    for role in plan.roles:
        for phase in role.phases:
            _law(isinstance(phase, Launch) != role.is_caller, f"`{role.name}` does what another role does")
    _law([isinstance(phase, Return) for phase in visits(plan)][-1:] == [True], "the caller's last phase is no return")
    _law(sum(isinstance(phase, Return) for phase in plan.phases) == 1, "a call returns once")
    for one in between:
        others = len(visits(plan)) - 1 if isinstance(one, Launch) else len(launches(plan))
        _law(0 <= one.after <= others, f"it comes after {one.after} phases, of which there are {others}")
        if isinstance(one, Launch):
            least = 0 if one.is_split else one.after
            _law(
                least <= one.opens <= one.after,
                f"it opens after {one.opens} phases, and comes after {one.after}",
            )
        if not isinstance(one, Return):
            _law(all(kept.copy for kept in one.writes), "what the caller gave is written")
        if isinstance(one, Task):
            _task(one, plan)
    for launch in launches(plan):
        for access, kept in ((Rights.READ, launch.reads), (Rights.WRITE, launch.writes)):
            wanted = [one.blocks for one in launch.moves.tensors if one.access is access]
            _law(wanted == [one.blocks for one in kept], "a launch is on other buffers than its moves")
        _law(len({*launch.writes}) == len(launch.writes), "a launch writes a copy twice")
        again = {kept.name for kept in launch.writes if kept in launch.reads}
        _law(again <= {*launch.moves.alias_safe}, "a launch writes a copy that it reads")
        _made_of(launch)
    found = {(kept.name, kept.unit) for kept in kept_by(plan)}
    _law(len(found) == len({name for name, _ in found}), "copies of a buffer are of different types or lengths")


def _task(task: Task, plan: Plan) -> None:
    """A sum of products of one result; what it waits for and pushes exists."""
    first, *others = task.products
    counts = {Over: len(launches(plan)), Ready: len(launches(plan)), Stored: len(tasks(plan))}
    for counter in task.counters:
        number = counter.task if isinstance(counter, Stored) else counter.launch
        _law(0 <= number < counts[type(counter)], f"a task waits for {counter}, which there is not")
    _law(
        not any(isinstance(one, Ready) for product in task.products for one in product.waits), "readiness is of pushes"
    )
    for at, one in enumerate(others, 1):
        _law(joins(Task(task.products[:at]), one), "a task ends with what stands before its last product")
        _law(one.writes == first.writes[:1] and one.result in one.sums, "a product is added to what another one makes")
    if task.push is not None:
        launch = launches(plan)[task.push]
        _law(launch.is_split and launch.reads == (task.result,), "a task pushes what a launch does not copy")
        _law(sum(one.push == task.push for one in tasks(plan)) == 1, "two tasks push for one launch")


def _made_of(launch: Launch) -> None:
    """All of the same, but sums, which are as long and of another type."""
    found: dict[bool, set[Unit]] = {True: set(), False: set()}
    for tensor, kept in zip(launch.moves.tensors, launch.operands, strict=True):
        found[tensor.is_sum].add(kept.unit)
    (unit, *others), wide = found[False], found[True]
    _law(
        not others and {one.size for one in wide} <= {unit.size}, "a launch is on buffers of different types or lengths"
    )
    _law(
        {one.element for one in wide} <= {SUM} - {unit.element}, f"a launch adds {unit.element} to sums of another type"
    )
