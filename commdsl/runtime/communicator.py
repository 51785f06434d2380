"""Turns a group's name into a Communicator: this rank's end of the group, with its symmetric memory and its kernels.

Assumes every rank of a group makes the same calls in the same order. Does not check tensors (`op` does). The table of
communicators is the one piece of state this package keeps per process: an op knows its group by name only.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commdsl.build.emit import Emitted
from commdsl.machine.config import Config, from_environment
from commdsl.program.plan import Transport
from commdsl.runtime.bootstrap import Board, Bootstrap, StoreBootstrap, ThreadBootstrap, exchange
from commdsl.runtime.error_page import ErrorPage, ErrorWord
from commdsl.runtime.errors import BrokenGroupError, GroupError
from commdsl.runtime.heap import Heap
from commdsl.runtime.kernel import Kernel, Launchable, Residence
from commdsl.runtime.program import Program
from commdsl.runtime.stream_order import StreamOrder
from commdsl.runtime.workspace import Open, Start, Tenant, Workspace

RESET_PATIENCE = 2.0
"""A reset waits this many time-outs for the others: they may still be inside a call that has to run out first."""


class Communicator(ABC):
    """What `host.py` and `device.py` have in common."""

    transport = Transport.PEER
    order: StreamOrder | None = None  # None where calls end before they return

    def __init__(self, name: str, bootstrap: Bootstrap, config: Config, errors: ErrorPage) -> None:
        self.name = name
        self.errors = errors
        self.bootstrap = bootstrap
        self.config = config
        self.lock = threading.RLock()
        self.tenants: dict[str, Tenant] = {}
        self.broken: Exception | None = None
        self._generation = 0
        self._made: dict[str, int] = {}
        self.numbers = itertools.count()  # of what all ranks make in the same order

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    @property
    def size(self) -> int:
        return self.bootstrap.size

    def exchange(self, key: str, value: bytes, patience: float = 1.0) -> tuple[bytes, ...]:
        timeout = self.config.timeout * patience
        return exchange(self.bootstrap, f"{self._generation}/{key}", value, timeout)

    def workspace(self, program: Program) -> Workspace:
        """The workspace of a Program; the first call for it is collective."""

        def open_(heap: Heap, error: ErrorWord) -> Workspace:
            return Workspace(program.plan, self.rank, heap, error, self.config.timeout, self.order)

        found = self.tenant(program.emitted.digest, program.plan.name, program.plan.symmetric_bytes, open_)
        assert isinstance(found, Workspace)
        return found

    def tenant(self, key: str, name: str, size: int, open_: Open) -> Tenant:
        """Who has symmetric memory under `key`; if nobody, `open_` is given `size` bytes and a word for errors. The
        first call for a key is collective.
        """
        self.refuse_if_broken()
        with self.lock:
            found = self.tenants.get(key)
            if found is None:
                found = self.tenants[key] = self._rendezvous(key, name, size, open_)
            return found

    def refuse_if_broken(self) -> None:
        if self.broken is not None:
            raise BrokenGroupError(
                f"group `{self.name}` cannot be used after `{type(self.broken).__name__}`: every rank has to call "
                f"commdsl.reset() first ({self.broken})"
            )

    def _rendezvous(self, key: str, name: str, size: int, open_: Open) -> Tenant:
        self.refuse_setup(name)
        number = self._made.get(key, 0)
        self._made[key] = number + 1
        where = f"{name}/{key}/{number}"
        try:
            # Twice: a rank that comes late finds the others gone here, not inside a collective that cannot time out.
            self.exchange(f"{where}/arrived", b"")
            self.exchange(f"{where}/agreed", b"")
            heap = self.make_heap(name, size, lambda what, value: self.exchange(f"{where}/{what}", value))
            made = open_(heap, self.errors.take())
            self.exchange(f"{where}/ready", b"")
        except Exception as error:
            self.broken = error
            raise
        return made

    def fail(self, error: Exception) -> None:
        """After a time-out the heap holds half a call: nothing runs until all ranks have reset."""
        self.broken = error

    def check(self) -> None:
        """Raises what a kernel of this rank reported."""
        if self.errors.is_blank():
            return
        for tenant in tuple(self.tenants.values()):
            failure = tenant.failure()
            if failure is not None:
                self.fail(failure)
                try:
                    raise failure
                finally:
                    del failure  # it is in its own traceback, and with it what the caller's frames hold: results

    def reset(self) -> None:
        """Collective: back to the state before the first call. Memory that not all ranks have is given up."""
        with self.lock:
            number = self._generation
            self._generation += 1
            mine = ",".join(sorted(self.tenants))
            everyone = exchange(
                self.bootstrap, f"reset/{number}/enter", mine.encode(), self.config.timeout * (1.0 + RESET_PATIENCE)
            )
            self.finish()
            common = set.intersection(*(set(value.decode().split(",")) for value in everyone))
            # Nobody clears a heap while a kernel of another rank may still write to it.
            exchange(self.bootstrap, f"reset/{number}/finished", b"", self.config.timeout * (1.0 + RESET_PATIENCE))
            for key in self.tenants.keys() - common:
                self.tenants.pop(key).close()
            for tenant in self.tenants.values():
                tenant.reset()
            self._made = dict.fromkeys(self.tenants, 1)
            self.broken = None
            exchange(self.bootstrap, f"reset/{number}/done", b"", self.config.timeout * (1.0 + RESET_PATIENCE))

    def release(self, tenant: str | None = None) -> None:
        """Collective: frees the symmetric memory of one tenant, or of all."""
        with self.lock:
            self.finish()
            for key in sorted(self.tenants) if tenant is None else [tenant]:
                found = self.tenants.pop(key, None)
                if found is not None:
                    found.close()
                    self.exchange(f"release/{key}/{self._made[key]}", b"")
                    found.heap.free()

    @abstractmethod
    def refuse_setup(self, what: str) -> None:
        """Raises where symmetric memory cannot be set up now."""

    @abstractmethod
    def make_heap(self, name: str, size: int, tell: Callable[[str, bytes], tuple[bytes, ...]]) -> Heap:
        """Symmetric memory; all ranks come here together."""

    @abstractmethod
    def load_kernel(self, emitted: Emitted, macros: tuple[str, ...], residence: Residence) -> Kernel:
        """A text, built for this rank's processor or GPU."""

    @abstractmethod
    def starter(self, tenant: Tenant, kernel: Kernel, prepared: Launchable) -> Start:
        """What starts calls of a kernel, one after another in call order."""

    @abstractmethod
    def prepare(self, program: Program, block_bytes: int, dtype: str, op: str) -> Start:
        """What starts calls of a Program on blocks of one size; the first for a Program is collective."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for this rank's kernels."""


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a name leads: a rank's bootstrap, and what keeps a stale entry from being used."""

    bootstrap: Bootstrap
    board: Board | None
    owner: Callable[[], object | None]

    def is_behind(self, found: object) -> bool:
        """Whether this is still what the name leads to, given what it leads to now."""
        return found is not None and self.owner() is found


_LOCK = threading.Lock()
_THREADS: dict[str, _Member] = {}
_COMMUNICATORS: dict[tuple[str, str], tuple[_Member, Communicator]] = {}
_NUMBERS = itertools.count()


def threads(num_ranks: int) -> tuple[str, ...]:
    """A group whose ranks are threads of this process: the group name for each rank. CPU tensors only."""
    board = Board()
    number = next(_NUMBERS)
    names = tuple(f"threads{number}:{rank}/{num_ranks}" for rank in range(num_ranks))
    for rank, name in enumerate(names):
        _THREADS[name] = _Member(ThreadBootstrap(rank, num_ranks, board), board, lambda: board)
    return names


def name_of(group: Any) -> str:
    """The name of a torch process group, of a name, or of the default group."""
    if isinstance(group, str):
        return group
    if group is not None:
        name = getattr(group, "group_name", None)
        if isinstance(name, str):
            return name
        raise GroupError(f"expected a process group or its name, got {type(group).__name__}")
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise GroupError("no group given and torch.distributed has none: call init_process_group or pass group=")
    return str(_c10d().group.WORLD.group_name)


def size_of(name: str) -> int | None:
    """The number of ranks of a group, None if this process does not know it."""
    if name in _THREADS:
        return _THREADS[name].bootstrap.size
    found = _process_group(name)
    return None if found is None else int(found.size())


def rank_of(name: str) -> int | None:
    if name in _THREADS:
        return _THREADS[name].bootstrap.rank
    found = _process_group(name)
    return None if found is None else int(found.rank())


def resolve(group: Any) -> tuple[str, object]:
    """The name of a group, and the object behind the name at this moment, None where there is none.

    A name may be given again once its group is destroyed, so what was kept under a name holds for that object only.
    """
    if isinstance(group, str):
        member = _THREADS.get(group)
        return group, _process_group(group) if member is None else member.owner()
    try:
        world: Any = torch.distributed.distributed_c10d._world
        found = world.default_pg if group is None else group
        return world.pg_names[found], found
    except (AttributeError, KeyError, TypeError):  # no torch.distributed, no such group, no group at all
        return name_of(group), None


def owner_of(name: str) -> Callable[[], object]:
    """Finds what `resolve` finds behind the name now, as long as that exists; does not keep it alive."""
    return _member(name).owner


def of(name: str, device: torch.device) -> Communicator:
    """The communicator of a group for one kind of device, made on first use."""
    key = (name, str(device))
    with _LOCK:
        found = _COMMUNICATORS.get(key)
    if found is not None and found[0].is_behind(resolve(name)[1]):
        return found[1]
    member = _member(name)
    made = _make(name, member, device)
    with _LOCK:
        _COMMUNICATORS[key] = (member, made)
    return made


def every(name: str | None = None) -> tuple[Communicator, ...]:
    """The communicators of one group, or all that this process made."""
    with _LOCK:
        return tuple(made for (group, _), (_, made) in _COMMUNICATORS.items() if name in (None, group))


def forget() -> None:
    with _LOCK:
        _COMMUNICATORS.clear()


def _make(name: str, member: _Member, device: torch.device) -> Communicator:
    from commdsl.runtime.device import DeviceCommunicator
    from commdsl.runtime.host import HostCommunicator

    config = from_environment()
    if device.type == "cpu":
        return HostCommunicator(name, member.bootstrap, config, member.board)
    if member.board is not None:
        raise GroupError("a group of threads runs on the CPU; GPUs take one process each")
    return DeviceCommunicator(name, member.bootstrap, config, device)


def _member(name: str) -> _Member:
    if name in _THREADS:
        return _THREADS[name]
    group = _process_group(name)
    if group is None:
        raise GroupError(f"no process group named `{name}` in this process")
    rank, size = int(group.rank()), int(group.size())
    if rank < 0:
        raise GroupError(f"this process is no rank of group `{name}`")
    store = _c10d()._get_process_group_store(group)
    return _Member(StoreBootstrap(rank, size, store, "commdsl"), None, weakref.ref(group))


def _process_group(name: str) -> Any | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    try:
        return _c10d()._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def _c10d() -> Any:
    """torch's module of process groups; a group's name and store are reached only through its private functions."""
    return torch.distributed.distributed_c10d
