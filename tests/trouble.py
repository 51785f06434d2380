"""What a rank does while another one is in trouble, and what it says of it afterwards.

Assumes Linux. Ranks are forked from a server that has imported what they need, so that many jobs of a few ranks are
quick; on the processor, or on GPUs. Does not judge: test_trouble.py and gpu/run_trouble.py do.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

import commdsl
import commdsl.runtime.load
from commdsl.runtime.errors import PeerError

RANKS = 3
PATIENCE = 60.0
"""Seconds until a time-out: far more than any of these jobs may take."""


NAMES = ("allreduce_ring", "allreduce_twoshot", "alltoall_direct")

NAP = 3.0
"""How long a rank oversleeps."""


@dataclass(frozen=True)
class Said:
    """How a rank's job ended. Times are of the machine's monotonic clock, which all its processes share."""

    rank: int
    error: str  # the name of its type, or nothing
    peer: int  # whom the error names; -1: nobody
    text: str
    at: float
    shutdown_seconds: float
    left: list[str] = field(default_factory=list)  # threads and descriptors that were not there before the job


@dataclass(frozen=True)
class Seat:
    """A rank's place in a job."""

    rank: int
    device: str

    def ones(self, count: int) -> torch.Tensor:
        return torch.ones(count, device=self.device)


Job = Callable[[Seat], None]
"""What a rank does until something goes wrong."""


@dataclass(frozen=True)
class Table:
    """Where a job runs."""

    ranks: int = RANKS
    device: str = "cpu"
    patience: float = PATIENCE


Ranks: TypeAlias = list[tuple[mp.process.BaseProcess, Connection]]


def ranks_of(job: Job, folder: Path, table: Table = Table()) -> Iterator[Ranks]:
    """The processes of a job, each with the end where it says first that it begins, and at last what it has to say."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "numpy.ma", "commdsl.runtime.load"])
    found = []
    for rank in range(table.ranks):
        here, there = context.Pipe()
        process = context.Process(target=_run, args=(job, rank, table, str(folder / "store"), there), daemon=True)
        process.start()
        there.close()
        found.append((process, here))
    for _, pipe in found:
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == "begins"
    yield found
    for process, _ in found:
        process.kill()
        process.join()


running = contextmanager(ranks_of)


def heard(pipe: Connection, seconds: float) -> Said:
    """What a rank has to say, which it has to do before so many seconds are over."""
    assert pipe.poll(seconds), f"a rank said nothing for {seconds} s"
    said = pipe.recv()
    assert isinstance(said, Said)
    return said


def _run(job: Job, rank: int, table: Table, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without
    os.environ["COMMDSL_TIMEOUT"] = str(table.patience)
    found = dist.FileStore(store, table.ranks)
    seat = Seat(rank, table.device)
    if table.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        seat.ones(1)
    dist.init_process_group("gloo", store=found, rank=rank, world_size=table.ranks)
    dist.barrier()
    before = _held()
    for name in NAMES:  # kernels are built here: a rank that builds one notices nothing
        op = commdsl.load(name)
        op(seat.ones(24))
        op.release()
    commdsl.load("allreduce_oneshot")(seat.ones(100))  # from here on ranks know each other's processes
    pipe.send("begins")
    error: BaseException | None = None
    try:
        job(seat)
    except BaseException as caught:
        error = caught
    at = time.monotonic()
    text = "" if error is None else "".join(traceback.format_exception(error))
    name, peer = type(error).__name__ if error else "", error.rank if isinstance(error, PeerError) else -1
    error = None
    commdsl.shutdown()
    spent = time.monotonic() - at
    left = [one for one in _soon(before) - before if table.device == "cpu" or "commdsl" in one or "pidfd" in one]
    pipe.send(Said(rank, name, peer, text, at, spent, left))
    time.sleep(PATIENCE)  # until it is ended: gloo's own end waits for ranks that are gone


def _held() -> set[str]:
    """Threads and descriptors of this process, by name."""
    names = {f"thread {thread.name}" for thread in threading.enumerate()}
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or one that another thread closes meanwhile
            names.add(f"descriptor {one.name} of {os.readlink(one)}")
    return names


def _soon(before: set[str]) -> set[str]:
    """What is held when what ends on another thread has had the time to."""
    end = time.monotonic() + 2
    while (held := _held()) - before and time.monotonic() < end:
        time.sleep(0.01)
    return held


# --- jobs -------------------------------------------------------------------------------------------------------------


def waits_in_setup(seat: Seat) -> None:
    """Rank 1 never comes to the first call of an op."""
    if seat.rank == 1:
        time.sleep(PATIENCE)
    commdsl.load("allreduce_ring")(seat.ones(100))


def waits_in_call(seat: Seat) -> None:
    """Rank 1 makes one call less than the others."""
    op = commdsl.load("allreduce_oneshot")
    if seat.rank == 1:
        time.sleep(PATIENCE)
    op(seat.ones(100))
    op.synchronize()


def waits_for_work(seat: Seat) -> None:
    """As `waits_in_call`, the call on another thread, or stream."""
    op = commdsl.load("allreduce_oneshot")
    if seat.rank == 1:
        time.sleep(PATIENCE)
    op(seat.ones(100), async_op=True).wait()
    op.synchronize()


def calls(seat: Seat) -> None:
    """Calls without end: of several sizes, some of them started and waited for later, and now and then a new set-up."""
    known = [commdsl.load("allreduce_oneshot")]
    names = itertools.cycle(NAMES)
    for number in itertools.count():
        op = known[number % len(known)]
        x = seat.ones(24 * (1 + number * 37 % 2500))
        if number % 3:
            op(x)
        else:
            first, second = op(x, async_op=True), op(2 * x, async_op=True)
            second.wait()
            first.wait()
        if number % 20 == 19:
            if len(known) < 4:
                known.append(commdsl.load(next(names)))
            else:
                known.pop().release()


def leaves(seat: Seat) -> None:
    """Rank 1 makes all its calls and is gone, without a word; the others have still to read what it sent."""
    op = commdsl.load("allreduce_oneshot")
    for _ in range(50):
        op(seat.ones(100))
    op.synchronize()
    if seat.rank == 1:
        os._exit(0)
    time.sleep(0.5)


def oversleeps(seat: Seat) -> None:
    """Rank 1 comes when the others have given up: its call fails as theirs did. After a reset all go on."""
    op = commdsl.load("allreduce_oneshot")
    if seat.rank == 1:
        time.sleep(NAP)
    failed: Exception | None = None
    try:
        op(seat.ones(100))
        op.synchronize()
    except (PeerError, commdsl.CommTimeout) as error:
        failed = error
    commdsl.reset()
    found = op(seat.ones(100))
    op.synchronize()
    assert found.unique().tolist() == [dist.get_world_size()]
    if failed is not None:
        raise failed
