"""Turns a Plan and the inputs of every rank into their outputs by running the emitted kernel on the processor.

Assumes the emitted text is the Plan's. Does not compare with the oracle; callers do. Ranks are threads of this process,
or processes that share memory, or threads of one process under ThreadSanitizer.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from commdsl.build.arena import Arena, Array, Inputs, layout
from commdsl.build.emit import Emitted, defines
from commdsl.build.host import build, build_runner, build_sanitized
from commdsl.machine.config import Config, from_environment
from commdsl.program.arguments import arguments
from commdsl.program.memory import Access
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch, block_bytes_of, host_launch
from commdsl.program.timeouts import timeout_of

GRACE = 60.0
"""Seconds beyond the time-out after which a process that does not end is stopped."""


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


@dataclass(frozen=True, slots=True)
class Options:
    """How to run; none of it may change the result."""

    mode: str = "threads"  # or "processes"
    sanitize: bool = False
    timeout: float | None = None  # seconds; None: the Config's
    absent: frozenset[int] = frozenset()  # ranks that never make the call
    max_delay: float = 0.0  # seconds: every rank starts every call after a random part of it
    seed: int = 0
    shift: int = 0  # bytes by which all tensors are off a 16-byte line
    in_place: bool = False  # alias-safe inout buffers: read and written tensor are the same memory
    first_round: int = 0  # what the round counters hold before the first call


class DataRaceError(RuntimeError):
    """ThreadSanitizer saw two unordered accesses; the message is its report."""


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
    options = Options(mode, sanitize, timeout, frozenset(absent))
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
    settings = config or from_environment()
    start = _starter(emitted, defines(plan, dtype.name, op), options, settings)
    block_bytes = [_block_bytes(plan, given, dtype) for given in inputs]
    launches = [host_launch(plan.moves, size) for size in block_bytes]
    seconds = options.timeout or settings.timeout
    where = layout(plan, block_bytes, shift=options.shift, in_place=options.in_place)
    with tempfile.TemporaryDirectory(prefix="commdsl-") as folder:
        shared = Path(folder) / "arena" if options.sanitize or options.mode == "processes" else None
        with Arena(plan, where, block_bytes, shared) as arena:
            for call, given in enumerate(inputs):
                arena.fill(call, given)
            if options.first_round:
                arena.set_first_round(options.first_round)
            job = _Job(arena, launches, seconds, op == "avg", _delays(plan, len(inputs), options))
            start(job, [rank for rank in range(plan.num_ranks) if rank not in options.absent], Path(folder))
            failure = timeout_of(plan, arena.records(), seconds)
            if failure is not None:
                raise failure
            return [_collect(arena, call, dtype) for call in range(len(inputs))]


def _block_bytes(plan: Plan, inputs: Inputs, dtype: ElementType) -> int:
    """The one block size of all read tensors of all ranks in a call; ValueError where they differ."""
    found: dict[int, str] = {}
    for tensor in plan.moves.tensors:
        if tensor.access is not Access.READ:
            continue
        arrays = inputs[tensor.name]
        if len(arrays) != plan.num_ranks:
            raise ValueError(f"`{tensor.name}` has {len(arrays)} arrays for {plan.num_ranks} ranks")
        for array in arrays:
            if array.dtype != dtype.storage or array.ndim != 1:
                raise ValueError(f"`{tensor.name}` is {array.ndim}-D {array.dtype}, expected 1-D {dtype.storage}")
            found.setdefault(block_bytes_of(tensor, array.nbytes), tensor.name)
    if len(found) != 1:
        sizes = ", ".join(f"{size} bytes (`{name}`)" for size, name in sorted(found.items()))
        raise ValueError(f"all blocks of a schedule are equally long, found {sizes}")
    return next(iter(found))


def _delays(plan: Plan, calls: int, options: Options) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Nanoseconds before each call of each rank."""
    random = np.random.default_rng(options.seed).random((calls, plan.num_ranks))
    return (random * options.max_delay * 1e9).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _Job:
    arena: Arena
    launches: Sequence[Launch]  # by call
    seconds: float
    average: bool
    delays: np.ndarray[tuple[int, int], np.dtype[np.uint64]]

    def arguments(self, base: int, ranks: Sequence[int]) -> bytes:
        return self.arena.arguments(base, ranks, self.launches, self.seconds, self.average)

    def delays_of(self, ranks: Sequence[int]) -> bytes:
        return np.ascontiguousarray(self.delays[:, list(ranks)]).tobytes()

    def pack(self, ranks: Sequence[int]) -> bytes:
        """The job file of runner.cpp, with offsets for addresses."""
        plan = self.arena.plan
        calls = len(self.arena.where.tensors)
        layout = arguments(plan)
        return job_head(len(ranks), calls, layout.size, layout.address_words) + (
            self.arguments(0, ranks) + self.delays_of(ranks)
        )


def job_head(ranks: int, calls: int, args_bytes: int, addresses: Sequence[int]) -> bytes:
    """The front of a job file. `addresses`: the 64-bit words of the arguments to which the arena's place is added."""
    return struct.pack(f"<{4 + len(addresses)}Q", ranks, calls, args_bytes, len(addresses), *addresses)


def _starter(
    emitted: Emitted, macros: tuple[str, ...], options: Options, config: Config
) -> Callable[[_Job, Sequence[int], Path], None]:
    """Builds what the mode takes; what it returns runs a job's ranks to their end, with a folder for its files."""
    match options.mode, options.sanitize:
        case "threads", False:
            library = build(emitted, macros, config)
            return lambda job, ranks, folder: _run_threads(job, library, ranks)
        case "threads", True:
            program = [str(build_sanitized(emitted, macros, config))]
            return lambda job, ranks, folder: _run_processes(job, program, [ranks], folder)
        case "processes", False:
            command = [str(build_runner(config)), str(build(emitted, macros, config))]
            return lambda job, ranks, folder: _run_processes(job, command, [[rank] for rank in ranks], folder)
        case "processes", True:
            raise ValueError("ThreadSanitizer sees one process only: run its ranks as threads")
        case mode, _:
            raise ValueError(f"mode is `threads` or `processes`, not `{mode}`")


def _run_threads(job: _Job, library: Path, ranks: Sequence[int]) -> None:
    """One call into the library, which starts the threads; ctypes releases the GIL for it."""
    entry = ctypes.CDLL(str(library)).commdsl_launch
    calls = len(job.arena.where.tensors)
    failure = entry(job.arguments(job.arena.address, ranks), len(ranks), calls, job.delays_of(ranks))
    if failure:
        lanes = max(launch.active_lanes for launch in job.launches)
        raise OSError(failure, f"cannot start a thread for each of {len(ranks)} x {lanes} lanes")


def _run_processes(job: _Job, program: Sequence[str], groups: Sequence[Sequence[int]], folder: Path) -> None:
    """One process per group of ranks; none outlives this call."""
    started: list[subprocess.Popen[str]] = []
    try:
        for index, ranks in enumerate(groups):
            path = folder / f"{index}.job"
            path.write_bytes(job.pack(ranks))
            command = [*program, str(folder / "arena"), str(path)]
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


def _collect(arena: Arena, call: int, dtype: ElementType) -> HostResult:
    outputs: dict[str, list[Array]] = {}
    yields: list[Array] = []
    for index, tensor in enumerate(arena.plan.moves.tensors):
        if tensor.access is not Access.WRITE:
            continue
        arrays = [arena.output(call, rank, index, dtype.storage) for rank in range(arena.plan.num_ranks)]
        if tensor.is_yield:
            yields = arrays
        else:
            outputs[tensor.name] = arrays
    return HostResult(outputs, yields)
