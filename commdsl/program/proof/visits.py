"""C210: a Plan with visits hands over, and returns, the data that its schedule does.

Assumes a Plan that `verify` passed, and launches that are proved each by itself. Does not know how the Plan
was made: it sees phases, copies and tables only.

Data (C210): what every copy holds on every rank is followed through the tables of the launches, in the order of their
turns, beside the steps of the schedule. Every visit is handed what the schedule hands over there (of buffers that
rotate what is new), and the caller gets back what the schedule leaves; what its function computes is a value of its own
on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.ir.classes import Unit, units
from commdsl.ir.held import handed
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Diagnostic
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.memory import Kept, Rights
from commdsl.program.plan import Plan
from commdsl.program.proof import messages
from commdsl.program.proof.computes import follow
from commdsl.program.proof.meaning import returned, start, states
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.values import STALE, UNWRITTEN, Values, computed
from commdsl.program.tasks import Product, Task
from commdsl.program.visited import kept_by, launches, segments, visits


def visits_compute(schedule: Schedule, plan: Plan) -> Iterator[Diagnostic]:
    """The first chunk that the caller is handed, or gets back, with other data than the schedule gives it."""
    numbers = {buffer.name: number for number, buffer in enumerate(schedule.buffers)}
    meant = start(schedule)
    held: dict[Kept, Values] = {}
    known, rounds = units(schedule), {moves: Round(moves) for moves in segments(plan)}
    for buffer, values in zip(schedule.buffers, start(schedule), strict=True):
        unit = known[buffer.name]
        if unit is not None:
            held[Kept(buffer.name, buffer.blocks, 0, unit)] = values.reshape(schedule.num_ranks, -1)
    wrong_unit = _other_unit(plan, known)
    if wrong_unit is not None:
        yield messages.other_unit(schedule, wrong_unit)
        return
    schedule_states, everything = states(schedule, meant), handed(schedule)
    for phase in sorted(_phases(plan), key=lambda phase: phase.turn):
        match phase:
            case Launch():
                _launch(phase, rounds[phase.moves], held)
            case Visit(step=stop) | Product(step=stop):
                number, step = next(schedule_states, (-1, None))
                name = phase.name if isinstance(phase, Visit) else stop.name
                if step is None or step != stop or (name, len(phase.reads)) != (step.name, len(step.reads)):
                    yield messages.other_visit(schedule, phase)
                    return
                visiting = schedule.visiting(step)
                for kept, read, fresh in zip(phase.reads, step.reads, next(everything).fresh, strict=True):
                    wanted = meant[read]
                    if read in visiting:  # what is not new is not handed over
                        wanted = np.where(fresh.reshape(-1), wanted, UNWRITTEN)
                    wrong = _differs(held, kept, wanted, numbers[kept.name] == read)
                    if wrong is not None:
                        yield messages.wrong_visit(step.span, kept.name, wrong)
                        return
                for kept, written in zip(phase.writes, step.writes, strict=True):
                    held[kept] = computed(schedule, number, written).reshape(schedule.num_ranks, -1)
            case Return():
                yield from _returned(schedule, phase, held, meant, unvisited=next(schedule_states, None) is not None)


def _phases(plan: Plan) -> Iterator[Launch | Visit | Product | Return]:
    """In no order, and of a task each product."""
    yield from launches(plan)
    for phase in visits(plan):
        if isinstance(phase, Task):
            yield from phase.products
        else:
            yield phase


def _other_unit(plan: Plan, known: dict[str, Unit | None]) -> str | None:
    """The first buffer that the Plan has in another type or length than the schedule."""
    return next((kept.name for kept in kept_by(plan) if known.get(kept.name) != kept.unit), None)


def _launch(phase: Launch, found: Round, held: dict[Kept, Values]) -> None:
    moves = phase.moves
    tensors = [tensor for tensor in moves.tensors if tensor.access is Rights.READ]
    nothing = {tensor: np.full((moves.num_ranks, tensor.blocks * tensor.cut), STALE) for tensor in moves.tensors}
    before = {one: held.get(kept, nothing[one]) for one, kept in zip(tensors, phase.reads, strict=True)}
    results = follow(found, before).results
    tensors = [tensor for tensor in moves.tensors if tensor.access is Rights.WRITE]
    for tensor, kept in zip(tensors, phase.writes, strict=True):
        made = results[tensor]
        held[kept] = np.where(made == UNWRITTEN, held.get(kept, STALE), made)


def _differs(held: dict[Kept, Values], kept: Kept, wanted: Values, is_named: bool) -> tuple[int, int] | None:
    """Rank and chunk of the first that the schedule has written, and that is not there."""
    found = held.get(kept)
    if found is None or not is_named:
        return 0, 0
    wanted = wanted.reshape(found.shape)
    wrong = np.argwhere((wanted != UNWRITTEN) & (wanted != found))
    return None if not len(wrong) else (int(wrong[0, 0]), int(wrong[0, 1]))


def _returned(
    schedule: Schedule, phase: Return, held: dict[Kept, Values], meant: list[Values], *, unvisited: bool
) -> Iterator[Diagnostic]:
    wanted = {tensor.name: values for tensor, values in returned(schedule, meant).items()}
    for kept in phase.reads:
        wrong = _differs(held, kept, wanted.get(kept.name, meant[0]), kept.name in wanted)
        if wrong is not None:
            yield messages.wrong_visit(schedule.span, kept.name, wrong)
            return
    unreturned = [name for name, values in wanted.items() if (values != UNWRITTEN).any()]
    if unvisited or {*unreturned} - {kept.name for kept in phase.reads}:
        yield messages.other_visit(schedule, phase)
