"""Turns a schedule with products into one that stops at each of them: a product is a yield to a function of ours.

Assumes a schedule that passed the checks up to where its indices are right. Does not move anything, and leaves a
schedule without products as it is.

What a product reads and writes are single chunks, another one on each rank. So that one may be computed while another
travels, each becomes a buffer of its own, a *part*: the chunk that one product has, on every rank. What is added to
what a product made, on the same rank and before anything else happens, is added within it, in float32; and where its
rows are copied then, on the same rank, it is what copies them: it has read them. A product that is added to what is
there reads that, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.functions import Epilogue
from commdsl.ir.schedules import AnyStep, Buffer, Schedule, Statement, Step, Yield
from commdsl.language.diagnostics import CommError, Diagnostic, Label
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.language.records import dataclass
from commdsl.language.source import Span

MATMUL = "matmul"


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of a buffer on every rank, as a buffer."""

    name: str
    of: str
    chunks: tuple[int, ...]  # by rank


@dataclass(frozen=True, eq=False)
class Stopping:
    """The schedule that stops, and its parts: those of one buffer in the order in which products have them."""

    schedule: Schedule
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class _Product:
    """A step that multiplies, the steps behind it that add to what it made, and one that copies its rows."""

    statement: Statement
    bindings: tuple[tuple[str, int], ...]
    sums: tuple[Statement, ...] = ()
    copy: Statement | None = None

    @property
    def writes(self) -> tuple[Statement, ...]:
        """Whose destinations."""
        return (self.statement,) if self.copy is None else (self.statement, self.copy)


def stopping(schedule: Schedule) -> Stopping:
    """Raises CommError (C592) where a product is none that a kernel runs."""
    if not schedule.has_products or any(isinstance(step, Yield) and step.is_product for step in schedule.steps):
        return Stopping(schedule, ())
    for buffer in schedule.buffers:
        if buffer.like is not None:
            raise _fault(buffer.span, "products say how long its blocks are", f"leave `like {buffer.like}` out")
    steps = tuple(_grouped(schedule))
    parts = _Parts(schedule, steps)
    made: list[AnyStep] = []
    for step in steps:
        match step:
            case _Product(statement, bindings, sums) as product:
                writes = tuple(map(parts.dest, product.writes))
                added = (*(writes[:1] if statement.accumulate else ()), *map(parts.source, sums))
                ends = parts.epilogue(statement)
                reads = (parts.source(statement), parts.factor(statement), *added, *ends.buffers)
                made.append(Yield(reads, bindings, statement.span, writes, MATMUL, is_product=True, epilogue=ends))
            case Step():
                made.append(replace(step, moves=tuple(one for moves in step.moves for one in parts.split(moves))))
            case _:
                raise _fault(step.span, "what the caller computes stands beside it", "leave one of them out")
    none = np.zeros(0, np.int32)
    kept = replace(schedule.contracts[0], source_buffer=0, dest_buffer=0, dest_rank=none, dest_chunk=none, value=none)
    stopped = replace(schedule, buffers=parts.buffers, contracts=(kept,), steps=tuple(made))
    return Stopping(stopped, parts.parts)


def added(schedule: Schedule) -> frozenset[Span]:
    """The places in the texts of the statements that are added within a product, whenever they are reached."""
    within, alone = set[Span](), set[Span]()
    for step in _grouped(schedule) if schedule.has_products else ():
        match step:
            case _Product(sums=sums):
                within.update(one.span for one in sums)
            case Step(moves):
                alone.update(one.span for one in moves)
            case _:
                pass
    return frozenset(within - alone)


def _grouped(schedule: Schedule) -> Iterator[AnyStep | _Product]:
    """The steps; a product with the sums behind it, or the copy."""
    uses = _uses(schedule)
    now: _Product | None = None
    for step in schedule.steps:
        one = step.moves[0] if isinstance(step, Step) and len(step.moves) == 1 else None
        if now is not None and one is not None and _adds(now.statement, one):
            now = replace(now, sums=(*now.sums, one))
            continue
        if now is not None and one is not None and _copies(now, one, uses):
            now = replace(now, copy=one)
            continue
        if now is not None:
            yield now
        now = None
        if one is not None and one.factor is not None:
            now = _Product(one, step.bindings)
        else:
            yield step
    if now is not None:
        yield now


def _adds(product: Statement, one: Statement) -> bool:
    """Whether a statement adds what lies on a rank to what the product made there, on every rank."""
    return (
        one.kind is MoveKind.REDUCE
        and product.epilogue.activation is None
        and one.operation in (None, "sum")
        and one.accumulate
        and one.dest_buffer == product.dest_buffer
        and np.array_equal(one.source_rank[:, 0], one.dest_rank)
        and np.array_equal(one.dest_rank, product.dest_rank)
        and np.array_equal(one.dest_chunk, product.dest_chunk)
    )


def _uses(schedule: Schedule) -> tuple[NDArray[np.int64], ...]:
    """By buffer, rank and chunk, how many statements read or write it."""
    found = tuple(np.zeros((schedule.num_ranks, buffer.num_chunks), np.int64) for buffer in schedule.buffers)
    for one in schedule.statements:
        np.add.at(found[one.source_buffer], (one.source_rank, one.source_chunk), 1)
        np.add.at(found[one.dest_buffer], (one.dest_rank, one.dest_chunk), 1)
        for buffer in one.epilogue.buffers:
            found[buffer][:] += 1
        if one.factor is not None:
            found[one.factor][one.actor, _factor_chunk(one)] += 1
    return found


def _copies(product: _Product, one: Statement, uses: Sequence[NDArray[np.int64]]) -> bool:
    """Whether a statement copies what the product multiplied, on every rank, and is the first to, and nothing else
    touches the copy: no counter says that it is there. A product that is added to what is there copies nothing.
    """
    of = product.statement
    return (
        one.kind is MoveKind.PUT
        and product.writes == (of,)
        and not of.accumulate
        and not product.sums
        and one.source_buffer == of.source_buffer
        and np.array_equal(one.source_rank, of.source_rank)
        and np.array_equal(one.source_chunk, of.source_chunk)
        and np.array_equal(one.dest_rank, of.dest_rank)
        and bool((uses[one.dest_buffer][one.dest_rank, one.dest_chunk] == 1).all())
    )


class _Parts:
    """Which chunks are which part, and the buffers there are then (private to this pass)."""

    def __init__(self, schedule: Schedule, steps: tuple[AnyStep | _Product, ...]) -> None:
        self._schedule = schedule
        self._ranks = np.arange(schedule.num_ranks)
        shape = [(schedule.num_ranks, buffer.num_chunks) for buffer in schedule.buffers]
        self._part_of: list[NDArray[np.int64]] = [np.full(one, -1) for one in shape]  # by rank and chunk
        self._chunks: list[list[tuple[int, ...]]] = [[] for _ in shape]
        for step in steps:
            if isinstance(step, _Product):
                factor = step.statement.factor
                bias, residual = step.statement.epilogue.bias, step.statement.epilogue.residual
                beside = [(one, _factor_chunk(step.statement)) for one in (factor, bias) if one is not None]
                beside += [] if residual is None else [(residual, step.statement.dest_chunk)]
                for one, chunk in beside:
                    if schedule.buffers[one].num_chunks > 1:
                        self._take(step.statement, one, chunk)
                self._take(step.statement, step.statement.source_buffer, step.statement.source_chunk[:, 0])
                for write in step.writes:
                    self._take(write, write.dest_buffer, write.dest_chunk)
                for term in step.sums:
                    self._take(term, term.source_buffer, term.source_chunk[:, 0])
        moves = [one for step in steps if isinstance(step, Step) for one in step.moves]
        self._take_rest(moves)
        self.buffers = tuple(self._all())
        self._number = {buffer.name: number for number, buffer in enumerate(self.buffers)}

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(
            Part(_name(buffer, number), buffer.name, chunks)
            for buffer, parts in zip(self._schedule.buffers, self._chunks, strict=True)
            for number, chunks in enumerate(parts)
        )

    def number(self, buffer: int) -> int:
        """Of a buffer without parts."""
        return self._number[self._schedule.buffers[buffer].name]

    def source(self, one: Statement) -> int:
        return self._of(one.source_buffer, one.source_rank[0, 0], one.source_chunk[0, 0])

    def dest(self, one: Statement) -> int:
        return self._of(one.dest_buffer, one.dest_rank[0], one.dest_chunk[0])

    def factor(self, one: Statement) -> int:
        assert one.factor is not None
        return self._of(one.factor, one.actor[0], _factor_chunk(one)[0])

    def epilogue(self, one: Statement) -> Epilogue:
        """What it reads as parts, where these are of several chunks."""
        ends, rank = one.epilogue, one.actor[0]
        bias = None if ends.bias is None else self._of(ends.bias, rank, _factor_chunk(one)[0])
        residual = None if ends.residual is None else self._of(ends.residual, rank, one.dest_chunk[0])
        return replace(ends, bias=bias, residual=residual)

    def split(self, moves: Statement) -> Iterator[Statement]:
        """A statement for each two parts that it has chunks of."""
        if moves.factor is not None:
            raise _fault(moves.span, "it is not alone in its step", "write an `each` for every product")
        source, dest = self._part_of[moves.source_buffer], self._part_of[moves.dest_buffer]
        if not self._chunks[moves.source_buffer] and not self._chunks[moves.dest_buffer]:
            yield self._renamed(moves, slice(None))
            return
        if moves.source_rank.shape[1] != 1:
            raise _fault(moves.span, "it combines chunks that products have", "combine them one after another")
        froms = source[moves.source_rank[:, 0], moves.source_chunk[:, 0]]
        tos = dest[moves.dest_rank, moves.dest_chunk]
        for pair in dict.fromkeys(zip(froms.tolist(), tos.tolist(), strict=True)):
            yield self._renamed(moves, np.flatnonzero((froms == pair[0]) & (tos == pair[1])))

    def _renamed(self, moves: Statement, rows: NDArray[np.int64] | slice) -> Statement:
        source, dest = moves.source_buffer, moves.dest_buffer
        kept = replace(
            moves,
            actor=moves.actor[rows],
            source_rank=moves.source_rank[rows],
            source_chunk=moves.source_chunk[rows] * (0 if self._chunks[source] else 1),
            source_valid=None if moves.source_valid is None else moves.source_valid[rows],
            dest_rank=moves.dest_rank[rows],
            dest_chunk=moves.dest_chunk[rows] * (0 if self._chunks[dest] else 1),
        )
        froms = self._of(source, kept.source_rank[0, 0], moves.source_chunk[rows][0, 0])
        return replace(
            kept, source_buffer=froms, dest_buffer=self._of(dest, kept.dest_rank[0], moves.dest_chunk[rows][0])
        )

    def _of(self, buffer: int, rank: int, chunk: int) -> int:
        if not self._chunks[buffer]:
            return self.number(buffer)
        part = int(self._part_of[buffer][rank, chunk])
        if part < 0:
            raise _fault(
                self._schedule.buffers[buffer].span, "a chunk of it moves that no product has", "use all of it"
            )
        return self._number[_name(self._schedule.buffers[buffer], part)]

    def _take(self, one: Statement, buffer: int, chunk: NDArray[np.int32]) -> None:
        """The chunks that a statement has, one on each rank, are a part, if they are none yet."""
        ranks = self._ranks
        if not np.array_equal(one.actor, ranks) or self._schedule.buffers[buffer].cut != 1:
            raise _fault(one.span, "it is not of one whole block on every rank", "multiply blocks, on all ranks")
        found = self._part_of[buffer][ranks, chunk]
        self._take_new(buffer, chunk)
        if (found != found[0]).any():
            raise _fault(one.span, "on some ranks it has what another product has", "let products share all or nothing")

    def _take_rest(self, moves: Sequence[Statement]) -> None:
        """What each statement takes from every rank, of an input that products read in part; what it brings, of a
        result that they make in part, or of a scratch buffer where all is of what products have.
        """
        for number, buffer in enumerate(self._schedule.buffers):
            takes = [one for one in moves if one.source_buffer == number and self._is_of_all(one.source_rank[:, 0])]
            for one in takes if buffer.kind is BufferKind.INPUT and self._chunks[number] else ():
                self._take_new(number, one.source_chunk[np.argsort(one.source_rank[:, 0]), 0])
            brings = [one for one in moves if one.dest_buffer == number]
            alone = [one for one in brings if self._is_of_all(one.dest_rank)]
            if self._chunks[number]:
                is_open = buffer.kind is BufferKind.OUTPUT
            else:
                of_parts = all(self._chunks[one.source_buffer] for one in brings)
                is_open = buffer.kind is BufferKind.SCRATCH and buffer.cut == 1 and of_parts and alone == brings
            for one in alone if is_open else ():
                self._take_new(number, one.dest_chunk[np.argsort(one.dest_rank)])

    def _is_of_all(self, ranks: NDArray[np.int32]) -> bool:
        """Whether it is once of each."""
        return np.array_equal(np.sort(ranks), self._ranks)

    def _take_new(self, buffer: int, chunk: NDArray[np.int32]) -> None:
        if (self._part_of[buffer][self._ranks, chunk] < 0).all():
            self._part_of[buffer][self._ranks, chunk] = len(self._chunks[buffer])
            self._chunks[buffer].append(tuple(chunk.tolist()))

    def _all(self) -> Iterator[Buffer]:
        for buffer, parts in zip(self._schedule.buffers, self._chunks, strict=True):
            if not parts:
                yield buffer
            for number in range(len(parts)):
                like = None if number == 0 else _name(buffer, 0)
                yield replace(buffer, name=_name(buffer, number), dims=(), blocks=1, cut=1, like=like)


def _factor_chunk(one: Statement) -> NDArray[np.int32]:
    assert one.factor_chunk is not None, "every product has a factor"
    return one.factor_chunk


def _name(buffer: Buffer, number: int) -> str:
    """Of a part: no buffer of a text can be called so."""
    return f"{buffer.name}.{number}"


def _fault(span: Span, label: str, help: str) -> CommError:
    return CommError((Diagnostic("C592", "no kernel runs this product", Label(span, label), help=help),))
