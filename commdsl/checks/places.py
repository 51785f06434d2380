"""C319: yields to one function name what rotates, and what comes back, in the same places.

Assumes that rotations are kept, and what they bring back: `rotations` and `returns` prove that. A function knows what
it is handed, and what it is to write, by its place alone. Does not ask where other buffers stand: two that a schedule
uses in turn may change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from commdsl.checks.locations import Located
from commdsl.ir.classes import connected
from commdsl.ir.schedules import Yield
from commdsl.ir.words import at_bindings
from commdsl.language.diagnostics import Diagnostic, Label

Part: TypeAlias = tuple[int, int]
"""Which rotation, and which of the buffers that rotate together."""


def other_places(located: Located) -> Iterator[Diagnostic]:
    """One message per function, for the first yield that names a buffer elsewhere than one before it."""
    visiting, back = _parts(located)
    classes = connected(located.schedule)
    first: dict[tuple[str, bool, Part], tuple[int, int, Yield]] = {}
    told: set[str] = set()
    for step in located.schedule.steps:
        if not isinstance(step, Yield) or step.name is None or step.name in told:
            continue
        stands = [(False, at, one, visiting.get(one)) for at, one in enumerate(step.reads)]
        stands += [(True, at, one, back.get(classes[one])) for at, one in enumerate(step.writes)]
        for writes, at, buffer, part in stands:
            if part is None:
                continue
            place, other, before = first.setdefault((step.name, writes, part), (at, buffer, step))
            if place != at and step.name not in told:
                told.add(step.name)
                names = tuple(located.schedule.buffers[one].name for one in (buffer, other))
                what = "written" if writes else "read"
                yield Diagnostic(
                    "C319",
                    f"`{step.name}` is handed its buffers in another order",
                    Label(step.span, f"`{names[0]}` is number {at + 1} of those {what}{at_bindings(step.bindings)}"),
                    (Label(before.span, f"`{names[1]}`, its like, is number {place + 1}"),),
                    help="name what rotates, and what comes back, in the same places at every yield",
                )


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
