"""Turns a schedule into what its buffers are made of: how long a block is and of which element type, where it is known.

Assumes a resolved schedule. Does not know numbers: the length of a block is that of one of a tensor that the caller
gives, and so is an element type that is not declared.

Buffers that moves join are of one *class*: a block of one is as long as a block of the other, of the same type. With
`like` a class is as long as another, of a type of its own. Where all that is given is equally long, so is everything.
Where the caller computes nothing that travels, everything is as the first tensor given.

Only a sum may be of another type than what it is the sum of: a buffer declared float32, to which a rank adds whole
blocks of its own that have a floating type of their own. Then the two are as long, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import TypeAlias

from commdsl.ir.functions import GATED, ROWWISE, Extent
from commdsl.ir.schedules import Buffer, Schedule, Statement, Yield
from commdsl.language.kinds import GIVEN, MoveKind
from commdsl.language.records import dataclass
from commdsl.machine.dtypes import BY_NAME, DType

SUM = "float32"
"""The type of a sum of what has another."""

MADE = MappingProxyType({"float8_e4m3fn": "bfloat16"})
"""The type of what is made of what is only multiplied, where none is declared."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What blocks are: as long as those of `size`, a tensor that the caller gives, and of the type `element`; where
    that is None of the type of `typed`, another. With `factor` it is not as long, but has as many rows, each as wide
    as that tensor has rows; or half as wide, if it `is_gated`. What an `ending` names, a bias or a
    residual, is of the type of what products make.
    """

    size: str
    element: str | None
    typed: str
    factor: str | None = None
    is_gated: bool = False
    ending: str = ""

    @property
    def is_made(self) -> bool:
        """Whether it has the type of what products make, where none is declared."""
        return self.factor is not None or bool(self.ending)


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
    """Every statement that moves anything as it is."""
    return (one for one in schedule.statements if len(one.actor) and one.factor is None)


def classes(schedule: Schedule) -> tuple[int, ...]:
    """Of each buffer the first of its class; all are in one where the caller computes nothing."""
    return _joined(schedule, sums(schedule)).groups() if schedule.has_own_units else (0,) * len(schedule.buffers)


def connected(schedule: Schedule) -> tuple[int, ...]:
    """As `classes`, a sum and what is added to it being one: what may become part of what."""
    return _joined(schedule, frozenset()).groups() if schedule.has_own_units else (0,) * len(schedule.buffers)


Pair: TypeAlias = tuple[int, int]
"""Two buffers: one that is read, and one that is written."""


def sums(schedule: Schedule) -> frozenset[Pair]:
    """What is added to sums of another type, and those."""
    if not schedule.has_bodies:
        return frozenset()
    found: set[Pair] = set()
    others: set[Pair] = set()
    for moves in joining(schedule):
        (found if _may_widen(schedule, moves) else others).add((moves.source_buffer, moves.dest_buffer))
    apart = frozenset(found - others)
    joined = _joined(schedule, apart)
    typed = {joined.first(at) for at, buffer in enumerate(schedule.buffers) if _has_type(buffer)}
    fixed = {joined.first(at) for at, buffer in enumerate(schedule.buffers) if not _fits(buffer.element)}
    fixed |= {at for at in typed - fixed if not _fits(_element(schedule.buffers, joined.groups(), at))}
    return frozenset(pair for pair in apart if joined.first(pair[0]) in typed - fixed)


def _may_widen(schedule: Schedule, moves: Statement) -> bool:
    """Whether it adds whole blocks that a rank has to what it has, which is declared to be a sum."""
    source, dest = (schedule.buffers[at] for at in (moves.source_buffer, moves.dest_buffer))
    if moves.kind is not MoveKind.REDUCE or dest.element != SUM or not source.cut == dest.cut == 1:
        return False
    return bool((moves.source_rank == moves.dest_rank[:, None]).all())


def _element(buffers: tuple[Buffer, ...], groups: tuple[int, ...], of: int) -> str | None:
    """The type of a class, if one is declared, there or where it is like."""
    found = _typed(buffers, groups, of, frozenset())
    return None if found is None else found[0]


def _fits(element: str | None) -> bool:
    """Whether it may be added to sums of another type: floating numbers, which the caller may bring."""
    of = None if element is None else BY_NAME[element]
    return of is None or (of.is_float and bool(of.ops) and of.name != SUM)


def _has_type(buffer: Buffer) -> bool:
    """Whether it does not take the type of what it is moved to."""
    return buffer.element is not None or buffer.like is not None or buffer.kind in GIVEN


def _joined(schedule: Schedule, apart: frozenset[Pair]) -> Joined:
    """By every move but those between two that are `apart`."""
    joined = Joined(len(schedule.buffers))
    for moves in joining(schedule):
        if (moves.source_buffer, moves.dest_buffer) not in apart:
            joined.join(moves.source_buffer, moves.dest_buffer)
    for step in schedule.steps:
        if isinstance(step, Yield) and step.is_product:
            for copy in step.writes[1:]:
                joined.join(step.reads[0], copy)
    for rows, applied in ((one.source_buffer, one.applied) for one in schedule.rowwise):
        assert applied is not None
        for buffer, extent in zip(applied.given, ROWWISE[applied.function].given, strict=True):
            if extent is Extent.ROWS:
                joined.join(rows, buffer)
    return joined


def units(schedule: Schedule) -> dict[str, Unit | None]:
    """By buffer. None: nothing is known of its length; no such buffer is handed over (`checks`)."""
    buffers, moved = schedule.buffers, classes(schedule)
    numbers = {buffer.name: number for number, buffer in enumerate(buffers)}
    long = Joined(len(buffers))
    for number, buffer in enumerate(buffers):
        long.join(number, moved[number])
        if buffer.like is not None:
            long.join(number, numbers[buffer.like])
    for pair in sums(schedule):
        long.join(*pair)
    lengths = long.groups()
    given = {lengths[number]: buffer.name for number, buffer in reversed([*enumerate(buffers)]) if buffer.kind in GIVEN}
    only = next(iter(given.values())) if len(given) == 1 else None
    made = {lengths[to]: (lengths[of], buffers[factor].name) for of, factor, to in schedule.products}
    is_gated = any(one.activation == GATED for one in schedule.epilogues)
    endings: dict[int | None, str] = {}
    for one in schedule.epilogues:
        endings |= {one.bias: "bias", one.residual: "residual"}
    found: dict[str, Unit | None] = {}
    for number, buffer in enumerate(buffers):
        size, factor = given.get(lengths[number], only), None
        if size is None and lengths[number] in made:
            of, factor = made[lengths[number]]
            size = given.get(of)
        element, typed = _typed(buffers, moved, moved[number], frozenset()) or (None, size or "")
        if number in endings:
            typed = buffers[schedule.products[0][1]].name
        ends = is_gated and factor is not None, endings.get(number, "")
        found[buffer.name] = None if size is None else Unit(size, element, typed, factor, *ends)
    return found


def types(schedule: Schedule, otherwise: DType) -> dict[str, DType]:
    """By buffer the type declared for its class; `otherwise` where none is, and what products make of that."""
    return {name: otherwise if unit is None else _type(unit, otherwise) for name, unit in units(schedule).items()}


def _type(unit: Unit, otherwise: DType) -> DType:
    if unit.element is not None:
        return BY_NAME[unit.element]
    return BY_NAME[MADE.get(otherwise.name, otherwise.name)] if unit.is_made else otherwise


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
