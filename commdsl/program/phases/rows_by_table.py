"""Rows that go where a table says: pushed to where they wait or straight to their place, then finished.

Assumes the table of a call, made by `tiles`. Does not say which row goes where.
"""

from __future__ import annotations

from commdsl.language.records import dataclass
from commdsl.program.memory import Rows, Transport
from commdsl.program.phases.common import ByLanes, Constant, Field, Ways, addresses, listed
from commdsl.program.touches import Touch, makes, reads, writes


def _push(given: tuple[Rows, ...], to: tuple[Rows, ...], held: Ways) -> None:
    names = {rows.name for rows in given}
    for rows in (rows for rows in to if rows.name in names):
        held[rows].add((f"rows of {rows.name}", "pushed"))


@dataclass(frozen=True, slots=True)
class Push(ByLanes):
    """Rows of the rank's tensors to where they wait on the ranks that a routing says: those of which copies are added
    up. `copied`: by tensor, whether a row may go to several ranks. `packed`: all rows wait, in one stretch a source
    rank; `reason` says why where the file has it otherwise.
    """

    given: tuple[Rows, ...]
    to: tuple[Rows, ...]
    copied: tuple[bool, ...]
    packed: bool
    reason: str = ""

    name = "push"
    pushes = True
    header = "rows.cuh"

    @property
    def description(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"push {listed(self.given)}, by {self.by.value}{why}"

    @property
    def details(self) -> tuple[str, ...]:
        there = "unpacked from a message per peer" if self.packed else "straight to its place"
        back = {True: "copies wait until they are summed", False: "so is its way back"}
        rows = enumerate(zip(self.given, self.copied, strict=True))
        return tuple(f"tensor {index} {one.name}: {there}; {back[copied]}" for index, (one, copied) in rows)

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (*reads(*self.given), *writes(*self.to))

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        rows = len(self.given)
        return (
            Field("waiting", rows),  # offsets in every heap of where rows wait
            Field("waiting_rows", rows),  # room there
            *addresses("table"),
            Field("inputs", rows, is_address=True),  # tensors that no tile of the table names may be 0
            Field("outputs", rows, is_address=True),
            *(Field(name, rows) for name in ("row_bytes", "input_rows", "output_rows")),
        )

    def constants(self, num_ranks: int, waves: int) -> tuple[Constant, ...]:
        return (("i32", "kNumRows", len(self.given)),)

    def carry(self, held: Ways) -> None:
        _push(self.given, self.to, held)

    def call(self, number: int, wave: str) -> str:
        return "commdsl::push_waiting(here, peers, ahead);"


@dataclass(frozen=True, slots=True)
class PushStraight(ByLanes):
    """The other rows, to the places that the routing says. A lane leaves some of them to where it finishes what waited,
    so that they cross meanwhile.
    """

    given: tuple[Rows, ...]
    to: tuple[Rows, ...]

    name = "push straight"

    @property
    def description(self) -> str:
        return f"{self.name} {listed(self.to)}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (*reads(*self.given), *writes(*self.to))

    def carry(self, held: Ways) -> None:
        _push(self.given, self.to, held)

    def call(self, number: int, wave: str) -> str:
        return "commdsl::push_straight(here, peers, ahead);"


@dataclass(frozen=True, slots=True)
class Finish(ByLanes):
    """Rows that waited: copied or summed to where they belong; rows that nobody sends: zero. In between, what the lane
    has `left` of the phase that sends rows straight to other ranks.
    """

    waiting: tuple[Rows, ...]
    to: tuple[Rows, ...]
    left: PushStraight | None = None
    is_spare: bool = True

    name = "finish"

    @property
    def description(self) -> str:
        left = "" if self.left is None else ", and push straight what is left"
        return f"finish {listed(self.to)}{left}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        left = () if self.left is None else self.left.touches
        return (*reads(*self.waiting), *makes(*self.to), *left)

    def carry(self, held: Ways) -> None:
        for waiting, to in zip(self.waiting, self.to, strict=False):
            held[to].update([(*way, "finished") for way in held[waiting]])

    def call(self, number: int, wave: str) -> str:
        done = "finish(here)" if self.left is None else "finish_beside(here, peers, ahead)"
        return f"{'if (here.is_busy()) ' if self.is_spare else ''}commdsl::{done};"
