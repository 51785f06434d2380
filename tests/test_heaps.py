"""Symmetric memory of host ranks: passed without a name, reserved as it is used, refused with both sizes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from thread_ranks import outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402
from commdsl.machine.config import from_environment  # noqa: E402
from commdsl.planner.tuning import selection  # noqa: E402
from commdsl.program.memory import Transport  # noqa: E402
from commdsl.program.sizes import HOST_MAX_LANES, touched  # noqa: E402
from commdsl.runtime import descriptors as descriptors_module  # noqa: E402
from commdsl.runtime import groups  # noqa: E402
from commdsl.runtime.bootstrap import Board, Exchange, ThreadBootstrap, exchange  # noqa: E402
from commdsl.runtime.descriptors import pass_round  # noqa: E402
from commdsl.runtime.errors import GroupError, RendezvousError  # noqa: E402
from commdsl.runtime.heap import Extent, SharedHeap  # noqa: E402
from commdsl.runtime.load import definition  # noqa: E402
from commdsl.runtime.program import program  # noqa: E402

DOCKER_BYTES = 64 << 20
"""Shared memory of a container, unless told otherwise."""


def ends(size: int, timeout: float = 5.0) -> list[Exchange]:
    board = Board()
    return [partial(_exchange, ThreadBootstrap(rank, size, board), timeout) for rank in range(size)]


def _exchange(end: ThreadBootstrap, timeout: float, key: str, value: bytes) -> tuple[bytes, ...]:
    return exchange(end, key, value, timeout, "test")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_with(content: bytes) -> int:
    made = os.memfd_create("test")
    os.write(made, content)
    return made


# --- descriptors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 12])
def test_descriptors_go_round(size: int) -> None:
    """Every rank gets what every rank gave, in rank order, and nothing else stays open."""
    own = [memory_with(f"of rank {rank}".encode()) for rank in range(size)]
    before, tell = descriptors(), ends(size)

    found = outcomes(size, lambda rank: pass_round(own[rank], rank, tell[rank]))

    assert descriptors() == before + size * size
    for passed in found:
        assert [os.pread(one, 99, 0).decode() for one in passed] == [f"of rank {rank}" for rank in range(size)]
        assert not any(os.get_inheritable(one) for one in passed)
    for one in (*own, *(one for passed in found for one in passed)):
        os.close(one)


@pytest.mark.parametrize(
    ("listens", "kind", "message"),
    [
        (True, RendezvousError, "waited 0.3 s for rank 2"),
        (False, GroupError, "rank [01] cannot pass memory to rank 2: Connection refused"),
    ],
)
def test_descriptors_that_do_not_come(listens: bool, kind: type[Exception], message: str) -> None:
    """A rank that ends before it passes anything, or is not to be reached, is named, and what came is given back."""
    own = [memory_with(b"") for _ in range(3)]
    before, tell = descriptors(), ends(3, 0.3)

    def body(rank: int) -> None:
        if rank < 2:
            pass_round(own[rank], rank, tell[rank])
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(b"")  # a name that the system chooses
            if listens:
                door.listen()
            tell[rank]("doors", door.getsockname())
            if not listens:
                tell[rank]("handed", b"")
            time.sleep(0.6)

    found = outcomes(3, body)

    assert [type(error) for error in found[:2]] == [kind, kind]
    assert all(re.search(message, str(error)) for error in found[:2])
    assert descriptors() == before
    for one in own:
        os.close(one)


def test_memory_is_not_passed_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that belongs to another user gets no descriptor, and every rank hears whose it is."""
    own, before, tell = [memory_with(b"") for _ in range(2)], descriptors(), ends(2)
    sent: list[object] = []
    monkeypatch.setattr(descriptors_module, "_user_of", lambda connection: os.geteuid() + 1)
    monkeypatch.setattr(socket, "send_fds", lambda *said: sent.append(said))
    found = outcomes(2, lambda rank: pass_round(own[rank], rank, tell[rank]))

    message = f"rank 0 does not pass memory to rank 1: .* belongs to user {os.geteuid() + 1}, .* user {os.geteuid()}"
    assert [type(error) for error in found] == [GroupError] * 2
    assert all(re.search(message, str(error)) for error in found)
    assert sent == []
    assert descriptors() == before
    for one in own:
        os.close(one)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is played by a child of root")
def test_another_user_listens() -> None:
    """The same with a process of another user, whose name the store returns."""
    name, (ready, started) = f"\0commdsl-test-{os.getpid()}".encode(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(12345)
        os.setuid(12345)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(name)
            door.listen()
            os.write(started, b"x")
            with contextlib.suppress(OSError):
                door.accept()[0].recv(1)
            time.sleep(60)
    try:
        os.read(ready, 1)
        own, tell = memory_with(b"secret"), ends(2)

        def body(rank: int) -> None:
            if rank == 0:
                pass_round(own, rank, tell[rank])
                return
            tell[rank]("doors", name)
            tell[rank]("handed", b"")

        refused, _ = outcomes(2, body)
        assert isinstance(refused, GroupError)
        assert "belongs to user 12345, and rank 0 runs as user 0" in str(refused)
        os.close(own)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(started)


# --- what is reserved -------------------------------------------------------------------------------------------------


def test_pages() -> None:
    """Stretches are reserved in whole pages, those that touch as one."""
    assert Extent("x", 1 << 20, ((0, 10), (64, 4032), (8192, 1), (20000, 4096))).pages == (
        (0, 4096),
        (8192, 4096),
        (16384, 8192),
    )
    assert Extent.whole("x", 5000).pages == ((0, 8192),)


def test_heaps_of_processes_are_one_memory() -> None:
    """What a rank writes into a part all see, as long as one of them has it; nothing stays open."""
    extent, before = Extent.whole("x", 5000), descriptors()
    tell = ends(3)
    heaps = outcomes(3, lambda rank: SharedHeap(extent, rank, tell[rank]))

    assert descriptors() == before
    for rank, heap in enumerate(heaps):
        ctypes.memset(heap.addresses[1] + 1000 * rank, rank + 1, 1000)
    heaps[1].free()
    for heap in (heaps[0], heaps[2]):
        assert ctypes.string_at(heap.addresses[1], 3001) == b"\1" * 1000 + b"\2" * 1000 + b"\3" * 1000 + b"\0"
        assert heap.reserved_bytes == 8192


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": commdsl.all_reduce,
    "all_gather": commdsl.all_gather,
    "reduce_scatter": commdsl.reduce_scatter,
    "all_to_all": commdsl.all_to_all,
    "broadcast": commdsl.broadcast,
}


def test_calls_touch_what_is_reserved() -> None:
    """After all five collectives in many sizes, and tiles beside moves, the rest of each heap is as it was: zero."""
    names = commdsl.threads(2)

    def body(rank: int) -> int:
        for call in CALLS.values():
            for numel in (2, 1000, 300_000, 6_000_000):
                call(torch.full((numel,), 3.0), group=names[rank])
        commdsl.load("add_reduce_scatter", ranks=2)(torch.ones(60_000), torch.ones(60_000), group=names[rank])
        checked = 0
        for workspace in groups.of(names[rank], torch.device("cpu")).workspaces.values():
            size = workspace.plan.symmetric_bytes
            held = np.frombuffer(ctypes.string_at(workspace.heap.addresses[rank], size), np.uint8).copy()
            assert held.any()
            for first, length in Extent("", size, touched(workspace.plan.moves, HOST_MAX_LANES)).pages:
                held[first : first + length] = 0
            assert not held.any(), workspace.plan.name
            checked += 1
        return checked

    assert outcomes(2, body) == [10, 10]


def test_eight_ranks_and_all_collectives_fit_a_container() -> None:
    """Every schedule that the five collectives choose on the processor, for eight ranks together."""
    rows = [(name, row) for name in CALLS for row in selection.rows_for((), name, 8, "cpu", plain=False).rows]
    total: dict[str, int] = {}
    for name, row in rows:
        params = {"root": 0} if name in selection.ROOTED else {}
        asked = definition(row.candidate.schedule, None, params, None, dict(row.candidate.tune))
        found = program(asked, 8, Transport.PEER, from_environment())
        extent = Extent("", found.plan.symmetric_bytes, touched(found.plan.moves, HOST_MAX_LANES))
        total[found.emitted.digest] = 8 * extent.reserved_bytes
    assert len(total) == 9
    assert 24 << 20 < sum(total.values()) < 36 << 20
    assert sum(total.values()) < DOCKER_BYTES


# --- what goes wrong --------------------------------------------------------------------------------------------------


def python(text: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], text=True, stdout=subprocess.PIPE, **more)


def test_no_memory() -> None:
    """Too little memory is an error that gives both sizes, whatever it is that sets the limit."""
    process = python("""
        import resource
        from commdsl.runtime.heap import Extent, SharedHeap
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for size in (1 << 19, 1 << 21, 1 << 50):
            try:
                SharedHeap(Extent.whole("ring", size), 0, lambda key, value: (value,))
                print("made")
            except MemoryError as error:
                print(error)
    """)
    said = process.communicate()[0].splitlines()
    where = "bytes of shared memory on every rank of this machine, and 1048576 can be had: there is not enough memory"
    assert said == ["made", *(f"error[C969]: `ring` takes {size} {where}" for size in (1 << 21, 1 << 50))]


def test_ranks_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    """Memory of a rank that is killed while it sets up is gone: it has no name anywhere."""
    folders = [Path("/dev/shm"), tmp_path]
    before = [sorted(folder.iterdir()) for folder in folders]
    process = python(
        """
        import time
        from commdsl.runtime.heap import Extent, SharedHeap
        def tell(key, value):
            if key == "doors":
                print(key, flush=True)
                time.sleep(60)
            return (value,)
        SharedHeap(Extent.whole("ring", 64 << 20), 0, tell)
        """,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "doors\n"
    maps = Path(f"/proc/{process.pid}/fd")
    assert any("commdsl" in os.readlink(one) for one in maps.iterdir())
    assert [sorted(folder.iterdir()) for folder in folders] == before
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [sorted(folder.iterdir()) for folder in folders] == before
