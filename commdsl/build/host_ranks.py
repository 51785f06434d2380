"""Turns a Plan and the arguments of its calls into what they leave in memory, by running its kernel on host ranks.

Assumes the kernel's text is the Plan's, and values for every argument that `program.arguments` says the Plan has; it
knows no kind of phase. Does not lay out tensors: `host_run` does for chunks, `host_rows` for rows. Ranks are threads of
this process, or processes that share memory, or threads of one process under ThreadSanitizer.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from commdsl.build.arena import PAGE, Bytes, Ground
from commdsl.build.emit import Emitted
from commdsl.build.host import AT_ONCE, build, build_runner, build_sanitized, loaded
from commdsl.language.diagnostics import InternalError
from commdsl.machine.config import DEFAULT_TIMEOUT, Config, from_environment
from commdsl.machine.private import work_folder
from commdsl.machine.shortage import explained
from commdsl.program.arguments import arguments, heaps
from commdsl.program.desk import desk_bytes, notice_bytes
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.timeouts import RECORD_BYTES, STOPPED, TIMED_OUT, ErrorRecord, complaint, timeout_of, unpack

GRACE = 60.0
"""Seconds beyond the time-out after which a process that does not end is stopped."""

Values: TypeAlias = Mapping[str, "int | Sequence[int]"]
"""Arguments of one call on one rank by name, offsets for addresses."""


@dataclass(frozen=True, slots=True)
class Running:
    """How the calls of a kernel run; none of it may change the result."""

    timeout: float | None = None  # seconds; None: the Config's
    absent: frozenset[int] = frozenset()  # ranks that never make the call
    max_delay: float = 0.0  # seconds: every rank starts every call after a random part of it
    seed: int = 0
    halved: frozenset[int] = frozenset()  # ranks whose calls are two launches each
    nodes: tuple[int, ...] = ()  # by rank the node it counts as on; empty: over NVSHMEM each its own, else all one


TWO: tuple[Values, Values] = {"half": 1}, {"half": 2}
"""What tells the launches of a call apart that is two."""

ONE: tuple[Values, Values] = {}, {"half": 2, "active_lanes": 0}
"""A call that is one launch, where those of others are two: a second one of nobody."""


class DataRaceError(RuntimeError):
    """ThreadSanitizer saw two unordered accesses; the message is its report."""


class RowsError(RuntimeError):
    """A kernel that checks met rows that its table must not name, or that did not come."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return complaint(self.record)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Plan's text, built for this processor in the way in which its ranks run."""

    plan: Plan
    command: tuple[str, ...]  # that runs a job; a library alone is loaded into this process
    is_shared: bool  # whether processes share its memory
    is_split: bool  # whether each rank is a process


def built(
    plan: Plan,
    emitted: Emitted,
    macros: tuple[str, ...],
    *,
    mode: str = "threads",
    sanitize: bool = False,
    config: Config | None = None,
) -> Kernel:
    """The kernel for ranks that are `threads` or `processes`. Raises NoHostCompilerError."""
    settings = config or from_environment()
    match mode, sanitize:
        case "threads", False:
            return Kernel(plan, (str(build(emitted, macros, settings, AT_ONCE)),), False, False)
        case "threads", True:
            return Kernel(plan, (str(build_sanitized(emitted, macros, settings)),), True, False)
        case "processes", False:
            command = str(build_runner(settings)), str(build(emitted, macros, settings, AT_ONCE))
            return Kernel(plan, command, True, True)
        case "processes", True:
            raise ValueError("ThreadSanitizer sees one process only: run its ranks as threads")
        case _:
            raise ValueError(f"mode is `threads` or `processes`, not `{mode}`")


@dataclass(frozen=True, slots=True)
class Seats:
    """Where every rank has what all kernels need, in a room with space for what else a Plan takes."""

    room: Ground
    heaps: tuple[int, ...]
    errors: tuple[int, ...]
    desks: tuple[int, ...]
    notices: tuple[int, ...]


def seats(plan: Plan, heap_bytes: int) -> Seats:
    """Symmetric memory of so many bytes for every rank, its error record, desk and notice."""
    room = Ground()

    def each(size: int, what: str, **place: int) -> tuple[int, ...]:
        return tuple(room.take(size, f"the {what} of rank {rank}", **place) for rank in range(plan.num_ranks))

    return Seats(
        room,
        each(heap_bytes, "heap", align=PAGE),
        each(RECORD_BYTES, "error record"),
        each(desk_bytes(plan.num_ranks), "desk", align=PAGE),
        each(notice_bytes(plan.num_ranks), "notice"),
    )


def run_ranks(
    kernel: Kernel,
    where: Seats,
    calls: Sequence[Sequence[Values]],
    running: Running = Running(),
    config: Config | None = None,
) -> Bytes:
    """The memory when all calls, given by call and rank, are over; ranks are not joined in between.

    Raises CommTimeout, RowsError, DataRaceError, InternalError where a kernel wrote beside what it was given, and
    CacheError or ResourceError where there is no room for the memory or no process can be started.
    """
    plan, known = kernel.plan, config or from_environment()
    seconds = running.timeout or known.timeout or DEFAULT_TIMEOUT
    layout = arguments(plan)
    is_far = plan.transport is Transport.NVSHMEM
    nodes = running.nodes or (range(plan.num_ranks) if is_far else (0,) * plan.num_ranks)
    same: list[dict[str, int | Sequence[int]]] = [
        {
            "heap": heaps(where.heaps, nodes, rank),
            "pe": range(plan.num_ranks),
            "timeout_ns": int(seconds * 1e9),
            "error": where.errors[rank],
            "desk": heaps(where.desks, nodes, rank),
            "notice": where.notices[rank],
            "digest": 0,  # all ranks are given what one caller says
            "rank": rank,
            "half": 0,
        }
        for rank in range(plan.num_ranks)
    ]
    turns = [TWO if rank in running.halved else ONE for rank in range(plan.num_ranks)]
    packed = [
        [layout.pack({**one, **of, **turn[at]}) for one, of, turn in zip(same, call, turns, strict=True)]
        for call in calls
        for at in range(2 if running.halved else 1)
    ]
    random = np.random.default_rng(running.seed).random((len(packed), plan.num_ranks))
    delays = (random * running.max_delay * 1e9).astype(np.uint64)
    job = _Job(kernel, packed, delays, seconds)
    ranks = [rank for rank in range(plan.num_ranks) if rank not in running.absent]
    with work_folder() as folder, explained("run host ranks"):
        arena = folder / "arena" if kernel.is_shared else None
        data = where.room.made(arena)
        if arena is None:
            _run_here(job, data, ranks)
        else:
            _run_apart(job, arena, [[rank] for rank in ranks] if kernel.is_split else [ranks])
    for name in where.room.overwritten(data):
        raise InternalError(f"the kernel of `{plan.name}` wrote beside {name}")
    failure = _failure(plan, [unpack(data[at : at + RECORD_BYTES].tobytes()) for at in where.errors], seconds)
    if failure is not None:
        raise failure
    return data


def _failure(plan: Plan, records: Sequence[ErrorRecord | None], seconds: float) -> Exception | None:
    """Rows that are wrong rather than ranks that waited for them in vain."""
    late = timeout_of(plan, records, seconds)
    of_rows = [record for record in records if record is not None and record.code not in (TIMED_OUT, STOPPED)]
    return RowsError(of_rows[0]) if of_rows else late


@dataclass(frozen=True, slots=True)
class _Job:
    kernel: Kernel
    packed: Sequence[Sequence[bytes]]  # by call, rank
    delays: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]  # nanoseconds before each call of each rank
    seconds: float

    def arguments(self, ranks: Sequence[int]) -> bytes:
        return b"".join(call[rank] for call in self.packed for rank in ranks)

    def delays_of(self, ranks: Sequence[int]) -> bytes:
        return np.ascontiguousarray(self.delays[:, list(ranks)]).tobytes()

    def pack(self, ranks: Sequence[int]) -> bytes:
        """The job file of runner.cpp, with offsets for addresses."""
        layout = arguments(self.kernel.plan)
        words = layout.address_words
        head = struct.pack(f"<{4 + len(words)}Q", len(ranks), len(self.packed), layout.size, len(words), *words)
        return head + self.arguments(ranks) + self.delays_of(ranks)


def _run_here(job: _Job, data: Bytes, ranks: Sequence[int]) -> None:
    """One call into the library, which starts the threads; ctypes releases the GIL for it."""
    layout, calls = arguments(job.kernel.plan), len(job.packed)
    packed = bytearray(job.arguments(ranks))
    for launch in range(calls * len(ranks)):
        words = np.frombuffer(packed, np.uint64, layout.size // 8, launch * layout.size)
        words[[*layout.address_words]] += np.uint64(data.ctypes.data)
    entry = loaded(Path(job.kernel.command[0])).commdsl_launch
    failure = entry(bytes(packed), len(ranks), calls, job.delays_of(ranks))
    if failure:
        why = os.strerror(failure) if failure > 0 else "no memory"
        raise MemoryError(f"cannot start a thread for every lane of {len(ranks)} host ranks ({why})")


def _run_apart(job: _Job, arena: Path, groups: Sequence[Sequence[int]]) -> None:
    """One process per group of ranks; none outlives this call."""
    started: list[subprocess.Popen[str]] = []
    try:
        for index, ranks in enumerate(groups):
            path = arena.with_name(f"{index}.job")
            path.write_bytes(job.pack(ranks))
            command = [*job.kernel.command, str(arena), str(path)]
            started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for process in started:
            _, report = process.communicate(timeout=job.seconds + GRACE)
            if "ThreadSanitizer: data race" in report:
                raise DataRaceError(report)
            if process.returncode != 0:
                raise RuntimeError(f"a host rank ended with {process.returncode}\n{report}")
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
