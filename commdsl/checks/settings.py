"""C505, C506, C510: `landing` and `matmul` have an effect, no tile parts a scale's elements, the carrier can combine.

Assumes what `resolve.tuning` accepts, which judges settings where they are written. Does not judge others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from commdsl.checks.locations import Located, statement_key
from commdsl.ir.classes import classes, joining
from commdsl.ir.landing import landing
from commdsl.ir.products import added
from commdsl.ir.schedules import Schedule, Statement
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import MoveKind
from commdsl.machine.carriers import DEFAULT, names
from commdsl.program.moves import WIDEST


def idle_landing(located: Located) -> Iterator[Diagnostic]:
    """Words that carry their flags need cells; without what visits there is no place to put to."""
    schedule = located.schedule
    if schedule.tuning.landing != "place":
        return
    if schedule.tuning.carrier.has_flags_in_data:
        why = f"the words of `protocol {schedule.tuning.carrier.name}` are put into cells, as each carries a flag"
    elif not landing(schedule):
        why = "no buffer that a yield hands over, and nothing combines into, is put to by another rank"
    else:
        return
    help = "leave out `landing`, or tune it to `cells`"
    yield Diagnostic("C506", "nothing lands in its place", Label(schedule.span, why), help=help)


def idle_matmul(located: Located) -> Iterator[Diagnostic]:
    """Without a product nothing multiplies; without what is put to others of its result, nothing is pushed."""
    schedule = located.schedule
    tuning, made = schedule.tuning, {result for _, _, result in schedule.products}
    if tuning.matmul is not None and not made:
        message, why = "nothing is multiplied", "no `compute matmul` stands in it"
    elif tuning.matmul == "push" and (tuning.carrier.runs_on_sms or tuning.landing != "place"):
        engine = " or ".join(names(lambda one: not one.runs_on_sms))
        message, why = "nothing is pushed", f"products push what goes by `protocol {engine}   landing place`"
    elif tuning.matmul == "push" and not any(map(partial(_sends, made), schedule.statements)):
        message, why = "nothing is pushed", "no rank puts to another what a product has made"
    else:
        return
    yield Diagnostic("C506", message, Label(schedule.span, why), help="leave out `matmul`")


def _sends(made: set[int], moves: Statement) -> bool:
    is_copied = moves.factor is None and moves.copies and moves.source_buffer in made
    return is_copied and bool((moves.source_rank[:, 0] != moves.dest_rank).any())


def parting_tile(located: Located) -> Iterator[Diagnostic]:
    """A round moves whole stretches, of elements of any size."""
    schedule = located.schedule
    tile, cast = schedule.tuning.tile_bytes, schedule.cast
    if tile is None or cast is None or not cast.stretch or tile % (cast.stretch * WIDEST) == 0:
        return
    stretch = cast.stretch * WIDEST
    what = f"a `tile` of what travels {cast.words} is a multiple of {stretch} B"
    label = Label(schedule.span, f"{tile} B would part a stretch: {cast.stretch} elements of up to {WIDEST} B")
    help = f"tune a tile of {max(round(tile / stretch), 1) * stretch} B, or leave it out"
    yield Diagnostic("C505", what, label, help=help)


def combining_engine(located: Located) -> Iterator[Diagnostic]:
    """Report C510 once for each statement that combines where the carrier cannot.

    Where a yield calls a function the moves are several launches: those that combine take SMs, the carrier the rest.
    """
    schedule = located.schedule
    if schedule.tuning.carrier.combines or (schedule.has_bodies and _has_launches_that_only_move(schedule)):
        return
    told: set[tuple[str, int, int]] = set()
    within = added(schedule)
    for _, _, moves in located.statements():
        key = statement_key(moves.moves.span)
        if moves.moves.kind is MoveKind.REDUCE and key not in told and moves.moves.span not in within:
            told.add(key)
            help = f"tune another protocol for `{schedule.name}`, as `{DEFAULT.name}`"
            label = Label(moves.moves.span, "this combines")
            yield Diagnostic("C510", "the copy engine moves, it does not combine", label, help=help)


def _has_launches_that_only_move(schedule: Schedule) -> bool:
    """Buffers that no move joins are launched apart."""
    class_of = classes(schedule)
    moved = {class_of[moves.dest_buffer]: False for moves in joining(schedule)}
    for moves in joining(schedule):
        moved[class_of[moves.dest_buffer]] |= moves.kind is MoveKind.REDUCE
    return not all(moved.values())
