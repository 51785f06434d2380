"""Turns the steps of a schedule into phases of operations whose operands lie in tensors and cells.

Assumes a schedule that passed the checks: no two writes of one step meet, nothing undefined is read. Does not order
anything across ranks; `ordering` derives the flags. Does not save copies; `fuse` does.

Every write makes a new version of a chunk, in a cell of its own. Data only ever travels by the rank that has it: what a
rank would `get`, or combine from elsewhere, its owner puts there, as links carry stores faster than loads, and as data
that is put may bring its own flag. So a rank reads its own memory only, and of a peer's writes cells alone.

But for buffers that land: what is put there once, and stays, is put where it belongs. Its owner *opens* the chunk
before anything else, and *takes* it behind the put: two operations that do nothing, a write and a read of it to whoever
orders or proves. So the put waits for the owner, and the owner's launch is not over before what came is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.functions import ELEMENTWISE
from commdsl.ir.schedules import Ints, Schedule, Statement, Step, Task, Yield
from commdsl.language.diagnostics import InternalError
from commdsl.language.kinds import MoveKind
from commdsl.language.source import Span
from commdsl.machine.carriers import Carrier
from commdsl.program.lower.alike import alike
from commdsl.program.lower.cells import allocate
from commdsl.program.lower.fuse import fuse
from commdsl.program.lower.homes import UNDEFINED, Homes, ints
from commdsl.program.lower.problem import most_groups
from commdsl.program.lower.rows import Batch, Rows, SizeClass, assemble
from commdsl.program.memory import Tensor, Transport
from commdsl.program.moves import CELL, KIND_OF, MOST_CONTRIBUTIONS, Form, OpKind, Origin

Longs: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Placed:
    """`rows.rank` counts who acts: the moves of every rank, then, where there are tasks, the tiles of every rank."""

    rows: Rows
    tensors: tuple[Tensor, ...]
    num_cells: int
    origins: tuple[Origin, ...]


class _Placer:
    """Walks the steps once; holds the homes and the phases made so far (private to this pass)."""

    def __init__(self, schedule: Schedule, landing: frozenset[str]) -> None:
        self.schedule = schedule
        self.homes = Homes(schedule, landing)
        self.averaged = sorted(schedule.summed)
        self.phases: list[list[Batch]] = []
        self.opens: list[Batch] = []  # chunks that peers put where they belong; before anything else
        self.origins: list[Origin] = []

    def origin(self, span: Span, bindings: tuple[tuple[str, int], ...], step: int, note: str = "") -> int:
        self.origins.append(Origin(span, bindings, step, note))
        return len(self.origins) - 1

    def step(self, number: int, step: Step) -> None:
        """One step becomes a phase of transfers and a phase of what each rank does with what it has."""
        transfers: list[Batch] = []
        local: list[Batch] = []
        updates: list[tuple[Statement, tuple[Ints, Ints, Ints], SizeClass, Longs]] = []
        for moves in step.moves:
            if not len(moves.actor):
                continue
            origin = self.origin(moves.span, step.bindings, number)
            size_class = self._size_class(moves)
            sources = self.homes.locate(moves.source_buffer, moves.source_rank, moves.source_chunk)
            form = ints(Form.AS_IS, moves.dest_rank.shape)
            if moves.kind is MoveKind.REDUCE:
                near = self._bring(moves, sources, size_class, origin, transfers)
                space, dest = ints(CELL, moves.dest_rank.shape), self.homes.version(moves)
                held, held_by_all = self._contributions(moves)
                local.append(self._combine(moves, near, dest, size_class, origin, self._weights(held, held_by_all)))
            else:
                batch = self._copy(moves, sources, size_class, origin)
                owner, chunk = batch.rank, moves.source_chunk[:, 0]
                held_by_all = self.homes.contributions[moves.source_buffer][owner, chunk]
                far, stays = owner != moves.dest_rank, _stays(moves)
                space, dest, form = self._homes_of(moves, batch)
                transfers += [] if not far.any() else [batch.take(far)]
                local += [] if (far | stays).all() else [batch.take(~far & ~stays)]
                landed = (space != CELL) & ~stays
                if landed.any():
                    self.opens.append(self._hold(batch.take(landed), step, number, "opens"))
                    local.append(self._hold(batch.take(landed), step, number, "takes"))
            updates.append((moves, (space, dest, form), size_class, held_by_all))
        for moves, (space, dest, form), (cut, piece, length), contributions in updates:
            buffer, at = moves.dest_buffer, (moves.dest_rank, moves.dest_chunk)
            self.homes.space[buffer][at], self.homes.index[buffer][at] = space, dest
            self.homes.cut[buffer][at], self.homes.piece[buffer][at] = cut, piece
            self.homes.length[buffer][at] = length
            self.homes.written_in[buffer][at] = number
            self.homes.contributions[buffer][at] = contributions
            self.homes.form[buffer][at] = form
        self.phases += [transfers, local]

    def _forms(self, moves: Statement) -> Ints:
        """How a statement reads each source: what it rounds on the way, unless that has been."""
        found = self.homes.form[moves.source_buffer][moves.source_rank, moves.source_chunk]
        return found if moves.cast is None else np.where(found == Form.AS_IS, np.int32(Form.ROUNDED), found)

    def _copy(self, moves: Statement, sources: tuple[Ints, Ints, Ints], size_class: SizeClass, origin: int) -> Batch:
        """What has been rounded, or is now, travels and lies in cells as such."""
        space, dest = self.homes.place_for(moves)
        form = self._forms(moves)
        return Batch(
            rank=moves.source_rank[:, 0],
            kind=OpKind.COPY,
            size_class=size_class,
            dest=(space, moves.dest_rank, dest),
            source=sources,
            valid=None,
            origin=origin,
            dest_form=_travelling(form[:, 0]),
            source_form=_lying(form),
        )

    def _homes_of(self, moves: Statement, made: Batch) -> tuple[Ints, Ints, Ints]:
        """Where the versions that a copy makes lie, and in what form: space, index, Form."""
        assert made.dest_form is not None
        there = made.dest[0], made.dest[2], made.dest_form
        here = made.source[0][:, 0], made.source[2][:, 0], self._forms(moves)[:, 0]
        stays = _stays(moves)
        space, index, form = (np.where(stays, one, other) for one, other in zip(here, there, strict=True))
        return space, index, form

    def _hold(self, put: Batch, step: Step, number: int, note: str) -> Batch:
        """What the owner does to chunks that are put where they belong: it opens them before, and takes them behind."""
        space, rank, chunk = put.dest
        valid = np.full((len(rank), 1), note == "takes")
        statement = self.origins[put.origin]
        origin = self.origin(statement.span, step.bindings, number, note)
        return Batch(rank, OpKind.HOLD, put.size_class, put.dest, _column((space, rank, chunk)), valid, origin)

    def _size_class(self, moves: Statement) -> SizeClass:
        if not self.homes.is_scratch(moves.dest_buffer):
            return self.homes.size_class(moves.dest_buffer, moves.dest_rank, moves.dest_chunk)
        first = np.zeros(len(moves.actor), np.intp) if moves.source_valid is None else moves.source_valid.argmax(axis=1)
        rows = np.arange(len(moves.actor))
        return self.homes.size_class(
            moves.source_buffer, moves.source_rank[rows, first], moves.source_chunk[rows, first]
        )

    def _bring(
        self,
        moves: Statement,
        sources: tuple[Ints, Ints, Ints],
        size_class: SizeClass,
        origin: int,
        transfers: list[Batch],
    ) -> tuple[Ints, Ints, Ints]:
        """The operands as the combining rank finds them: those of other ranks are put into cells of its own."""
        reader = np.broadcast_to(moves.dest_rank[:, None], moves.source_rank.shape)
        far = moves.source_rank != reader
        if moves.source_valid is not None:
            far = far & moves.source_valid
        if not far.any():
            return sources
        (row, operand), owner = np.nonzero(far), moves.source_rank[far]
        cell = self.homes.inbox(moves.dest_buffer, reader[far], moves.dest_chunk[row], operand)
        dest = (ints(CELL, owner.shape), reader[far], cell)
        there = sources[0][far], sources[1][far], sources[2][far]
        cut, piece, length = size_class
        sizes = cut[row], piece[row], length[row]
        forms = self._forms(moves)[far]
        arriving, leaving = _travelling(forms), _lying(forms)[:, None]
        put = Batch(owner, OpKind.COPY, sizes, dest, _column(there), None, origin)
        transfers.append(replace(put, dest_form=arriving, source_form=leaving))
        space, place, index = (part.copy() for part in sources)
        space[far], place[far], index[far] = CELL, reader[far], cell
        return space, place, index

    def _contributions(self, moves: Statement) -> tuple[Longs, Longs]:
        """How many each operand of a reduction holds, 0 where there is none; and all together. Of what no `avg` weighs
        each is one, and so are all together.
        """
        held = self.homes.contributions[moves.source_buffer][moves.source_rank, moves.source_chunk]
        if moves.source_valid is not None:
            held = np.where(moves.source_valid, held, 0)
        if moves.accumulate:
            old = self.homes.contributions[moves.dest_buffer][moves.dest_rank, moves.dest_chunk]
            held = np.concatenate([old[:, None], held], axis=1)
        if moves.operation is not None:
            return np.minimum(held, 1), np.ones(len(held), np.int64)
        return held, np.minimum(held.sum(axis=1), MOST_CONTRIBUTIONS)

    def _weights(self, held: Longs, held_by_all: Longs) -> tuple[Ints, Ints]:
        """What an `avg` weighs the operands by, and the whole, in lowest terms (`moves`)."""
        every = np.column_stack((held, held_by_all))
        is_one = bool(len(every)) and bool((every == every[0]).all())  # as where all ranks do the same
        divisors = self._divisors(every[:1] if is_one else every)
        lowest = divisors // np.gcd.reduce(divisors, axis=1, keepdims=True)
        found = np.broadcast_to(lowest.astype(np.int32), every.shape)
        return found[:, :-1], found[:, -1]

    def _divisors(self, held: Longs) -> Longs:
        """0 where nothing is held."""
        powers = np.where(held > 0, 1 << np.ceil(np.log2(np.maximum(held, 1))).astype(np.int64), 0)
        return np.where(np.isin(held, self.averaged), held, powers)

    def _combine(
        self,
        moves: Statement,
        sources: tuple[Ints, Ints, Ints],
        cell: Ints,
        size_class: SizeClass,
        origin: int,
        weights: tuple[Ints, Ints],
    ) -> Batch:
        valid, rank, forms = moves.source_valid, moves.dest_rank, self._forms(moves)
        forms = np.where(moves.source_rank == rank[:, None], forms, _travelling(forms))
        if moves.accumulate:
            old = self.homes.locate(moves.dest_buffer, rank, moves.dest_chunk)
            sources, valid = _beside(old, sources), None
            before = self.homes.form[moves.dest_buffer][rank, moves.dest_chunk]
            forms = np.concatenate([before[:, None], forms], axis=1)
        dest = (ints(CELL, rank.shape), rank, cell)
        kind = OpKind.REDUCE if moves.operation is None else KIND_OF[moves.operation]
        return Batch(rank, kind, size_class, dest, sources, valid, origin, *weights, source_form=forms)

    def task(self, number: int, step: Task) -> None:
        """Every chunk of what a task writes is made by the rank's tiles, in the order in which ranks turn to peers."""
        (buffer,), ranks = step.writes, self.schedule.num_ranks
        chunks = self.schedule.buffers[buffer].num_chunks
        rank, chunk = (part.ravel() for part in np.indices((ranks, chunks), np.int32))
        order = np.lexsort((chunk, (chunk.astype(np.int64) * ranks // chunks - rank - 1) % ranks, rank))
        rank, chunk = rank[order], chunk[order]
        self.homes.compute(buffer, number)
        dest = self.homes.locate(buffer, rank, chunk)
        parts = [self.homes.locate(read, rank, chunk) for read in step.reads]
        space, place, index = (np.stack(columns, axis=1) for columns in zip(*parts, strict=True))
        origin = self.origin(step.span, step.bindings, number)
        size_class = self.homes.size_class(buffer, rank, chunk)
        who = (rank + np.int32(ranks)).astype(np.int32)
        kind = KIND_OF[ELEMENTWISE[step.function].operation]
        batch = Batch(who, kind, size_class, dest, (space, place, index), None, origin)
        self.phases.append([batch])

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
        """Every defined chunk goes to the tensor returned."""
        batches = []
        for number, tensor in enumerate(self.homes.write):
            if tensor is None:
                continue
            home = self.homes.space[number]
            rank, chunk = self.homes.chunks(number, (home != UNDEFINED) & (home != tensor))
            if not len(rank):
                continue
            origin = self.origin(self.schedule.buffers[number].span, (), len(self.schedule.steps), "copy out")
            source = _column(self.homes.locate(number, rank, chunk))
            dest = (ints(tensor, rank.shape), rank, chunk)
            size_class = self.homes.size_class(number, rank, chunk)
            form = self.homes.form[number][rank, chunk]
            back = np.where(form == Form.AS_IS, form, np.int32(Form.ROUNDED))
            batch = Batch(rank, OpKind.COPY, size_class, dest, source, None, origin)
            batches.append(replace(batch, dest_form=back, source_form=_lying(form)[:, None]))
        self.phases.append(batches)


def num_actors(schedule: Schedule) -> int:
    """Who acts: the ranks' moves, then the ranks' tiles if there are any."""
    return schedule.num_ranks * (1 + any(isinstance(step, Task) for step in schedule.steps))


def _stays(moves: Statement) -> Mask:
    """Rows that need no operation: what a rank rounds and keeps lies where it lay, for who reads it to round."""
    stays: Mask = (moves.source_rank[:, 0] == moves.dest_rank) & (moves.cast is not None)
    return stays


def _travelling(form: Ints) -> Ints:
    """The form of a cell to which something is put that is read so."""
    return np.where(form == Form.AS_IS, form, np.int32(Form.CAST))


def _lying(form: Ints) -> Ints:
    """The form in which something lies that is read so."""
    return np.where(form == Form.ROUNDED, np.int32(Form.AS_IS), form)


def _column(location: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    space, rank, index = location
    return space[:, None], rank[:, None], index[:, None]


def _beside(first: tuple[Ints, Ints, Ints], rest: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    space, rank, index = (np.concatenate([a[:, None], b], axis=1) for a, b in zip(first, rest, strict=True))
    return space, rank, index


def place(schedule: Schedule, transport: Transport, carrier: Carrier, landing: frozenset[str]) -> Placed:
    """Phases of operations for all ranks; see the head of the module for where versions live."""
    placer = _Placer(schedule, landing)
    yields = 0
    for number, step in enumerate(schedule.steps):
        match step:
            case Step():
                placer.step(number, step)
            case Yield():
                placer.hand_over(number, step, yields)
                yields += 1
            case Task():
                placer.task(number, step)
            case _:
                assert_never(step)
    placer.copy_out()
    rows = assemble([placer.opens, *placer.phases], num_actors(schedule))
    if (rows.source_space == UNDEFINED).any():
        raise InternalError(f"`{schedule.name}` reads data that was never written, yet passed the checks")
    tensors = tuple(placer.homes.tensors)
    rows = fuse(rows, tensors, schedule.num_ranks, reduces_remotely=transport is Transport.PEER)
    if len(rows.leaders) > most_groups(schedule.num_ranks):
        rows = alike(rows, schedule.num_ranks)
    rows, num_cells = allocate(rows, placer.homes.num_slots, one_write_each=carrier.has_flags_in_data)
    return Placed(rows, tensors, num_cells, tuple(placer.origins))
