"""Turns a candidate into its times on this machine: set up, checked once, timed, and its memory given back.

Assumes that all ranks measure the same candidates in the same order. All get the same numbers: the slowest rank's
median. Does not decide what is measured (`search` does).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from commdsl.language.diagnostics import CommError
from commdsl.planner.tuning.search import Failure, Times
from commdsl.planner.tuning.selection import Candidate, size_text
from commdsl.runtime import groups
from commdsl.runtime.ahead import Ahead
from commdsl.runtime.errors import GroupError
from commdsl.runtime.load import load, reset, shutdown
from commdsl.runtime.menu import home, name_of_device

GRAPH_BYTES = 4 << 20
"""Below it calls are timed inside a CUDA graph: there the host's part would show."""

CALLS_IN_GRAPH = 20
REPEATS = 9
ENOUGH_US = 4000.0
"""Long calls are repeated to about this, `FEWEST` times at least."""

FEWEST = 3
HOST_REPEATS = 5
PATIENCE = timedelta(seconds=180)
"""How long a rank waits for another that builds, before the run ends."""

CHECKED_BYTES = 64 << 20
"""Results are checked at the largest size measured up to this one."""


Inputs: TypeAlias = tuple[torch.Tensor, ...]


class WrongResultError(Exception):
    """A candidate gave something else than its collective."""


@dataclass(frozen=True)
class Clock:
    """Rank 0's, on all ranks."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.seconds * (1.0 - self.spent())

    def spent(self) -> float:
        """The share of the time that has passed."""
        return largest([(time.monotonic() - self.start) / self.seconds if is_first() else 0.0])[0]


class Loaded(Protocol):
    """What a candidate is loaded as."""

    def __call__(self, *inputs: torch.Tensor) -> Any: ...

    def synchronize(self) -> None: ...

    def release(self) -> None: ...


@dataclass
class Machine:
    """This rank's end of the bench."""

    collective: str
    element: str
    most_symmetric: int  # bytes of symmetric memory that a candidate may take
    clock: Clock
    ahead: Ahead
    device: torch.device = field(default_factory=home)
    most_in_graph: int = GRAPH_BYTES
    _expected: tuple[int, Inputs, torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.element)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def spent(self) -> float:
        return self.clock.spent()

    def announce(self, candidates: tuple[Candidate, ...]) -> None:
        self.ahead.build(candidates, self.device, self.element)

    def measure(self, candidate: Candidate, sizes: tuple[int, ...]) -> Times | Failure:
        """Times at every size. What fails on one rank fails on all, and leaves nothing behind."""
        op, failure, times = None, "", [0.0] * len(sizes)
        try:
            op = self._load(candidate)
            self._check(op, max((size for size in sizes if size <= CHECKED_BYTES), default=sizes[0]))
        except Exception as error:
            # Whatever it is: a candidate that cannot run is one less, and is reported.
            failure = _reason(error)
        failure = _first_failure(failure)
        if not failure and op is not None:
            try:
                times = [self._time(op, size) for size in sizes]
            except Exception as error:
                failure = _reason(error)
            failure = _first_failure(failure)
        self._give_back(op)
        slowest = largest(times)
        return Failure(failure) if failure else dict(zip(sizes, slowest, strict=True))

    def _load(self, candidate: Candidate) -> Loaded:
        op = load(candidate.schedule, params=dict(candidate.params), ranks=self.ranks, tune=dict(candidate.tune))
        needed = op.program(self.ranks).plan.symmetric_bytes
        if needed > self.most_symmetric:
            raise MemoryError(f"more than {size_text(self.most_symmetric)} of symmetric memory")
        return op

    def _give_back(self, op: Loaded | None) -> None:
        broken = any(comm.broken is not None for comm in groups.every(groups.name_of(None)))
        if largest([float(broken)])[0]:
            reset()
        if op is not None:
            op.release()

    # --- one size -----------------------------------------------------------------------------------------------------

    def _inputs(self, nbytes: int, rank: int) -> Inputs:
        """The larger side is `nbytes`, or a little less where that is no equal blocks. Whole numbers, few enough that
        every order of summation gives the same bits."""
        elements = max(nbytes // self.dtype.itemsize // self.ranks, 1) * (
            1 if self.collective == "all_gather" else self.ranks
        )
        generator = torch.Generator(self.device).manual_seed(rank)
        found = torch.randint(-2, 3, (elements,), generator=generator, device=self.device, dtype=torch.int8)
        return (found.to(self.dtype),)

    def _check(self, op: Loaded, nbytes: int) -> None:
        if self._expected is None or self._expected[0] != nbytes:
            rank, blocks = dist.get_rank(), [self._inputs(nbytes, one) for one in range(self.ranks)]
            self._expected = (nbytes, blocks[rank], self._wanted(blocks, rank))
        _, given, wanted = self._expected
        for _ in range(2):
            if not torch.equal(op(*given), wanted):
                raise WrongResultError(f"another result than {self.collective} has")
        op.synchronize()

    def _wanted(self, given: list[Inputs], rank: int) -> torch.Tensor:
        """What a rank is to have of the inputs of all."""
        inputs = [x for (x,) in given]
        match self.collective:
            case "all_reduce":
                return _sum(inputs)
            case "reduce_scatter":
                return _sum([x.chunk(self.ranks)[rank] for x in inputs])
            case "all_gather":
                return torch.cat(inputs)
            case "all_to_all":
                return torch.cat([x.chunk(self.ranks)[rank] for x in inputs])
            case _:
                return inputs[0]

    def _time(self, op: Loaded, nbytes: int) -> float:
        """The median time of a call in microseconds, on this rank."""
        given = self._inputs(nbytes, dist.get_rank())
        op(*given)
        if self.device.type == "cpu":
            return statistics.median(_host_times(lambda: op(*given)))
        torch.cuda.synchronize(self.device)
        dist.barrier()
        timed = _graph_times if nbytes <= self.most_in_graph else _stream_times
        found = timed(lambda: op(*given))
        op.synchronize()
        return statistics.median(found)


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors[0].dtype)


def _host_times(call: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(HOST_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def _graph_times(call: Callable[[], object]) -> list[float]:
    """Replays of a graph of calls that follow one another. Not through torch.cuda.graph: its garbage collection and its
    emptying of caches take longer than the measurement."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(CALLS_IN_GRAPH):
                call()
        finally:
            graph.capture_end()
        graph.replay()
        return [us / CALLS_IN_GRAPH for us in _between(graph.replay, REPEATS)]


def _stream_times(call: Callable[[], object]) -> list[float]:
    (once,) = _between(call, 1)
    # The same number on every rank, as they call together.
    repeats = int(largest([min(max(ENOUGH_US / max(once, 1.0), FEWEST), REPEATS)])[0])
    return _between(call, repeats)


def _between(call: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each call on the current stream."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [first.elapsed_time(last) * 1e3 for first, last in pairwise(events)]


# --- between the ranks ------------------------------------------------------------------------------------------------


def largest(values: list[float]) -> list[float]:
    """The largest over all ranks, place by place: what every rank may decide by."""
    joined = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(joined, dist.ReduceOp.MAX)
    return [float(value) for value in joined]


def _first_failure(failure: str) -> str:
    """The first rank's that has one, on all ranks."""
    if not largest([float(bool(failure))])[0]:
        return ""
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, failure)
    return next(one for one in found if one)


def _reason(error: Exception) -> str:
    if isinstance(error, CommError):
        return f"refused: {error.diagnostics[0].code} {error.diagnostics[0].headline}"
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def start() -> None:
    """Joins the ranks that torchrun started. Small values go over gloo; the kernels need no other process group."""
    if not dist.is_torchelastic_launched():
        raise GroupError("one process a rank is needed: `torchrun --nproc-per-node 4 -m commdsl tune ...`")
    dist.init_process_group("gloo", timeout=PATIENCE)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def stop() -> None:
    shutdown()
    dist.destroy_process_group()


def is_first() -> bool:
    return dist.get_rank() == 0


def where() -> tuple[str, int]:
    """The device's name and the number of ranks."""
    return name_of_device(home()), dist.get_world_size()


def about(element: str) -> tuple[tuple[str, str], ...]:
    """With what is measured."""
    found = {"dtype": element, "torch": torch.__version__}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return tuple(sorted(found.items()))


@contextmanager
def builders() -> Iterator[Ahead]:
    made = Ahead(dist.get_rank(), dist.get_world_size())
    try:
        yield made
    finally:
        made.close()
