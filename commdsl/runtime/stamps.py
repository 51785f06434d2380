"""Turns the calls of a stamped Plan on one rank into Profiles: memory for the time stamps of a call, and what they say.

Assumes that a call's stamps are read before the next one begins. Does not stamp what kernels do, nor products on the
processor: they do that. It says when a call begins and ends on the caller's stream, when the stream beside it comes to
wait, and when what landed is copied.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from commdsl.cost.profile import Profile
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch
from commdsl.program.stamps import INTERVAL, Layout, Task, alone, layout, together
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.streams import Around, Streams
from commdsl.runtime.workspace import ALONE, Meanwhile, Start, Workspace, nothing

WORDS = INTERVAL.itemsize // 8
BEGIN, READY, END = range(3)  # of an interval

Mark: TypeAlias = Callable[[int], None]
"""Writes at an address what time it is when the current stream is there, by the clock of the call's other stamps."""


def mark_now(address: int) -> None:
    """On the processor."""
    ctypes.c_int64.from_address(address).value = time.monotonic_ns()


class Stamps:
    """Of one call: room for what its launches write, and when it began and ended, if somebody says so."""

    def __init__(self, name: str, rank: int, device: torch.device, mark: Mark = mark_now) -> None:
        self._name, self._rank, self._device, self._mark = name, rank, device, mark
        self._layouts: list[Layout] = []
        self._written: list[torch.Tensor] = []
        self._since: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._call: list[torch.Tensor] = []

    def take(self, *layouts: Layout) -> list[torch.Tensor]:
        """Room for each launch: a row of WORDS an interval. The current stream zeroes it."""
        sizes = [len(layout.task) for layout in layouts]
        rooms = torch.zeros(sum(sizes), WORDS, dtype=torch.int64, device=self._device).split(sizes)
        self._layouts += layouts
        self._written += rooms
        return [*rooms]

    def call(self) -> None:
        """The call begins here, on the caller's stream, or ends."""
        self._call.append(self._now())

    def mark(self, room: torch.Tensor, stamp: int) -> None:
        """Writes a stamp of a room's only interval."""
        self._mark(room.data_ptr() + 8 * stamp)

    def wait(self, room: torch.Tensor, behind: torch.Tensor | None = None) -> None:
        """From here on, or from the end of what another room is of, the current stream waits for what the only interval
        of a room comes after.
        """
        if len(room) == 1:
            self._since.append((room, self._now() if behind is None else behind[0, END:]))

    def profile(self) -> Profile:
        """Of the call, which is over with this."""
        for room, since in self._since:
            room[0, BEGIN] = since[0]
        written = torch.cat(self._written).cpu().numpy().view(INTERVAL)[:, 0]
        call = [int(one) for one in self._call]
        return Profile.of(self._name, self._rank, together(self._layouts), written, call)

    def _now(self) -> torch.Tensor:
        found = torch.empty(1, dtype=torch.int64, device=self._device)
        self._mark(found.data_ptr())
        return found


def of_launch(comm: Communicator, plan: Plan, start: Start, task: Task | None = None) -> Layout:
    """What a launch of a Plan writes on this rank: of copies by the copy engine from the first to the last. `task`:
    what it is as a whole.
    """
    if comm.kind == "cuda" and not plan.moves.carrier.runs_on_sms:
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

    def begin(self, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        return self._start.begin((self._room(), *changing), meanwhile)

    def _room(self) -> int:
        self.stamps = self._begin()
        (room,) = self.stamps.take(self._layout)
        return room.data_ptr()


class StampedStreams(Around):
    """The streams of a call that is stamped: `launched` are the rooms to which its launches write, `brought` those of
    copies on the caller's stream.
    """

    def __init__(
        self,
        streams: Streams,
        stamps: Stamps,
        launched: Sequence[torch.Tensor],
        brought: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(streams)
        self._stamps, self._launched = stamps, launched
        self._brought: Iterator[torch.Tensor] = iter(brought)
        self._last: torch.Tensor | None = None  # of those, the room of the last copy
        self._started = 0  # launches
        self._is_pushed = False  # what is waited for

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Ready where its first kernel says so, or behind that where it waits for a product. What is pushed it does not
        wait for until then: its first kernel says when peers are ready, which products wait for.
        """
        number, between = self._started, meanwhile.between
        room = self._launched[number]

        def waited() -> None:
            self._is_pushed = self._started > number
            between()
            is_pushed, self._is_pushed = self._is_pushed, False
            if len(room) == 1 and not is_pushed:
                with self.beside():
                    self._stamps.mark(room, READY)

        if between is not nothing:
            meanwhile = replace(meanwhile, between=waited)
        rest = self._streams.start(start, (room.data_ptr(), *changing), meanwhile)
        self._started += 1
        return rest

    def wait(self, what: Hashable, *, beside: bool) -> None:
        """Beside the caller's stream it is the next launch that waits, or the end of one that products push."""
        if beside and self._launched and not self._is_pushed:
            with self.beside():
                self._stamps.wait(self._launched[self._started])
        self._streams.wait(what, beside=beside)

    def bring(self, dest: torch.Tensor, source: torch.Tensor, behind: Hashable | None) -> None:
        room, last = next(self._brought), self._last
        self._last = room
        self._stamps.wait(room, last)
        if behind is not None:
            self._streams.wait(behind, beside=False)
        self._stamps.mark(room, READY)
        self._streams.bring(dest, source, None)
        self._stamps.mark(room, END)

    def join(self) -> None:
        self._streams.join()
        self._stamps.call()
