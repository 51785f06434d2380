"""Turns calls of a dispatch into what its kernel leaves on every rank, and, from the Routes alone, into what it must.

Assumes legal flows. Ranks are threads of this process, or of one under ThreadSanitizer. Calls follow each other on one
heap, and nothing joins the ranks in between. Every tensor has guards on both sides, and results hold a pattern before.
Does not use torch's ops: `commdsl.dispatch` has tests of its own.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commdsl import compiler
from commdsl.build import host, host_run
from commdsl.build.emit import emit
from commdsl.machine.config import from_environment
from commdsl.program.arguments import arguments
from commdsl.program.plan import Plan
from commdsl.program.tiles import Flow, table
from commdsl.program.timeouts import RECORD_BYTES, ErrorRecord, unpack

Bytes = NDArray[np.uint8]
LINE, GUARD_BYTES, GUARD, UNWRITTEN = 64, 64, 0x5A, 0xA5
TENSORS = ("q", "k", "v")


@dataclass(frozen=True, eq=False)
class Call:
    """One call on all ranks."""

    flows: tuple[Flow, ...]
    inputs: Sequence[Sequence[Bytes]] | None  # by tensor, then rank: (rows, width); None: what the call before left
    packed: bool
    lanes: tuple[int, ...]  # by rank
    tile_bytes: int = 256
    slot: int | None = None  # results lie in that of the memories which calls share; None: in memory of their own


@dataclass(frozen=True)
class Damage:
    """Bits of one word of a rank's table in the last call."""

    rank: int
    word: int
    bits: int


class Reported(Exception):  # noqa: N818 - it is a report
    """A rank gave up; its record."""

    def __init__(self, record: ErrorRecord, code: int) -> None:
        super().__init__(record, code)
        self.record = record
        self.code = code


# --- the oracle -------------------------------------------------------------------------------------------------------


def expected(flow: Flow, inputs: Sequence[Bytes], dtype: str) -> list[Bytes]:
    """By rank what one tensor must hold: rows where their routes lead; copies summed in order, in float32, rounded
    once; zeros where nothing leads.
    """
    routes = flow.routes
    outputs = [np.zeros((int(rows), flow.width), np.uint8) for rows in flow.rows]
    if not flow.is_sum:
        for at in range(routes.num):
            outputs[routes.dest[at]][_rows(routes.dest_row[at], routes.length[at])] = _sent(flow, inputs, at)
        return outputs
    totals = [np.zeros((len(rows), flow.width // np.dtype(dtype).itemsize), np.float32) for rows in outputs]
    touched = [np.zeros((len(rows), 1), np.bool_) for rows in outputs]
    for at in np.argsort(routes.copy, kind="stable"):
        dest = routes.dest[at]
        rows = _rows(routes.dest_row[at] - routes.copy[at] * flow.rows[dest], routes.length[at])
        value = np.ascontiguousarray(_sent(flow, inputs, at)).view(dtype).astype(np.float32)
        totals[dest][rows] = np.where(touched[dest][rows], totals[dest][rows] + value, value)
        touched[dest][rows] = True
    return [total.astype(dtype).view(np.uint8).reshape(rows.shape) for total, rows in zip(totals, outputs, strict=True)]


def _rows(first: int, count: int) -> slice:
    return slice(int(first), int(first + count))


def _sent(flow: Flow, inputs: Sequence[Bytes], at: int) -> Bytes:
    routes = flow.routes
    found: Bytes = inputs[routes.source[at]][_rows(routes.source_row[at], routes.length[at])]
    return found


def chained(calls: Sequence[Call], dtype: str) -> list[list[list[Bytes]]]:
    """By call, tensor and rank what must be there."""
    found: list[list[list[Bytes]]] = []
    for call in calls:
        inputs = found[-1] if call.inputs is None else call.inputs
        found.append([expected(flow, given, dtype) for flow, given in zip(call.flows, inputs, strict=True)])
    return found


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A kernel, built for this machine."""

    plan: Plan
    path: Path
    is_sanitized: bool


def launched(num_ranks: int, lanes: int = 3, tensors: tuple[str, ...] = TENSORS) -> Plan:
    """One text for both puts: which it is stands in the tables."""
    rows = "   ".join(f"rows {name}[T]" for name in tensors)
    text = f"""dispatch qkv for P ranks {{
      {rows}
      route home[S, C] for {", ".join(tensors)}
      place home by (source rank, shard)
      tune {{ sms {lanes}   threads 32   tile 256 B }}
    }}"""
    files = compiler.read_text(text, "by_hand.comm", Path())
    return compiler.check_dispatch(files, ranks=num_ranks).plan


def program(of: Plan, dtype: str = "float32", *, sanitize: bool = False) -> Program:
    config, macros = from_environment(), (f"COMMDSL_DTYPE={dtype}", "COMMDSL_CHECK=1")
    build = host.build_sanitized if sanitize else host.build
    return Program(of, build(emit(of), macros, config), sanitize)


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """Offsets are handed out first; then the memory is made and filled."""

    size: int = 0
    contents: list[tuple[int, Bytes]] = field(default_factory=list)
    guards: list[tuple[int, int]] = field(default_factory=list)

    def take(self, size: int, *, align: int = LINE, shift: int = 0) -> int:
        """Room between two guards; zeros until something is put there."""
        at = -(-(self.size + GUARD_BYTES) // align) * align + shift
        self.guards += [(at - GUARD_BYTES, at), (at + size, at + size + GUARD_BYTES)]
        self.size = at + size + GUARD_BYTES
        return at

    def put(self, content: Bytes, *, align: int = LINE, shift: int = 0) -> int:
        at = self.take(content.size, align=align, shift=shift)
        self.contents.append((at, content.reshape(-1)))
        return at

    def fill(self, data: Bytes) -> None:
        for begin, end in self.guards:
            data[begin:end] = GUARD
        for at, content in self.contents:
            data[at : at + content.size] = content

    def broken_guards(self, data: Bytes) -> list[int]:
        return [begin for begin, end in self.guards if (data[begin:end] != GUARD).any()]


@dataclass(frozen=True)
class Layout:
    """Where everything is, and the packed arguments with offsets for addresses."""

    memory: Memory
    errors: list[int]
    outputs: list[list[list[int]]]  # by call, tensor, rank
    arguments: bytes  # calls x ranks


def layout(of: Plan, calls: Sequence[Call], options: Options) -> Layout:
    """Results are off their alignment; those of one slot lie in one place, as large as the largest of them."""
    ranks, memory = range(of.num_ranks), Memory()
    errors = [memory.take(RECORD_BYTES) for _ in ranks]
    tables = [
        [table(call.flows, rank, packed=call.packed, tile_bytes=call.tile_bytes) for rank in ranks] for call in calls
    ]
    if options.damage is not None:
        tables[-1][options.damage.rank].words[options.damage.word] ^= options.damage.bits
    waiting = [0] * len(of.push.given)
    for call, row in zip(calls, tables, strict=True):
        for tensor, flow in enumerate(call.flows):
            waiting[tensor] = max(waiting[tensor], row[0].waiting_rows[tensor] * flow.width)
    ends = np.cumsum([-(-of.symmetric_bytes // LINE) * LINE, *(-(-size // LINE) * LINE for size in waiting)]).tolist()
    heaps = [memory.take(ends[-1]) for _ in ranks]
    outputs = _results(memory, of, calls)
    packed, inputs = b"", []
    for number, (call, row) in enumerate(zip(calls, tables, strict=True)):
        if call.inputs is None:
            inputs, counts = outputs[number - 1], [flow.rows for flow in calls[number - 1].flows]
        else:
            inputs = [[memory.put(rows, shift=2 * rank) for rank, rows in enumerate(given)] for given in call.inputs]
            counts = [[len(rows) for rows in given] for given in call.inputs]
        room = [size // flow.width for size, flow in zip(waiting, call.flows, strict=False)]
        for rank in ranks:
            packed += arguments(of).pack(
                {
                    "heap": heaps,
                    "timeout_ns": int(options.timeout * 1e9),
                    "error": errors[rank],
                    "waiting": ends[:-1],
                    "waiting_rows": room,
                    "table": memory.put(row[rank].words.view(np.uint8)),
                    "inputs": [place[rank] for place in inputs],
                    "outputs": [place[rank] for place in outputs[number]],
                    "row_bytes": [flow.width for flow in call.flows],
                    "input_rows": [int(count[rank]) for count in counts],
                    "output_rows": [int(flow.rows[rank]) for flow in call.flows],
                    "rank": rank,
                    "active_lanes": call.lanes[rank],
                }
            )
    return Layout(memory, errors, outputs, packed)


def _results(memory: Memory, of: Plan, calls: Sequence[Call]) -> list[list[list[int]]]:
    sizes: dict[tuple[int | None, int, int, int], int] = {}
    keys = []
    for number, call in enumerate(calls):
        which = (call.slot, -1 if call.slot is not None else number)
        keys.append([[(*which, tensor, rank) for rank in range(of.num_ranks)] for tensor in range(len(call.flows))])
        for tensor, flow in enumerate(call.flows):
            for rank in range(of.num_ranks):
                key = keys[-1][tensor][rank]
                sizes[key] = max(sizes.get(key, 0), int(flow.rows[rank]) * flow.width)
    places = {key: memory.put(np.full(size, UNWRITTEN, np.uint8), shift=2 * key[3] + 6) for key, size in sizes.items()}
    return [[[places[key] for key in row] for row in call] for call in keys]


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    timeout: float = 20.0
    max_delay: float = 0.0  # seconds: every rank starts every call after a random part of it
    seed: int = 0
    damage: Damage | None = None


def run(made: Program, calls: Sequence[Call], options: Options = Options()) -> list[list[list[Bytes]]]:
    """By call, tensor and rank what lies in the results' memory when all calls are over.

    Raises DataRaceError, Reported for a rank that gave up, AssertionError for a guard that was written over.
    """
    of = made.plan
    found = layout(of, calls, options)
    random = np.random.default_rng(options.seed).random((len(calls), of.num_ranks))
    delays = (random * options.max_delay * 1e9).astype(np.uint64).tobytes()
    data = (
        _run_apart(made, found, len(calls), delays) if made.is_sanitized else _run_here(made, found, len(calls), delays)
    )
    assert found.memory.broken_guards(data) == []
    for at in found.errors:
        record = unpack(data[at : at + RECORD_BYTES].tobytes())
        if record is not None:
            raise Reported(record, int(data[at]))
    return [
        [
            [_at(data, at, int(flow.rows[rank]), flow.width) for rank, at in enumerate(places)]
            for flow, places in zip(call.flows, row, strict=True)
        ]
        for call, row in zip(calls, found.outputs, strict=True)
    ]


def _at(data: Bytes, at: int, rows: int, width: int) -> Bytes:
    return data[at : at + rows * width].reshape(rows, width).copy()


def _run_here(made: Program, found: Layout, num_calls: int, delays: bytes) -> Bytes:
    """In this process; ctypes releases the GIL."""
    room = np.zeros(found.memory.size + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    data = room[begin : begin + found.memory.size]
    found.memory.fill(data)
    launches = num_calls * made.plan.num_ranks
    size = len(found.arguments) // launches
    packed = bytearray(found.arguments)
    for launch in range(launches):
        words = np.frombuffer(packed, np.uint64, size // 8, launch * size)
        words[[*arguments(made.plan).address_words]] += np.uint64(data.ctypes.data)
    start = ctypes.CDLL(str(made.path)).commdsl_launch
    assert start(bytes(packed), made.plan.num_ranks, num_calls, delays) == 0
    return data


def _run_apart(made: Program, found: Layout, num_calls: int, delays: bytes) -> Bytes:
    """In a process of its own, whose threads are watched."""
    of = made.plan
    with tempfile.TemporaryDirectory(prefix="commdsl-") as folder:
        arena, job = Path(folder) / "arena", Path(folder) / "job"
        data = np.zeros(-(-found.memory.size // 4096) * 4096, np.uint8)
        found.memory.fill(data)
        data.tofile(arena)
        args_bytes = len(found.arguments) // (num_calls * of.num_ranks)
        head = host_run.job_head(of.num_ranks, num_calls, args_bytes, arguments(of).address_words)
        job.write_bytes(head + found.arguments + delays)
        command = [str(made.path), str(arena), str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if "ThreadSanitizer: data race" in done.stderr:
            raise host_run.DataRaceError(done.stderr)
        if done.returncode != 0:
            raise RuntimeError(f"a host rank ended with {done.returncode}\n{done.stderr}")
        return np.fromfile(arena, np.uint8)
