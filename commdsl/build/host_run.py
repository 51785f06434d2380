"""Turns a Plan of chunks and the tensors of every rank into their results by running the emitted kernel on host ranks.

Assumes the emitted text is the Plan's, and all ranks have tensors of the same block size in a call. Does not compare
with the oracle; callers do. What runs is `host_ranks`'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.build.arena import Bytes
from commdsl.build.emit import Emitted, defines
from commdsl.build.host_ranks import DataRaceError, Running, Seats, Values, built, run_ranks, seats
from commdsl.ir.classes import SUM
from commdsl.ir.functions import ROWWISE, Extent
from commdsl.ir.lengths import known_to
from commdsl.machine.config import Config
from commdsl.machine.dtypes import BY_NAME
from commdsl.program.memory import Rights, Tensor
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch, block_bytes_of, host_launch, tensor_bytes
from commdsl.program.stamps import INTERVAL, layout

__all__ = ["DataRaceError", "ElementType", "HostResult", "Options", "run", "run_calls"]

Array: TypeAlias = NDArray[np.generic]
Inputs: TypeAlias = Mapping[str, Sequence[Array]]
"""By buffer, then by rank: 1-D arrays of whole blocks in storage type. Where blocks have lengths of their own, by
the name of their table one array of them, in elements.
"""


class ElementType(Protocol):
    """What a run needs of a DType: its name in elements.cuh and how numpy stores it."""

    @property
    def name(self) -> str: ...

    @property
    def storage(self) -> np.dtype[np.generic]: ...


@dataclass(frozen=True, slots=True)
class HostResult:
    """What one call left on every rank."""

    outputs: dict[str, list[Array]]  # by buffer, then by rank
    yields: list[Array]  # by rank, all yields of a rank stacked; empty when the schedule yields nothing
    launch: Launch
    intervals: list[NDArray[np.void]]  # by rank, of a stamped Plan, as its `layout` has them; else empty


@dataclass(frozen=True, slots=True)
class Options(Running):
    """How to run chunks; none of it may change the result."""

    mode: str = "threads"  # or "processes"
    sanitize: bool = False
    shift: int = 0  # bytes by which all tensors are off a 16-byte line
    in_place: bool = False  # alias-safe inout buffers: read and written tensor are the same memory
    reuse: bool = False  # what lands does so in the same memory in all calls: only the last one's results stay
    first_round: int = 0  # what the round counters hold before the first call


def run(
    plan: Plan,
    emitted: Emitted,
    inputs: Inputs,
    dtype: ElementType,
    op: str = "sum",
    calls: int = 1,
    mode: str = "threads",
    sanitize: bool = False,
    timeout: float | None = None,
    absent: Collection[int] = frozenset(),
    config: Config | None = None,
) -> HostResult:
    """The last of `calls` equal calls on one heap. Raises CommTimeout, DataRaceError, NoHostCompilerError."""
    options = Options(timeout, frozenset(absent), mode=mode, sanitize=sanitize)
    return run_calls(plan, emitted, [inputs] * calls, dtype, op, options, config)[-1]


def run_calls(
    plan: Plan,
    emitted: Emitted,
    inputs: Sequence[Inputs],
    dtype: ElementType,
    op: str = "sum",
    options: Options = Options(),
    config: Config | None = None,
) -> list[HostResult]:
    """One call after another on one heap, each with inputs and a size of its own; ranks are not joined in between."""
    if not inputs:
        return []
    macros = defines(plan, dtype.name, op)
    kernel = built(plan, emitted, macros, mode=options.mode, sanitize=options.sanitize, config=config)
    where = seats(plan, plan.symmetric_bytes)
    if options.first_round:
        _begin_at(plan, where, options.first_round)
    launches = [_launches(plan, given, dtype) for given in inputs]
    sizes = [max(launch.block_bytes for launch in of_ranks) for of_ranks in launches]
    own = _own(plan, where, max(sizes), options.shift)
    places = _landing(plan, where, sizes, options)
    each = zip(inputs, launches, places, strict=True)
    laid = [_lay(plan, where, given, of_ranks, own, at, dtype, options) for given, of_ranks, at in each]
    calls = [_values(plan, call) for call in laid]
    data = run_ranks(kernel, where, calls, options, config)
    return [_collect(plan, call, data, dtype) for call in laid]


# --- where tensors lie ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Laid:
    """The tensors of one call."""

    launches: tuple[Launch, ...]  # by rank
    tensors: tuple[tuple[int, ...], ...]  # offsets by rank, tensor
    landing: tuple[int, ...]  # offsets by rank; none where nothing lands
    stamps: tuple[tuple[int, int], ...]  # by rank where time stamps go, and how many bytes; none of a plain Plan


Own: TypeAlias = Mapping[tuple[int, str], int]
"""Offsets by rank and tensor."""


def _own(plan: Plan, where: Seats, block_bytes: int, shift: int) -> Own:
    """What only the kernel uses lies in the same memory in all calls."""
    return {
        (rank, tensor.name): where.room.poisoned(
            tensor_bytes(tensor, block_bytes), f"`{tensor.name}` of rank {rank}", align=16, shift=shift
        )
        for rank in range(plan.num_ranks)
        for tensor in plan.moves.tensors
        if tensor.access is Rights.OWN
    }


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where what lands begins on each rank, and by tensor of a call how far behind that it is."""

    base: tuple[int, ...]
    at: Mapping[str, int]


def _landing(plan: Plan, where: Seats, sizes: Sequence[int], options: Options) -> list[_Landing]:
    """By call; `sizes`: bytes of a block."""
    found: list[dict[str, int]] = []
    most = 0
    for block_bytes in sizes:
        end = 0 if options.reuse else most
        at: dict[str, int] = {}
        for tensor in (one for one in plan.moves.tensors if one.lands):
            at[tensor.name] = end + options.shift
            end += -(-(tensor_bytes(tensor, block_bytes) + options.shift) // 16) * 16
        most = max(most, end)
        found.append(at)
    ranks = range(plan.num_ranks) if plan.moves.lands else ()
    base = tuple(where.room.poisoned(most, f"what lands on rank {rank}", align=16) for rank in ranks)
    return [_Landing(base, at) for at in found]


def _lay(
    plan: Plan,
    where: Seats,
    inputs: Inputs,
    launches: tuple[Launch, ...],
    own: Own,
    landing: _Landing,
    dtype: ElementType,
    options: Options,
) -> _Laid:
    """What is read, and a pattern where results go. `in_place` gives a result the memory of its twin."""
    ranks: list[tuple[int, ...]] = []
    for rank in range(plan.num_ranks):
        offsets: list[int] = []
        read: dict[str, int] = {}
        for tensor in plan.moves.tensors:
            name, place = f"`{tensor.name}` of rank {rank}", {"align": 16, "shift": options.shift}
            if tensor.access is Rights.READ:
                given: Bytes = np.ascontiguousarray(inputs[tensor.name][rank]).view(np.uint8)
                offsets.append(where.room.put(given, name, **place))
                read[tensor.name] = offsets[-1]
            elif tensor.access is Rights.OWN:
                offsets.append(own[rank, tensor.name])
            elif tensor.lands:
                offsets.append(landing.base[rank] + landing.at[tensor.name])
            elif options.in_place and tensor.name in plan.moves.alias_safe and tensor.name in read:
                offsets.append(read[tensor.name])
            else:
                offsets.append(where.room.poisoned(_nbytes(plan, tensor, rank, launches[rank], dtype), name, **place))
        ranks.append(tuple(offsets))
    stamps = tuple(_stamps(plan, where, launches))
    return _Laid(launches, tuple(ranks), landing.base, stamps)


def _stamps(plan: Plan, where: Seats, launches: tuple[Launch, ...]) -> Iterator[tuple[int, int]]:
    for rank in range(plan.num_ranks) if plan.stamped else ():
        size = layout(plan, rank, launches[rank]).nbytes
        yield where.room.take(size, f"the time stamps of rank {rank}"), size


def _launches(plan: Plan, inputs: Inputs, dtype: ElementType) -> tuple[Launch, ...]:
    """How a call runs, by rank: alike, but for what ranks know of lengths."""
    ranks, row_bytes, lengths = plan.num_ranks, _row_bytes(plan, inputs), plan.moves.lengths
    if lengths is None:
        return (host_launch(plan.moves, _block_bytes(plan, inputs, dtype), row_bytes),) * ranks
    table = [int(length) * dtype.storage.itemsize for length in inputs[lengths.table][0]]
    return tuple(host_launch(plan.moves, known_to(rank, ranks, table), row_bytes) for rank in range(ranks))


def _block_bytes(plan: Plan, inputs: Inputs, dtype: ElementType) -> int:
    """The one block size of all read tensors of all ranks in a call, sums as if they were of the type of the others;
    ValueError where they differ.
    """
    found: dict[int, str] = {}
    others = _others(plan)
    for number, tensor in enumerate(plan.moves.tensors):
        if tensor.access is not Rights.READ or number in others:
            continue
        arrays = inputs[tensor.name]
        if len(arrays) != plan.num_ranks:
            raise ValueError(f"`{tensor.name}` has {len(arrays)} arrays for {plan.num_ranks} ranks")
        storage = _type(tensor, dtype).storage
        for array in arrays:
            if array.dtype != storage or array.ndim != 1:
                raise ValueError(f"`{tensor.name}` is {array.ndim}-D {array.dtype}, expected 1-D {storage}")
            found.setdefault(block_bytes_of(tensor, array.size * dtype.storage.itemsize), tensor.name)
    if len(found) != 1:
        sizes = ", ".join(f"{size} bytes (`{name}`)" for size, name in sorted(found.items()))
        raise ValueError(f"all blocks of a schedule are equally long, found {sizes}")
    return next(iter(found))


def _others(plan: Plan) -> dict[int, Extent]:
    """The tensors that are not as long as blocks, by number."""
    if plan.by_row is None:
        return {}
    given = zip(plan.by_row.given, ROWWISE[plan.by_row.function].given, strict=True)
    return {number: extent for number, extent in given if extent is not Extent.ROWS}


def _row_bytes(plan: Plan, inputs: Inputs) -> int:
    """Of a row, where lanes have whole ones."""
    return 0 if plan.by_row is None else inputs[plan.moves.tensors[plan.by_row.row].name][0].nbytes


def _type(tensor: Tensor, dtype: ElementType) -> ElementType:
    return BY_NAME[SUM] if tensor.is_sum else dtype


def _nbytes(plan: Plan, tensor: Tensor, rank: int, launch: Launch, dtype: ElementType) -> int:
    nbytes = sum(launch.blocks_of(plan.moves, tensor, rank))
    return nbytes // dtype.storage.itemsize * _type(tensor, dtype).storage.itemsize


def _begin_at(plan: Plan, where: Seats, first: int) -> None:
    """Counters and flags as they stand after `first` rounds."""
    moves = plan.moves
    for rank, heap in enumerate(where.heaps):
        flags = np.zeros((moves.lanes, moves.flags_per_lane, 8), np.uint64)
        flags[:, :, 0] = np.array([first * int(count) % 2**64 for count in moves.signals_per_round[:, rank]], np.uint64)
        rounds = np.zeros((moves.lanes, 8), np.uint64)
        rounds[:, [0, 1, 3]] = first  # done, entered, and tiles done
        for at, words in ((heap, flags), (heap + moves.flags_bytes, rounds)):
            where.room.contents.append((at, words.reshape(-1).view(np.uint8)))


def _values(plan: Plan, laid: _Laid) -> list[Values]:
    """What every rank's kernel is told of one call."""
    stamps = [at for at, _ in laid.stamps] or [0] * plan.num_ranks
    return [
        {"stamps": at, "landing": laid.landing, "tensors": offsets, **launch.arguments_of(plan.moves, rank)}
        for rank, (at, offsets, launch) in enumerate(zip(stamps, laid.tensors, laid.launches, strict=True))
    ]


def _collect(plan: Plan, laid: _Laid, data: Bytes, dtype: ElementType) -> HostResult:
    outputs: dict[str, list[Array]] = {}
    yields: list[Array] = []
    for index, tensor in enumerate(plan.moves.tensors):
        if tensor.access is not Rights.WRITE:
            continue
        storage = _type(tensor, dtype).storage
        found = [
            data[offsets[index] : offsets[index] + _nbytes(plan, tensor, rank, laid.launches[rank], dtype)]
            for rank, offsets in enumerate(laid.tensors)
        ]
        arrays: list[Array] = [np.frombuffer(part.tobytes(), storage) for part in found]
        if tensor.is_yield:
            yields = arrays
        else:
            outputs[tensor.name] = arrays
    written = (data[at : at + size].tobytes() for at, size in laid.stamps)
    return HostResult(outputs, yields, laid.launches[0], [np.frombuffer(one, INTERVAL) for one in written])
