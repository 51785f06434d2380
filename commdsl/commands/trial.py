"""Turns a compiled schedule into the outcome of one run: the emitted kernel on host ranks beside the oracle.

Assumes the schedule was proved. The oracle's results are held to the words of `ensure` (`promised`); then the kernel's
to the oracle's, bit for bit, where `ensure` speaks of them; other memory is free. Without a C++ compiler only the
oracle runs, and the trial says so. Does not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, isqrt, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.build import host, host_run
from commdsl.build.emit import Emitted, emit
from commdsl.build.host_ranks import DataRaceError, RowsError
from commdsl.commands.arguments import UsageError
from commdsl.commands.budget import refuse_large
from commdsl.commands.output import bytes_text
from commdsl.commands.promised import Promised, Ran, held_to_ensure, in_one
from commdsl.commands.visited import Visited
from commdsl.compiler import CompiledSchedule
from commdsl.cost.profile import Profile
from commdsl.ir import interpret
from commdsl.ir.classes import Unit, joining, types, units
from commdsl.ir.contracts import Contract, is_exact
from commdsl.ir.extents import depths
from commdsl.ir.functions import ROWWISE, Extent
from commdsl.ir.lengths import block_lengths, num_entries
from commdsl.ir.products import stopping
from commdsl.ir.schedules import Schedule, Yield
from commdsl.language.kinds import BufferKind
from commdsl.machine import dtypes
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import Array, DType
from commdsl.program.plan import Plan
from commdsl.program.sizes import chunk_range
from commdsl.program.stamps import layout, stamped
from commdsl.program.timeouts import CommTimeout

SEED = 20
BUFFER_BYTES = 1 << 20
SHARE_OF_SOME = 0.75
"""Of blocks that have lengths of their own; the others are of nothing."""

ROWS = 8
"""Into which a tensor falls, where it is whole rows and divides by it."""

COPIES = 7
"""Of a tensor, that a run has at once."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: sizes, element type, operation, and how ranks are made. None: not said."""

    bytes: int | None
    dtype: str
    op: str | None
    sanitize: bool
    processes: bool
    profile: bool = False  # by the build that writes time stamps

    @property
    def mode(self) -> str:
        return "processes" if self.processes else "threads"

    @property
    def buffer_bytes(self) -> int:
        """Of the largest buffer of a rank."""
        return BUFFER_BYTES if self.bytes is None else self.bytes

    @property
    def operation(self) -> str:
        return self.op or "sum"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came out. `compiler` is None where the interpreter ran alone; `fault` is empty when all is right."""

    block_bytes: int
    compiler: str | None
    remark: str
    compared_bytes: int
    fault: str
    seconds: float
    profiles: tuple[Profile, ...] = ()  # by rank, where they were asked for
    promised: Promised | None = None  # of a schedule that ran to its end: what its contracts say

    @property
    def is_right(self) -> bool:
        return not self.fault


Found: TypeAlias = tuple[int, str, tuple[Profile, ...]]
"""Of a run: the bytes compared, the first difference in words, and the profiles, where they were asked for."""


def find_dtype(name: str, op: str, *, reduces: bool, computes: bool = False) -> DType:
    """The element type; UsageError when it is unknown, has no such operation and the schedule reduces, or is of whole
    numbers and the schedule multiplies or norms.
    """
    if name not in dtypes.BY_NAME:
        raise UsageError(f"--dtype expects one of {', '.join(dtypes.BY_NAME)}, got `{name}`")
    if op not in dtypes.OPS:
        raise UsageError(f"--op expects one of {', '.join(dtypes.OPS)}, got `{op}`")
    found = dtypes.BY_NAME[name]
    if reduces and op not in found.ops:
        raise UsageError(f"{name} has no `{op}`; it has {', '.join(found.ops) or 'none: its bytes are only moved'}")
    if computes and not found.is_float:
        raise UsageError(f"{name} is of whole numbers: what multiplies or norms takes floats")
    return found


def trial(compiled: CompiledSchedule, settings: Settings) -> Trial:
    """Runs once. A wrong result or a time-out is in `fault`."""
    reduces = compiled.plan.has_reduction
    if settings.op is not None and not reduces:
        raise UsageError(f"`{compiled.schedule.name}` combines nothing: leave out --op {settings.op}")
    if settings.op is not None and not compiled.plan.asks:
        raise UsageError(f"`{compiled.schedule.name}` says itself how it combines: leave out --op {settings.op}")
    stopped, plan = stopping(compiled.schedule), compiled.plan
    schedule = stopped.schedule
    computes = schedule.has_products or plan.by_row is not None
    dtype = find_dtype(settings.dtype, settings.operation, reduces=reduces and not plan.is_visited, computes=computes)
    if schedule.cast is not None and not dtype.casts:
        raise UsageError(f"--dtype {dtype.name} does not travel as {schedule.cast.words}")
    of = types(schedule, dtype)
    for name in reduced(schedule) if compiled.plan.is_visited else ():
        find_dtype(of[name].name, settings.operation, reduces=True)
    averages = reduces and settings.operation == "avg"
    if averages and compiled.plan.is_visited:
        raise UsageError("with visits there is no `avg`: take the sum and divide it")
    most = max(buffer.blocks * of[buffer.name].size for buffer in schedule.buffers)
    elements = settings.buffer_bytes // most
    if elements == 0:
        raise UsageError(
            f"--bytes {bytes_text(settings.buffer_bytes)}: nothing to move or compare, as one element in each block of "
            f"the largest buffer takes {bytes_text(most)}"
        )
    if schedule.has_products:
        elements = max(isqrt(elements), 1) ** 2  # blocks are square matrices
    largest = max(one.size for one in of.values())
    refuse_large(memory_of(schedule, elements * largest), settings.buffer_bytes, compiled.plan.num_ranks)
    inputs = make_inputs(schedule, of, elements)
    block_bytes = elements * dtype.size
    lengths = () if schedule.lengths is None else inputs[schedule.lengths.table][0].tolist()
    blocks = tuple(length * dtype.size for length in lengths) or block_bytes
    plan, emitted = stamped_of(compiled) if settings.profile else (compiled.plan, compiled.emitted)

    visited, operation = Visited(schedule, elements, dtype, depths(schedule, inputs)), settings.operation
    expected = interpret.run(schedule, inputs, dtype, operation, visited.bodies)
    given, left = (in_one(compiled.schedule, stopped.parts, tensors) for tensors in (inputs, expected.outputs))
    declared, handings = types(compiled.schedule, dtype), visited.handings(expected)
    ran = Ran(compiled.schedule, dtype, blocks, declared, operation, given, left, handings)
    promised = held_to_ensure(ran, compiled.schedule.contracts)
    if promised.fault:
        return Trial(block_bytes, None, "", 0, f"the oracle broke the contract: {promised.fault}", 0.0, (), promised)

    def run() -> Found:
        compared, fault, profiles = 0, "", tuple[Profile, ...]()
        if not plan.is_visited:
            found = host_run.run(
                plan, emitted, inputs, dtype, operation, mode=settings.mode, sanitize=settings.sanitize
            )
            compared, fault = compare(schedule, expected, found, blocks)
            within = [contract for contract in schedule.contracts if not is_exact(contract)]
            held = held_to_ensure(replace(ran, left=found.outputs), within)
            compared, fault = compared + held.compared_bytes, fault or held.fault
            profiles = tuple(profiled(plan, found))
        if compiled.visits is not None and not fault and not averages:
            options = host_run.Options(mode=settings.mode, sanitize=settings.sanitize)
            further, fault = visited.compare(compiled, expected, inputs, operation, options)
            compared += further
        return compared, fault, profiles

    return replace(tried(run, settings, block_bytes), promised=promised)


def tried(run: Callable[[], Found], settings: Settings, block_bytes: int = 0) -> Trial:
    """What a run finds, and how long it takes: a time-out or a race is in `fault`, and without a C++ compiler nothing
    is compared.
    """
    start = time.perf_counter()
    try:
        compared, fault, profiles = run()
        name = " ".join(host.find_compiler(from_environment()).command)
    except host.NoHostCompilerError as error:
        if settings.sanitize:
            raise UsageError(f"--sanitize needs a C++ compiler: {error}") from error
        return Trial(block_bytes, None, str(error), 0, "", time.perf_counter() - start)
    except (CommTimeout, RowsError, DataRaceError) as error:
        return Trial(block_bytes, "", "", 0, str(error), time.perf_counter() - start)
    if not compared and not fault:
        fault = "no byte was compared: nothing that ran is held to anything"
    return Trial(block_bytes, name, "", compared, fault, time.perf_counter() - start, profiles)


def stamped_of(compiled: CompiledSchedule) -> tuple[Plan, Emitted]:
    """The build that writes time stamps."""
    if compiled.plan.is_visited:
        raise UsageError(f"--profile is of one launch; of those of `{compiled.plan.name}` `op.profiled` is, in Python")
    if compiled.plan.moves.has_heads:
        raise UsageError(f"`{compiled.plan.name}` has as many rounds as peers say: its kernel has no time stamps")
    plan = stamped(compiled.plan)
    return plan, emit(plan)


def profiled(plan: Plan, found: host_run.HostResult) -> Iterator[Profile]:
    """By rank, where the build writes time stamps."""
    for rank, written in enumerate(found.intervals):
        yield Profile.of(plan.name, rank, layout(plan, rank, found.launch), written)


def reduced(schedule: Schedule) -> set[str]:
    """The buffers that moves combine, and into which they do."""
    combining = (moves for moves in joining(schedule) if moves.accumulate or moves.is_list)
    return {schedule.buffers[end].name for moves in combining for end in (moves.source_buffer, moves.dest_buffer)}


def memory_of(schedule: Schedule, block_bytes: int) -> int:
    """The bytes that a run takes, about: every tensor of every rank and what it hands over, as the oracle and the
    kernel have them and as they are compared.
    """
    handed = sum(schedule.buffers[step.buffer].blocks for step in schedule.steps if isinstance(step, Yield))
    blocks = sum(buffer.blocks for buffer in schedule.buffers) + handed
    return COPIES * blocks * block_bytes * schedule.num_ranks


def make_inputs(schedule: Schedule, of: Mapping[str, DType], elements: int) -> dict[str, list[Array]]:
    """Random elements for every rank, the same on every machine; factors as matrices."""
    random = np.random.default_rng(SEED)
    inputs: dict[str, list[Array]] = {}
    blocks: int | tuple[int, ...] = elements
    if schedule.lengths is not None:  # some of none, one of all
        count = num_entries(schedule.num_ranks, len(schedule.lengths.axes))
        table = random.integers(0, elements + 1, count) * (random.random(count) < SHARE_OF_SOME)
        table[-1] = elements
        inputs[schedule.lengths.table], blocks = [table], tuple(table.tolist())
    for buffer in schedule.buffers:
        if buffer.kind in (BufferKind.INPUT, BufferKind.INOUT):
            of_ranks = block_lengths(buffer.lengths, schedule.num_ranks, buffer.blocks, blocks)
            inputs[buffer.name] = [make_array(random, of[buffer.name], sum(one)) for one in of_ranks]
    for applied in (one.applied for one in schedule.rowwise[:1]):
        assert applied is not None
        for number, extent in zip(applied.given, ROWWISE[applied.function].given, strict=True):
            name = schedule.buffers[number].name
            inputs[name] = [_of_rows(values, extent) for values in inputs[name]]
    for name, unit in units(schedule).items():
        if name in inputs and unit is not None and unit.dims:
            blocks_of = next(one.blocks for one in schedule.buffers if one.name == name)
            inputs[name] = [_matrices(random, of[name], unit, elements, blocks_of) for _ in inputs[name]]
    return inputs


def _matrices(random: np.random.Generator, dtype: DType, unit: Unit, elements: int, blocks: int) -> Array:
    """Blocks of the sides that a schedule says, of about so many elements each; a bias is flat."""
    even = max(isqrt(elements) // 2 * 2, 2) if elements > 1 else 2
    first, *rest = (even << dim.scale if dim.scale >= 0 else even >> -dim.scale for dim in unit.dims)
    values = make_array(random, dtype, blocks * first * prod(rest))
    return values.reshape(blocks * first, *rest) if rest else values


def _of_rows(values: Array, extent: Extent) -> Array:
    """Of as many numbers as rows have, what a row-wise function is given; what is one number is not negative."""
    match extent:
        case Extent.ROWS:
            return values
        case Extent.ROW:
            return values[: len(values) // gcd(len(values), ROWS)]
        case Extent.NUMBER:
            return np.abs(values[:1])


def make_array(random: np.random.Generator, dtype: DType, size: int) -> Array:
    """Normal numbers for floating point, small whole numbers for integers."""
    if dtype.is_float:
        return dtype.from_float32(random.standard_normal(size, dtype=np.float32))
    return random.integers(0, 100, size).astype(dtype.storage)


def compare(
    schedule: Schedule, expected: interpret.Result, found: host_run.HostResult, blocks: int | tuple[int, ...]
) -> tuple[int, str]:
    """The bytes compared, and the first difference in words, but for results of which kernels choose the last bits."""
    compared, exact = 0, replace(schedule, contracts=tuple(filter(is_exact, schedule.contracts)))
    for name, rank, first, last in locations(exact, blocks):
        wanted, got = (as_bytes(result.outputs[name][rank])[first:last] for result in (expected, found))
        compared += last - first
        if not np.array_equal(wanted, got):
            return compared, difference(name, rank, first, wanted, got)
    for rank in range(schedule.num_ranks) if expected.yields else ():
        wanted = as_bytes(np.concatenate([handed[rank] for handed in expected.yields]))
        got = as_bytes(found.yields[rank])
        compared += len(wanted)
        if not np.array_equal(wanted, got):
            return compared, difference("yield", rank, 0, wanted, got)
    return compared, ""


def locations(schedule: Schedule, blocks: int | tuple[int, ...]) -> Iterator[tuple[str, int, int, int]]:
    """Every place a contract speaks of: buffer, rank, and the bytes there."""
    for contract in schedule.contracts:
        yield from contract_locations(schedule, contract, blocks)


def contract_locations(
    schedule: Schedule, contract: Contract, blocks: int | tuple[int, ...]
) -> Iterator[tuple[str, int, int, int]]:
    buffer = schedule.buffers[contract.dest_buffer]
    of_ranks = block_lengths(buffer.lengths, schedule.num_ranks, buffer.blocks, blocks)
    for rank, chunk in zip(contract.dest_rank.tolist(), contract.dest_chunk.tolist(), strict=True):
        yield buffer.name, rank, *chunk_range(of_ranks[rank], buffer.cut, chunk)


def as_bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def difference(name: str, rank: int, first: int, wanted: NDArray[np.uint8], got: NDArray[np.uint8]) -> str:
    where = np.flatnonzero(wanted != got)
    byte = first + int(where[0])
    return f"`{name}` on rank {rank} differs from the oracle in {len(where):,} bytes, first at byte {byte:,}"
