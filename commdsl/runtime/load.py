"""Turns a path into an Op, and names what a program does with groups: check, reset, shut down.

Assumes torch. Raises CommError with every fault of the file, as the compiler does. Does not build or launch kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commdsl.machine.config import from_environment
from commdsl.machine.resources import data_dir
from commdsl.program.memory import Transport
from commdsl.runtime import groups
from commdsl.runtime.device import stop_nvshmem
from commdsl.runtime.errors import OpError
from commdsl.runtime.op import Op, register
from commdsl.runtime.program import Backward, Definition, digest_of, program

DEFAULT_RANKS = 8


def load(
    path: Path | str,
    schedule: str | None = None,
    params: Mapping[str, int] | None = None,
    group: Any = None,
    ranks: int | None = None,
    on: str | None = None,
    tune: Mapping[str, int | str] | None = None,
) -> Op:
    """The op of one schedule of a `.comm` file, or of a shipped one by its name ("allreduce_ring").

    It is proved now for `ranks`, or for the size of `group` or of the default group, and for others when they are met.
    `tune` stands in place of what the text tunes, key by key, under the same laws: `{"protocol": "packet", "lanes": 8,
    "threads": 512, "tile": 4096, "sms": 8}`, the tile in bytes. Two tunings are two ops.
    """
    asked = definition(path, schedule, params, on, tune)
    chosen = ranks or _size(group) or DEFAULT_RANKS
    known = program(asked, chosen, Transport.PEER, from_environment())
    suffix = "".join(f"_{key}_{value}".replace("-", "m") for key, value in (*asked.params, *asked.tune))
    name = known.plan.name + suffix + ("" if on is None else "_on_" + re.sub(r"\W", "_", Path(on).name))
    return register(name, digest_of(asked), asked, chosen, _inverse)


def definition(
    path: Path | str,
    name: str | None,
    params: Mapping[str, int] | None,
    on: str | None,
    tune: Mapping[str, int | str] | None,
) -> Definition:
    """What is asked for, whatever the order in which parameters and tuning are given."""
    values, tuned = tuple(sorted((params or {}).items())), tuple(sorted((tune or {}).items()))
    return Definition(find(path), name, values, on, tuned)


def _inverse(way: Backward, ranks: int) -> Op:
    return load(way.schedule, params=dict(way.params), ranks=ranks)


def find(path: Path | str) -> Path:
    """A file, or a shipped schedule by its name."""
    given = Path(path)
    if given.is_file():
        return given
    shipped = sorted(data_dir("schedules").rglob(f"{given.name.removesuffix('.comm')}.comm"))
    if len(given.parts) == 1 and shipped:
        return shipped[0]
    raise FileNotFoundError(f"no file `{path}`, and no shipped schedule of that name")


def _size(group: Any) -> int | None:
    try:
        return groups.size_of(groups.name_of(group))
    except OpError:
        if group is not None:
            raise
        return None


def check(group: Any = None) -> None:
    """Raises the time-out that a kernel of this rank reported; does not wait for kernels that still run."""
    for comm in groups.every(None if group is None else groups.name_of(group)):
        comm.check()


def reset(group: Any = None) -> None:
    """Collective, after a time-out: brings a group's ops back to the state before their first call."""
    for comm in groups.every(groups.name_of(group)):
        comm.reset()


def shutdown() -> None:
    """Collective, at the end: frees all symmetric memory and stops NVSHMEM. An exit without it is clean, too, but for a
    note of NVSHMEM's that memory was not freed."""
    for comm in groups.every():
        comm.close()
    groups.forget()
    stop_nvshmem()
