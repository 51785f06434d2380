"""Turns calls into times: medians over batches of the slowest rank, all contenders of a row taking turns.

Assumes one process per GPU and a NCCL group beside a gloo one. Calls of one batch depend on each other across ranks:
a call of a collective ends on a rank only after every rank began it, and a broadcast's root moves on by one rank every
call, so no rank runs ahead of the others. Does not know what a call does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.report import Kind, Timing
from benchmarks.values import bytes_of, differs, fingerprint, given, poison, wanted

T = TypeVar("T")
CHECKED_CALLS = 3
LONG = 8 << 30
"""Bytes that a GPU sends in a batch that takes tens of milliseconds: the skew of a barrier is a thousandth of that."""
LEAST_ROUNDS = 5


class Batched(Protocol):
    """A case, as far as timing knows it: the calls of a graph, and the bytes that a GPU sends in one of them."""

    @property
    def calls(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...


@dataclass(frozen=True)
class Contender:
    """Something to be timed: `call(index)` makes one call on the current stream and returns where its result is.

    `prepare` brings the input into a buffer of the contender's own, `finish` raises what went wrong on the GPU, and
    `release` gives back what torch does not free.
    """

    name: str
    kind: Kind
    call: Callable[[int], torch.Tensor | None]
    prepare: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    detail: str = ""


@dataclass
class Bench:
    """This rank's place in the run."""

    rank: int
    ranks: int
    device: torch.device
    group: Any  # NCCL: the group under test
    control: Any  # gloo: what the ranks tell each other
    deadline: float
    batches: int = 30
    _token: torch.Tensor | None = None

    def everyone(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def time_is_up(self) -> bool:
        """Rank 0's clock decides for all."""
        return self.everyone(time.monotonic() > self.deadline)[0]

    def barrier(self) -> None:
        """Everything that any rank has launched is over."""
        if self._token is None:
            self._token = torch.zeros(1, device=self.device)
        torch.cuda.synchronize()
        dist.all_reduce(self._token, group=self.group)
        torch.cuda.synchronize()

    def attempt(self, what: Callable[[], T]) -> tuple[T | None, str]:
        """Does something on all ranks: what it gave here, or why it failed on the first rank where it did.

        `what` must not use `everyone`: the rank where it fails would miss its turn.
        """
        problem, found = "", None
        try:
            found = what()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = self.everyone(problem)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        return (None, failed[0]) if failed else (found, "")


def started(seconds: float, batches: int, *, on_gpus: bool = True) -> Bench:
    """This process's, as torchrun started it: a GPU a rank, or the processor."""
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return Bench(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        device=device,
        group=dist.group.WORLD,
        control=dist.new_group(backend="gloo"),
        deadline=time.monotonic() + seconds,
        batches=batches,
    )


def root_of(index: int, ranks: int) -> int:
    """The root of a broadcast in a batch: one rank back every call, so that the next root is the last one reached."""
    return -index % ranks


@dataclass
class Ready:
    """A contender with its batch, a graph of calls."""

    contender: Contender
    graph: torch.cuda.CUDAGraph
    last: torch.Tensor | None = None  # the result of the last call
    times: list[float] = field(default_factory=list)

    def run(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        self.graph.reset()
        self.last = None
        self.contender.release()


def ready(contender: Contender, case: Batched) -> Ready:
    """Captures a batch of calls; the contender has been called before."""
    index, last = count(), None

    def call() -> None:
        nonlocal last
        last = contender.call(next(index))

    graph = captured(call, case.calls, before=0)
    return Ready(contender, graph, last)


def captured(call: Callable[[], object], calls: int, before: int = 3) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, after some `before` the capture."""
    for _ in range(before):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it empties the allocator's cache first, which here would cost more than the measurement.
    with torch.cuda.stream(torch.cuda.Stream()):
        # NCCL's watchdog thread may query events while we capture.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
        except BaseException:
            with suppress(RuntimeError):  # it says once more that the capture is none
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def check(bench: Bench, case: Case, contender: Contender, x: torch.Tensor) -> int:
    """Calls with inputs that differ by rank, position and call, into poisoned memory: how many are wrong on this rank.

    Where every rank has the one exact result, all ranks have the same bits.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    for call in range(max(CHECKED_CALLS, case.ranks)):  # every root has its turn, and so is set up before a capture
        root = root_of(call, case.ranks)
        want = wanted(case, bench.rank, call, root, x.dtype, bench.device)
        x.copy_(given(case, bench.rank, call, x.dtype, bench.device))
        contender.prepare()
        poison(case.num_out, x.dtype, bench.device)
        got = contender.call(call)
        assert got is not None
        wrong += differs(got, want)
        del got, want
    found = int(wrong.item())
    contender.finish()
    return found


def check_graph(bench: Bench, case: Case, batch: Ready, x: torch.Tensor) -> int:
    """The last call of a replayed graph, on inputs that were not there when it was captured: 1 if it is wrong."""
    assert batch.last is not None
    root = root_of(case.calls - 1, case.ranks)
    want = wanted(case, bench.rank, CHECKED_CALLS, root, x.dtype, bench.device)
    x.copy_(given(case, bench.rank, CHECKED_CALLS, x.dtype, bench.device))
    bytes_of(batch.last).fill_(255)
    batch.run()
    found = int(differs(batch.last, want).item())
    batch.contender.finish()
    return found


def float_bits(bench: Bench, contender: Contender, x: torch.Tensor) -> list[int]:
    """The fingerprint of a result on random floats, whose sum depends on the order of summation."""
    generator = torch.Generator(device=bench.device).manual_seed(bench.rank + 1)
    x.copy_(torch.randn(x.numel(), device=bench.device, generator=generator, dtype=x.dtype))
    contender.prepare()
    got = contender.call(0)
    assert got is not None
    found: list[int] = fingerprint(got).tolist()
    contender.finish()
    return found


def measure(bench: Bench, case: Batched, batches: Sequence[Ready], rounds: int) -> list[Timing]:
    """Each contender's microseconds a call. They take turns, in an order that shifts, so drift hits all alike."""
    for batch in batches:
        batch.contender.prepare()
        batch.run()
        batch.run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(rounds):
        for position in range(len(batches)):
            batch = batches[(position + turn) % len(batches)]
            bench.barrier()
            if case.calls * case.sent_bytes <= LONG:
                batch.run()  # absorbs what skew the barrier left, and hides the launch of what follows
            start.record()
            batch.run()
            end.record()
            end.synchronize()
            batch.times.append(1000 * start.elapsed_time(end) / case.calls)
    slowest = torch.tensor([batch.times for batch in batches], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=bench.control)
    return [Timing.of(times) for times in slowest.tolist()]


def rounds_for(case: Batched, batches: int) -> int:
    """Fewer batches where one takes many milliseconds and varies little."""
    nbytes = case.calls * case.sent_bytes
    fewer = 6 if nbytes > 4 * LONG else 3 if nbytes > LONG else 2 if nbytes > LONG // 8 else 1
    return max(LEAST_ROUNDS, batches // fewer)
