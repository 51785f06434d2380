"""Where the current version of every chunk of every rank lies, step by step.

Assumes the steps are walked once, in order. Does not give versions memory: `cells` does, once `fuse` has said which
of them need any.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints, Schedule, Statement, Task, Yield
from commdsl.language.diagnostics import InternalError
from commdsl.language.kinds import GIVEN, RETURNED, BufferKind, MoveKind
from commdsl.program.lower.hazards import Index
from commdsl.program.lower.rows import SizeClass, narrow
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import CELL, Form

UNDEFINED = -2


def ints(values: object, shape: tuple[int, ...]) -> Ints:
    return np.broadcast_to(np.asarray(values, np.int32), shape)


class Homes:
    """Where the current version of every chunk lies, per rank; grows step by step."""

    def __init__(self, schedule: Schedule, landing: frozenset[str] = frozenset()) -> None:
        """`landing`: buffers that peers may put to, where a chunk is written once."""
        self.buffers = schedule.buffers
        self.lands = _landing(schedule, landing)
        self.tensors, self.read, self.write, self.own = _tensors(schedule, self.lands)
        shapes = [(schedule.num_ranks, buffer.num_chunks) for buffer in schedule.buffers]
        self.space = [np.full(shape, UNDEFINED, np.int32) for shape in shapes]
        self.index = [np.zeros(shape, np.int32) for shape in shapes]
        self.contributions = [np.ones(shape, np.int64) for shape in shapes]  # how many are combined in the version
        self.form = [np.full(shape, Form.AS_IS, np.int32) for shape in shapes]  # of the version, to who reads it
        self.writes = [np.zeros(shape, np.int32) for shape in shapes]
        self.written_in = [np.full(shape, -1, np.int32) for shape in shapes]  # the step that wrote the version
        self.cut = [np.full(shape, buffer.cut, np.int32) for shape, buffer in zip(shapes, self.buffers, strict=True)]
        self.piece = [
            ints(np.arange(b.num_chunks) % b.cut, s).copy() for s, b in zip(shapes, self.buffers, strict=True)
        ]
        self.length = [buffer.length_of(schedule.num_ranks) for buffer in self.buffers]  # which one its block has
        counts = [buffer.num_chunks for buffer in self.buffers]
        self.first_chunk = np.cumsum([0, *counts])  # of each buffer, among the chunks of all
        self.num_chunks = int(self.first_chunk[-1])
        self.num_slots = self.num_chunks * (1 + _most_operands(schedule))
        for number, tensor in enumerate(self.read):
            if tensor is not None:
                self.space[number][:] = tensor
                self.index[number][:] = np.arange(self.buffers[number].num_chunks)

    def is_scratch(self, buffer: int) -> bool:
        return self.buffers[buffer].kind is BufferKind.SCRATCH

    def place_for(self, moves: Statement) -> tuple[Ints, Ints]:
        """Space and index for what a statement moves: a tensor where it lands, else a cell for this version."""
        lands = self.lands[moves.dest_buffer][moves.dest_rank, moves.dest_chunk]
        tensor = self.write[moves.dest_buffer]
        space = np.where(lands, CELL if tensor is None else tensor, CELL).astype(np.int32)
        return space, np.where(lands, moves.dest_chunk, self.version(moves)).astype(np.int32)

    def version(self, moves: Statement) -> Ints:
        """A cell for the next version of each chunk, one that nothing else is ever written to."""
        buffer, rank, chunk = moves.dest_buffer, moves.dest_rank, moves.dest_chunk
        turn = self.writes[buffer][rank, chunk]
        self.writes[buffer][rank, chunk] += 1
        return self._cell(self.first_chunk[buffer] + chunk, turn)

    def inbox(self, buffer: int, rank: Ints, chunk: Ints, operand: Index) -> Ints:
        """Cells for operands of the next version of each chunk that other ranks bring."""
        slot = (1 + operand.astype(np.int64)) * self.num_chunks + self.first_chunk[buffer] + chunk
        return self._cell(slot, self.writes[buffer][rank, chunk])

    def _cell(self, slot: NDArray[np.int64], turn: Ints) -> Ints:
        cell = turn.astype(np.int64) * self.num_slots + slot
        if len(cell) and int(cell.max()) > np.iinfo(np.int32).max:
            raise InternalError("more versions of chunks than 32 bits can number")
        return cell.astype(np.int32)

    def compute(self, buffer: int, number: int) -> None:
        """From this step on every chunk lies in the rank's own tensor, where a task wrote it."""
        tensor = self.own[buffer]
        assert tensor is not None
        self.space[buffer][:] = tensor
        self.index[buffer][:] = np.arange(self.buffers[buffer].num_chunks)
        self.written_in[buffer][:] = number
        self.contributions[buffer][:] = 1

    def chunks(self, buffer: int, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """The chosen (rank, chunk) pairs, oldest version first, each rank starting from its own share of the chunks.

        So the last to arrive is awaited last, and ranks that do the same do it in the same order.
        """
        rank, chunk = (array.astype(np.int32) for array in np.nonzero(chosen))
        num_ranks, num_chunks = chosen.shape
        turn = (chunk - rank * num_chunks // num_ranks) % num_chunks
        order = np.lexsort((narrow(turn), narrow(self.written_in[buffer][rank, chunk]), narrow(rank)))
        return rank[order], chunk[order]

    def locate(self, buffer: int, rank: Ints, chunk: Ints) -> tuple[Ints, Ints, Ints]:
        return self.space[buffer][rank, chunk], rank, self.index[buffer][rank, chunk]

    def size_class(self, buffer: int, rank: Ints, chunk: Ints) -> SizeClass:
        return self.cut[buffer][rank, chunk], self.piece[buffer][rank, chunk], self.length[buffer][rank, chunk]


def _landing(schedule: Schedule, names: frozenset[str]) -> list[NDArray[np.bool_]]:
    """For each buffer which chunks of which ranks peers put where they belong: a version is alone, and theirs."""
    found = []
    for number, buffer in enumerate(schedule.buffers):
        writes = np.zeros((schedule.num_ranks, buffer.num_chunks), np.int32)
        far = np.zeros_like(writes, np.bool_)
        moved = schedule.statements if buffer.name in names else ()
        for moves in (one for one in moved if one.dest_buffer == number and len(one.actor)):
            place = moves.dest_rank, moves.dest_chunk
            writes[place] += 1
            far[place] = (moves.kind is not MoveKind.REDUCE) & (moves.source_rank[:, 0] != moves.dest_rank)
        is_result = buffer.kind in RETURNED
        found.append(far & (writes == 1) & is_result)
    return found


def _most_operands(schedule: Schedule) -> int:
    """The longest list that is combined."""
    moves = (moves for moves in schedule.statements if moves.kind is MoveKind.REDUCE)
    return max((some.source_rank.shape[1] for some in moves), default=0)


Numbers = list[int | None]


def _tensors(schedule: Schedule, lands: list[NDArray[np.bool_]]) -> tuple[list[Tensor], Numbers, Numbers, Numbers]:
    """The tensors in order of declaration, then those that tasks write; and for each buffer the one it is read from,
    the one it is written to, and the one that holds what a task writes.
    """
    tensors: list[Tensor] = []
    read: list[int | None] = []
    write: list[int | None] = []
    for buffer, here in zip(schedule.buffers, lands, strict=True):
        reads = buffer.kind in GIVEN
        writes = buffer.kind in RETURNED
        read.append(len(tensors) if reads else None)
        if reads:
            tensors.append(Tensor(buffer.name, Rights.READ, buffer.blocks, buffer.cut, lengths=buffer.lengths))
        write.append(len(tensors) if writes else None)
        if writes:
            made = Tensor(buffer.name, Rights.WRITE, buffer.blocks, buffer.cut, lengths=buffer.lengths)
            tensors.append(replace(made, lands=bool(here.any())))
    computed = {buffer for step in schedule.steps if isinstance(step, Task) for buffer in step.writes}
    own: Numbers = [None] * len(schedule.buffers)
    for number in sorted(computed):
        buffer, own[number] = schedule.buffers[number], len(tensors)
        tensors.append(Tensor(buffer.name, Rights.OWN, buffer.blocks, buffer.cut))
    yielded = [step.buffer for step in schedule.steps if isinstance(step, Yield)]
    if yielded:
        buffer = schedule.buffers[yielded[0]]
        tensors.append(Tensor("yields", Rights.WRITE, len(yielded) * buffer.blocks, buffer.cut, is_yield=True))
    return tensors, read, write, own
