"""Turns the steps of a schedule into phases of operations whose operands lie in tensors and cells.

Assumes a schedule that passed the checks: no two writes of one step meet, nothing undefined is read. Does not order
anything across ranks; `ordering` derives the flags.

Every write makes a new version of a chunk. A version lives in user memory where it can; in a cell where a peer touches
it: where a peer put it, where a peer will read it, or where the step that writes it also reads the old version. The
cells of one chunk are used in turn, so that a step may send a chunk on and receive the next one at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.diagnostics import InternalError
from commdsl.ir import Ints, Moves, Schedule, Step, Yield
from commdsl.kinds import MoveKind
from commdsl.lower.homes import UNDEFINED, Homes, ints
from commdsl.lower.rows import Batch, Rows, assemble, renumber
from commdsl.plan import CELL, OpKind, Origin, Tensor, Transport
from commdsl.source import Span


@dataclass(frozen=True, eq=False)
class Placed:
    rows: Rows
    tensors: tuple[Tensor, ...]
    num_cells: int
    origins: tuple[Origin, ...]


def _pushes(moves: Moves) -> bool:
    """A reduce into a peer's chunk travels as a put into a cell there, and the peer combines."""
    return moves.kind is MoveKind.REDUCE and bool(np.any(moves.dest_rank != moves.actor))


def _pulled(schedule: Schedule) -> tuple[list[NDArray[np.bool_]], list[list[NDArray[np.bool_] | None]]]:
    """For each buffer's first version and each written one: will a peer read it?"""
    pulled = [np.zeros((schedule.num_ranks, buffer.num_chunks), np.bool_) for buffer in schedule.buffers]
    answers: list[list[NDArray[np.bool_] | None]] = []
    for step in reversed(schedule.steps):
        here: list[NDArray[np.bool_] | None] = []
        if isinstance(step, Step):
            for moves in step.moves:
                flags = pulled[moves.dest_buffer][moves.dest_rank, moves.dest_chunk]
                here.append(flags if flags.any() else None)
            for moves in step.moves:
                pulled[moves.dest_buffer][moves.dest_rank, moves.dest_chunk] = False
            for moves in step.moves:
                far = moves.source_rank != moves.actor[:, None]
                if moves.source_valid is not None:
                    far = far & moves.source_valid
                if far.any():
                    pulled[moves.source_buffer][moves.source_rank[far], moves.source_chunk[far]] = True
        answers.append(here)
    return pulled, answers[::-1]


class _Placer:
    """Walks the steps once; holds the homes and the phases made so far (private to this pass)."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.schedule = schedule
        self.transport = transport
        self.homes = Homes(schedule)
        self.phases: list[list[Batch]] = []
        self.origins: list[Origin] = []

    def origin(self, span: Span, bindings: tuple[tuple[str, int], ...], step: int, note: str = "") -> int:
        self.origins.append(Origin(span, bindings, step, note))
        return len(self.origins) - 1

    def stage_in(self, pulled: list[NDArray[np.bool_]]) -> None:
        """What a peer reads of the caller's tensors is copied to cells first."""
        batches = []
        for number, flags in enumerate(pulled):
            rank, chunk = self.homes.chunks(number, flags & (self.homes.space[number] >= 0))
            if len(rank):
                origin = self.origin(self.schedule.buffers[number].span, (), 0, "stage in")
                batches.append(self._copy_to_cell(number, rank, chunk, origin))
        self.phases.append(batches)

    def _copy_to_cell(self, buffer: int, rank: Ints, chunk: Ints, origin: int) -> Batch:
        homes = self.homes
        source = homes.locate(buffer, rank, chunk)
        cell = homes.next_cell(buffer, rank, chunk)
        dest = (ints(CELL, rank.shape), rank, cell)
        homes.space[buffer][rank, chunk], homes.index[buffer][rank, chunk] = CELL, cell
        return Batch(rank, OpKind.COPY, homes.size_class(buffer, rank, chunk), dest, _column(source), None, origin)

    def step(self, number: int, step: Step, pulled: list[NDArray[np.bool_] | None]) -> None:
        """One step becomes a phase of transfers and a phase that combines what was put to be reduced."""
        fetches: list[Batch] = []
        transfers: list[Batch] = []
        combines: list[Batch] = []
        updates: list[tuple[Moves, tuple[Ints, Ints, Ints], tuple[Ints, Ints]]] = []
        for moves, flags in zip(step.moves, pulled, strict=True):
            if not len(moves.actor):
                continue
            origin = self.origin(moves.span, step.bindings, number)
            size_class = self._size_class(moves)
            if _pushes(moves):
                dest = self._push(moves, flags, size_class, origin, transfers, combines)
            else:
                dest = self._place(moves, flags, step)
                transfers.append(self._direct(moves, dest, size_class, origin, fetches))
            updates.append((moves, dest, size_class))
        for moves, (space, _, index), (cut, piece) in updates:
            at = moves.dest_buffer, (moves.dest_rank, moves.dest_chunk)
            self.homes.space[at[0]][at[1]] = space
            self.homes.index[at[0]][at[1]] = index
            self.homes.cut[at[0]][at[1]] = cut
            self.homes.piece[at[0]][at[1]] = piece
            self.homes.written_in[at[0]][at[1]] = number
        self.phases += [fetches, transfers, combines]

    def _is_read(self, step: Step, buffer: int, rank: Ints, chunk: Ints) -> NDArray[np.bool_]:
        """Whether the step reads these chunks."""
        read = np.zeros((self.schedule.num_ranks, self.schedule.buffers[buffer].num_chunks), np.bool_)
        for moves in step.moves:
            if moves.source_buffer == buffer:
                valid = ... if moves.source_valid is None else moves.source_valid
                read[moves.source_rank[valid], moves.source_chunk[valid]] = True
        return read[rank, chunk]

    def _size_class(self, moves: Moves) -> tuple[Ints, Ints]:
        if not self.homes.is_scratch(moves.dest_buffer):
            return self.homes.size_class(moves.dest_buffer, moves.dest_rank, moves.dest_chunk)
        first = np.zeros(len(moves.actor), np.intp) if moves.source_valid is None else moves.source_valid.argmax(axis=1)
        rows = np.arange(len(moves.actor))
        return self.homes.size_class(
            moves.source_buffer, moves.source_rank[rows, first], moves.source_chunk[rows, first]
        )

    def _place(self, moves: Moves, pulled: NDArray[np.bool_] | None, step: Step) -> tuple[Ints, Ints, Ints]:
        """The home of each new version: user memory if it may, else the next cell."""
        homes, buffer = self.homes, moves.dest_buffer
        tensor = homes.write[buffer]
        rank, chunk = moves.dest_rank, moves.dest_chunk
        in_cell = np.full(rank.shape, tensor is None) | (rank != moves.actor)
        if pulled is not None:
            in_cell |= pulled
        # Where the old version lies where the new one would go, this very step may still read it.
        busy = ~in_cell & (homes.space[buffer][rank, chunk] == tensor)
        if busy.any():
            in_cell[busy] |= self._is_read(step, buffer, rank[busy], chunk[busy])
        return self._new_home(buffer, rank, chunk, in_cell)

    def _new_home(self, buffer: int, rank: Ints, chunk: Ints, in_cell: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """The next cell of each chunk that needs one, the tensor that is returned for the others."""
        tensor = self.homes.write[buffer]
        space = np.where(in_cell, CELL, CELL if tensor is None else tensor).astype(np.int32)
        index = chunk.astype(np.int32).copy()
        if in_cell.any():
            index[in_cell] = self.homes.next_cell(buffer, rank[in_cell], chunk[in_cell])
        return space, rank, index

    def _direct(
        self,
        moves: Moves,
        dest: tuple[Ints, Ints, Ints],
        size_class: tuple[Ints, Ints],
        origin: int,
        fetches: list[Batch],
    ) -> Batch:
        source = self.homes.locate(moves.source_buffer, moves.source_rank, moves.source_chunk)
        if moves.kind is MoveKind.REDUCE and self.transport is Transport.NVSHMEM:
            source = self._fetch(moves, source, size_class, origin, fetches)
        valid = moves.source_valid
        if not moves.accumulate:
            kind = OpKind.REDUCE if moves.is_list else OpKind.COPY
            return Batch(moves.actor, kind, size_class, dest, source, valid, origin)
        old = self.homes.locate(moves.dest_buffer, moves.dest_rank, moves.dest_chunk)
        return Batch(moves.actor, OpKind.REDUCE, size_class, dest, _beside(old, source), None, origin)

    def _fetch(
        self,
        moves: Moves,
        source: tuple[Ints, Ints, Ints],
        size_class: tuple[Ints, Ints],
        origin: int,
        fetches: list[Batch],
    ) -> tuple[Ints, Ints, Ints]:
        """NVSHMEM brings whole tiles, nothing is read by the element: a peer's operands are copied first."""
        far = moves.source_rank != moves.actor[:, None]
        if moves.source_valid is not None:
            far = far & moves.source_valid
        if not far.any():
            return source
        row = np.nonzero(far)[0]
        cell = self.homes.fetched_cell(moves.source_buffer, moves.source_rank[far], moves.source_chunk[far])
        rank = moves.actor[row]
        dest = (ints(CELL, rank.shape), rank, cell)
        there = source[0][far], source[1][far], source[2][far]
        sizes = size_class[0][row], size_class[1][row]
        fetches.append(Batch(rank, OpKind.COPY, sizes, dest, _column(there), None, origin))
        space, place, index = (part.copy() for part in source)
        space[far], place[far], index[far] = CELL, rank, cell
        return space, place, index

    def _push(
        self,
        moves: Moves,
        pulled: NDArray[np.bool_] | None,
        size_class: tuple[Ints, Ints],
        origin: int,
        transfers: list[Batch],
        combines: list[Batch],
    ) -> tuple[Ints, Ints, Ints]:
        rank, chunk, buffer = moves.dest_rank, moves.dest_chunk, moves.dest_buffer
        inbox = (ints(CELL, rank.shape), rank, self.homes.next_cell(buffer, rank, chunk))
        source = self.homes.locate(moves.source_buffer, moves.source_rank, moves.source_chunk)
        transfers.append(Batch(moves.actor, OpKind.COPY, size_class, inbox, source, None, origin))
        old = self.homes.locate(buffer, rank, chunk)
        in_cell = np.full(rank.shape, self.homes.write[buffer] is None)
        if pulled is not None:
            in_cell |= pulled
        dest = self._new_home(buffer, rank, chunk, in_cell)
        combines.append(Batch(rank, OpKind.REDUCE, size_class, dest, _beside(old, _column(inbox)), None, origin))
        return dest

    def hand_over(self, number: int, step: Yield, count: int) -> None:
        """A yield copies the resident buffer to its place among the yields."""
        buffer = self.schedule.buffers[step.buffer]
        rank, chunk = self.homes.chunks(step.buffer, self.homes.space[step.buffer] != UNDEFINED)
        dest = (
            ints(len(self.homes.tensors) - 1, rank.shape),
            rank,
            (chunk + count * buffer.num_chunks).astype(np.int32),
        )
        source = _column(self.homes.locate(step.buffer, rank, chunk))
        origin = self.origin(step.span, step.bindings, number)
        size_class = self.homes.size_class(step.buffer, rank, chunk)
        self.phases.append([Batch(rank, OpKind.COPY, size_class, dest, source, None, origin)])

    def copy_out(self) -> None:
        """What lies in cells, or in a tensor that is read, goes to the tensor returned; an `avg` divides here."""
        batches = []
        for number, tensor in enumerate(self.homes.write):
            if tensor is None:
                continue
            away = (self.homes.space[number] != tensor) & (self.homes.space[number] != UNDEFINED)
            sums = self._sums(number)
            batches += self._settle(number, tensor, away & ~sums, OpKind.COPY, "copy out")
            batches += self._settle(number, tensor, away & sums, OpKind.SCALE, "copy out, average")
            batches += self._settle(number, tensor, ~away & sums, OpKind.SCALE, "average")
        self.phases.append(batches)

    def _sums(self, buffer: int) -> NDArray[np.bool_]:
        """The chunks that an `avg` divides: those whose contract is a sum. An average over one rank is what it was."""
        sums = np.zeros(self.homes.space[buffer].shape, np.bool_)
        for contract in self.schedule.contracts:
            if contract.is_sum and contract.dest_buffer == buffer and self.schedule.num_ranks > 1:
                sums[contract.dest_rank, contract.dest_chunk] = True
        return sums

    def _settle(self, buffer: int, tensor: int, chosen: NDArray[np.bool_], kind: OpKind, note: str) -> list[Batch]:
        """The chosen chunks go to the tensor that is returned, if they are not there."""
        rank, chunk = self.homes.chunks(buffer, chosen)
        if not len(rank):
            return []
        origin = self.origin(self.schedule.buffers[buffer].span, (), len(self.schedule.steps), note)
        source = _column(self.homes.locate(buffer, rank, chunk))
        dest = (ints(tensor, rank.shape), rank, chunk)
        return [Batch(rank, kind, self.homes.size_class(buffer, rank, chunk), dest, source, None, origin)]


def _column(location: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    space, rank, index = location
    return space[:, None], rank[:, None], index[:, None]


def _beside(first: tuple[Ints, Ints, Ints], rest: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    space, rank, index = (np.concatenate([a[:, None], b], axis=1) for a, b in zip(first, rest, strict=True))
    return space, rank, index


def place(schedule: Schedule, transport: Transport) -> Placed:
    """Phases of operations for all ranks; see the head of the module for where versions live."""
    placer = _Placer(schedule, transport)
    pulled, answers = _pulled(schedule)
    placer.stage_in(pulled)
    yields = 0
    for number, (step, flags) in enumerate(zip(schedule.steps, answers, strict=True)):
        match step:
            case Step():
                placer.step(number, step, flags)
            case Yield():
                placer.hand_over(number, step, yields)
                yields += 1
            case _:
                assert_never(step)
    placer.copy_out()
    rows, num_cells = renumber(assemble(placer.phases, schedule.num_ranks))
    if (rows.source_space == UNDEFINED).any():
        raise InternalError(f"`{schedule.name}` reads data that was never written, yet passed the checks")
    return Placed(rows, tuple(placer.homes.tensors), num_cells, tuple(placer.origins))
