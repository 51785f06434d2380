"""Turns a path into an Op, and names what a program does with groups: check, reset, shut down.

Assumes torch. Raises CommError with every fault of the file, as the compiler does. Does not build or launch kernels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Never, NoReturn, TypeAlias

from commdsl.build.built import Built
from commdsl.ir.backward import Backward
from commdsl.ir.resolve.tuning import KEYS
from commdsl.language.source import Texts
from commdsl.machine import resources
from commdsl.machine.cache import key
from commdsl.machine.config import from_environment
from commdsl.machine.errors import ArgumentError, NotFoundError
from commdsl.machine.resources import SUFFIX
from commdsl.program.memory import Transport
from commdsl.runtime import far, given, groups
from commdsl.runtime.errors import GroupError
from commdsl.runtime.memory_summary import MemorySummary, held
from commdsl.runtime.op import Op
from commdsl.runtime.program import Definition, digest_of, program
from commdsl.runtime.registry import register

DEFAULT_RANKS = 8

Where: TypeAlias = Path | str | Mapping[str, str]
"""A `.comm` file: its path, the name of a shipped one, or its text by its name and behind it what it uses."""

Kernels: TypeAlias = Mapping[str, tuple[Path, str]]
"""Cubins built ahead of time: by what each was built from, the file and its SHA-256."""


def load(
    path: Where,
    schedule: str | None = None,
    params: Mapping[str, int] | None = None,
    group: Any = None,
    ranks: int | None = None,
    on: str | None = None,
    tune: Mapping[str, int | str] | None = None,
    kernels: Kernels | None = None,
    **others: Never,
) -> Op:
    """The op of one schedule of a `.comm` file (`file.comm:name` is one of several), or of a shipped one by its name
    ("allreduce_ring"), or of texts in hand: `{"mine.comm": text}`, first the file's own, then all that it uses.

    It is proved now for `ranks`, or for the size of `group` or of the default group, and for others when they are met.
    `tune` stands in place of what the text tunes, key by key, under the same laws: `{"protocol": "packet", "lanes": 8,
    "threads": 512, "tile": 4096, "sms": 8, "landing": "cells"}`, the tile in bytes. Two tunings are two ops.
    `kernels` are cubins that `commdsl compile --arch` built ahead of time: by what each was built from, where it lies
    and its SHA-256. What is not among them, or is not what it was, is built when it is needed.
    """
    if others:
        _refuse(others)
    groups.announce()
    asked = definition(path, schedule, params, on, tune, kernels)
    chosen = _size(group) if ranks is None else given.whole("ranks", ranks, 1)
    known = program(asked, chosen, Transport.PEER, from_environment())
    suffix = "".join(f"_{key}_{value}".replace("-", "m") for key, value in (*asked.params, *asked.tune))
    name = known.plan.name + suffix + ("" if on is None else "_on_" + re.sub(r"\W", "_", Path(on).name, flags=re.ASCII))
    return register(name, key([digest_of(asked), *(one.key for one in asked.kernels)]), asked, chosen, _inverse, load)


def _refuse(others: Mapping[str, Any]) -> NoReturn:
    """Raise ArgumentError (C973) for keywords that are parameters of a schedule, or keys of a tuning."""
    name, value = next(iter(others.items()))
    where = "tune" if name in KEYS else "params"
    hint = f"where the schedule has it, write {where}={{{name!r}: {value!r}}}; "
    given.unexpected("load", load, others, hint=hint)


def definition(
    path: Where,
    name: str | None,
    params: Mapping[str, int] | None,
    on: str | None,
    tune: Mapping[str, int | str] | None,
    kernels: Kernels | None = None,
) -> Definition:
    """What is asked for, whatever the order in which parameters and tuning are given."""
    values, tuned = given.parameters(params), given.tuning(tune)
    built = tuple(Built(key, where, digest) for key, (where, digest) in (kernels or {}).items())
    file, named = resources.split_place(os.fspath(path)) if isinstance(path, str | os.PathLike) else (path, None)
    return Definition(find(file), given.text("schedule", name or named), values, given.text("on", on), tuned, built)


@cache  # every backward pass asks
def _inverse(way: Backward, ranks: int) -> Op:
    return load(way.schedule, params=dict(way.params), ranks=ranks)


def find(path: Where) -> Path | Texts:
    """A file, or a shipped schedule by its name; texts in hand."""
    if isinstance(path, Mapping):
        return given.texts(path)
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ArgumentError(f"expected the path of a .comm file, or the name of a shipped schedule, not {path!r}")
    wanted = Path(path)
    if wanted.is_file():
        return wanted
    shipped = resources.shipped_file(wanted.name) if len(wanted.parts) == 1 else None
    if shipped is not None:
        return shipped
    beside = [str(file) for file in sorted(wanted.parent.glob(f"*{SUFFIX}"))]
    names = [file.stem for file in resources.shipped_files()]
    close = get_close_matches(wanted.name.removesuffix(SUFFIX), names, 3, 0.7) + get_close_matches(
        str(wanted), beside, 2, 0.8
    )
    meant = f"; did you mean {', '.join(f'`{one}`' for one in close)}?" if close else ""
    what = "a folder" if wanted.is_dir() else "no file"
    raise NotFoundError(f"`{path}` is {what}, and there is no shipped schedule of that name{meant}")


def _size(group: Any) -> int:
    try:
        name = groups.name_of(group)
    except GroupError:
        if group is not None:
            raise
        return DEFAULT_RANKS
    known = groups.size_of(name)
    if known is None:
        raise GroupError(f"no process group named `{name}` in this process")
    return known


def check(group: Any = None) -> None:
    """Raises the time-out that a kernel of this rank reported; does not wait for kernels that still run."""
    for comm in groups.every(None if group is None else groups.name_of(group)):
        comm.check()


def reset(group: Any = None) -> None:
    """Collective, after a time-out: brings a group's ops back to the state before their first call."""
    name = groups.name_of(group)
    groups.renew(name)
    for comm in groups.every(name):
        comm.reset()


def release(group: Any = None) -> None:
    """Gives back all that this rank has for a group: symmetric memory, threads, descriptors. Every rank does so in its
    own time, and the next call on the group sets it up anew on all. What belongs to a process group that was destroyed
    is given back without it, when the next group is set up. Raises GroupError.
    """
    groups.release(groups.name_of(group))


def memory_summary() -> MemorySummary:
    """The symmetric memory that this process has, by group and op."""
    groups.sweep()
    return MemorySummary(tuple(one for comm in groups.every() for one in held(comm)))


def shutdown() -> None:
    """At the end: gives back all symmetric memory. Collective only where NVSHMEM was started, which it stops. An exit
    without it is clean, too, but for a note of NVSHMEM's that memory was not freed. Where a rank is gone, or a group
    broken, it returns at once."""
    known = groups.every()
    for comm in known:
        comm.close()
    groups.forget()
    if not any(comm.gone or comm.broken for comm in known):
        far.stop()
