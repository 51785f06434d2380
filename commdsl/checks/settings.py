"""C506: where `landing` or `matmul` would have no effect.

Assumes nothing. Does not judge other settings of `tune`: `resolve.tuning` does, where they are written.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.checks.locations import Located
from commdsl.ir.landing import landing
from commdsl.language.diagnostics import Diagnostic, Label

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
