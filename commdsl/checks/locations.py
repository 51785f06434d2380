"""Turns the chunks a schedule touches into flat locations: one number for (rank, buffer, chunk).

Assumes ranks and chunks in bounds wherever the numbers are used as indices (`bounds` proves that first). Does not
judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.contracts import Contract
from commdsl.ir.functions import MATMUL
from commdsl.ir.held import first_chunks, place
from commdsl.ir.schedules import AnyStep, Buffer, Schedule, Statement, Step, Task, Yield
from commdsl.ir.words import at_bindings
from commdsl.language.kinds import GIVEN, BufferKind
from commdsl.language.records import dataclass
from commdsl.language.source import Span

Locations = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LocatedMoves:
    """One statement of one step; a source that a list's condition leaves out is the location `nowhere`."""

    moves: Statement
    dest: Locations  # (n,)
    sources: Locations  # (n, k), of a function (n, 1): its first operand
    given: Locations | None = None  # (n, k), of a function: its other operands
    bias: Locations | None = None  # (n,)
    residual: Locations | None = None  # (n,)

    @property
    def function(self) -> tuple[str, int]:
        """The function that is applied, and which of its results is written; without a name: none."""
        applied = self.moves.applied
        if applied is not None:
            return applied.function, applied.result
        return ("" if self.given is None else MATMUL), 0

    @property
    def reads(self) -> Locations:
        """All that is read, (n, k)."""
        others = (one for one in (self.given, self.bias, self.residual) if one is not None)
        return np.column_stack((self.sources, *others))


@dataclass(frozen=True, eq=False)
class LocatedStep:
    step: Step
    moves: tuple[LocatedMoves, ...]


@dataclass(frozen=True, eq=False)
class LocatedTask:
    """What computes whole buffers on every rank, ours or the caller's; row r is what rank r reads and writes.

    Nobody knows what the caller's writes, so each chunk of it is an origin of its own, as the chunks that are given.
    """

    step: Yield | Task
    reads: Locations  # (num_ranks, chunks of the buffers it reads)
    writes: Locations  # (num_ranks, chunks of those it writes)
    origins: Locations  # as `writes`

    @property
    def operands(self) -> Locations:
        """Of a function of ours, which is element-wise: for each chunk of `writes` those it is made of, (n, k)."""
        num_ranks, chunks = self.writes.shape
        return self.reads.reshape(num_ranks, -1, chunks).transpose(0, 2, 1).reshape(num_ranks * chunks, -1)


class Located:
    """A schedule with every operand as a location: rank * chunks_per_rank + first chunk of the buffer + chunk.

    Behind the last location and `nowhere` come the chunks that tasks make, as numbers for what is combined elsewhere:
    nowhere + 1 + rank * made_per_rank + place among the chunks that all tasks write on a rank.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        counts = [buffer.num_chunks for buffer in schedule.buffers]
        self.first_chunk = first_chunks(schedule)
        self.chunks_per_rank = int(self.first_chunk[-1])
        writes = [() if isinstance(step, Step) else step.writes for step in schedule.steps]
        made = [sum(counts[buffer] for buffer in buffers) for buffers in writes]
        self.first_made: Locations = np.concatenate(([0], np.cumsum(made, dtype=np.int64)))  # of each step
        self.made_per_rank = int(self.first_made[-1])

    @property
    def nowhere(self) -> int:
        """One location more than there are; arrays over locations have a last element for it."""
        return self.schedule.num_ranks * self.chunks_per_rank

    @property
    def size(self) -> int:
        """Locations, `nowhere`, and what tasks make."""
        return self.nowhere + 1 + self.schedule.num_ranks * self.made_per_rank

    @cached_property
    def steps(self) -> tuple[LocatedStep | LocatedTask, ...]:
        return tuple(self._locate_step(index, step) for index, step in enumerate(self.schedule.steps))

    def _locate_step(self, index: int, step: AnyStep) -> LocatedStep | LocatedTask:
        match step:
            case Step():
                return LocatedStep(step, tuple(self._locate_moves(moves) for moves in step.moves if len(moves.actor)))
            case Yield() | Task():
                writes = self._all(step.writes)
                ranks = np.arange(self.schedule.num_ranks, dtype=np.int64)[:, None]
                place = int(self.first_made[index]) + np.arange(writes.shape[1])
                origins = self.nowhere + 1 + ranks * self.made_per_rank + place
                return LocatedTask(step, self._all(step.reads), writes, origins)
            case _:
                assert_never(step)

    def _all(self, buffers: tuple[int, ...]) -> Locations:
        none = np.zeros((self.schedule.num_ranks, 0), np.int64)
        return np.concatenate([none, *map(self.whole, buffers)], axis=1)

    def _locate_moves(self, moves: Statement) -> LocatedMoves:
        sources = self.locate(moves.source_buffer, moves.source_rank, moves.source_chunk)
        if moves.source_valid is not None:
            sources = np.where(moves.source_valid, sources, self.nowhere)
        dest = self.locate(moves.dest_buffer, moves.dest_rank, moves.dest_chunk)
        if moves.applied is not None:
            every = np.zeros_like(moves.actor)
            given = np.column_stack([self.locate(buffer, moves.actor, every) for buffer in moves.applied.given])
            return LocatedMoves(moves, dest, sources, given)
        if moves.factor is None or moves.factor_chunk is None:
            return LocatedMoves(moves, dest, sources)
        ends, bias, residual = moves.epilogue, None, None
        if ends.bias is not None:  # one row is that of all
            chunk = moves.factor_chunk * (self.schedule.buffers[ends.bias].num_chunks > 1)
            bias = self.locate(ends.bias, moves.actor, chunk)
        if ends.residual is not None:
            residual = self.locate(ends.residual, moves.actor, moves.dest_chunk)
        factors = self.locate(moves.factor, moves.actor, moves.factor_chunk)[:, None]
        return LocatedMoves(moves, dest, sources, factors, bias, residual)

    def locate(self, buffer: int, rank: NDArray[np.integer], chunk: NDArray[np.integer]) -> Locations:
        return place(self.first_chunk, buffer, rank, chunk)

    def whole(self, buffer: int) -> Locations:
        """Every location of a buffer, (num_ranks, num_chunks)."""
        ranks = np.arange(self.schedule.num_ranks)[:, None]
        return self.locate(buffer, ranks, np.arange(self.schedule.buffers[buffer].num_chunks))

    def over_locations(self, per_buffer: Iterable[NDArray[np.generic]], nowhere: int) -> NDArray[np.generic]:
        """An array over all locations from one array over the chunks of each buffer, the same on every rank."""
        one_rank = np.concatenate([np.atleast_1d(values) for values in per_buffer])
        return np.append(np.tile(one_rank, self.schedule.num_ranks), np.asarray(nowhere, one_rank.dtype))

    def given(self) -> NDArray[np.bool_]:
        """Which locations hold the caller's data at the start. `nowhere` does too, so that nobody misses it, and what
        tasks make.
        """
        given = (np.full(buffer.num_chunks, buffer.kind in GIVEN) for buffer in self.schedule.buffers)
        made = np.ones(self.size - self.nowhere - 1, np.bool_)
        return np.append(self.over_locations(given, nowhere=1).astype(np.bool_), made)

    def left(self) -> NDArray[np.bool_]:
        """Which locations hold anything at the end: those given, and what moves and tasks write."""
        found = self.given()
        for step in self.steps:
            for places in [step.writes] if isinstance(step, LocatedTask) else [moves.dest for moves in step.moves]:
                found[places] = True
        return found

    def split(self, location: int) -> tuple[int, int, int]:
        """The rank, buffer and chunk of a location."""
        rank, offset = divmod(int(location), self.chunks_per_rank)
        buffer = int(np.searchsorted(self.first_chunk, offset, side="right")) - 1
        return rank, buffer, offset - int(self.first_chunk[buffer])

    def chunk_name(self, location: int) -> str:
        """`x[3]`, as the text would write it."""
        _, buffer, chunk = self.split(location)
        return chunk_name(self.schedule.buffers[buffer], chunk)

    def name(self, location: int) -> str:
        """`x[3]` on rank 2."""
        return f"{self.chunk_name(location)} on rank {self.split(location)[0]}"

    def by_rank(self, origins: Locations) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rank of each chunk given or made, and a number for which of the rank's it is: see `origin_name`."""
        is_made = origins > self.nowhere
        rank, place = np.divmod(origins, self.chunks_per_rank)
        made_rank, made_place = np.divmod(origins - self.nowhere - 1, max(self.made_per_rank, 1))
        return np.where(is_made, made_rank, rank), np.where(is_made, self.chunks_per_rank + made_place, place)

    def origin_name(self, number: int) -> str:
        """`x[3]`, or with the task that made it: `c[0]` by `add` at s = 2."""
        if number < self.chunks_per_rank:
            return self.chunk_name(number)
        place = number - self.chunks_per_rank
        index = int(np.searchsorted(self.first_made, place, side="right")) - 1
        located = self.steps[index]
        assert isinstance(located, LocatedTask)
        name = self.chunk_name(int(located.writes[0, place - int(self.first_made[index])]))
        step = located.step
        maker = step.function if isinstance(step, Task) else step.name
        return f"{name} by `{maker}`{at_bindings(step.bindings)}"

    def statements(self) -> Iterator[tuple[int, LocatedStep, LocatedMoves]]:
        """Every statement of every step in order, with the index of the step."""
        for index, located in enumerate(self.steps):
            if isinstance(located, LocatedStep):
                for moves in located.moves:
                    yield index, located, moves

    def tasks(self) -> Iterator[LocatedTask]:
        return (located for located in self.steps if isinstance(located, LocatedTask))

    def contract_dests(self, contract: Contract) -> Locations:
        return self.locate(contract.dest_buffer, contract.dest_rank, contract.dest_chunk)

    def contract_sources(self, contract: Contract) -> Locations:
        """(m, k); a source left out is `nowhere`. Of a scratch buffer: what the caller's last function made there."""
        sources = self.at_start(contract.source_buffer, contract.source_rank, contract.source_chunk)
        return sources if contract.source_valid is None else np.where(contract.source_valid, sources, self.nowhere)

    def at_start(self, buffer: int, rank: NDArray[np.integer], chunk: NDArray[np.integer]) -> Locations:
        """Locations of chunks that are given, or the origins of those that the caller's last function made."""
        places = self.locate(buffer, rank, chunk)
        if self.schedule.buffers[buffer].kind is not BufferKind.SCRATCH:
            return places
        makers = [task for task in self.tasks() if buffer in task.step.writes]
        made = np.full(self.nowhere + 1, self.nowhere)
        made[makers[-1].writes] = makers[-1].origins
        return made[places]


def chunk_name(buffer: Buffer, chunk: int) -> str:
    if not buffer.dims:
        return f"`{buffer.name}`"
    if not 0 <= chunk < buffer.num_chunks:
        return f"chunk {chunk} of `{buffer.name}`"
    indices = ", ".join(str(int(index)) for index in np.unravel_index(chunk, buffer.dims))
    return f"`{buffer.name}[{indices}]`"


def statement_key(span: Span) -> tuple[str, int, int]:
    """What makes two spans the same statement, so that a fault in a loop is told once."""
    return span.source.name, span.start, span.end
