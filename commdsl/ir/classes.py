"""Turns a schedule into what its buffers are made of: how long a block is and of which element type, where it is known.

Assumes a resolved schedule. Does not know numbers: the length of a block is that of one of a tensor that the caller
gives, and so is an element type that is not declared.

Buffers that moves join are of one *class*: a block of one is as long as a block of the other, of the same type. With
`like` a class is as long as another, of a type of its own. Where all that is given is equally long, so is everything.
Where the caller computes nothing that travels, everything is as the first tensor given.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.ir.schedules import Buffer, Schedule, Statement, Step
from commdsl.language.kinds import GIVEN
from commdsl.language.records import dataclass
from commdsl.machine.dtypes import BY_NAME, DType


@dataclass(frozen=True, slots=True)
class Unit:
    """What blocks are: as long as those of `size`, a tensor that the caller gives, and of the type `element`; where
    that is None of the type of `typed`, another.
    """

    size: str
    element: str | None
    typed: str


class Joined:
    """Buffers by number, each in one group; at first alone."""

    def __init__(self, count: int) -> None:
        self._first = list(range(count))

    def first(self, buffer: int) -> int:
        """The least of its group."""
        while self._first[buffer] != buffer:
            buffer = self._first[buffer]
        return buffer

    def join(self, one: int, other: int) -> None:
        least, most = sorted((self.first(one), self.first(other)))
        self._first[most] = least

    def groups(self) -> tuple[int, ...]:
        """Of each buffer the least of its group."""
        return tuple(map(self.first, range(len(self._first))))


def joining(schedule: Schedule) -> Iterator[Statement]:
    """Every statement that moves anything."""
    return (one for step in schedule.steps if isinstance(step, Step) for one in step.moves if len(one.actor))


def classes(schedule: Schedule) -> tuple[int, ...]:
    """Of each buffer the first of those that moves join to it; all in one where the caller computes nothing."""
    joined = Joined(len(schedule.buffers))
    if not schedule.has_bodies:
        return (0,) * len(schedule.buffers)
    for moves in joining(schedule):
        joined.join(moves.source_buffer, moves.dest_buffer)
    return joined.groups()


def units(schedule: Schedule) -> dict[str, Unit | None]:
    """By buffer. None: nothing is known of its length; no such buffer is handed over (`checks`)."""
    buffers, moved = schedule.buffers, classes(schedule)
    numbers = {buffer.name: number for number, buffer in enumerate(buffers)}
    long = Joined(len(buffers))
    for number, buffer in enumerate(buffers):
        long.join(number, moved[number])
        if buffer.like is not None:
            long.join(number, numbers[buffer.like])
    lengths = long.groups()
    given = {lengths[number]: buffer.name for number, buffer in reversed([*enumerate(buffers)]) if buffer.kind in GIVEN}
    only = next(iter(given.values())) if len(given) == 1 else None
    found: dict[str, Unit | None] = {}
    for number, buffer in enumerate(buffers):
        size = given.get(lengths[number], only)
        element, typed = _typed(buffers, moved, moved[number], frozenset()) or (None, size or "")
        found[buffer.name] = None if size is None else Unit(size, element, typed)
    return found


def types(schedule: Schedule, otherwise: DType) -> dict[str, DType]:
    """By buffer the type declared for its class; `otherwise` where none is."""
    elements = {name: None if unit is None else unit.element for name, unit in units(schedule).items()}
    return {name: otherwise if element is None else BY_NAME[element] for name, element in elements.items()}


def _typed(
    buffers: tuple[Buffer, ...], moved: tuple[int, ...], of: int, seen: frozenset[int]
) -> tuple[str | None, str] | None:
    """The type of a class, and who has it, as in Unit: the one declared, or else that of what is given, or else that of
    the class it is like.
    """
    members = [number for number, group in enumerate(moved) if group == of]
    element = next((buffers[number].element for number in members if buffers[number].element), None)
    given = next((number for number in members if buffers[number].kind in GIVEN), None)
    if element is not None or (given is not None and buffers[given].like is None):
        return element, "" if given is None else buffers[given].name
    for number in members if given is None else [given]:
        like = next((at for at, buffer in enumerate(buffers) if buffer.name == buffers[number].like), None)
        if like is not None and moved[like] not in {*seen, of}:
            return _typed(buffers, moved, moved[like], seen | {of})
    return None
