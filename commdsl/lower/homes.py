"""Where the current version of every chunk of every rank lies, step by step.

Assumes the steps are walked once, in order. Does not decide where a new version goes; `placement` does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.ir import Ints, Schedule, Yield
from commdsl.kinds import BufferKind
from commdsl.plan import Access, Tensor

UNDEFINED = -2
DEPTH = 4  # cells a chunk uses in turn: more than two, so that the credit for a reuse is seldom waited for


def ints(values: object, shape: tuple[int, ...]) -> Ints:
    return np.broadcast_to(np.asarray(values, np.int32), shape)


class Homes:
    """Where the current version of every chunk lies, per rank; grows step by step."""

    def __init__(self, schedule: Schedule) -> None:
        self.buffers = schedule.buffers
        self.tensors, self.read, self.write = _tensors(schedule)
        shapes = [(schedule.num_ranks, buffer.num_chunks) for buffer in schedule.buffers]
        self.space = [np.full(shape, UNDEFINED, np.int32) for shape in shapes]
        self.index = [np.zeros(shape, np.int32) for shape in shapes]
        self.writes = [np.zeros(shape, np.int32) for shape in shapes]
        self.written_in = [np.full(shape, -1, np.int32) for shape in shapes]  # the step that wrote the version
        self.cut = [np.full(shape, buffer.cut, np.int32) for shape, buffer in zip(shapes, self.buffers, strict=True)]
        self.piece = [
            ints(np.arange(b.num_chunks) % b.cut, s).copy() for s, b in zip(shapes, self.buffers, strict=True)
        ]
        self.first_cell = np.cumsum([0, *(DEPTH * buffer.num_chunks for buffer in self.buffers)])
        fetched = (schedule.num_ranks * buffer.num_chunks for buffer in self.buffers)
        self.first_fetched = np.cumsum([self.first_cell[-1], *fetched])
        for number, tensor in enumerate(self.read):
            if tensor is not None:
                self.space[number][:] = tensor
                self.index[number][:] = np.arange(self.buffers[number].num_chunks)

    def is_scratch(self, buffer: int) -> bool:
        return self.buffers[buffer].kind is BufferKind.SCRATCH

    def next_cell(self, buffer: int, rank: Ints, chunk: Ints) -> Ints:
        """Takes the next cell of each chunk's ring of cells."""
        turn = self.writes[buffer][rank, chunk] % DEPTH
        self.writes[buffer][rank, chunk] += 1
        return np.asarray(self.first_cell[buffer] + chunk * DEPTH + turn, np.int32)

    def fetched_cell(self, buffer: int, rank: Ints, chunk: Ints) -> Ints:
        """The own cell for a copy of a peer's chunk: one for each, as only its own rank ever touches it."""
        return np.asarray(self.first_fetched[buffer] + rank * self.buffers[buffer].num_chunks + chunk, np.int32)

    def chunks(self, buffer: int, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """The chosen (rank, chunk) pairs, oldest version first, each rank starting from its own share of the chunks.

        So the last to arrive is awaited last, and ranks that do the same do it in the same order.
        """
        rank, chunk = (array.astype(np.int32) for array in np.nonzero(chosen))
        num_ranks, num_chunks = chosen.shape
        turn = (chunk - rank * num_chunks // num_ranks) % num_chunks
        order = np.lexsort((turn, self.written_in[buffer][rank, chunk], rank))
        return rank[order], chunk[order]

    def locate(self, buffer: int, rank: Ints, chunk: Ints) -> tuple[Ints, Ints, Ints]:
        return self.space[buffer][rank, chunk], rank, self.index[buffer][rank, chunk]

    def size_class(self, buffer: int, rank: Ints, chunk: Ints) -> tuple[Ints, Ints]:
        return self.cut[buffer][rank, chunk], self.piece[buffer][rank, chunk]


def _tensors(schedule: Schedule) -> tuple[list[Tensor], list[int | None], list[int | None]]:
    """The tensors in order of declaration, and for each buffer the one it is read from and the one it is written to."""
    tensors: list[Tensor] = []
    read: list[int | None] = []
    write: list[int | None] = []
    for buffer in schedule.buffers:
        reads = buffer.kind in (BufferKind.INPUT, BufferKind.INOUT)
        writes = buffer.kind in (BufferKind.OUTPUT, BufferKind.INOUT)
        read.append(len(tensors) if reads else None)
        if reads:
            tensors.append(Tensor(buffer.name, Access.READ, buffer.blocks, buffer.cut))
        write.append(len(tensors) if writes else None)
        if writes:
            tensors.append(Tensor(buffer.name, Access.WRITE, buffer.blocks, buffer.cut))
    yielded = [step.buffer for step in schedule.steps if isinstance(step, Yield)]
    if yielded:
        buffer = schedule.buffers[yielded[0]]
        tensors.append(Tensor("yields", Access.WRITE, len(yielded) * buffer.blocks, buffer.cut, is_yield=True))
    return tensors, read, write
