"""Turns a group's name into a Communicator: of the processor or of a GPU, made on first use and kept.

Assumes torch.distributed, or groups of threads made here. Does not run collectives. The table of communicators is the
one piece of state this package keeps per process: an op knows its group by name only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from commdsl.machine.config import DEFAULT_TIMEOUT, from_environment
from commdsl.machine.errors import ArgumentError
from commdsl.program.memory import Transport
from commdsl.runtime.bootstrap import Board, Bootstrap, Life, StoreBootstrap, ThreadBootstrap, World, life
from commdsl.runtime.breaking import is_settled, raised, settle, step_key
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.device import DeviceCommunicator
from commdsl.runtime.errors import GroupError
from commdsl.runtime.host import HostCommunicator
from commdsl.runtime.watch import own_process


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a name leads: a rank's bootstrap, and what keeps a stale entry from being used."""

    bootstrap: Bootstrap
    world: World
    board: Board | None
    owner: Callable[[], object | None]
    timeout: Callable[[torch.device], float]  # seconds, where COMMDSL_TIMEOUT does not say

    def is_behind(self, found: object) -> bool:
        """Whether this is still what the name leads to, given what it leads to now."""
        return found is not None and self.owner() is found


_Key: TypeAlias = tuple[str, torch.device]

_LOCK = threading.Lock()
_DONE = threading.Condition(_LOCK)
_THREADS: dict[str, _Member] = {}
_COMMUNICATORS: dict[_Key, tuple[_Member, Communicator]] = {}
_MAKING: set[_Key] = set()  # what some thread makes now
_FAILED: dict[_Key, tuple[_Member, Communicator]] = {}  # whose set-up failed, until the group is reset
_EARLY: dict[tuple[str, str], tuple[Life, int]] = {}  # by group and kind of device the steps before its first set-up
_ANNOUNCED: weakref.WeakSet[Any] = weakref.WeakSet()  # default groups whose ranks know which process this is
_NUMBERS = itertools.count()
_FORKS: list[int] = []  # the process that asked to be told of forks
_INHERITED: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of the process that this one was forked from


def threads(num_ranks: int) -> tuple[str, ...]:
    """A group whose ranks are threads of this process: the group name for each rank. CPU tensors only."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ArgumentError(f"`num_ranks` is a whole number from 1 on, not {num_ranks!r}")
    board = Board()
    number = next(_NUMBERS)
    names = tuple(f"threads{number}:{rank}/{num_ranks}" for rank in range(num_ranks))
    for rank, name in enumerate(names):
        own = ThreadBootstrap(rank, num_ranks, board)
        _THREADS[name] = _Member(own, World(own, tuple(range(num_ranks))), board, lambda: board, _short)
    return names


def name_of(group: Any) -> str:
    """The name of a torch process group, of a mesh of one dimension, of a name, or of the default group."""
    if isinstance(group, str):
        return group
    if group is not None:
        if _is_mesh(group):
            group = _group_of(group)
        name = getattr(group, "group_name", None)
        if isinstance(name, str):
            return name
        if isinstance(group, int) and group == torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise GroupError("this process is no rank of that group: only its ranks call")
        raise GroupError(f"expected a process group, its name or a mesh of one dimension, got {type(group).__name__}")
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


def own_rank(name: str) -> int:
    """This process's rank in a group. Raises GroupError where it has none."""
    rank = rank_of(name)
    if rank is None or rank < 0:
        raise GroupError(f"this process is no rank of a process group named `{name}`")
    return rank


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
        return resolve(_group_of(group)) if _is_mesh(group) else (name_of(group), None)


def _is_mesh(group: Any) -> bool:
    """Without an import of what few programs use."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(group, module.DeviceMesh)


def _group_of(mesh: Any) -> Any:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names
    each = "get_group(0) and so on" if names is None else " or ".join(f"mesh[{name!r}]" for name in names)
    raise GroupError(f"a mesh of {mesh.ndim} dimensions is no group: pass one of them, {each}")


def owner_of(name: str) -> Callable[[], object]:
    """Finds what `resolve` finds behind the name now, as long as that exists; does not keep it alive."""
    return _member(name).owner


def of(name: str, device: torch.device) -> Communicator:
    """The communicator of a group for one kind of device, made on first use."""
    return _known(name, resolve(name)[1], device)


def reaches_far(group: Any, device: torch.device) -> bool:
    """Whether kernels of a group have to reach ranks that plain loads and stores of such a device do not; the first
    time collective, as the group's first call is.
    """
    return device.type == "cuda" and _known(*resolve(group), device).transport is Transport.NVSHMEM


def _known(name: str, behind: object, device: torch.device) -> Communicator:
    """`behind`: what the name leads to."""
    key = (name, device)
    found = _COMMUNICATORS.get(key)  # without the lock: every call comes here
    if found is not None and found[0].is_behind(behind):
        return found[1]
    device = _whole(device)
    key = (name, device)
    with _alone(key):
        found = _COMMUNICATORS.get(key)
        if found is not None and found[0].is_behind(behind):
            return found[1]
        sweep()
        member = _member(name)
        announce()
        _refuse_failed(key, member, behind)
        made = _make(name, member, device)
        present, steps = _EARLY.pop((name, device.type), (made.bootstrap, 0))
        made.steps = steps if present.number == made.bootstrap.number else 0
        try:
            made.open()
        except BaseException as error:
            made.end_half_way(error)
            with _LOCK:
                _FAILED[key] = (member, made)
            raise
        with _LOCK:
            _COMMUNICATORS[key] = (member, made)
    return made


def _refuse_failed(key: _Key, member: _Member, behind: object) -> None:
    """Raises BrokenGroupError where a set-up of the group failed, and the group was not reset since."""
    failed = _FAILED.get(key)
    if failed is None:
        return
    if failed[0].is_behind(behind):
        failed[1].refuse_if_broken()
    with _LOCK:
        _FAILED.pop(key, None)


def renew(name: str) -> None:
    """Forgets set-ups of a group that failed on this rank, and what it refused before any: the next call begins anew,
    with those of the other ranks.
    """
    with _LOCK:
        failed = [_FAILED.pop(key)[1] for key in tuple(_FAILED) if key[0] == name]
        early = [_EARLY.pop(key)[0] for key in tuple(_EARLY) if key[0] == name]
    for comm in failed:
        comm.close()
    for present in early:  # as peers do, which have a set-up that failed to close
        present.end()


def report(error: BaseException, name: str, kind: str, what: str) -> None:
    """Report to the peers that this rank's call of `what` raised, where nothing of it was started: those that wait for
    it raise, too. `kind`: cpu or cuda, where the tensors of the call are.
    """
    if is_settled(error, name) or (size_of(name) or 1) == 1:
        return
    settle(error, name)
    known = every(name)
    for comm in [one for one in known if one.kind == kind] or known:
        comm.report(error, what)
    if not known and not any(key[0] == name for key in _FAILED):
        _report_early(error, name, kind, what)


def _report_early(error: BaseException, name: str, kind: str, what: str) -> None:
    """The group is not set up yet."""
    member = _member(name)
    present = life(member.bootstrap, kind)
    with _LOCK:
        before, step = _EARLY.get((name, kind), (present, 0))
        step = step if before.number == present.number else 0
        _EARLY[name, kind] = present, step + 1
    reports = member.world.reports(present)
    reports.put(step_key(0, step, reports.rank), raised(error, what, 0).pack())
    reports.alarm()


def announce() -> None:
    """Tells the other processes which one this rank is, once: they hear of its end before it has set up a group."""
    with contextlib.suppress(Exception):  # no process group yet: its first use announces
        everyone = torch.distributed.group.WORLD
        if everyone is not None and everyone not in _ANNOUNCED:
            _ANNOUNCED.add(everyone)
            _world(everyone).announce(own_process())


def _whole(device: torch.device) -> torch.device:
    """As tensors there say it: "cuda" is the current GPU, which has one end of a group however it is called."""
    if device.type != "cuda":
        return torch.device(device.type)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _alone(key: _Key) -> Iterator[None]:
    """Of the threads of a rank that make a group's first call at once one sets it up, which other ranks meet once."""
    with _DONE:
        _DONE.wait_for(lambda: key not in _MAKING)
        if not _FORKS:
            _FORKS.append(os.getpid())
            os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_after_fork)
        _MAKING.add(key)
    try:
        yield
    finally:
        with _DONE:
            _MAKING.discard(key)
            _DONE.notify_all()


def sweep() -> None:
    """Gives back what belongs to process groups that were destroyed."""
    with _LOCK:
        gone = [key for key, (member, _) in _COMMUNICATORS.items() if not member.is_behind(resolve(key[0])[1])]
        closing = [_COMMUNICATORS.pop(key)[1] for key in gone]
        gone = [key for key, (member, _) in _FAILED.items() if not member.is_behind(resolve(key[0])[1])]
        closing += [_FAILED.pop(key)[1] for key in gone]
    for comm in closing:
        comm.close()


def release(name: str) -> None:
    """Gives back all that this rank has for a group."""
    sweep()
    with _LOCK:
        closing = [_COMMUNICATORS.pop(key)[1] for key in tuple(_COMMUNICATORS) if key[0] == name]
    for comm in closing:
        comm.close()
    renew(name)


def _after_fork() -> None:
    """What was set up here is the parent's: the child has its memory, but is none of the ranks."""
    _LOCK.release()
    _MAKING.clear()
    _ANNOUNCED.clear()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for group in _c10d()._world.pg_names:
            _INHERITED.add(group)
    for _, comm in _COMMUNICATORS.values():
        comm.disown()


def every(name: str | None = None) -> tuple[Communicator, ...]:
    """The communicators of one group, or all that this process made."""
    with _LOCK:
        return tuple(made for (group, _), (_, made) in _COMMUNICATORS.items() if name in (None, group))


def forget() -> None:
    with _LOCK:
        failed = [comm for _, comm in _FAILED.values()]
        _COMMUNICATORS.clear()
        _FAILED.clear()
    for comm in failed:
        comm.close()


def _make(name: str, member: _Member, device: torch.device) -> Communicator:
    config = from_environment()
    config = config if config.timeout is not None else replace(config, timeout=member.timeout(device))
    if device.type == "cpu":
        return HostCommunicator(name, member.bootstrap, config, member.board, member.world)
    if member.board is not None:
        raise GroupError("a group of threads runs on the CPU; GPUs take one process each")
    return DeviceCommunicator(name, member.bootstrap, config, device, member.world)


def _member(name: str) -> _Member:
    if name in _THREADS:
        return _THREADS[name]
    group = _process_group(name)
    if group is None:
        raise GroupError(f"no process group named `{name}` in this process")
    if group in _INHERITED:
        raise GroupError(f"group `{name}` is of the process that this one was forked from: start processes by `spawn`")
    rank, size = int(group.rank()), int(group.size())
    if rank < 0:
        raise GroupError(f"this process is no rank of group `{name}`")
    store, owner = _c10d()._get_process_group_store(group), weakref.ref(group)
    own = StoreBootstrap(rank, size, store, "commdsl")
    return _Member(own, _world(group), None, owner, partial(_patience, owner))


def _world(group: Any) -> World:
    """The default group, and the numbers there of a group's ranks."""
    distributed = torch.distributed
    rank, size = distributed.get_rank(), distributed.get_world_size()
    everyone = StoreBootstrap(rank, size, _c10d()._get_default_store(), "commdsl/world")
    return World(everyone, tuple(distributed.get_process_group_ranks(group)), str(group.group_name))


def _short(device: torch.device) -> float:
    return DEFAULT_TIMEOUT


def _patience(owner: Callable[[], Any], device: torch.device) -> float:
    """Seconds that a process group itself waits, for such a device or for the first that it serves."""
    for kind in dict.fromkeys((device.type, "cuda", "cpu")):
        try:
            return float(owner()._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # no backend for such devices, or one that does not say
            continue
    return float(_c10d().default_pg_timeout.total_seconds())


def _process_group(name: str) -> Any | None:
    try:  # no question first whether there is one: every call comes here
        return _c10d()._resolve_process_group(name)
    except (AttributeError, RuntimeError, ValueError, KeyError):  # no torch.distributed, or no such group
        return None


def _c10d() -> Any:
    """torch's module of process groups; a group's name and store are reached only through its private functions."""
    return torch.distributed.distributed_c10d
