"""Turns what the proof by region found into diagnostics: which threads, in which call, at which memory.

Assumes each finding is real. Does not look for faults; `regions` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.source import Span
from commdsl.program.memory import words_for
from commdsl.program.phases import Ranks
from commdsl.program.proof.clocks import Run, chain
from commdsl.program.proof.events import Events
from commdsl.program.touches import Touch

HELP = "the protocol of a dispatch is commdsl's, so this is its fault: report it with this file"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of which the first, in call 0, need not be over before the second."""

    steps: tuple[int, int]
    accesses: tuple[Touch, Touch]
    actors: tuple[int, int]
    second_call: int
    known: int  # steps of the first actor that the second knows done, counted through the calls
    is_backwards: bool


def _thread(found: Events, actor: int) -> str:
    rank, role = actor % found.num_ranks, int(found.role[actor // found.num_ranks])
    return f"the stream of rank {rank}" if role < 0 else f"lane {role} of rank {rank}"


def _event(found: Events, actor: int, count: int) -> str:
    call, step = divmod(count, len(found.steps))
    return f"`{found.steps[step].name}` of {_thread(found, actor)} in call {call}"


def _owner(found: Events, race: Race) -> int:
    """A rank at whose memory the two meet."""
    one, other = race.accesses
    first, second = (actor % found.num_ranks for actor in race.actors)
    if one.on is Ranks.OWN:
        return first
    if other.on is Ranks.OWN or Ranks.OTHERS not in (one.on, other.on):
        return second
    return next(rank for rank in range(found.num_ranks) if rank not in (first, second))


def race(found: Events, race: Race, span: Span) -> Diagnostic:
    """C640."""
    first, second = race.actors
    ranks = sorted({actor % found.num_ranks for actor in race.actors})
    who = f"ranks {ranks[0]} and {ranks[1]}" if len(ranks) > 1 else f"threads of rank {ranks[0]}"
    one, other = (
        _event(found, actor, call * len(found.steps) + step)
        for actor, call, step in zip(race.actors, (0, race.second_call), race.steps, strict=True)
    )
    verbs = ["writes" if access.writes else "reads" for access in race.accesses]
    place = f"{words_for(race.accesses[1].memory)} of rank {_owner(found, race)}"
    how = "in the wrong order" if race.is_backwards else "in no order"
    knows = f"{_thread(found, second)} then knows nothing done of {_thread(found, first)}"
    if race.known:
        last = _event(found, first, race.known - 1)
        knows = f"the last that {_thread(found, second)} then knows done of {_thread(found, first)} is {last}"
    return Diagnostic(
        "C640",
        f"{who} touch {place} {how}",
        Label(span, f"{other} {verbs[1]} there"),
        (Label(span, f"{one} {verbs[0]} there, and has to be over by then"),),
        notes=(knows,),
        help=HELP,
    )


def _waits(found: Events, wait: int) -> str:
    """Who waits, and for what, in the first call in which it does."""
    timeline, length = found.timeline, len(found.steps)
    op, back = int(timeline.wait_op[wait]), int(timeline.wait_rounds_back[wait])
    waiter = _event(found, int(timeline.actor[op]), back * length + int(timeline.local[op]))
    return f"{waiter} waits for {_event(found, int(timeline.wait_peer[wait]), int(timeline.wait_signal[wait]))}"


def silent(found: Events, span: Span) -> Diagnostic:
    """C641, of a wait that nobody ends: the earliest of the first thread that has one."""
    timeline = found.timeline
    waits = np.flatnonzero(~found.told)
    op = timeline.wait_op[waits]
    keys = (op, found.place_of(timeline.actor[op]), timeline.wait_rounds_back[waits])
    wait = int(waits[np.lexsort(keys)[0]])
    waiter = _thread(found, int(timeline.actor[timeline.wait_op[wait]]))
    label = Label(span, f"{_waits(found, wait)}, which does not tell it")
    return Diagnostic("C641", f"{waiter} waits for ever", label, help=HELP)


def stuck(found: Events, order: Run, span: Span) -> Diagnostic:
    """C641, of a circle: from a stuck thread to the one it waits for, until one comes again."""
    timeline = found.timeline
    actors = np.flatnonzero(order.done < len(found.steps))
    given = [found.steps[step].given for step in order.done[actors].tolist()]  # it waits for its own lanes
    start = int(actors[np.lexsort((found.place_of(actors), given))[0]])
    circle = chain(timeline, order, start)
    notes = [f"{_waits(found, wait)}, which has not run" for _, wait in circle]
    notes[-1] += ", and so in a circle"
    waits_for_ever = f"{_thread(found, start)} waits for ever"
    return Diagnostic("C641", waits_for_ever, Label(span, notes[0]), notes=tuple(notes[1:]), help=HELP)


def idle(found: Events, wait: int, span: Span) -> Diagnostic:
    """C642."""
    timeline = found.timeline
    op, back = int(timeline.wait_op[wait]), int(timeline.wait_rounds_back[wait])
    what = found.steps[int(timeline.wait_signal[wait])].name
    when = f" {back} call{'s' if back > 1 else ''} before" if back else ""
    event = f"`{found.steps[int(timeline.local[op])].name}` of {_thread(found, int(timeline.actor[op]))}"
    return Diagnostic(
        "C642",
        "a wait of a dispatch orders nothing that is not in order without it",
        Label(span, f"{event} waits for `{what}` of {_thread(found, int(timeline.wait_peer[wait]))}{when}"),
        help=HELP,
    )
