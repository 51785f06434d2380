"""Turns a schedule with yields into the steps between them, each segment as a schedule of its own.

Assumes a schedule that passed the checks, without tasks. Does not lower anything.

Buffers that nothing moves between are segments of their own: one that does not need what the caller computes need not
wait for it. Where neither does, or both do, the same yield waits for them, and their blocks are of one length and type,
they are one. What is added to sums of another type is a segment of its own, behind what brings it.

Whatever lives across a yield is at home in the rank's own memory there: an `input` of the segments that read it, an
`output` of those that write it anew, `inout` where something of it stays that is read later. A `scratch` buffer of one
segment alone stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.classes import Joined, Pair, Unit, sums, units
from commdsl.ir.held import Origins, first_chunks, handed, place
from commdsl.ir.schedules import AnyStep, Buffer, Schedule, Statement, Step, Task, Yield
from commdsl.language.diagnostics import InternalError
from commdsl.language.kinds import GIVEN, RETURNED, BufferKind, MoveKind


@dataclass(frozen=True, eq=False)
class Segment:
    """Steps between two yields. `content`: equal for segments that have the same tables, on whatever buffers.
    `in_place`: outputs that are written where they are: no visit touches them, or none reads them and something of them
    stays. `sums`: those to which others are added that have another type; then nothing else is done. `stays`: outputs
    of which something stays.
    """

    schedule: Schedule
    content: tuple[object, ...]
    in_place: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()

    def names(self, *kinds: BufferKind) -> tuple[str, ...]:
        return tuple(buffer.name for buffer in self.schedule.buffers if buffer.kind in kinds)


Part: TypeAlias = Segment | Yield


def parts(schedule: Schedule) -> Iterator[Part]:
    """Yields, and the segments between them that move anything."""
    apart = _Apart(tuple(units(schedule).values()), sums(schedule))
    runs = list(_runs(schedule, apart))
    homes = _users(runs)
    kept = iter(_kept(schedule))
    stays = next(kept)
    filled = {number for number, buffer in enumerate(schedule.buffers) if buffer.kind in GIVEN}
    stops = [step for step in schedule.steps if isinstance(step, Yield)]
    handed_over = {buffer for step in stops for buffer in step.reads}
    visited = handed_over | {buffer for step in stops for buffer in step.writes}
    ours: set[int] = set()
    for run in runs:
        if isinstance(run, Yield):
            filled |= {*run.writes}
            stays = next(kept)
            yield run
        else:
            in_place = (stays & (ours - handed_over)) | (ours - visited)
            yield _segment(schedule, run, homes, filled, (stays, in_place), apart.sums)
            filled |= _written(run)
            ours |= _written(run)


def _runs(schedule: Schedule, apart: _Apart) -> Iterator[tuple[Step, ...] | Yield]:
    steps: list[Step] = []
    fresh: set[int] = set()
    for number, step in enumerate(schedule.steps):
        match step:
            case Step():
                steps.append(step)
            case Yield():
                yield from apart.segments(steps, fresh, schedule.steps[number:])
                yield step
                steps, fresh = [], {*step.writes}
            case Task():
                raise InternalError(f"`{schedule.name}` has a task, yet passed the checks")
    yield from apart.segments(steps, fresh, ())


def _kept(schedule: Schedule) -> list[frozenset[int]]:
    """For the steps before each yield, and those behind the last: the buffers that have a chunk which none of these
    steps writes, and which somebody reads later: a move, the end of the call, or a yield that hands it over.
    """
    first = first_chunks(schedule)
    handed_over = [now.fresh for now in handed(schedule)]
    live = np.zeros((schedule.num_ranks, int(first[-1])), np.bool_)
    for number, declared in enumerate(schedule.buffers):
        live[:, first[number] : first[number + 1]] = declared.kind in RETURNED
    found: list[frozenset[int]] = []
    needed, written = live.copy(), np.zeros_like(live)
    for step in reversed(schedule.steps):
        if isinstance(step, Step):
            _before(step, first, live.reshape(-1), written.reshape(-1))
            continue
        found.append(_with_any(needed & ~written, first))
        for buffer in step.writes:
            live[:, first[buffer] : first[buffer + 1]] = False
        fresh = handed_over.pop() if isinstance(step, Yield) else ()
        visiting = schedule.visiting(step)
        for buffer, new in zip(step.reads, fresh, strict=True):
            live[:, first[buffer] : first[buffer + 1]] |= new if buffer in visiting else True
        needed, written = live.copy(), np.zeros_like(live)
    return [*reversed([*found, _with_any(needed & ~written, first)])]


def _before(step: Step, first: Origins, live: NDArray[np.bool_], written: NDArray[np.bool_]) -> None:
    """What is live before a step, from what is behind it; and what the step writes besides."""
    moves = [one for one in step.moves if len(one.actor)]
    for one in moves:
        places = place(first, one.dest_buffer, one.dest_rank, one.dest_chunk)
        written[places] = True
        live[places] = one.accumulate
    for one in moves:
        live[place(first, one.source_buffer, one.source_rank, one.source_chunk)] = True


def _with_any(places: NDArray[np.bool_], first: Origins) -> frozenset[int]:
    """The buffers with any of these places, on any rank."""
    found = (places[:, first[number] : first[number + 1]].any() for number in range(len(first) - 1))
    return frozenset(number for number, any_ in enumerate(found) if any_)


Turn: TypeAlias = tuple[bool, int]
"""Whether it needs what the caller has just computed, and behind how many sums and moves it comes."""


@dataclass(frozen=True)
class _Apart:
    """What has to be in segments of its own: buffers by what they are made of, and sums of another type."""

    made_of: tuple[Unit | None, ...]
    sums: frozenset[Pair]

    def segments(self, steps: list[Step], fresh: set[int], behind: Sequence[AnyStep]) -> Iterator[tuple[Step, ...]]:
        """The steps by the buffers they touch, those first that touch nothing `fresh`; together what the same of the
        yields `behind` them waits for, and is made of the same, as a launch can have both.
        """
        first, members = self._together(steps)
        found: dict[tuple[Turn, object, object, object], tuple[set[int], dict[int, list[Statement]]]] = {}
        for number, moves, turn in self._turns(steps, first, {at: bool(one & fresh) for at, one in members.items()}):
            mine = members[first[moves.dest_buffer]]
            added = self.made_of[moves.source_buffer] if self._adds(moves) else None
            key = turn, self.made_of[min(mine)], added, _awaiting(mine, behind)
            buffers, by_step = found.setdefault(key, (set(), {}))
            buffers |= mine
            by_step.setdefault(number, []).append(moves)
        for _, (_, by_step) in sorted(found.items(), key=lambda one: (one[0][0], min(one[1][0]))):
            yield tuple(replace(steps[number], moves=tuple(moves)) for number, moves in by_step.items())

    def _together(self, steps: list[Step]) -> tuple[dict[int, int], dict[int, set[int]]]:
        """Of each buffer the first of those that it is moved with; and by that one all of them."""
        joined = Joined(len(self.made_of))
        for moves in (one for step in steps for one in step.moves if len(one.actor) and not self._adds(one)):
            joined.join(moves.source_buffer, moves.dest_buffer)
        first = {buffer: joined.first(buffer) for buffer in sorted(_read(steps) | _written(steps))}
        members: dict[int, set[int]] = {}
        for buffer, at in first.items():
            members.setdefault(at, set()).add(buffer)
        return first, members

    def _turns(
        self, steps: list[Step], first: dict[int, int], is_fresh: dict[int, bool]
    ) -> Iterator[tuple[int, Statement, Turn]]:
        """Every statement with the number of its step. What is added to sums is behind what has brought it and what
        was added before, and in front of whatever is done with either later; in its own step, of anything else.
        """
        turns: dict[int, Turn] = {at: (one, 0) for at, one in is_fresh.items()}
        for number, step in enumerate(steps):
            moves = [one for one in step.moves if len(one.actor)]
            for one in filter(self._adds, moves):
                ends = first[one.source_buffer], first[one.dest_buffer]
                fresh, turn = (max(part) for part in zip(*(turns[end] for end in ends), strict=True))
                yield number, one, (bool(fresh), turn + 1)
                turns |= dict.fromkeys(ends, (bool(fresh), turn + 2))
            yield from ((number, one, turns[first[one.dest_buffer]]) for one in moves if not self._adds(one))

    def _adds(self, moves: Statement) -> bool:
        return (moves.source_buffer, moves.dest_buffer) in self.sums


def _awaiting(buffers: set[int], behind: Sequence[AnyStep]) -> int | None:
    """The first of these steps that hands one of the buffers to the caller."""
    for number, step in enumerate(behind):
        if isinstance(step, Yield) and buffers & {*step.reads, *step.writes}:
            return number
    return None


def _read(steps: Iterable[Step]) -> set[int]:
    moves = [one for step in steps for one in step.moves if len(one.actor)]
    return {one.source_buffer for one in moves} | {one.dest_buffer for one in moves if one.accumulate}


def _written(steps: Iterable[Step]) -> set[int]:
    return {one.dest_buffer for step in steps for one in step.moves if len(one.actor)}


def _users(runs: list[tuple[Step, ...] | Yield]) -> dict[int, int]:
    """How many segments and yields touch a buffer."""
    touched = [{*r.reads, *r.writes} if isinstance(r, Yield) else _read(r) | _written(r) for r in runs]
    return {buffer: sum(buffer in one for one in touched) for buffer in set().union(*touched)}


def _segment(
    schedule: Schedule,
    steps: tuple[Step, ...],
    users: dict[int, int],
    filled: set[int],
    stays: tuple[frozenset[int], frozenset[int]],
    apart: frozenset[Pair],
) -> Segment:
    """`stays`: the buffers of which something stays, and those that may be written where they are."""
    read, written = _read(steps), _written(steps)
    in_place = stays[1] & written - read
    pairs = {(one.source_buffer, one.dest_buffer) for step in steps for one in step.moves if len(one.actor)}
    wide = frozenset(schedule.buffers[dest].name for _, dest in pairs & apart)
    number: dict[int, int] = {}
    buffers: list[Buffer] = []
    for index, buffer in enumerate(schedule.buffers):
        if index not in read | written:
            continue
        number[index] = len(buffers)
        if buffer.kind is BufferKind.SCRATCH and users[index] == 1:
            kind = BufferKind.SCRATCH
        elif index not in written:
            kind = BufferKind.INPUT
        elif index in in_place or index not in filled or (index not in read and index not in stays[0]):
            kind = BufferKind.OUTPUT
        else:
            kind = BufferKind.INOUT
        buffers.append(replace(buffer, kind=kind))
    renamed = tuple(replace(step, moves=tuple(_renamed(step.moves, number))) for step in steps)
    made = replace(schedule, buffers=tuple(buffers), contracts=(), steps=renamed)
    here, stay = (frozenset(schedule.buffers[index].name for index in of) for of in (in_place, stays[0] & written))
    return Segment(made, (*_content(made), bool(wide)), here, wide, stay)


def _renamed(moves: tuple[Statement, ...], number: dict[int, int]) -> Iterator[Statement]:
    for one in moves:
        if len(one.actor):
            yield replace(one, source_buffer=number[one.source_buffer], dest_buffer=number[one.dest_buffer])


def _content(schedule: Schedule) -> tuple[object, ...]:
    buffers = tuple((one.kind, one.dims, one.blocks, one.cut) for one in schedule.buffers)
    steps = (step for step in schedule.steps if isinstance(step, Step))
    return buffers, tuple(tuple(_row(moves) for moves in step.moves) for step in steps)


def _row(moves: Statement) -> tuple[object, ...]:
    arrays = (moves.actor, moves.source_rank, moves.source_chunk, moves.dest_rank, moves.dest_chunk)
    valid = None if moves.source_valid is None else moves.source_valid.tobytes()
    kind: tuple[MoveKind, bool, bool] = (moves.kind, moves.accumulate, moves.is_list)
    return *kind, moves.source_buffer, moves.dest_buffer, valid, *(array.tobytes() for array in arrays)
