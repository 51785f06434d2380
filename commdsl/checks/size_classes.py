"""C305: what moves into a chunk is as long as the chunk.

Assumes indices in bounds and no undefined reads. Piece i of a block cut into C has the size class (C, i), and where
blocks have lengths of their own, that of its block; classes differ in length for some tensor size. A scratch slot takes
the class of what is written to it; a task takes and makes whole blocks, cut as the buffer is declared; what a yield
need not hand over it does not look at. A scratch buffer that launches before and after a yield use, or the yield
itself, is kept as it is declared. Does not know bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask, statement_key
from commdsl.ir.schedules import Buffer, Step, Task
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import BufferKind
from commdsl.language.records import dataclass

Classes = NDArray[np.int64]  # (length * radix + cut) * radix + piece, or UNKNOWN
UNKNOWN = -1

Number = TypeVar("Number", int, Classes)


def initial_classes(located: Located) -> Classes:
    """The class of every location, UNKNOWN for scratch slots and for `nowhere`."""
    is_scratch = [np.full(one.num_chunks, one.kind is BufferKind.SCRATCH) for one in located.schedule.buffers]
    unknown = located.over_locations(is_scratch, nowhere=1).astype(np.bool_)
    return np.where(unknown, UNKNOWN, _declared(located))


def _declared(located: Located) -> Classes:
    ranks, buffers, radix = located.schedule.num_ranks, located.schedule.buffers, _radix(located)
    whole = [one.length_of(ranks).astype(np.int64) * radix + one.cut for one in buffers]
    codes = [first * radix + np.arange(one.num_chunks) % one.cut for first, one in zip(whole, buffers, strict=True)]
    return np.append(np.concatenate(codes, axis=1).ravel(), UNKNOWN)


def _radix(located: Located) -> int:
    """More than there are pieces of any block."""
    return 1 + max(buffer.cut for buffer in located.schedule.buffers)


@dataclass(frozen=True, eq=False)
class ClassedMoves:
    """A statement of one step with the class each row moves, and the class its destination had before."""

    step_index: int
    step: LocatedStep
    located: LocatedMoves
    moved: Classes  # (n,)
    before: Classes  # (n,)
    mixed: NDArray[np.bool_] | None  # (n,) rows of a list whose sources differ in class; None: not a list


@dataclass(frozen=True, eq=False)
class ClassedTask:
    """A task with the class of every chunk it reads, and the class that it takes it for."""

    located: LocatedTask
    found: Classes  # as `located.reads`
    wanted: Classes


def classes_of_moves(located: Located) -> Iterator[ClassedMoves]:
    """Every statement in order; after it a scratch slot has the class that was written there."""
    return (one for one in classes_of_steps(located) if isinstance(one, ClassedMoves))


def classes_of_steps(located: Located) -> Iterator[ClassedMoves | ClassedTask]:
    """As `classes_of_moves`, with the tasks between them."""
    classes = initial_classes(located)
    declared = _declared(located)
    scratch = classes == UNKNOWN
    for index, step in enumerate(located.steps):
        if isinstance(step, LocatedTask):
            if isinstance(step.step, Task) or step.step.name is not None:
                yield ClassedTask(step, classes[step.reads], declared[step.reads])
            classes[step.writes] = declared[step.writes]
            continue
        classed = [_classed(index, step, moves, classes) for moves in step.moves]
        yield from classed
        for one in classed:
            dest = one.located.dest
            classes[dest] = np.where(scratch[dest], one.moved, one.before)


def _classed(index: int, step: LocatedStep, moves: LocatedMoves, classes: Classes) -> ClassedMoves:
    before = classes[moves.dest]
    if moves.sources.shape[1] == 1:
        return ClassedMoves(index, step, moves, classes[moves.sources[:, 0]], before, None)
    sources = classes[moves.sources]
    moved = sources.max(axis=1)  # UNKNOWN, the class of a source left out, is the least
    mixed = ((sources != moved[:, None]) & (sources != UNKNOWN)).any(axis=1)
    return ClassedMoves(index, step, moves, moved, before, mixed)


def unequal_sizes(located: Located) -> Iterator[Diagnostic]:
    """One message per statement."""
    told: set[tuple[str, int, int]] = set()
    scratch = initial_classes(located) == UNKNOWN
    declared = _declared(located)
    kept = scratch & np.isin(_buffer_of(located), list(_kept_scratch(located)))
    for one in classes_of_steps(located):
        if isinstance(one, ClassedTask):
            places = np.argwhere((one.found != one.wanted) & (one.found != UNKNOWN))
            if len(places) and statement_key(one.located.step.span) not in told:
                told.add(statement_key(one.located.step.span))
                yield _task(located, one, tuple(places[0].tolist()))
            continue
        key = statement_key(one.located.moves.span)
        if key in told:
            continue
        keeps_class = one.located.moves.accumulate | ~scratch[one.located.dest]
        rows = np.flatnonzero(keeps_class & (one.before != one.moved))
        if len(rows):
            told.add(key)
            yield _unequal(located, one, int(rows[0]))
        elif one.mixed is not None and one.mixed.any():
            told.add(key)
            yield _mixed_list(located, one, int(np.flatnonzero(one.mixed)[0]))
        else:
            wrong = np.flatnonzero(kept[one.located.dest] & (one.moved != declared[one.located.dest]))
            if len(wrong):
                told.add(key)
                yield _other_slot(located, one, int(wrong[0]), declared)


def _kept_scratch(located: Located) -> set[int]:
    """The scratch buffers that more than one launch uses, or a launch and a yield."""
    schedule = located.schedule
    if not schedule.stops:
        return set()
    used: dict[int, set[int]] = {}
    turn = 0
    for step in schedule.steps:
        if isinstance(step, Step):
            buffers = [buffer for moves in step.moves for buffer in (moves.source_buffer, moves.dest_buffer)]
        else:
            buffers, turn = [*step.reads, *step.writes], turn + 1
        for buffer in buffers:
            used.setdefault(buffer, set()).add(turn)
        turn += not isinstance(step, Step)
    return {buffer for buffer, turns in used.items() if len(turns) > 1}


def _buffer_of(located: Located) -> NDArray[np.int64]:
    counts = [np.full(buffer.num_chunks, number) for number, buffer in enumerate(located.schedule.buffers)]
    return located.over_locations(counts, nowhere=-1).astype(np.int64)


def split(located: Located, classes: Number) -> tuple[Number, Number, Number]:
    """Of chunks of these classes: which length their blocks have, into how many those are cut, which piece they are."""
    radix = _radix(located)
    return classes // radix**2, classes // radix % radix, classes % radix


def _describe(located: Located, code: int) -> str:
    length, cut, piece = split(located, code)
    lengths = located.schedule.lengths
    block = "block" if lengths is None else f"block of {lengths.entry_name(located.schedule.num_ranks, length)}"
    return f"a whole {block}" if cut == 1 else f"piece {piece} of a {block} cut into {cut}"


def _who(one: ClassedMoves, row: int) -> str:
    return f"rank {int(one.located.moves.actor[row])}{bindings_text(one.step.step.bindings)}"


def _unequal(located: Located, one: ClassedMoves, row: int) -> Diagnostic:
    moves, moved, before = one.located, int(one.moved[row]), int(one.before[row])
    source, dest = located.chunk_name(int(moves.sources[row, 0])), located.chunk_name(int(moves.dest[row]))
    buffers = [located.schedule.buffers[index] for index in (moves.moves.source_buffer, moves.moves.dest_buffer)]
    (length, cut, _), (length_before, cut_before, _) = (split(located, code) for code in (moved, before))
    same_cut, other = cut == cut_before, length != length_before
    return Diagnostic(
        "C305",
        f"{source} and {dest} differ in size",
        Label(moves.moves.span, f"{_who(one, row)}: moves {_describe(located, moved)} to {_describe(located, before)}"),
        () if same_cut else tuple(Label(buffer.span, _cut_text(buffer)) for buffer in dict.fromkeys(buffers)),
        ("when a tensor does not divide evenly, the pieces of a block differ by 16 bytes",)
        if same_cut and not other
        else (),
        help="move between blocks of one length"
        if other
        else "move between equal pieces, or through a `scratch` slot of its own",
    )


def _task(located: Located, one: ClassedTask, at: tuple[int, int]) -> Diagnostic:
    location, found, wanted = int(one.located.reads[at]), int(one.found[at]), int(one.wanted[at])
    buffer = located.schedule.buffers[located.split(location)[1]]
    return Diagnostic(
        "C305",
        f"{located.chunk_name(location)} is of another size than declared",
        Label(
            one.located.step.span,
            f"{located.name(location)} holds {_describe(located, found)}, not {_describe(located, wanted)}",
        ),
        (Label(buffer.span, "what a task reads is a buffer of its declared shape"),),
        help=f"write to each slot of `{buffer.name}` a piece as long as it",
    )


def _other_slot(located: Located, one: ClassedMoves, row: int, declared: Classes) -> Diagnostic:
    dest = int(one.located.dest[row])
    moved, wanted = int(one.moved[row]), int(declared[dest])
    buffer = located.schedule.buffers[located.split(dest)[1]]
    return Diagnostic(
        "C305",
        f"{located.chunk_name(dest)} is of another size than declared",
        Label(
            one.located.moves.span,
            f"{_who(one, row)}: moves {_describe(located, moved)} to {_describe(located, wanted)}",
        ),
        (Label(buffer.span, "kept as it is declared, as more than one launch uses it"),),
        help="use a `scratch` of its own between two yields, or cut it as what is written to it",
    )


def _cut_text(buffer: Buffer) -> str:
    if buffer.kind is BufferKind.SCRATCH:
        return "a slot is as long as what is written to it"
    return "whole blocks" if buffer.cut == 1 else f"blocks cut into {buffer.cut}"


def _mixed_list(located: Located, one: ClassedMoves, row: int) -> Diagnostic:
    dest = located.name(int(one.located.dest[row]))
    return Diagnostic(
        "C305",
        "the sources of a reduction differ in size",
        Label(one.located.moves.span, f"{_who(one, row)}: reduces pieces of unequal length into {dest}"),
        help="reduce pieces with the same index, of buffers cut alike",
    )
