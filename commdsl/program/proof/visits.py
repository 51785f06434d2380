"""Turns a Plan with visits into what is wrong with it: an order of launches and visits, or data, that no one meant.

Assumes a Plan that `verify` passed, and launches that are proved each by itself. Does not know how the Plan
was made: it sees phases, copies and tables only.

Order (C640 to C642): a rank has two threads, its caller's stream and the one beside it for launches. Buffers belong to
the rank; what peers put there lies within the launch of the rank that has it so (C212, of each launch). So no hazard is
between two ranks, and one rank stands for all. Before a call the caller may have written to
all it gives, behind it to all it gave and got. What SMs copy within a GPU may wait for visits that it does not touch.

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
from commdsl.program.launches import Between, Launch, Return, Visit, opening, touches
from commdsl.program.memory import Kept, Rights
from commdsl.program.phases import Actor, Ranks
from commdsl.program.plan import Plan
from commdsl.program.proof import messages
from commdsl.program.proof.computes import follow
from commdsl.program.proof.events import Step, Wait, events
from commdsl.program.proof.meaning import returned, start, states
from commdsl.program.proof.regions import prove
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.values import STALE, UNWRITTEN, Values, computed
from commdsl.program.touches import Touch
from commdsl.program.visited import kept_by, launches, segments, visits

COMM = 1
"""Lanes of a rank, for the proof: all of a launch are one thread."""


def order_of_visits(plan: Plan) -> Iterator[Diagnostic]:
    """The first access that comes in no order, or the first wait without need."""
    yield from prove(events(steps(plan), 1, COMM), plan.span)


def steps(plan: Plan) -> tuple[Step, ...]:
    """A call of one rank: what its caller had written before, then all phases by their turns. Where a launch opens
    before it goes on, peers may write from there.
    """
    phases: list[tuple[int, Between]] = [*enumerate(launches(plan)), *enumerate(visits(plan))]
    phases.sort(key=lambda phase: phase[1].turn)
    every = dict.fromkeys(touch.memory for _, phase in phases for touch in touches(phase))
    before = tuple(Touch(memory, Ranks.OWN, True, -1) for memory in every)
    made = (step for phase in phases for step in _steps(*phase))
    return Step("prepare", Actor.CALLER, before, tells=Ranks.OWN, given=True), *made


def _steps(number: int, phase: Between) -> Iterator[Step]:
    if not isinstance(phase, Launch):
        wait = Wait(f"launch {phase.after - 1}", Actor.LANES, Ranks.OWN) if phase.after else None
        yield Step(f"visit {number}", Actor.CALLER, touches(phase), wait, Ranks.OWN, given=number == phase.after == 0)
        return
    if phase.opens < phase.after:
        wait, is_first = _of_launch(number, phase.opens)
        yield Step(f"opening {number}", Actor.LANES, opening(phase), wait, Ranks.OWN, given=is_first)
    wait, is_first = _of_launch(number, phase.after)
    waits_for_sms = phase.moves.is_within  # whatever it touches
    yield Step(f"launch {number}", Actor.LANES, touches(phase), wait, Ranks.OWN, given=waits_for_sms or is_first)


def _of_launch(number: int, after: int) -> tuple[Wait | None, bool]:
    """What it waits for, so many phases of the caller's; and whether that is where the stream beside begins."""
    if number == after == 0:
        return Wait("prepare", Actor.CALLER, Ranks.OWN), True
    return (Wait(f"visit {after - 1}", Actor.CALLER, Ranks.OWN) if after else None), False


# --- data -------------------------------------------------------------------------------------------------------------


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
    for phase in sorted((*launches(plan), *visits(plan)), key=lambda phase: phase.turn):
        match phase:
            case Launch():
                _launch(phase, rounds[phase.moves], held)
            case Visit(step=stop):
                number, step = next(schedule_states, (-1, None))
                if step is None or step != stop or (phase.name, len(phase.reads)) != (step.name, len(step.reads)):
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
