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
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

import commdsl
import commdsl.runtime.load
from commdsl import ep
from commdsl.runtime.errors import PeerError

RANKS = 3
PATIENCE = 1000.0
"""Seconds until a time-out: far more than a test may take, so who is done has not waited for it."""


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


def heard(pipe: Connection, seconds: float | None = None) -> Said:
    """What a rank has to say, before so many seconds are over where it is said."""
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


# --- experts, some of whose ranks go ----------------------------------------------------------------------------------

KEYS_A_RANK, ENTRIES, TOKENS, WIDTH = 2, 3, 6, 4


class Experts:
    """Tokens to experts and back, of the ranks that live: held to what must come of every call, exactly."""

    def __init__(self, seat: Seat, group: ep.Living | None, ranks: tuple[int, ...], before: int) -> None:
        self.ranks, self.own, self.before, self.lost = ranks, seat.rank, before, 0
        self.keys, self.device = KEYS_A_RANK * before, seat.device
        self.known = None if group is None else group.key_map(self.keys, seat.device)
        limits = ep.Limits(TOKENS, ENTRIES, before * TOKENS * ENTRIES, (4 * WIDTH, 2), 4 * WIDTH)
        self.experts = ep.Experts(limits, group, seat.device, params={"E": KEYS_A_RANK * len(ranks)}, check=True)

    def drawn(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, experts and weights of a rank in a call: whole numbers, small enough that sums of them are exact."""
        dice = torch.Generator().manual_seed(1000 * number + rank)
        x = torch.randint(-99, 100, (TOKENS - rank % 2, WIDTH), generator=dice).float()
        keys = torch.randint(0, self.keys + 1, (len(x), ENTRIES), generator=dice).int()
        return x, keys, torch.randint(1, 4, keys.shape, generator=dice).float()

    def call(self, number: int, dies: Callable[[str], None] = lambda where: None) -> None:
        """There, computed and back. `dies`: asked before each part."""
        x, keys, weights = (one.to(self.device) for one in self.drawn(number, self.own))
        given = keys if self.known is None else self.known(keys)
        pending = self.experts.dispatch_send((x, torch.zeros_like(x[:, :1]).half()), given)
        dies("between its halves")
        there = pending.receive()
        self.experts.synchronize()  # or a GPU that waited in vain would not have said so
        made = self.made(there, self.wanted(number))
        dies("before its way back")
        home = self.experts.combine(made, there.handle, weights)
        self.experts.synchronize()
        self.judge(number, home.cpu())

    def wanted(self, number: int) -> list[tuple[int, torch.Tensor]]:
        """The expert and the token of each row that comes: by expert, rank and entry."""
        sent = [self.drawn(number, rank) for rank in self.ranks]
        first = KEYS_A_RANK * self.own
        return [
            (expert, x[entry // ENTRIES])
            for expert in range(first, first + KEYS_A_RANK)
            for x, keys, _ in sent
            for entry in (keys.flatten() == expert).nonzero()[:, 0].tolist()
        ]

    def made(self, there: ep.Received, wanted: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """What experts make of what came, which is held to what must."""
        rows = there.rows[0].cpu()
        assert int(there.offsets[-1]) == len(wanted)
        for place, (expert, token) in enumerate(wanted):
            assert torch.equal(rows[place], token)
            rows[place] *= expert + 1
        return rows.to(self.device)

    def judge(self, number: int, home: torch.Tensor) -> None:
        """Whether what comes back is what experts that live made, and so many choices of others are counted."""
        x, keys, weights = self.drawn(number, self.own)
        lives = torch.tensor([expert // KEYS_A_RANK in self.ranks for expert in range(self.keys)] + [False])[
            keys.long()
        ]
        assert torch.equal(home, x * torch.where(lives, (keys + 1) * weights, 0).sum(1, keepdim=True))
        self.lost += int(((keys < self.keys) & ~lives).sum())
        assert self.known is None or self.known.lost.item() == self.lost


@dataclass(frozen=True)
class GoesOn:
    """A job: calls of experts until so many ranks are gone, and some more of those that live."""

    deaths: int
    where: str = ""  # rank 1, and then rank 3, ends itself there in its fourth call; nowhere: a rank is killed

    def __call__(self, seat: Seat) -> None:
        before = dist.get_world_size()
        group: ep.Living | None = None
        ranks = tuple(range(before))
        while (gone := before - len(ranks)) < self.deaths:
            try:
                self._call(Experts(seat, group, ranks, before), (1, 3)[gone])
            except PeerError as error:
                if error.gone is None:
                    raise
                dead = ranks[error.gone]
            commdsl.release(group)
            group = ep.Living.of(group, (dead,), PATIENCE)
            ranks = group.ranks
        experts = Experts(seat, group, ranks, before)
        for number in range(5):
            experts.call(number)

    def _call(self, experts: Experts, victim: int) -> NoReturn:
        for number in itertools.count():

            def dies(where: str, number: int = number) -> None:
                if where == self.where and number == 3 and experts.own == victim:
                    os.kill(os.getpid(), signal.SIGKILL)

            experts.call(number, dies)
        raise AssertionError


def reads_the_page(seat: Seat) -> None:
    """Rank 1 ends itself before a call of experts; the others do what the README says."""
    page = (Path(__file__).parents[1] / "commdsl" / "ep" / "README.md").read_text(encoding="utf-8")
    lines = page.partition("\n## Ranks that are gone\n")[2].partition("```python\n")[2].partition("```")[0]
    ranks = tuple(range(dist.get_world_size()))
    made = Experts(seat, None, ranks, len(ranks))
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x, chosen, _ = (one.to(seat.device) for one in made.drawn(0, seat.rank))
    names = {"commdsl": commdsl, "ep": ep, "group": None, "num_experts": made.keys, "limits": made.experts.limits}
    names |= {"experts": made.experts, "x": x, "scale": torch.zeros_like(x[:, :1]).half(), "chosen": chosen}
    exec(lines, names)
    made.ranks = names["living"].ranks
    made.made(names["there"], made.wanted(0))
