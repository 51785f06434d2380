"""What a rank does while another one is in trouble, and what it says of it afterwards.

Assumes Linux. Ranks are forked from a server that has imported what they need, so that many jobs of a few ranks are
quick. Does not judge: the tests do.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import commdsl
import commdsl.runtime.load
from commdsl.runtime.errors import PeerError

RANKS = 3
PATIENCE = 60.0
"""Seconds until a time-out: far more than any of these jobs may take."""


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


Job = Callable[[int], None]
"""What a rank does, given its number, until something goes wrong."""


def ranks_of(job: Job, folder: Path) -> Iterator[list[tuple[mp.process.BaseProcess, Connection]]]:
    """The processes of a job, each with the end where it says first that it begins, and at last what it has to say."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "commdsl.runtime.load"])
    found = []
    for rank in range(RANKS):
        here, there = context.Pipe()
        process = context.Process(target=_run, args=(job, rank, str(folder / "store"), there), daemon=True)
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


def _run(job: Job, rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["COMMDSL_TIMEOUT"] = str(PATIENCE)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    dist.barrier()
    before = _held()
    commdsl.load("allreduce_ring")  # so that a job begins with what it is about
    commdsl.load("allreduce_oneshot")(torch.ones(100))  # from here on ranks know each other's processes
    pipe.send("begins")
    error: BaseException | None = None
    try:
        job(rank)
    except BaseException as caught:
        error = caught
    at = time.monotonic()
    text = "" if error is None else "".join(traceback.format_exception(error))
    name, peer = type(error).__name__ if error else "", error.rank if isinstance(error, PeerError) else -1
    error = None
    commdsl.shutdown()
    spent = time.monotonic() - at
    left = [str(one) for one in itertools.filterfalse(before.__contains__, _soon(before))]
    pipe.send(Said(rank, name, peer, text, at, spent, left))
    time.sleep(PATIENCE)  # until it is ended: gloo's own end waits for ranks that are gone


def _held() -> set[str]:
    """Threads and descriptors of this process, by name."""
    folder = Path("/proc/self/fd")
    names = {f"descriptor {one.name} of {os.readlink(one)}" for one in folder.iterdir() if one.exists()}
    return names | {f"thread {thread.name}" for thread in threading.enumerate()}


def _soon(before: set[str]) -> set[str]:
    """What is held when what ends on another thread has had the time to."""
    end = time.monotonic() + 2
    while (held := _held()) - before and time.monotonic() < end:
        time.sleep(0.01)
    return held


# --- jobs -------------------------------------------------------------------------------------------------------------


def waits_in_setup(rank: int) -> None:
    """Rank 1 never comes to the first call of another op."""
    if rank == 1:
        time.sleep(PATIENCE)
    commdsl.load("allreduce_ring", ranks=RANKS)(torch.ones(100))


def calls(rank: int) -> None:
    """Calls without end: of several sizes, some of them started and waited for later, and now and then a new set-up."""
    known = [commdsl.load("allreduce_oneshot")]
    names = itertools.cycle(("allreduce_ring", "allreduce_twoshot", "alltoall_direct"))
    for number in itertools.count():
        op = known[number % len(known)]
        x = torch.ones(3 * (1 + number * 37 % 5000))
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


def waits_in_call(rank: int) -> None:
    """Rank 1 makes one call less than the others."""
    op = commdsl.load("allreduce_oneshot")
    if rank == 1:
        time.sleep(PATIENCE)
    op(torch.ones(100))


def waits_for_work(rank: int) -> None:
    """As `waits_in_call`, the call on a thread of its own."""
    op = commdsl.load("allreduce_oneshot")
    if rank == 1:
        time.sleep(PATIENCE)
    op(torch.ones(100), async_op=True).wait()


def leaves(rank: int) -> None:
    """Rank 1 makes all its calls and is gone, without a word; the others have still to read what it sent."""
    op = commdsl.load("allreduce_oneshot")
    for _ in range(50):
        op(torch.ones(100))
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
