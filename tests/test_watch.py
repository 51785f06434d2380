"""Who watches learns that a peer's process has ended, and of Ctrl-C; nothing is left when nobody watches any more."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commdsl.runtime import watch
from commdsl.runtime.bootstrap import Board, SharedBootstrap, ThreadBootstrap
from commdsl.runtime.watch import Watcher, own_process

LIMIT = 120.0
"""Seconds: far more than what is waited for takes."""

SOCKET, PIDFD = "socket:", "anon_inode:[pidfd]"


class Seat:
    """Somebody who watches: what it was told."""

    def __init__(self, *processes: str) -> None:
        self.processes = processes
        self.gone: set[int] = set()
        self.everyone = ThreadBootstrap(0, 1, Board())
        self.heard = 0

    def hear(self, world: SharedBootstrap) -> bool:
        self.heard += 1
        return False

    def mark_gone(self, rank: int) -> None:
        self.gone.add(rank)

    def interrupt(self, seconds: float) -> None:
        raise AssertionError("nobody interrupts here")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def name_of(pid: int) -> str:
    """As that process would call itself."""
    boot, namespace, _, _ = own_process().split()
    return f"{boot} {namespace} {pid} {watch._started(pid)}"


def comes(what: Callable[[], object]) -> bool:
    """Whether something becomes true."""
    end = time.monotonic() + LIMIT
    while not what() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(what())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "commdsl watch"]


def descriptors() -> Counter[str]:
    """Those of the kinds that a watcher has: others come and go with whatever else the process does."""
    found: Counter[str] = Counter()
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            link = os.readlink(f"/proc/self/fd/{one}")
            found.update(kind for kind in (SOCKET, PIDFD) if link.startswith(kind))
    return found


def test_end_of_a_process(child: subprocess.Popen[bytes]) -> None:
    """A rank whose process is killed is named at once to everybody who watches it, and no other is."""
    watcher = Watcher()
    one, other = Seat(own_process(), name_of(child.pid)), Seat(name_of(child.pid), own_process())
    watcher.add(one)
    watcher.add(other)
    time.sleep(0.05)
    assert not one.gone | other.gone
    child.send_signal(signal.SIGKILL)  # not waited for: a zombie has ended, too

    assert comes(lambda: 1 in one.gone and 0 in other.gone)
    assert (one.gone, other.gone) == ({1}, {0})
    late = Seat(own_process(), name_of(child.pid))
    watcher.add(late)
    assert late.gone == {1}


def test_another_process_of_that_number(child: subprocess.Popen[bytes]) -> None:
    """A pid that was given anew is no sign that the rank lives on."""
    *rest, started = name_of(child.pid).split()
    seat = Seat(own_process(), " ".join([*rest, str(int(started) - 1)]))
    Watcher().add(seat)
    assert seat.gone == {1}


def test_out_of_sight(child: subprocess.Popen[bytes]) -> None:
    """Of processes on other machines, in other namespaces, or of which the system says nothing, nothing is said."""
    boot, namespace, *rest = name_of(child.pid).split()
    seat = Seat(f"another {namespace} {rest[0]} 1", f"{boot} pid:[1] {rest[0]} 1", "", own_process())
    watcher = Watcher()
    watcher.add(seat)
    time.sleep(0.05)
    assert seat.gone == set()
    assert watcher._peers == {}


@pytest.mark.parametrize("how", ["removed", "let go"])
def test_nothing_is_left(child: subprocess.Popen[bytes], how: str) -> None:
    """Thread, pipe, descriptors and the wakeup descriptor end with the last who watches."""
    for one in tuple(watch.watcher()._watched):  # groups of other tests
        watch.watcher().remove(one)
    gc.collect()
    assert comes(lambda: threads() == [])
    before = descriptors()
    watcher, seat = Watcher(), Seat(own_process(), name_of(child.pid))
    for _ in range(3):
        seats = [seat, Seat(*seat.processes)]
        for one in seats:
            watcher.add(one)
        assert threads() == ["commdsl watch"]
        assert descriptors() - before == {SOCKET: 2, PIDFD: 1}  # one a process, however many watch it
        if how == "removed":
            for one in seats:
                watcher.remove(one)
        seat = Seat(*seat.processes)
        del seats, one

        assert comes(lambda: threads() == [])
        assert descriptors() == before
        assert signal.set_wakeup_fd(-1) == -1


SCRIPT = """
import ctypes, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without
from commdsl.runtime import watch
from commdsl.runtime.bootstrap import Board, ThreadBootstrap
watch.INTERRUPT_SECONDS = 0.3
class Seat:
    processes, told = (watch.own_process(), "elsewhere pid:[1] 1 1"), []
    everyone = ThreadBootstrap(0, 1, Board())
    def hear(self, world): return False
    def interrupt(self, seconds): self.told.append(seconds)
    def mark_gone(self, rank): pass
def interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
def wait(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
"""


def says(script: str) -> str:
    code = SCRIPT + script
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_interrupt() -> None:
    """Ctrl-C is passed on at once, also while the main thread is not in Python, and is over after a while."""
    script = """
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # of zeros: PTHREAD_MUTEX_INITIALIZER
class Unlocking(Seat):
    def interrupt(self, seconds):
        super().interrupt(seconds)
        libc.pthread_mutex_unlock(mutex)
seat = Unlocking()
watch.watcher().add(seat)
libc.pthread_mutex_lock(mutex)
threading.Timer(0.05, interrupt).start()
try:
    libc.pthread_mutex_lock(mutex)  # no signal ends this; who is told does
except KeyboardInterrupt:
    pass
first = list(seat.told)
while len(seat.told) < 2:
    wait(0.01)
print(first, seat.told)
"""
    assert says(script) == "[0.3] [0.3, 0.0]"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_users(when: str) -> None:
    """Who handles Ctrl-C itself is not disturbed: nothing is passed on; nor is a wakeup descriptor taken away."""
    own = "signal.signal(signal.SIGINT, lambda *_: None)\n"
    script = f"""
seat = Seat()
{own if when == "before" else ""}
watch.watcher().add(seat)
{own if when == "after" else ""}
interrupt()
wait(0.1)
print(seat.told, signal.set_wakeup_fd(-1) == -1)
"""
    assert says(script) == f"[] {when == 'before'}"


def test_a_wakeup_descriptor_of_the_users() -> None:
    """Where somebody listens for signals already, they do so afterwards, too."""
    script = """
here, there = os.pipe()
os.set_blocking(there, False)
signal.set_wakeup_fd(there)
seat = Seat()
watch.watcher().add(seat)
watch.watcher().remove(seat)
print(signal.set_wakeup_fd(-1) == there)
"""
    assert says(script) == "True"


def test_a_forked_child() -> None:
    """A child has no watcher, and its Ctrl-C is not its parent's."""
    script = """
seat = Seat()
watch.watcher().add(seat)
child = os.fork()
if child == 0:
    interrupt()
    wait(0.1)
    os._exit(signal.set_wakeup_fd(-1) != -1)
print(os.waitpid(child, 0)[1])
wait(0.2)
print(seat.told)
"""
    assert says(script) == "0\n[]"
