"""Turns one rank's end of a group and a Plan of rows into launches of it: its symmetric memory, and kernels as they are
asked for.

Assumes every rank makes the same ones in the same order, and makes the same calls. Does not know where rows go, nor
what lies behind what the Plan itself has in symmetric memory: whoever launches says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commdsl.build.emit import Emitted
from commdsl.program.plan import Plan
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.kernel import Prepared, residence_of
from commdsl.runtime.pool import Pool
from commdsl.runtime.workspace import Explain, Start, timeout_argument

Arguments = Mapping[str, int | Sequence[int]]

LANE_BYTES = 160 << 10
"""What a lane moves at least: with less, another lane only adds its own."""

ROW_BYTES = 1024
"""A row that goes by itself takes as long as so many bytes: measured at 2 to 512 bytes a row, on two H200s."""

HOST_LANES = 2
"""A lane is a thread there: more of them than cores only switch, but two race each other under test."""


class Launches:
    """One rank's end of the calls of a Plan."""

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        emitted: Emitted,
        room: int,
        explain: Explain,
        terms: Mapping[str, object],
        seconds: float | None,
    ) -> None:
        """Collective: symmetric memory with `room` bytes behind the Plan's. `explain` is a method, known weakly.
        `terms` have to be the same on all ranks: AgreementError (C964) otherwise. `seconds`: how long a wait
        may take, if not as long as the group's.
        """
        self.plan = plan
        comm.compare(f"the set-up of `{plan.name}`")
        self.number = next(comm.numbers)
        self._most_lanes = plan.comm.lanes
        self._comm, self._emitted, self._seconds = comm, emitted, seconds
        self._halfway: tuple[int, object] | None = None  # the generation of the group in which it was opened, and what
        self._key = f"{self.number}/{emitted.identity}"
        self._workspace = comm.workspace(
            plan, emitted, self._key, room=room, explain=explain, terms=terms, seconds=seconds
        )

    @property
    def is_closed(self) -> bool:
        return self._workspace.is_closed

    @property
    def halfway(self) -> object | None:
        """What a call that has made the first of its two launches alone has left here. A reset of the group ends it."""
        if self._halfway is not None and self._halfway[0] != self._comm.generation:
            self._halfway = None
        return None if self._halfway is None else self._halfway[1]

    def open_halves(self, left: object) -> None:
        """A call has made its first launch."""
        self._halfway = self._comm.generation, left

    def resume(self) -> None:
        """It is about to make its second."""
        self._comm.resume()

    def close_halves(self) -> None:
        """It has made its second."""
        self._halfway = None

    @property
    def heap(self) -> int:
        """The address of the rank's own symmetric memory."""
        return self._workspace.heap.addresses[self._comm.rank]

    def pool(self, begin: int, sizes: tuple[int, int], calls: int) -> Pool:
        """Places for results so many bytes behind the beginning of `heap`, which stays as long as one is held."""
        made = Pool(self.plan.name, self.heap + begin, sizes, calls)
        self._workspace.pools.append(made)
        return made

    def start(self, macros: tuple[str, ...], always: Arguments, changing: Arguments) -> Start:
        """Loads the kernel that is built with these macros; not in a capture. `always`: arguments that no call changes;
        `changing`: the others, in their order, each with what it has before the first.
        """
        self._comm.refuse_setup(self.plan.name)
        loaded = self._comm.load_kernel(self._emitted, macros, residence_of(self.plan, self._emitted.name))
        names = list(changing)
        values = {**changing, **always, **self._workspace.every_call, **timeout_argument(self._seconds)}
        prepared = Prepared(self.plan, values, (names[0], names[-1]), None)
        return self._comm.starter(self._workspace, loaded, prepared)

    def digest(self, words: str) -> int:
        """Of a call of this Plan, in words that are the same on every rank that makes it."""
        source = self.plan.span.source.name
        return self._workspace.said.digest(f"`{self.plan.name}` {words}", self._emitted.identity, source)

    def know_plan(self, digest: int, words: str) -> None:
        """The words of a table's digest."""
        self._workspace.said.know_plan(digest, words)

    def lanes(self, moved: int, least: int = LANE_BYTES) -> int:
        """Of a call that moves so many bytes, of which a lane has at least so many."""
        if self._comm.kind == "cpu":
            return min(HOST_LANES, self._most_lanes)
        return max(1, min(self._most_lanes, -(-moved // least)))

    def release(self) -> None:
        """Collective: gives back the symmetric memory."""
        self._comm.release(self._key)


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
