"""C505, C506: what `landing` and `matmul` set has an effect, and no tile parts what shares a scale.

Assumes what `resolve.tuning` accepts, which judges settings where they are written. Does not judge others.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.checks.locations import Located
from commdsl.ir.landing import landing
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
    """Without a product nothing multiplies."""
    schedule = located.schedule
    if schedule.tuning.matmul is None or schedule.has_products:
        return
    yield Diagnostic(
        "C506",
        "nothing is multiplied",
        Label(schedule.span, "no `compute matmul` stands in it"),
        help="leave out `matmul`",
    )


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
