"""Turns a schedule and the ranks' tensors into the tensors it leaves: the oracle for both compiled forms.

Assumes a schedule that passed the checks. Does not know lanes, cells, flags or rounds, and shares nothing with `lower`
or `emit`: every step reads everything it reads, then writes everything it writes, one chunk after another.

What a text combines by an operation of its own is combined so, whatever the call says. With `avg` a chunk holds what it
does with `sum`, divided: by how many contributions it holds, where a contract sums so many, else by the least power of
two that is not less. So a result is a mean, no partial sum is larger than what was given, and what is rounded on the
way is rounded as in the sum.

What was cast is kept in float32, beside what it is in the caller's type, into which it is rounded where it is returned.

A product is made in float64, or integers that wrap, with what it is added to and what follows it, and rounded once;
what is added to it behind is another step. What
a row-wise function makes of a row beside the sum is made in float64, too, so kernels are held to it but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import erf, gcd, sqrt
from types import MappingProxyType
from typing import TypeAlias, assert_never

import numpy as np

from commdsl.ir.classes import types
from commdsl.ir.extents import block_elements, depths
from commdsl.ir.functions import ELEMENTWISE
from commdsl.ir.lengths import block_lengths
from commdsl.ir.rounding import rounded
from commdsl.ir.schedules import Applied, Cast, Schedule, Statement, Step, Task, Yield
from commdsl.language.kinds import GIVEN, RETURNED, BufferKind
from commdsl.machine.dtypes import BY_NAME, Array, DType

UNIT = 16  # bytes: where chunks may be cut
MOST_CONTRIBUTIONS = 1 << 24  # that a chunk is said to hold: float32 has every whole number up to it

Place: TypeAlias = tuple[int, int, int]
"""A buffer, a rank and a chunk."""

Body: TypeAlias = Callable[[int, Sequence[Array]], Sequence[Array]]
"""What the caller computes at a `yield` with a body: from its rank and whole buffers to whole buffers."""


@dataclass(frozen=True, eq=False)
class Result:
    """`outputs[name][rank]`: the output and inout buffers; `yields[n][rank]`: what rank was handed at the n-th yield.

    One-dimensional arrays in the storage dtype. What a schedule leaves unwritten in an output is zero here.
    """

    outputs: dict[str, list[Array]]
    yields: list[list[Array]]


class _Memory:
    """All chunks of all ranks (private to a run)."""

    def __init__(self, schedule: Schedule, inputs: Mapping[str, Sequence[Array]], dtype: DType) -> None:
        self.buffers = schedule.buffers
        self.depths = depths(schedule, inputs)
        self.elements = block_elements(schedule, inputs)
        self.dtypes = tuple(types(schedule, dtype).values())
        self.blocks = [_blocks(schedule, at, self.elements[at], inputs) for at in range(len(self.buffers))]
        self.spans = [
            [[self._cut(at, blocks, chunk) for chunk in range(one.num_chunks)] for blocks in self.blocks[at]]
            for at, one in enumerate(self.buffers)
        ]
        self.data: list[list[Array]] = []
        self.slots: dict[tuple[int, int, int], Array] = {}  # scratch: whatever was put there
        self.summed = schedule.summed
        self.cast: dict[Place, Array] = {}  # of a chunk that a cast left: its values in float32
        self.contributions: dict[tuple[int, int, int], int] = {}  # of a chunk that was reduced; others hold one
        for buffer, blocks, of in zip(self.buffers, self.blocks, self.dtypes, strict=True):
            if buffer.name in inputs and buffer.kind in GIVEN:
                given = inputs[buffer.name]
                self.data.append([np.array(given[rank], of.storage).ravel() for rank in range(schedule.num_ranks)])
            else:
                has_slots = buffer.kind is BufferKind.SCRATCH
                sizes = [0 if has_slots else sum(blocks[rank % len(blocks)]) for rank in range(schedule.num_ranks)]
                self.data.append([np.zeros(size, of.storage) for size in sizes])

    def _cut(self, buffer: int, blocks: Sequence[int], chunk: int) -> slice:
        """Where a chunk lies in its buffer, of blocks of so many elements."""
        cut, size = self.buffers[buffer].cut, self.dtypes[buffer].size
        block, piece = divmod(chunk, cut)
        before, elements = sum(blocks[:block]), blocks[block]
        whole = -(-elements * size // UNIT)
        first, last = (min(UNIT * (whole * p // cut) // size, elements) for p in (piece, piece + 1))
        return slice(before + first, before + last)

    def span(self, buffer: int, rank: int, chunk: int) -> slice:
        """Where a chunk of a rank lies in its buffer."""
        spans = self.spans[buffer]
        return spans[rank % len(spans)][chunk]

    def read(self, buffer: int, rank: int, chunk: int) -> Array:
        if self.buffers[buffer].kind is BufferKind.SCRATCH:
            return self.slots[buffer, rank, chunk].copy()
        return self.data[buffer][rank][self.span(buffer, rank, chunk)].copy()

    def read_as(self, dtype: DType, buffer: int, rank: int, chunk: int) -> Array:
        """In the type of the sum that it is added to, where that is another."""
        values, of = self.read(buffer, rank, chunk), self.dtypes[buffer]
        return values if of is dtype else dtype.from_float32(of.to_float32(values))

    def read_cast(self, cast: Cast | None, dtype: DType, buffer: int, rank: int, chunk: int) -> Array:
        """What a source of a move is: in float32 where it was rounded on its way, now or before."""
        found = self.cast.get((buffer, rank, chunk))
        if found is not None or cast is None:
            return self.read_as(dtype, buffer, rank, chunk) if found is None else found
        return rounded(dtype.to_float32(self.read_as(dtype, buffer, rank, chunk)), cast)

    def held(self, buffer: int, rank: int, chunk: int) -> int:
        """How many contributions are combined in a chunk."""
        return self.contributions.get((buffer, rank, chunk), 1)

    def write(self, buffer: int, rank: int, chunk: int, values: Array, contributions: int = 1) -> None:
        self.contributions[buffer, rank, chunk] = contributions
        self.cast.pop((buffer, rank, chunk), None)
        if self.buffers[buffer].kind is BufferKind.SCRATCH:
            self.slots[buffer, rank, chunk] = values
        else:
            self.data[buffer][rank][self.span(buffer, rank, chunk)] = values

    def write_cast(self, buffer: int, rank: int, chunk: int, values: Array, contributions: int) -> None:
        """What a move left of its source, in float32."""
        self.write(buffer, rank, chunk, self.dtypes[buffer].from_float32(values), contributions)
        self.cast[buffer, rank, chunk] = values

    def whole(self, buffer: int, rank: int) -> Array:
        """A whole buffer; scratch slots one after another, zeros as long as declared where nothing was put."""
        if self.buffers[buffer].kind is not BufferKind.SCRATCH:
            return self.data[buffer][rank].copy()
        chunks = range(self.buffers[buffer].num_chunks)
        return np.concatenate([self._slot(buffer, rank, chunk) for chunk in chunks])

    def _slot(self, buffer: int, rank: int, chunk: int) -> Array:
        found = self.slots.get((buffer, rank, chunk))
        if found is not None:
            return found
        span = self.span(buffer, rank, chunk)
        return np.zeros(span.stop - span.start, self.dtypes[buffer].storage)

    def fill(self, buffer: int, rank: int, values: Array) -> None:
        """A whole buffer; scratch slots are cut as declared."""
        wanted = (self.buffers[buffer].blocks * self.elements[buffer],), self.dtypes[buffer].storage
        if (values.shape, values.dtype) != wanted:
            what = f"{wanted[0][0]} elements of {wanted[1]}"
            raise ValueError(f"`{self.buffers[buffer].name}` is {what}, got {values.shape} of {values.dtype}")
        for chunk in range(self.buffers[buffer].num_chunks):
            self.write(buffer, rank, chunk, values[self.span(buffer, rank, chunk)].copy())


def _blocks(schedule: Schedule, buffer: int, elements: int, inputs: Mapping[str, Sequence[Array]]) -> list[list[int]]:
    """The elements of each block, by rank; one rank stands for all where all blocks are as long."""
    of = schedule.buffers[buffer]
    if of.lengths is None:
        return [[elements] * of.blocks]
    return block_lengths(of.lengths, schedule.num_ranks, of.blocks, inputs[of.lengths.table][0].tolist())


def run(
    schedule: Schedule,
    inputs: Mapping[str, Sequence[Array]],
    dtype: DType,
    op: str,
    bodies: Mapping[str, Body] = MappingProxyType({}),
) -> Result:
    """Runs all ranks; `inputs[name][rank]` for every input and inout buffer, blocks * n elements in storage dtype;
    `bodies` by name for every `yield` that has one. `dtype`: of buffers of which the schedule declares none. What a
    product reads is given as matrices (rows, columns).

    `op` is sum, max, min, prod or avg. Raises ValueError for inputs of unequal blocks or an `op` a dtype has not.
    """
    memory = _Memory(schedule, inputs, dtype)
    if schedule.cast is not None and not dtype.casts:
        raise ValueError(f"{dtype.name} does not travel as {schedule.cast.element}")
    reduced = (one for one in schedule.statements if one.accumulate or one.is_list)
    for of, how in {(memory.dtypes[one.dest_buffer].name, one.operation or op) for one in reduced}:
        if how not in BY_NAME[of].ops:
            raise ValueError(f"{of} has no `{how}`")
    yields = []
    for step in schedule.steps:
        match step:
            case Step():
                results = [result for moves in step.moves for result in _results(memory, moves, op)]
                for is_cast, place, values, contributions in results:
                    (memory.write_cast if is_cast else memory.write)(*place, values, contributions)
            case Yield(name=None):
                yields.append([memory.whole(step.buffer, rank) for rank in range(schedule.num_ranks)])
            case Yield(name=name):
                assert name is not None
                for rank in range(schedule.num_ranks):
                    given = [memory.whole(buffer, rank) for buffer in step.reads]
                    for buffer, values in zip(step.writes, bodies[name](rank, given), strict=True):
                        memory.fill(buffer, rank, values)
            case Task():
                operation = ELEMENTWISE[step.function].operation
                for rank in range(schedule.num_ranks):
                    given = [memory.whole(buffer, rank) for buffer in step.reads]
                    made = combine(given, memory.dtypes[step.writes[0]], operation)
                    memory.fill(step.writes[0], rank, made)
            case _:
                assert_never(step)
    outputs = {b.name: memory.data[i] for i, b in enumerate(schedule.buffers) if b.kind in RETURNED}
    return Result(outputs, yields)


def _results(memory: _Memory, moves: Statement, op: str) -> Iterator[tuple[bool, Place, Array, int]]:
    """What each row of a statement will write, computed from the state before the step; first whether it is cast."""
    dtype, how = memory.dtypes[moves.dest_buffer], moves.operation or op
    for row, (rank, chunk) in enumerate(zip(moves.dest_rank.tolist(), moves.dest_chunk.tolist(), strict=True)):
        places = [(moves.dest_buffer, rank, chunk)] if moves.accumulate else []
        for k, (source_rank, source_chunk) in enumerate(
            zip(moves.source_rank[row].tolist(), moves.source_chunk[row].tolist(), strict=True)
        ):
            if moves.source_valid is None or moves.source_valid[row, k]:
                places.append((moves.source_buffer, source_rank, source_chunk))
        held = [memory.held(*place) for place in places]
        casts = [None if moves.accumulate and not number else moves.cast for number in range(len(places))]
        operands = [memory.read_cast(cast, dtype, *place) for cast, place in zip(casts, places, strict=True)]
        if moves.applied is not None:
            given = [memory.whole(buffer, rank) for buffer in moves.applied.given]
            values = by_row(moves.applied, operands[0], given, dtype)
        elif moves.factor is not None and moves.factor_chunk is not None:
            factor = memory.read_as(dtype, moves.factor, rank, int(moves.factor_chunk[row]))
            ends, at = moves.epilogue, int(moves.factor_chunk[row])
            bias = residual = None
            if ends.bias is not None:
                bias = memory.read(ends.bias, rank, 0 if memory.buffers[ends.bias].num_chunks == 1 else at)
            if ends.residual is not None:
                residual = memory.read(ends.residual, rank, chunk)
            values = product(ends.activation, operands, factor, (bias, residual), memory.depths[moves.factor], dtype)
        elif moves.copies:
            values = operands[0]
        elif how == "avg":
            values = average(operands, held, memory.summed, dtype)
        else:
            values = combine(operands, dtype, how)
        is_cast = moves.copies and (moves.cast is not None or places[0] in memory.cast)
        yield is_cast, (moves.dest_buffer, rank, chunk), values, _together(held, moves)


def _together(held: Sequence[int], moves: Statement) -> int:
    """How many contributions a result holds that an `avg` may come to divide by; what a text combines it never does."""
    return 1 if moves.operation is not None else min(sum(held), MOST_CONTRIBUTIONS)


def by_row(applied: Applied, rows: Array, given: Sequence[Array], dtype: DType) -> Array:
    """A result of a row-wise function, of rows that lie one behind another."""
    assert applied.function == "add_rms_norm"
    residual, weight, eps = given
    added = combine([rows, residual], dtype, "sum")
    if applied.result == 0:
        return added
    wide = dtype.widen(added).astype(np.float64).reshape(-1, weight.size)
    root = np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + float(eps[0]))
    made = wide / root * dtype.widen(weight).astype(np.float64)
    return dtype.narrow(made.astype(dtype.accumulator).ravel())


def product(
    activation: str | None,
    operands: Sequence[Array],
    factor: Array,
    beside: tuple[Array | None, Array | None],
    depth: int,
    dtype: DType,
) -> Array:
    """The last operand times the rows of the factor, all of them as deep, and those before it, and a bias; what the
    activation makes of that, and a residual: in float64, or integers that wrap, rounded once. Float8 is as if its
    scales were 1. `beside`: bias and residual.
    """

    def wide(values: Array) -> Array:
        return dtype.widen(values).astype(np.float64) if dtype.is_float else values

    a, b = operands[-1].reshape(-1, depth), factor.reshape(-1, depth)
    found = wide(a) @ wide(b).T
    for one in operands[:-1]:
        found = found + wide(one).reshape(found.shape)
    bias, residual = beside
    if bias is not None:
        found = found + wide(bias)
    if activation is not None and not dtype.is_float:
        raise ValueError(f"`{activation}` is of floats, not of {dtype.name}")
    match activation:
        case None:
            pass
        case "gelu":
            found = found * 0.5 * (1 + np.vectorize(erf, otypes=[np.float64])(found / sqrt(2)))
        case "swiglu":
            gate, up = np.split(found, 2, axis=1)
            found = gate / (1 + np.exp(-gate)) * up
        case unknown:
            raise AssertionError(unknown)
    if residual is not None:
        found = found + wide(residual).reshape(found.shape)
    return dtype.narrow(found.astype(dtype.accumulator).ravel()) if dtype.is_float else found.ravel()


def combine(operands: list[Array], dtype: DType, op: str) -> Array:
    """The operands combined in order; floats in float32 (float64 in itself), rounded once at the end; integers wrap."""
    if len(operands) == 1:
        return _narrow(operands[0], dtype)
    function = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    with np.errstate(over="ignore", invalid="ignore"):
        if not dtype.is_float:
            total = operands[0]
            for operand in operands[1:]:
                total = function(total, operand)
            return total
        total, wide = _wide(operands[0], dtype), partial(_extreme, function) if op in ("max", "min") else function
        for operand in operands[1:]:
            total = wide(total, _wide(operand, dtype))
        return dtype.narrow(total)


def _extreme(function: Callable[[Array, Array], Array], left: Array, right: Array) -> Array:
    """The larger or the smaller float by the order of their bits, so -0 is below +0; any NaN gives the same NaN."""
    kind = np.dtype(f"i{left.dtype.itemsize}")
    last, most = 8 * kind.itemsize - 1, np.iinfo(kind).max
    found = function(*(bits ^ ((bits >> last) & most) for bits in (left.view(kind), right.view(kind))))
    nan = np.array(0x7FFFFFFF, np.uint32).view(np.float32).astype(left.dtype)
    is_nan = np.isnan(left) | np.isnan(right)
    return np.where(is_nan, nan, (found ^ ((found >> last) & most)).view(left.dtype))


def _wide(values: Array, dtype: DType) -> Array:
    """As it is combined; what was cast is so already."""
    return values if values.dtype == dtype.accumulator else dtype.widen(values)


def _narrow(values: Array, dtype: DType) -> Array:
    """As it is kept."""
    return values if values.dtype == dtype.storage else dtype.narrow(values)


def average(operands: list[Array], held: Sequence[int], summed: frozenset[int], dtype: DType) -> Array:
    """The sum of what the operands hold, over its own divisor: combined in order, rounded once at the end.

    Scaled by a power of two meanwhile, which makes the sum no larger than the largest contribution.
    """
    if len(operands) == 1:
        return _narrow(operands[0], dtype)
    *weights, whole = (divisor(count, summed) for count in (*held, sum(held)))
    common = gcd(*weights, whole)
    unit = 1 / (1 << (whole // common - 1).bit_length())
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        parts = [
            _wide(values, dtype) * dtype.accumulator(w // common * unit)
            for values, w in zip(operands, weights, strict=True)
        ]
        return dtype.narrow(reduce(np.add, parts) / dtype.accumulator(whole // common * unit))


def divisor(count: int, summed: frozenset[int]) -> int:
    """What the sum of so many contributions is divided by where it is kept."""
    return count if count in summed else 1 << (count - 1).bit_length()
