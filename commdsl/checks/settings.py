"""C505, C506: what `landing` and `matmul` set has an effect, and no tile parts what shares a scale.

Assumes what `resolve.tuning` accepts, which judges settings where they are written. Does not judge others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from commdsl.checks.locations import Located
from commdsl.ir.landing import landing
from commdsl.ir.schedules import Statement
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.program.moves import WIDEST

CARRIES_FLAGS = ("packet", "line")


def idle_landing(located: Located) -> Iterator[Diagnostic]:
    """Words that carry their flags need cells; without what visits there is no place to put to."""
    schedule = located.schedule
    if schedule.tuning.landing != "place":
        return
    if schedule.tuning.protocol in CARRIES_FLAGS:
        why = f"the words of `protocol {schedule.tuning.protocol}` are put into cells, as each carries a flag"
    elif not landing(schedule):
        why = "no buffer that a yield hands over, and nothing combines into, is put to by another rank"
    else:
        return
    yield Diagnostic(
        "C506",
        "nothing lands in its place",
        Label(schedule.span, why),
        help="leave out `landing`, or tune it to `cells`",
    )


def idle_matmul(located: Located) -> Iterator[Diagnostic]:
    """Without a product nothing multiplies; without what is put to others of its result, nothing is pushed."""
    schedule = located.schedule
    tuning, made = schedule.tuning, {result for _, _, result in schedule.products}
    if tuning.matmul is not None and not made:
        message, why = "nothing is multiplied", "no `compute matmul` stands in it"
    elif tuning.matmul == "push" and (tuning.protocol, tuning.landing) != ("engine", "place"):
        message, why = "nothing is pushed", "products push what goes by `protocol engine   landing place`"
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
    yield Diagnostic(
        "C505",
        f"a `tile` of what travels {cast.words} is a multiple of {stretch} B",
        Label(schedule.span, f"{tile} B would part a stretch: {cast.stretch} elements of up to {WIDEST} B"),
        help=f"tune a tile of {max(round(tile / stretch), 1) * stretch} B, or leave it out",
    )
