"""Turns the calls of a stamped Plan on one rank into Profiles: memory for the time stamps of a call, and what they say.

Assumes that a call's stamps are read before the next one begins. Does not stamp anything itself: kernels do, and who
multiplies on the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from commdsl.cost.profile import Profile
from commdsl.program.moves import Protocol
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch
from commdsl.program.stamps import INTERVAL, Layout, Task, alone, layout, together
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.streams import Around, Streams
from commdsl.runtime.workspace import Start, Workspace

WORDS = INTERVAL.itemsize // 8


class Stamps:
    """Of one call: room for what its launches write."""

    def __init__(self, name: str, rank: int, device: torch.device) -> None:
        self._name, self._rank, self._device = name, rank, device
        self._layouts: list[Layout] = []
        self._written: list[torch.Tensor] = []

    def take(self, layout: Layout) -> torch.Tensor:
        """Room for a launch: a row of WORDS an interval. The current stream zeroes it."""
        room = torch.zeros(len(layout.task), WORDS, dtype=torch.int64, device=self._device)
        self._layouts.append(layout)
        self._written.append(room)
        return room

    def profile(self) -> Profile:
        """Of the call, which is over with this."""
        written = torch.cat(self._written).cpu().numpy().view(INTERVAL)[:, 0]
        return Profile.of(self._name, self._rank, together(self._layouts), written)


def of_launch(comm: Communicator, plan: Plan, start: Start, task: Task | None = None) -> Layout:
    """What a launch of a Plan writes on this rank: of copies by the copy engine from the first to the last. `task`:
    what it is as a whole.
    """
    if comm.kind == "cuda" and plan.moves.protocol is Protocol.ENGINE:
        return alone(task or Task("copies", False))
    found = layout(plan, comm.rank, start.launch)
    return found if task is None else alone(task, len(found.task))


class StampedStart:
    """Starts calls of a stamped Plan; `stamps` are those of the last."""

    __slots__ = ("_begin", "_layout", "_start", "stamps")

    def __init__(self, start: Start, begin: Callable[[], Stamps], layout: Layout) -> None:
        self._start, self._begin, self._layout = start, begin, layout
        self.stamps = begin()

    @property
    def workspace(self) -> Workspace:
        return self._start.workspace

    @property
    def launch(self) -> Launch:
        return self._start.launch

    def __call__(self, changing: Sequence[int]) -> None:
        self._start((self._room(), *changing))

    def begin(self, changing: Sequence[int], told: int = 0) -> Callable[[], None]:
        return self._start.begin((self._room(), *changing), told)

    def _room(self) -> int:
        self.stamps = self._begin()
        return self.stamps.take(self._layout).data_ptr()


class StampedStreams(Around):
    """The streams of a call whose launches write time stamps, each to a room."""

    def __init__(self, streams: Streams, rooms: Iterable[torch.Tensor]) -> None:
        super().__init__(streams)
        self._rooms = iter(rooms)

    def start(self, start: Start, changing: Sequence[int], told: int = 0) -> Callable[[], None]:
        return self._streams.start(start, (next(self._rooms).data_ptr(), *changing), told)
