"""Turns the end of a peer's process, what peers report, and Ctrl-C into something that who waits for them looks at.

Assumes Linux's pidfds. Does not raise anything: who is watched for decides what becomes of its waits. Where a peer is
on another machine or in another pid namespace nothing is known of its process, and its end is left to the time-out.

One thread for the process, which sleeps until something happens, and looks a few times a second which peers are on
their way out. Ctrl-C reaches it by Python's wakeup descriptor, which is written to also while the main thread waits in
a kernel; only where the handler is Python's own and nobody else uses the descriptor, and it is given back at the end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from commdsl.runtime.bootstrap import SharedBootstrap, alarms

INTERRUPT_SECONDS = 2.0
"""So long after Ctrl-C waits give up: more than a wait has to last for that."""

LOOK_SECONDS = 0.25
"""So often the thread looks whether a peer has lost its memory, and whether any rank has reported something."""

SOON_SECONDS = 0.05
"""So often it looks where a report may come to concern a rank of this process."""

POKE = b"\0"
"""Wakes the thread to look anew; signals come as their numbers, from 1 on."""


class Watched(Protocol):
    """A communicator. Both methods may be called in any thread."""

    @property
    def processes(self) -> Sequence[str]:
        """By rank who it is, as `own_process` says there."""
        ...

    @property
    def everyone(self) -> SharedBootstrap:
        """The store in which all processes report."""
        ...

    def hear(self, world: SharedBootstrap) -> bool:
        """Look at what peers report, through this end of `everyone`; whether to look again soon."""
        ...

    def mark_gone(self, rank: int) -> None: ...

    def interrupt(self, seconds: float) -> None:
        """Waits are to give up; with 0 seconds no longer."""
        ...


def own_process() -> str:
    """Which process this is, among all of all machines: pids are given anew, and mean something in their namespace
    alone. Nothing where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


def _started(pid: int) -> int:
    """When a process began, in ticks since the machine did."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])  # the name before it may hold anything


def _is_near(process: str, own: str) -> bool:
    """Whether it is another process whose end can be seen from this one."""
    return process not in ("", own) and process.split()[:2] == own.split()[:2] and hasattr(os, "pidfd_open")


def _opened(process: str) -> int | None:
    """A descriptor that can be read when the process has ended; None where it has already."""
    _, _, pid, started = process.split()
    try:
        descriptor = os.pidfd_open(int(pid))
        if _started(int(pid)) == int(started):
            return descriptor
        os.close(descriptor)  # of a later process
    except (ProcessLookupError, FileNotFoundError):
        pass
    return None


def _has_memory(process: str) -> bool:
    """Whether a process still has memory of its own. One that was killed lets go of that first, and of what it has on a
    GPU, which takes seconds, only then: its descriptor tells of its end when all is done.
    """
    pid = process.split()[2]
    try:
        return Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split(maxsplit=1)[0] != "0"
    except (OSError, IndexError):
        return False


@dataclass(slots=True)
class _Ear:
    """An end of the thread's own at what all processes report; None where it does not answer."""

    world: SharedBootstrap | None
    heard: int = -1  # how many alarms
    is_waiting: bool = False  # for a rank of this process


class Watcher:
    """Of one process: whom it watches for, and the thread that does while there is somebody."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._peers: dict[str, int | None] = {}  # the processes watched, with their descriptors; None: ended
        self._ears: tuple[socket.socket, socket.socket] | None = None
        self._is_hooked = False  # to Ctrl-C
        self._worlds: dict[SharedBootstrap, _Ear] = {}  # by the end of whom it watches for; the thread's alone

    def add(self, one: Watched) -> None:
        """Watches for it, until it is removed or gone itself. Of ranks that have ended already it learns before this
        returns.
        """
        own = own_process()
        weakref.finalize(one, self._poke).atexit = False  # called when the set has let go of it, as that comes after it
        with self._lock:
            self._watched.add(one)
            if self._ears is None:
                self._start()
            for process in one.processes:
                if process not in self._peers and _is_near(process, own):
                    with suppress(OSError):  # no more descriptors: left to the time-out
                        self._peers[process] = _opened(process)
            self._tell()
        self._hook()
        self._poke()

    def remove(self, one: Watched) -> None:
        """The thread, the pipe and the descriptors end with the last."""
        with self._lock:
            self._watched.discard(one)
        self._poke()

    def _start(self) -> None:
        self._ears = socket.socketpair()
        for end in self._ears:
            end.setblocking(False)
        threading.Thread(target=self._run, args=(self._ears[0],), name="commdsl watch", daemon=True).start()

    def _poke(self) -> None:
        if not self._watched:
            self._unhook()
        ears = self._ears
        if ears is not None:
            with suppress(OSError):  # full: it will look anyway; closed: it has ended
                ears[1].send(POKE)

    # --- Ctrl-C: only the main thread may have its descriptor changed -------------------------------------------------

    def _hook(self) -> None:
        if self._is_hooked or self._ears is None or not _takes_interrupts():
            return
        before = signal.set_wakeup_fd(self._ears[1].fileno(), warn_on_full_buffer=False)
        self._is_hooked = before == -1
        if before != -1:
            signal.set_wakeup_fd(before)

    def _unhook(self) -> None:
        if not self._is_hooked or threading.current_thread() is not threading.main_thread():
            return
        assert self._ears is not None
        before = signal.set_wakeup_fd(-1)
        if before != self._ears[1].fileno():
            signal.set_wakeup_fd(before)  # somebody else took it meanwhile
        self._is_hooked = False

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, ear: socket.socket) -> None:
        until = None  # when an interrupt is over
        while (peers := self._look()) is not None:
            poll = select.poll()
            for descriptor in (ear.fileno(), *peers):
                poll.register(descriptor, select.POLLIN)
            left = SOON_SECONDS if self._hear() else LOOK_SECONDS if peers or self._worlds else None
            if until is not None:
                left = min(max(0.0, until - time.monotonic()), LOOK_SECONDS)
            found = [descriptor for descriptor, _ in poll.poll(None if left is None else left * 1000)]
            if signal.SIGINT in self._heard(ear) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                until = time.monotonic() + INTERRUPT_SECONDS
                self._interrupt(INTERRUPT_SECONDS)
            elif until is not None and time.monotonic() >= until:
                until = None
                self._interrupt(0.0)
            with self._lock:
                self._end(found)
                self._tell()

    def _look(self) -> list[int] | None:
        """The descriptors of peers, once what nobody needs any more is let go of; None where that is all."""
        with self._lock:
            wanted = {process for one in self._watched for process in one.processes}
            for process in self._peers.keys() - wanted:
                descriptor = self._peers.pop(process)
                if descriptor is not None:
                    os.close(descriptor)
            if self._watched or self._is_hooked:  # hooked: only the main thread can change that, when it comes by
                return [descriptor for descriptor in self._peers.values() if descriptor is not None]
            assert self._ears is not None
            for end in self._ears:
                end.close()
            self._ears = None
            return None

    def _hear(self) -> bool:
        """Passes on what ranks have reported; whether some of it waits for a rank of this process."""
        with self._lock:
            watched = list(self._watched)
        by_world: dict[SharedBootstrap, list[Watched]] = {}
        for one in watched:
            by_world.setdefault(one.everyone, []).append(one)
        del watched
        self._worlds = {world: self._worlds.get(world) or _Ear(_apart(world)) for world in by_world}
        for world, ear in self._worlds.items():
            if ear.world is None:
                continue
            try:
                count = alarms(ear.world)
                if count != ear.heard or ear.is_waiting:
                    waiting = [one.hear(ear.world) for one in by_world[world]]
                    ear.is_waiting = True in waiting
                    ear.heard = count
            except RuntimeError:  # of a store whose server has ended: that it has is seen otherwise
                ear.world, ear.is_waiting = None, False
        return any(ear.is_waiting for ear in self._worlds.values())

    def _heard(self, ear: socket.socket) -> bytes:
        with suppress(BlockingIOError):
            return ear.recv(4096)
        return b""

    def _interrupt(self, seconds: float) -> None:
        with self._lock:
            for one in self._watched:
                one.interrupt(seconds)

    def _end(self, found: Sequence[int]) -> None:
        """Notes which processes have ended, by their descriptors."""
        for process, descriptor in self._peers.items():
            if descriptor is not None and (descriptor in found or not _has_memory(process)):
                self._peers[process] = None
                os.close(descriptor)

    def _tell(self) -> None:
        ended = {process for process, descriptor in self._peers.items() if descriptor is None}
        for one in self._watched if ended else ():
            for rank, process in enumerate(one.processes):
                if process in ended:
                    one.mark_gone(rank)

    def _after_fork(self) -> None:
        """A child has no such thread, and must not wake that of its parent."""
        hooked, ears, peers = self._is_hooked, self._ears, self._peers
        if hooked:
            signal.set_wakeup_fd(-1)
        for end in ears or ():
            end.close()
        for descriptor in peers.values():
            if descriptor is not None:
                os.close(descriptor)
        self._reset()


def _apart(world: SharedBootstrap) -> SharedBootstrap | None:
    with suppress(RuntimeError):  # of a store whose server has ended, or out of descriptors
        return world.apart()
    return None


def _takes_interrupts() -> bool:
    """Whether Ctrl-C does here what Python does of its own, and this thread may ask to hear of it."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@cache
def watcher() -> Watcher:
    """This process's."""
    return Watcher()
