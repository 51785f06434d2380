"""Turns a group of ranks into a way to exchange small values: through the group's store, or between threads of one
process.

Assumes every rank of the group exchanges under the same keys. Does not use the group's own collectives: a store serves
every backend and can name who is missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from commdsl.machine.config import Config
from commdsl.runtime.errors import GroupError, OpError, PeerError, RendezvousError

POLL_SECONDS = 0.0005

ALARMS = "alarms"
"""The number of reports that ranks of any group have made, among the values of all processes."""

STORE_SECONDS = 1.0
"""So long after a store has failed it may take until it is noticed that a process has ended."""


Ended: TypeAlias = Callable[[Sequence[int]], Mapping[int, str]]
"""Of some ranks those that say no more than they have, and why, in words that follow their name."""


class Bootstrap(Protocol):
    """One rank's end of a group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """The value, None while nobody has put it."""
        ...

    def drop(self, key: str) -> None:
        """Nobody reads that key any more."""
        ...


class SharedBootstrap(Bootstrap, Protocol):
    """One rank's end of all processes, in which any thread may ask."""

    def count(self, key: str) -> None:
        """Add 1 to a number, which `get` returns in decimal digits once it is not 0."""
        ...

    def apart(self) -> SharedBootstrap:
        """Return another end at the same values, whose requests do not wait for those of this one."""
        ...


Judge: TypeAlias = Callable[[int, bytes], None]
"""Raises where the value of a rank makes it useless to wait for the others."""


def exchange(
    bootstrap: Bootstrap,
    key: str,
    value: bytes,
    timeout: float,
    what: str,
    ended: Ended = lambda absent: {},
    judge: Judge = lambda rank, value: None,
) -> tuple[bytes, ...]:
    """Every rank's value, in rank order; RendezvousError naming the ranks that had not come when time was up.

    `what`: for what they come, in words. `ended`: of ranks that are waited for those from which no more will come than
    is there, and why: PeerError. `judge` is called with each value as soon as it is there.
    """
    found: dict[int, bytes] = {}
    absent: Sequence[int] = range(bootstrap.size)
    deadline = time.monotonic() + timeout
    try:
        bootstrap.put(f"{key}/{bootstrap.rank}", value)
        while True:
            why = ended(absent)  # before the look: a rank's end is noticed after the last that it said
            for rank in absent:
                got = bootstrap.get(f"{key}/{rank}")
                if got is not None:
                    found[rank] = got
                    judge(rank, got)
            if len(found) == bootstrap.size:
                return tuple(found[rank] for rank in range(bootstrap.size))
            absent = [rank for rank in range(bootstrap.size) if rank not in found]
            _go_on(bootstrap.rank, absent, why, timeout if time.monotonic() > deadline else None, what)
            time.sleep(POLL_SECONDS)
    except OpError:
        raise
    except RuntimeError as error:  # of the store, whose server may be the process that has ended
        raise _unanswered(bootstrap.rank, absent, error, what, ended) from error


def _go_on(rank: int, absent: Sequence[int], why: Mapping[int, str], waited: float | None, what: str) -> None:
    """Raises where there is no use in waiting longer. `waited`: so many seconds, where they are all there were."""
    for peer in absent:
        if peer in why:
            raise PeerError(peer, f"{why[peer]}; rank {rank} waited for it to {what}")
    if waited is not None:
        names = f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))}"
        raise RendezvousError(
            f"rank {rank} waited {waited:g} s for {names} to {what}; every rank of the group has to make the call",
            tuple(absent),
        )


def _unanswered(rank: int, absent: Sequence[int], error: RuntimeError, what: str, ended: Ended) -> OpError:
    """What it means that the store does not answer: most often that the process which serves it has ended."""
    deadline = time.monotonic() + STORE_SECONDS
    while time.monotonic() < deadline:
        with suppress(RuntimeError):
            for peer, why in ended(absent).items():
                return PeerError(peer, f"{why}, and the group's store does not answer; rank {rank} was to {what}")
        time.sleep(POLL_SECONDS)
    return unanswered(rank, error, what)


class StoreError(RuntimeError):
    """The store of a process group does not answer."""


def unanswered(rank: int, error: RuntimeError, what: str) -> RendezvousError:
    """Return the error of a rank that was to do something where the store does not answer."""
    return RendezvousError(
        f"rank {rank} was to {what}, and the group's store does not answer: {error}. The process that serves it, often "
        "that of rank 0, has ended or cannot be reached"
    )


@dataclass(frozen=True, slots=True)
class StoreBootstrap:
    """A torch process group's rank. The store's type is not named: this module loads without torch."""

    rank: int
    size: int
    store: Any
    prefix: str

    def put(self, key: str, value: bytes) -> None:
        self._ask(self.store.set, key, value)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._ask(self._found, key)
        return found

    def drop(self, key: str) -> None:
        self._ask(self.store.delete_key, key)

    def count(self, key: str) -> None:
        self._ask(self.store.add, key, 1)

    def _found(self, name: str) -> bytes | None:
        return bytes(self.store.get(name)) if self.store.check([name]) else None

    def _ask(self, request: Callable[..., Any], key: str, *values: Any) -> Any:
        try:
            return request(f"{self.prefix}/{key}", *values)
        except RuntimeError as error:
            raise StoreError(str(error)) from error

    def apart(self) -> StoreBootstrap:
        return replace(self, store=self.store.clone())


@dataclass(frozen=True, slots=True)
class Life:
    """A bootstrap under a prefix of its own: what was said when the group was used before is not heard again.

    A rank's life ends when all it set up was given back; the number of the next one is kept where the values are.
    """

    bootstrap: Bootstrap
    kind: str
    number: int

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    @property
    def size(self) -> int:
        return self.bootstrap.size

    def put(self, key: str, value: bytes) -> None:
        self.bootstrap.put(f"{self.kind}/{self.number}/{key}", value)

    def get(self, key: str) -> bytes | None:
        return self.bootstrap.get(f"{self.kind}/{self.number}/{key}")

    def drop(self, key: str) -> None:
        self.bootstrap.drop(f"{self.kind}/{self.number}/{key}")

    def end(self) -> None:
        self.bootstrap.put(f"{self.kind}/lives/{self.rank}", str(self.number + 1).encode())


def life(bootstrap: Bootstrap, kind: str) -> Life:
    """Return the present life of a rank's communicators of one kind. A rank whose peers gave up a set-up that it never
    came to joins them in the life after it.
    """
    lives = (bootstrap.get(f"{kind}/lives/{rank}") for rank in range(bootstrap.size))
    return Life(bootstrap, kind, max(int(number or 0) for number in lives))


@dataclass(frozen=True, slots=True)
class Reports:
    """Values of one life of a group that lie where the whole world reads them, so that a process which watches for
    many groups asks one store. `world`: the end of all processes; `rank` and `size` are those of the group.
    """

    world: SharedBootstrap
    rank: int
    size: int
    prefix: str

    def put(self, key: str, value: bytes) -> None:
        self.world.put(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        return self.world.get(f"{self.prefix}/{key}")

    def drop(self, key: str) -> None:
        self.world.drop(f"{self.prefix}/{key}")

    def alarm(self) -> None:
        """Have the watch threads of all processes look at what ranks of their groups have reported."""
        self.world.count(ALARMS)


def alarms(world: SharedBootstrap) -> int:
    """Return how many alarms were raised so far."""
    return int(world.get(ALARMS) or 0)


@dataclass(frozen=True, slots=True, eq=False)
class Board:
    """What the threads of one process tell each other, and the memory they share."""

    values: dict[str, bytes] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # until all ranks have taken it
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class ThreadBootstrap:
    """A rank that is a thread of this process."""

    rank: int
    size: int
    board: Board

    def put(self, key: str, value: bytes) -> None:
        with self.board.lock:
            self.board.values[key] = value

    def get(self, key: str) -> bytes | None:
        with self.board.lock:
            return self.board.values.get(key)

    def drop(self, key: str) -> None:
        with self.board.lock:
            self.board.values.pop(key, None)

    def count(self, key: str) -> None:
        with self.board.lock:
            self.board.values[key] = str(int(self.board.values.get(key, b"0")) + 1).encode()

    def apart(self) -> ThreadBootstrap:
        return self


@dataclass(frozen=True, slots=True)
class World:
    """All processes that a group's ranks are some of."""

    bootstrap: SharedBootstrap
    ranks: tuple[int, ...]  # by rank of the group its rank here
    name: str = ""  # of the group, the same on all its ranks

    def reports(self, present: Life) -> Reports:
        """Return where the ranks of a group report in this life of it."""
        prefix = f"{self.name}/{present.kind}/{present.number}"
        return Reports(self.bootstrap, present.rank, present.size, prefix)

    def announce(self, process: str) -> None:
        """Say which process this rank is, before it sets up any group."""
        self.bootstrap.put(f"process/{self.bootstrap.rank}", process.encode())

    def process(self, rank: int) -> str:
        """Return what rank `rank` of the world has announced, nothing where it has not yet."""
        return (self.bootstrap.get(f"process/{rank}") or b"").decode()

    def nodes(self, config: Config) -> tuple[int, ...]:
        """By rank of the group the node that it is on: what plain loads and stores reach. All are on one, unless the
        Config says otherwise.
        """
        if not config.nodes:
            return self.ranks if config.transport == "nvshmem" else (0,) * len(self.ranks)
        if len(config.nodes) != self.bootstrap.size:
            raise GroupError(
                f"COMMDSL_NODES says where {len(config.nodes)} ranks are; there are {self.bootstrap.size} in all"
            )
        return tuple(config.nodes[rank] for rank in self.ranks)


Exchange = Callable[[str, bytes], tuple[bytes, ...]]
"""`exchange` of one communicator: its bootstrap and time-out are bound."""
