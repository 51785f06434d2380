"""Turns what yields handed over, as bytes, into whether a rotation showed every rank what it promises.

Assumes that the chunks that the caller gave are told apart by what they hold. Does not look at the moves, nor at which
chunks are new at a yield: a chunk counts as handed over again where it is there after it was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from commdsl.ir.contracts import Rotation
from commdsl.ir.schedules import Buffer, Schedule, Yield
from commdsl.language.records import dataclass
from commdsl.machine.dtypes import Array
from commdsl.program.sizes import chunk_range

Piece: TypeAlias = tuple[int, int]
"""A rank, and a chunk that it was given."""


@dataclass(frozen=True, eq=False)
class Handing:
    """A yield, and what it handed over: by rank, then by buffer that it reads."""

    step: Yield
    read: Sequence[Sequence[Array]]


def rotated(
    schedule: Schedule, rotation: Rotation, handings: Sequence[Handing], given: Mapping[str, Sequence[Array]]
) -> tuple[int, str, tuple[str, ...]]:
    """The bytes that were told apart, the first fault in words, and what was not evaluated, and why."""
    names = [schedule.buffers[number].name for number in rotation.sources]
    unknown = tuple(
        f"`back` of `{schedule.buffers[number].name}`: functions of the caller say what is written"
        for number in rotation.back
    )
    known = [_pieces(schedule.buffers[number], given) for number in rotation.sources]
    for name, pieces, number in zip(names, known, rotation.sources, strict=True):
        if len(pieces) < schedule.num_ranks * schedule.buffers[number].num_chunks:
            return 0, "", (*unknown, f"`rotation` of `{name}`: some of its chunks hold the same bytes")
    compared, seen = 0, [dict[Piece, int]() for _ in range(schedule.num_ranks)]
    before = [set[Piece]() for _ in range(schedule.num_ranks)]
    for one in handings:
        if not rotation.buffers & {*one.step.reads}:
            continue
        for rank, read in enumerate(one.read):
            found = [_handed(schedule, rotation, number, one.step, read, known[number]) for number in range(len(names))]
            for other, name in zip(found[1:], names[1:], strict=True):
                apart = [pair for pair in zip(found[0], other, strict=False) if None not in pair and pair[0] != pair[1]]
                if apart or len(found[0]) != len(other):
                    return compared, f"rank {rank} is handed chunks of `{names[0]}` with others of `{name}`", ()
            now = {piece for piece in found[0] if piece is not None}
            for piece in now - before[rank]:
                seen[rank][piece] = seen[rank].get(piece, 0) + 1
            before[rank] = now
            compared += sum(array.nbytes for array in read)
    for rank, times in enumerate(seen):
        wanted = set(_wanted(schedule, rotation, rank))
        for what, wrong in (
            ("never", wanted - times.keys()),
            ("more than once", {piece for piece, often in times.items() if often > 1}),
            ("against its condition", times.keys() - wanted),
        ):
            if wrong:
                owner, chunk = min(wrong)
                return compared, f"rank {rank} is handed chunk {chunk} of `{names[0]}` of rank {owner} {what}", ()
    return compared, "", unknown


def _wanted(schedule: Schedule, rotation: Rotation, rank: int) -> Iterator[Piece]:
    for owner in range(schedule.num_ranks):
        for chunk in range(schedule.buffers[rotation.sources[0]].num_chunks):
            if rotation.visits is None or rotation.visits[rank, owner, chunk]:
                yield owner, chunk


def _pieces(buffer: Buffer, given: Mapping[str, Sequence[Array]]) -> dict[bytes, Piece]:
    """By what they hold, the chunks that all ranks were given."""
    return {
        data: (rank, chunk)
        for rank, array in enumerate(given[buffer.name])
        for chunk, data in enumerate(_cut(buffer, array))
    }


def _cut(buffer: Buffer, array: Array) -> list[bytes]:
    data = np.ascontiguousarray(array).tobytes()
    lengths = [len(data) // buffer.blocks] * buffer.blocks
    return [data[slice(*chunk_range(lengths, buffer.cut, chunk))] for chunk in range(buffer.num_chunks)]


def _handed(
    schedule: Schedule,
    rotation: Rotation,
    number: int,
    step: Yield,
    read: Sequence[Array],
    known: Mapping[bytes, Piece],
) -> list[Piece | None]:
    """The chunks of the rotation's buffer of that number, or of where it visits, that a rank is handed, in order."""
    found: list[Piece | None] = []
    for buffer, array in zip(step.reads, read, strict=True):
        if buffer in (rotation.sources[number], rotation.dests[number]):
            found += map(known.get, _cut(schedule.buffers[buffer], array))
    return found
