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
class Dim:
    """A side of a block: 2 ** `scale` times side `side` of a block of `size`, a tensor that the caller gives."""

    size: str
    side: int  # 0: its first dimension, 1: its last
    scale: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """The size and type of a block: as long as a block of `size`, a tensor that the caller gives, and of the type
    `element`, or, where that is None, of the type of `typed`, another such tensor. With `dims` blocks are matrices, or
    rows, of these sides. With `is_made` they are results of products, or added to them: where no type is declared they
    have that of results.
    """

    size: str
    element: str | None
    typed: str
    dims: tuple[Dim, ...] = ()
    is_made: bool = False


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
    """Return the unit of each buffer by name; None where its length is not known (`checks` refuse to hand over such a
    buffer).
    """
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
    sides, result = _sides(schedule, lengths), {lengths[to] for _, _, to in schedule.products}
    added = {one: True for ends in schedule.epilogues for one in ends.buffers}
    factor = schedule.products[0][1] if schedule.products else 0
    found: dict[str, Unit | None] = {}
    for number, buffer in enumerate(buffers):
        dims = sides.get(lengths[number], ())
        size = given.get(lengths[number]) or (dims[0].size if dims else only)
        is_result = lengths[number] in result and lengths[number] not in given
        element, typed = _typed(buffers, moved, moved[number], frozenset()) or (None, size or "")
        if number in added:
            typed = sides[lengths[factor]][0].size if lengths[factor] not in given else given[lengths[factor]]
        found[buffer.name] = None if size is None else Unit(size, element, typed, dims, is_result or number in added)
    return found


def _sides(schedule: Schedule, lengths: tuple[int, ...]) -> dict[int, tuple[Dim, ...]]:
    """Return by class of length the sides of a block of all that is multiplied, made or added, where an input gives
    each of them. Empty where no sizes fit.
    """
    sizes = _Sizes()
    kinds: dict[int, int] = {}  # how many sides a block has
    for of, factor, to, ends in schedule.multiplied:
        rows, by, made = lengths[of], lengths[factor], lengths[to]
        kinds |= dict.fromkeys((rows, by, made), 2)
        sizes.join((rows, 1), (by, 1))
        sizes.join((made, 0), (rows, 0))
        sizes.join((by, 0), (made, 1), 1 if ends.activation == GATED else 0)
        if ends.bias is not None:
            kinds.setdefault(lengths[ends.bias], 1)
            sizes.join((lengths[ends.bias], 0), (by, 0))
        if ends.residual is not None:
            kinds[lengths[ends.residual]] = 2
            for side in range(2):
                sizes.join((lengths[ends.residual], side), (made, side))
    named: dict[Side, tuple[str, int, int]] = {}  # of each size a given buffer's side, and how it scales
    for number, buffer in enumerate(schedule.buffers):
        for side in range(kinds.get(lengths[number], 0) if buffer.kind in GIVEN else 0):
            root, scale = sizes.find((lengths[number], side))
            named.setdefault(root, (buffer.name, side, scale))
    found: dict[int, tuple[Dim, ...]] = {}
    for of, count in kinds.items() if not sizes.is_wrong else ():
        roots = [sizes.find((of, side)) for side in range(count)]
        if all(root in named for root, _ in roots):
            found[of] = tuple(Dim(*named[root][:2], scale - named[root][2]) for root, scale in roots)
    return found


Side: TypeAlias = tuple[int, int]
"""A class of length, and which side of a block."""


class _Sizes:
    """Sides of blocks, joined to sizes; sides of one size differ by a power of two (private to this pass)."""

    def __init__(self) -> None:
        self._above: dict[Side, tuple[Side, int]] = {}
        self.is_wrong = False  # whether a side would be twice as long as itself

    def find(self, side: Side) -> tuple[Side, int]:
        """Return the side that stands for the size, and the power of two between them."""
        scale = 0
        while side in self._above:
            side, more = self._above[side]
            scale += more
        return side, scale

    def join(self, one: Side, other: Side, scale: int = 0) -> None:
        """Record that one side is 2 ** `scale` times the other."""
        (root, own), (target, others) = self.find(one), self.find(other)
        if root != target:
            self._above[root] = target, scale + others - own
        elif own != scale + others:
            self.is_wrong = True


def types(schedule: Schedule, otherwise: DType) -> dict[str, DType]:
    """Return by buffer the type declared for its class; else `otherwise`, or for results the type that products make of
    it.
    """
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
