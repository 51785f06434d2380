"""C319: no two yields to one function exchange what stands in two of its places.

Assumes that rotations are kept, and what they bring back: `rotations` and `returns` prove that. A function knows what
it is handed, and what it is to write, by its place alone. What rotates, and what comes back, is held to the places that
it had first, all else to what `exchanges` finds. Does not ask more: two buffers used in turn may change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from commdsl.checks.exchanges import exchanges
from commdsl.checks.locations import Located
from commdsl.ir.classes import connected
from commdsl.ir.schedules import Yield
from commdsl.ir.words import at_bindings
from commdsl.language.diagnostics import Diagnostic, Label

Part: TypeAlias = tuple[int, int]
"""Which rotation, and which of the buffers that rotate together."""


def other_places(located: Located) -> Iterator[Diagnostic]:
    """One message per function: for the first yield that names what rotates elsewhere than one before it, or else for
    the first exchange that is found.
    """
    told = set[str | None]()
    for step, fault in (*_moved_on(located), *_exchanged(located)):
        if step.name not in told:
            told.add(step.name)
            yield fault


def _moved_on(located: Located) -> Iterator[tuple[Yield, Diagnostic]]:
    """Yields that name what rotates, or comes back, in another place than the first did."""
    visiting, back = _parts(located)
    classes = connected(located.schedule)
    help = "name what rotates, and what comes back, in the same places at every yield"
    first: dict[tuple[str, bool, Part], tuple[int, int, Yield]] = {}
    for step in located.schedule.steps:
        if not isinstance(step, Yield) or step.name is None:
            continue
        stands = [(False, at, one, visiting.get(one)) for at, one in enumerate(step.reads)]
        stands += [(True, at, one, back.get(classes[one])) for at, one in enumerate(step.writes)]
        for writes, at, buffer, part in stands:
            if part is None:
                continue
            place, other, before = first.setdefault((step.name, writes, part), (at, buffer, step))
            if place != at:
                names = tuple(located.schedule.buffers[one].name for one in (buffer, other))
                what = "written" if writes else "read"
                words = f"`{names[0]}` is number {at + 1} of those {what}{at_bindings(step.bindings)}"
                its_like = Label(before.span, f"`{names[1]}`, its like, is number {place + 1}")
                yield step, _diagnostic(step, Label(step.span, words), its_like, help)


def _exchanged(located: Located) -> Iterator[tuple[Yield, Diagnostic]]:
    help = "name them in one order at every yield, or give the function another name where another order is meant"
    for now, before in exchanges(located):
        yield now.step, _diagnostic(now.step, now.label, before.before, help)


def _diagnostic(step: Yield, label: Label, before: Label, help: str) -> Diagnostic:
    return Diagnostic("C319", f"`{step.name}` is handed its buffers in another order", label, (before,), help=help)


def _parts(located: Located) -> tuple[dict[int, Part], dict[int, Part]]:
    """Of buffers that rotate, which they are; of classes of buffers that moves join, which come back there."""
    classes = connected(located.schedule)
    visiting: dict[int, Part] = {}
    back: dict[int, Part] = {}
    for number, rotation in enumerate(located.schedule.rotations):
        for buffers in (rotation.sources, rotation.dests):
            visiting |= {buffer: (number, at) for at, buffer in enumerate(buffers)}
        back |= {classes[buffer]: (number, at) for at, buffer in enumerate(rotation.back)}
    return visiting, back
