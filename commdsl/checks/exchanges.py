"""Turns a schedule into what two yields to one function exchange: two things, in two of its places the other way round.

Assumes a schedule that passed the laws before C319, which is about this. Three kinds of things are told apart: results
of two types, state, and pieces of two inputs; each function here says when. Does not look at what stands in one place
alone, nor at what a function is handed both ways round: text that attends to images, then these to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedTask, Locations
from commdsl.ir.classes import Unit, units
from commdsl.ir.schedules import AnyStep, Schedule, Step, Yield
from commdsl.ir.words import at_bindings
from commdsl.language.diagnostics import Label
from commdsl.language.kinds import GIVEN
from commdsl.language.records import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """Two things in two places of a yield's function. It is at odds with one before it that is `alike` and has them the
    other way round.
    """

    step: Yield
    places: tuple[int, int]
    things: tuple[Hashable, Hashable]
    label: Label
    before: Label  # what shows a later one that is at odds with it
    alike: Hashable = None

    def key(self, things: tuple[Hashable, ...]) -> Hashable:
        return self.step.name, self.places, self.alike, things


def exchanges(located: Located) -> Iterator[tuple[Pair, Pair]]:
    """Pairs, each with one before it that it is at odds with; a function may have several."""
    yield from _crossed(_results(located.schedule))
    if _reads_several(located.schedule):
        handed = _Handed(located)
        yield from _crossed(_state(handed))
        yield from (found for found in _crossed(_inputs(handed)) if not handed.stands_in_both(found[0]))


def _crossed(pairs: Iterable[Pair]) -> Iterator[tuple[Pair, Pair]]:
    seen: dict[Hashable, Pair] = {}
    for now in pairs:
        seen.setdefault(now.key(now.things), now)
        before = seen.get(now.key(now.things[::-1]))
        if before is not None:
            yield now, before


def _calls(steps: Iterable[AnyStep]) -> Iterator[Yield]:
    """The yields to functions of the caller's."""
    return (one for one in steps if isinstance(one, Yield) and one.name is not None and not one.is_product)


def _label(step: Yield, places: tuple[int, int], names: Iterable[str], what: str) -> Label:
    one, other = names
    words = f"{one} is number {places[0] + 1} of those {what}, {other} number {places[1] + 1}"
    return Label(step.span, words + at_bindings(step.bindings))


# --- results ----------------------------------------------------------------------------------------------------------


def _results(schedule: Schedule) -> Iterator[Pair]:
    """Results declared to be of two types, or as long as two tensors, where what is read is of the same types and
    lengths: those of the results follow from that.
    """
    known = units(schedule)
    for step in _calls(schedule.steps):
        reads = tuple(known[schedule.buffers[one].name] for one in step.reads)
        for (at, one), (beside, other) in combinations(enumerate(step.writes), 2):
            things = _declared(schedule, known, one), _declared(schedule, known, other)
            if things[0] != things[1]:
                names = (f"`{schedule.buffers[buffer].name}`" for buffer in (one, other))
                label = _label(step, (at, beside), names, "written")
                yield Pair(step, (at, beside), things, label, label, reads)


def _declared(schedule: Schedule, known: dict[str, Unit | None], number: int) -> tuple[str | None, str | None]:
    """The type of a buffer, and the tensor that it is as long as; None where nothing in the text says it."""
    buffer = schedule.buffers[number]
    unit = known[buffer.name]
    if unit is None:
        return buffer.element, None
    is_its_own = buffer.kind in GIVEN and buffer.like is None
    return unit.element, None if is_its_own else unit.size


# --- what is read -----------------------------------------------------------------------------------------------------

NOTHING = -1
"""Of a location that nobody wrote, or that holds no chunk as it was given or made."""

Source: TypeAlias = int | tuple[int, int]
"""The buffer of chunks that were given; of those that were made, the step that wrote them, and in which place."""


def _reads_several(schedule: Schedule) -> bool:
    """Whether a function that is called twice reads, in two places, what does not rotate: what does has its place."""
    rotating = frozenset[int]().union(*(one.buffers for one in schedule.rotations))
    calls = Counter(step.name for step in _calls(schedule.steps))
    places = {
        (step.name, at) for step in _calls(schedule.steps) for at, one in enumerate(step.reads) if one not in rotating
    }
    return any(calls[name] > 1 for name, count in Counter(name for name, _ in places).items() if count > 1)


class _Handed:
    """What yields to functions are handed, as it was given or made.

    `calls`: each yield, and of each buffer that it reads where all that is there comes from, if from one source.
    """

    def __init__(self, located: Located) -> None:
        self.schedule = located.schedule
        self.calls: list[tuple[Yield, tuple[Source | None, ...]]] = []
        self._located = located
        self._stood: dict[tuple[str | None, int], NDArray[np.bool_]] = {}  # by place: which pieces given were there
        sizes = [buffer.num_chunks for buffer in located.schedule.buffers]
        self._sources: list[Source] = [*range(len(sizes))]  # as `Located.by_rank` numbers what they have
        for index, step in enumerate(located.schedule.steps):
            writes = () if isinstance(step, Step) else step.writes
            self._sources += [(index, at) for at in range(len(writes))]
            sizes += [sizes[buffer] for buffer in writes]
        self._ends = np.cumsum(sizes)
        self._run()

    def _run(self) -> None:
        held = np.where(self._located.given(), np.arange(self._located.size), NOTHING)
        held[self._located.nowhere] = NOTHING
        for step in self._located.steps:
            if isinstance(step, LocatedTask):
                for call in _calls([step.step]):
                    self._see(call, held[step.reads])
                held[step.writes] = step.origins
            else:
                made = [(moves.dest, _moved(moves, held)) for moves in step.moves]
                for dest, new in made:
                    held[dest] = new

    def _see(self, step: Yield, read: Locations) -> None:
        counts = [self.schedule.buffers[buffer].num_chunks for buffer in step.reads]
        parts = np.split(read, np.cumsum(counts)[:-1], axis=1)
        self.calls.append((step, tuple(map(self._source, parts))))
        for at, part in enumerate(parts):
            stood = self._stood.setdefault((step.name, at), np.zeros(self._located.nowhere, np.bool_))
            stood[part[(part != NOTHING) & (part < self._located.nowhere)]] = True

    def _source(self, origins: Locations) -> Source | None:
        if (origins == NOTHING).any():
            return None
        numbers = self._located.by_rank(origins)[1]
        first, last = np.searchsorted(self._ends, (numbers.min(), numbers.max()), side="right")
        return self._sources[first] if first == last else None

    def stands_in_both(self, pair: Pair) -> bool:
        """Whether a piece of one of these inputs ever stands in both of these places of the function."""
        one, other = (self._stood[pair.step.name, place] for place in pair.places)
        numbers = self._located.by_rank(np.flatnonzero(one & other))[1]
        return not {*pair.things}.isdisjoint(np.searchsorted(self._ends, numbers, side="right").tolist())


def _moved(moves: LocatedMoves, held: Locations) -> Locations:
    """What each row writes, where that is what it reads."""
    return held[moves.sources[:, 0]] if moves.moves.copies else np.full(len(moves.dest), NOTHING)


def _state(handed: _Handed) -> Iterator[Pair]:
    """Of what is read, what one yield to the function wrote in two places."""
    for step, sources in handed.calls:
        for (at, one), (beside, other) in combinations(enumerate(sources), 2):
            if not isinstance(one, tuple) or not isinstance(other, tuple) or one[0] != other[0] or one == other:
                continue
            maker = handed.schedule.steps[one[0]]
            if isinstance(maker, Yield) and maker.name == step.name:
                here, there = _state_labels(step, maker, {one[1]: at, other[1]: beside})
                yield Pair(step, (at, beside), (one[1], other[1]), here, there)


def _state_labels(step: Yield, maker: Yield, read: dict[int, int]) -> tuple[Label, Label]:
    """Where what a yield wrote in two places is read: told at the one that reads it, and at the one that wrote it."""
    (one, at), (other, beside) = sorted((wrote + 1, place + 1) for wrote, place in read.items())
    words = f"is number {at} of those read{{}}, number {other} number {beside}"
    where = at_bindings(step.bindings)
    here = Label(step.span, f"number {one} of what it wrote {words.format(where)}")
    return here, Label(maker.span, f"number {one} of what it writes {words.format(where or ' later')}")


def _inputs(handed: _Handed) -> Iterator[Pair]:
    """Of what is read, pieces of two inputs; of which none may stand in both places, be it at other yields."""
    for step, sources in handed.calls:
        for (at, one), (beside, other) in combinations(enumerate(sources), 2):
            if not isinstance(one, int) or not isinstance(other, int) or one == other:
                continue
            names = (_of(handed.schedule, *pair) for pair in ((step.reads[at], one), (step.reads[beside], other)))
            label = _label(step, (at, beside), names, "read")
            yield Pair(step, (at, beside), (one, other), label, label)


def _of(schedule: Schedule, buffer: int, source: int) -> str:
    """`kb`, of `k`; `k` itself."""
    name, given = (schedule.buffers[one].name for one in (buffer, source))
    return f"`{name}`" if name == given else f"`{name}`, of `{given}`,"
