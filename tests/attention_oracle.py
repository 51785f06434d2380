"""Tells whether a schedule of attention shows every rank the pieces that it needs, and brings home what was found.

Assumes the interpreter of moves, and that a function's first reads and writes are told by their places. What is new at
a yield is told from the tables of moves, what is needed from `attention_cases`: nothing is shared with the checker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from attention_cases import Case, brings, chunks

from commdsl.ir import interpret
from commdsl.ir.classes import types
from commdsl.ir.schedules import Schedule, Step, Yield
from commdsl.language.kinds import GIVEN
from commdsl.machine.dtypes import INT64, Array

ELEMENTS = 4
"""Of a block: of any type a whole unit."""

POISON = 1_000_000
"""What a function writes about a place where nothing new is."""

Fresh: TypeAlias = dict[int, np.ndarray]
"""By buffer that a yield reads, by rank and chunk."""


def mismatch(case: Case, schedule: Schedule) -> str:
    """What is wrong, or nothing."""
    run = _Run(case, schedule)
    given = {
        buffer.name: [run.labels(rank, number, buffer.blocks) for rank in range(case.ranks)]
        for number, buffer in enumerate(schedule.buffers)
        if buffer.kind in GIVEN
    }
    bodies = {step.name: run.body for step in run.yields if step.name is not None}
    outputs = interpret.run(schedule, given, INT64, "sum", bodies).outputs
    return run.fault or run.missing() or run.lost(outputs)


class _Run:
    """One run, which notes what each rank is handed."""

    def __init__(self, case: Case, schedule: Schedule) -> None:
        self.case, self.schedule = case, schedule
        self.rotation = schedule.rotations[0]
        self.types = tuple(types(schedule, INT64).values())
        self.yields = [step for step in schedule.steps if isinstance(step, Yield)]
        self.fresh = list(fresh(schedule))
        self.calls = 0
        self.seen = np.zeros((case.ranks, case.ranks * chunks(case)), np.int64)
        self.found = np.random.default_rng(1).integers(1, 1000, (*self.seen.shape, len(self.rotation.sources)))
        self.fault = ""

    def labels(self, rank: int, buffer: int, blocks: int) -> Array:
        """A piece of a rank is known by a number, which is the same for keys and values; what is no piece has none."""
        chunk, count = np.arange(blocks), chunks(self.case)
        rotates = buffer in self.rotation.sources
        numbers = np.where((chunk < count) & rotates, chunk + rank * count, -1)
        return np.repeat(numbers, ELEMENTS).astype(self.types[buffer].storage)

    def body(self, rank: int, given: Sequence[Array]) -> list[Array]:
        number, self.calls = self.calls // self.case.ranks, self.calls + 1
        step = self.yields[number]
        handed = [
            np.where(self.fresh[number][buffer][rank], np.asarray(values)[::ELEMENTS].astype(np.int64), -1)
            for buffer, values in zip(step.reads, given, strict=True)
            if buffer in self.rotation.buffers
        ]
        pieces = handed[0] if handed else np.zeros(0, np.int64)
        if len({one.tobytes() for one in handed}) > 1:
            self.fault = self.fault or f"visit {number} hands rank {rank} keys of one piece and values of another"
        for piece in pieces[pieces >= 0].tolist():
            self.seen[rank, piece] += 1
        return [self.written(rank, pieces, at, buffer) for at, buffer in enumerate(step.writes)]

    def written(self, rank: int, pieces: np.ndarray, at: int, buffer: int) -> Array:
        """What a rank finds about each piece, by place: a number that nobody else finds."""
        blocks = self.schedule.buffers[buffer].blocks
        numbers = np.zeros(blocks)
        if at < len(self.rotation.back) and len(pieces) == blocks:
            numbers = np.where(pieces >= 0, self.found[rank, pieces, at], POISON)
        return np.repeat(numbers, ELEMENTS).astype(self.types[buffer].storage)

    def needed(self, rank: int, piece: int) -> bool:
        return brings(self.case, rank, *divmod(piece, chunks(self.case)))

    def missing(self) -> str:
        for (rank, piece), times in np.ndenumerate(self.seen):
            if times != self.needed(rank, piece):
                return f"rank {rank} is handed piece {piece} {times} times"
        return ""

    def lost(self, outputs: dict[str, list[Array]]) -> str:
        ranks = range(self.case.ranks)
        for at, buffer in enumerate(self.rotation.back):
            name, blocks = self.schedule.buffers[buffer].name, chunks(self.case)
            for piece in range(self.case.ranks * blocks):
                owner, chunk = divmod(piece, blocks)
                wanted = sum(int(self.found[rank, piece, at]) for rank in ranks if self.needed(rank, piece))
                if int(outputs[name][owner][chunk * ELEMENTS]) != wanted:
                    return f"`{name}[{chunk}]` on rank {owner} is not the sum of what was found about it"
        return ""


def fresh(schedule: Schedule) -> list[Fresh]:
    """By yield, what was given or written since one handed it over."""
    new = [np.full((schedule.num_ranks, one.num_chunks), one.kind in GIVEN) for one in schedule.buffers]
    found = []
    for step in schedule.steps:
        if isinstance(step, Step):
            for moves in step.moves:
                new[moves.dest_buffer][moves.dest_rank, moves.dest_chunk] = True
        elif isinstance(step, Yield):
            found.append({buffer: new[buffer].copy() for buffer in step.reads})
            for buffer in step.reads:
                new[buffer][:] = False
            for buffer in step.writes:
                new[buffer][:] = True
    return found
