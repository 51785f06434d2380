"""Turns a Plan with visits into what is started, in order, and into the Plans of its launches, each of them once.

Assumes a Plan of `lower_visits`. Does not start anything. Of a launch, a kernel's text, its arguments and its heap are
those of a Plan with nothing but its moves, so whatever builds and runs such a Plan builds and runs launches.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.language.diagnostics import InternalError
from commdsl.program.launches import Between, Launch, Return, Visit, touches
from commdsl.program.memory import Kept, Rights
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan


def launches(plan: Plan) -> tuple[Launch, ...]:
    return tuple(phase for phase in plan.phases if isinstance(phase, Launch))


def visits(plan: Plan) -> tuple[Visit | Return, ...]:
    """The caller's phases."""
    return tuple(phase for phase in plan.phases if isinstance(phase, Visit | Return))


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


def segments(plan: Plan) -> tuple[Moves, ...]:
    """What is launched, each once."""
    return tuple(dict.fromkeys(launch.moves for launch in launches(plan)))


def landing(plan: Plan) -> tuple[Kept, ...]:
    """The copies of buffers that peers put to: they lie in symmetric memory, in this order."""
    found: dict[Kept, None] = {}
    for launch in launches(plan):
        written = (tensor for tensor in launch.moves.tensors if tensor.access is Rights.WRITE)
        found |= {kept: None for tensor, kept in zip(written, launch.writes, strict=True) if tensor.lands}
    return tuple(found)


def plan_of(plan: Plan, moves: Moves) -> Plan:
    """A launch as a Plan of its own."""
    return plan.launched[moves]
