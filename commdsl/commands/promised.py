"""Turns the words of `ensure` and what ranks were given into what they must have, and holds a run to that.

Assumes the schedule was resolved. Reads nothing of its steps but what the caller computes, and whether a `reduce`
names its operation. Shares nothing with the interpreter: a named collective is evaluated by its definition in the
language reference, a written equality term by term, floats in float64 (long double for float64) within what rounding
may change, all else exactly; what has functions in it, by `evaluated`. Does not run anything. Where a contract is about
what a function of the caller made, it is not evaluated, and `Promised` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, TypeAlias

import numpy as np

from commdsl.checks.locations import Located
from commdsl.checks.operations import by_the_call
from commdsl.commands.evaluated import Evaluation, value_of, whole
from commdsl.commands.handings import Handing, rotated
from commdsl.ir.contracts import Contract, Rounding, Term, sources_of
from commdsl.ir.lengths import block_lengths
from commdsl.ir.products import Part
from commdsl.ir.schedules import Schedule, Yield
from commdsl.language.kinds import GIVEN, BufferKind
from commdsl.language.records import dataclass
from commdsl.machine.dtypes import Array, DType
from commdsl.program.sizes import chunk_range

Chunk: TypeAlias = tuple[int, int]
"""A rank, and a chunk of a buffer there."""

Promise: TypeAlias = tuple[Sequence[Chunk], Sequence[Chunk]]
"""Chunks of the result that are equal, and the chunks of the source whose combination they are."""

Tensors: TypeAlias = Mapping[str, Sequence[Array]]
"""By name, then by rank."""

SPLIT_SOURCE = ("reduce_scatter", "alltoall", "scatter")
SPLIT_RESULT = ("allgather", "alltoall", "gather")

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8": 2.0**-4}
"""The most that rounding to a type changes a number, relative to it."""

SMALLEST = {"float64": 5e-324, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133, "float8": 0.0}
"""The numbers next to zero: rounding changes no number by more where its relative bound is less."""

LARGEST = {"float64": 1.7e308, "float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.3e38}

FLOAT8_FLOOR = 2.0**-17
"""The most by which a float8 with a scale differs from a number, relative to the largest one with that scale."""


@dataclass(frozen=True, slots=True)
class Promised:
    """How many bytes were held to `ensure`, the first that is wrong in words, and what was not evaluated, and why."""

    compared_bytes: int
    fault: str
    unknown: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Ran:
    """What ran: the schedule, the bytes of blocks in the caller's type, that type, the element type of each buffer, how
    the call combines, the tensors before and after, and what yields handed over.
    """

    schedule: Schedule
    caller: DType
    blocks: int | tuple[int, ...]
    types: Mapping[str, DType]
    operation: str
    given: Tensors
    left: Tensors
    handings: Sequence[Handing]

    @cached_property
    def by_the_call(self) -> tuple[Contract, ...]:
        """The contracts that leave it to the call how their terms are combined."""
        return by_the_call(Located(self.schedule))

    @cached_property
    def _lengths(self) -> dict[str, list[list[int]]]:
        """Return the elements of all blocks, by buffer and rank."""
        found = {}
        for buffer in self.schedule.buffers:
            of = self.type_of(buffer.name)
            blocks = block_lengths(buffer.lengths, self.schedule.num_ranks, buffer.blocks, self.blocks)
            found[buffer.name] = [[one // self.caller.size * of.size for one in row] for row in blocks]
        return found

    def type_of(self, name: str) -> DType:
        """The element type of a buffer."""
        return self.types[name]

    def chunk(self, tensors: Tensors, name: str, at: Chunk) -> Array:
        """The elements of a chunk of a rank."""
        rank, chunk = at
        size, cut = self.type_of(name).size, next(one.cut for one in self.schedule.buffers if one.name == name)
        whole = tensors[name][rank].reshape(-1)
        blocks = self._lengths[name][rank]
        if not self.schedule.lengths:  # some buffers have shorter blocks than the longest
            blocks = [whole.size * size // len(blocks)] * len(blocks)
        first, last = chunk_range(blocks, cut, chunk)
        return whole[first // size : last // size]


def in_one(schedule: Schedule, parts: Sequence[Part], tensors: Tensors) -> dict[str, list[Array]]:
    """Return the tensors of the buffers of a text, from those of the parts that products cut them into."""
    found = {name: list(arrays) for name, arrays in tensors.items()}
    for name, blocks in ((one.name, one.blocks) for one in schedule.buffers):
        own = [part for part in parts if part.of == name and part.name in tensors]
        arrays = [found.pop(part.name) for part in own]
        for rank in range(schedule.num_ranks if own else 0):
            here = {part.chunks[rank]: of[rank] for part, of in zip(own, arrays, strict=True)}
            nothing = np.zeros_like(arrays[0][rank])  # of a block that no product has
            whole = np.concatenate([here.get(block, nothing) for block in range(blocks)])
            found.setdefault(name, []).append(whole)
    return found


def held_to_ensure(ran: Ran, contracts: Sequence[Contract]) -> Promised:
    """Evaluate contracts and compare the results of a run with them, up to the first that is wrong."""
    compared, unknown = 0, list[str]()
    for contract in contracts:
        if contract.rotation is not None:
            found = rotated(ran.schedule, contract.rotation, ran.handings, ran.given)
        else:
            found = _evaluated(ran, contract)
        compared += found[0]
        if found[1]:
            return Promised(compared, found[1], tuple(unknown))
        unknown += found[2]
    return Promised(compared, "", tuple(dict.fromkeys(unknown)))


def _evaluated(ran: Ran, contract: Contract) -> tuple[int, str, tuple[str, ...]]:
    schedule = ran.schedule
    source, dest = (schedule.buffers[number].name for number in (contract.source_buffer, contract.dest_buffer))
    why = _unknown(ran, contract)
    if why:
        return 0, "", (f"`{contract.name}` of `{dest}`: {why}",)
    operation = ran.operation if any(one is contract for one in ran.by_the_call) else contract.operation
    of, compared = (ran.type_of(source), ran.type_of(dest)), 0
    wanted: Iterator[tuple[Sequence[Chunk], Wanted]]
    if contract.term is None:
        found = promises(schedule, contract)
        each = ((at, [ran.chunk(ran.given, source, one) for one in terms]) for at, terms in found)
        wanted = ((dests, combined(values, of, operation, contract.rounding)) for dests, values in each)
    else:
        wanted = _by_terms(ran, contract, contract.term, operation or "sum")
    for dests, due in wanted:
        for at in dests:
            got = ran.chunk(ran.left, dest, at)
            compared += got.nbytes
            wrong = due.wrong(got)
            if wrong:
                where = "" if schedule.buffers[contract.dest_buffer].num_chunks == 1 else f"chunk {at[1]} of "
                return compared, f"{where}`{dest}` on rank {at[0]} is not what `{contract.name}` promises: {wrong}", ()
    return compared, "", ()


def _by_terms(ran: Ran, contract: Contract, term: Term, operation: str) -> Iterator[tuple[Sequence[Chunk], Wanted]]:
    """Yield each chunk of a contract that names functions, with what its term is."""
    buffers, dtype = ran.schedule.buffers, ran.type_of(ran.schedule.buffers[contract.dest_buffer].name)
    stored = [_kind(ran.type_of(one.name).name) for one in buffers if one.kind is not BufferKind.INPUT]

    def chunk(buffer: int, rank: int, chunk: int) -> tuple[Array, DType, int | None]:
        name = buffers[buffer].name
        whole = ran.given[name][rank]
        columns = whole.shape[1] if whole.ndim == 2 else None
        return ran.chunk(ran.given, name, (rank, chunk)), ran.type_of(name), columns

    units = [ROUNDOFF.get(one, 0.0) for one in stored]
    numbers = Evaluation(chunk, operation, dtype, max(units), max(SMALLEST.get(one, 0.0) for one in stored))
    places = zip(contract.dest_rank.tolist(), contract.dest_chunk.tolist(), strict=True)
    for row, place in enumerate(places):
        made = value_of(term, row, numbers)
        if dtype.is_float:
            limit = min(LARGEST.get(one, np.inf) for one in stored)
            tolerance = np.where(made.most > limit, np.inf, made.error)
            yield [place], Wanted(None, made.elements, np.asarray(tolerance), dtype)
        else:
            yield [place], Wanted(made.elements, made.elements, made.error, dtype)


def _unknown(ran: Ran, contract: Contract) -> str:
    """Why a contract is not evaluated; empty where it is."""
    schedule = ran.schedule
    visits = [step for step in schedule.steps if isinstance(step, Yield)]
    if any(contract.dest_buffer in step.writes for step in visits):
        return f"a function of the caller writes `{schedule.buffers[contract.dest_buffer].name}`"
    for number in sources_of(contract):
        if schedule.buffers[number].kind not in GIVEN:
            maker = next(step for step in reversed(visits) if number in step.writes)
            return f"a function of the caller, `{maker.name}`, makes `{schedule.buffers[number].name}`"
    return ""


# --- what the words say -----------------------------------------------------------------------------------------------


def promises(schedule: Schedule, contract: Contract) -> Iterator[Promise]:
    """Yield what a contract says of its chunks: a named collective by its definition, any other by its rows."""
    source, ranks = schedule.buffers[contract.source_buffer], range(schedule.num_ranks)
    in_place = contract.source_buffer == contract.dest_buffer
    root = -1 if contract.root is None else contract.root
    is_split = contract.name in SPLIT_SOURCE or (in_place and contract.name in SPLIT_RESULT)
    count = source.num_chunks // len(ranks) if is_split else source.num_chunks
    every = range(count)

    def mine(rank: int, chunk: int) -> int:
        """Return the place of a chunk of the part that a rank owns."""
        return rank * count + chunk if in_place else chunk

    match contract.name:
        case "allreduce":
            yield from (([(r, c) for r in ranks], [(q, c) for q in ranks]) for c in every)
        case "reduce":
            yield from (([(root, c)], [(q, c) for q in ranks]) for c in every)
        case "reduce_scatter":
            yield from (([(r, mine(r, c))], [(q, r * count + c) for q in ranks]) for r in ranks for c in every)
        case "allgather":
            yield from (([(r, q * count + c) for r in ranks], [(q, mine(q, c))]) for q in ranks for c in every)
        case "gather":
            yield from (([(root, q * count + c)], [(q, mine(q, c))]) for q in ranks for c in every)
        case "alltoall":
            yield from (([(r, q * count + c)], [(q, r * count + c)]) for r in ranks for q in ranks for c in every)
        case "broadcast":
            yield from (([(r, c) for r in ranks], [(root, c)]) for c in every)
        case "scatter":
            yield from (([(r, mine(r, c))], [(root, r * count + c)]) for r in ranks for c in every)
        case _:
            yield from _written_out(contract)


def _written_out(contract: Contract) -> Iterator[Promise]:
    """A permutation, or an equality of the text: the ranks and chunks that its expressions name."""
    dests: dict[int, list[Chunk]] = {}
    rows = (contract.dest_rank.tolist(), contract.dest_chunk.tolist(), contract.value.tolist())
    for rank, chunk, value in zip(*rows, strict=True):
        dests.setdefault(value, []).append((rank, chunk))
    for value, of in dests.items():
        terms = list(zip(contract.source_rank[value].tolist(), contract.source_chunk[value].tolist(), strict=True))
        if contract.source_valid is not None:
            terms = [one for one, is_meant in zip(terms, contract.source_valid[value], strict=True) if is_meant]
        yield of, terms


# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Wanted:
    """The expected contents of a chunk: exact elements, or floats within a tolerance (infinite: anything)."""

    exact: Array | None
    values: Array
    tolerance: Array
    dtype: DType

    def wrong(self, got: Array) -> str:
        """Say which element is wrong first; empty where none is."""
        if self.exact is not None:
            if got.shape != self.exact.shape:
                return f"it has {got.size:,} elements, expected {self.exact.size:,}"
            bad = np.flatnonzero(got != self.exact)
            shown = self.exact
        else:
            if got.shape != self.values.shape:
                return f"it has {got.size:,} elements, expected {self.values.size:,}"
            found = self.dtype.widen(got).astype(self.values.dtype)
            with np.errstate(invalid="ignore"):
                bad = np.flatnonzero(~(np.abs(found - self.values) <= self.tolerance))
            got, shown = found, self.values
        if not len(bad):
            return ""
        at = int(bad[0])
        more = "" if self.exact is not None else f" within {self.tolerance[at]:.2g}"
        return f"element {at:,} is {got[at]}, expected {shown[at]}{more}; {len(bad):,} of {got.size:,} are wrong"


def combined(
    values: Sequence[Array], of: tuple[DType, DType], operation: str | None, rounding: Rounding | None
) -> Wanted:
    """Combine the terms of a promise; `of`: the types of the source and of the result."""
    source, dest = of
    none = np.zeros(0)
    same = source is dest and rounding is None
    if len(values) == 1 and same and values[0].dtype == dest.storage:
        return Wanted(values[0], none, none, dest)
    if not source.is_float and not dest.is_float:
        return Wanted(whole(values, dest, operation or "sum"), none, none, dest)
    precise: type[np.floating[Any]] = np.longdouble if dest.name == "float64" else np.float64
    terms = [_precise(one, source, precise) for one in values]
    result, scale, error = _floats(terms, operation or "sum")
    coarse = max((source.name, dest.name), key=lambda name: ROUNDOFF[_kind(name)])
    tolerance = error * ROUNDOFF[_kind(coarse)] * scale + 2 * error * SMALLEST[_kind(coarse)] * _swell(terms, operation)
    if operation in ("max", "min") and same:
        tolerance = np.zeros_like(scale)
    if rounding is not None:
        kind = _kind(rounding.element)
        tolerance = tolerance + scale * (1 + ROUNDOFF[kind]) ** rounding.times - scale
        floor = FLOAT8_FLOOR * scale.max(initial=0) if kind == "float8" else SMALLEST[kind]
        tolerance = tolerance + len(terms) * rounding.times * floor
    tolerance = np.where(_swell(terms, operation) > LARGEST.get(_kind(coarse), np.inf), np.inf, tolerance)
    return Wanted(None, result, np.asarray(tolerance, result.dtype), dest)


def _kind(name: str) -> str:
    return "float8" if name.startswith("float8") else name


def _precise(values: Array, of: DType, precise: type[np.floating[Any]]) -> Array:
    """In the type in which it is evaluated."""
    return (of.widen(values) if of.is_float else values).astype(precise)


def _floats(terms: Sequence[Array], operation: str) -> tuple[Array, Array, int]:
    """The combination, what its errors are relative to, and how many roundings there are at most."""
    total, size = reduce(np.add, terms), reduce(np.add, [np.abs(one) for one in terms])
    match operation:
        case "sum":
            return total, size, len(terms) + 1
        case "avg":
            return total / len(terms), size / len(terms), 2 * len(terms) + 2
        case "prod":
            made = reduce(np.multiply, terms)
            return made, np.abs(made), len(terms) + 1
        case "max" | "min":
            made = reduce(np.maximum if operation == "max" else np.minimum, terms)
            return made, reduce(np.maximum, [np.abs(one) for one in terms]), 1
        case unknown:
            raise AssertionError(unknown)


def _swell(terms: Sequence[Array], operation: str | None) -> Array:
    """The factor by which a product may enlarge the error of a part of it, and the largest size of that part."""
    if operation != "prod":
        return np.ones_like(terms[0])
    return reduce(np.multiply, [np.maximum(np.abs(one), 1) for one in terms])
