"""Where data lies in a Plan: memory as a closed union, each kind with what decides who may write it.

Assumes nothing. Does not say where in the heap memory starts (`plan` does) nor who touches it (`phases`, `moves`).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from commdsl.ir.classes import Unit
from commdsl.ir.lengths import Lengths
from commdsl.language.records import dataclass


class Transport(Enum):
    """What a kernel has to reach its peers."""

    PEER = "peer"  # plain loads and stores through peer pointers: all are near
    NVSHMEM = "nvshmem"  # the same for those that are near, NVSHMEM's puts and signals for those that are far


class Rights(Enum):
    READ = "read"
    WRITE = "write"
    OWN = "own"  # written and read by the rank itself in one call, gone afterwards: nobody outside sees it


@dataclass(frozen=True, slots=True)
class Tensor:
    """Memory of a rank, its caller's unless it is OWN: `blocks` equal blocks, each cut into `cut` chunks. All yields
    are one WRITE tensor. One that `lands` is written, and lies in the heap, so peers put chunks there themselves. One
    that `is_sum` has as many elements a block, in float32, whatever the others have.
    """

    name: str
    access: Rights
    blocks: int
    cut: int
    is_yield: bool = False
    lands: bool = False
    is_sum: bool = False
    lengths: Lengths | None = None  # None: its blocks are as long as those of all others


class Home(Enum):
    """Where rows lie, and for how long."""

    GIVEN = "given"  # in the caller's memory, of the rank alone
    RESULT = "result"  # in memory that the rank tells its peers with each call, and its caller reads afterwards
    WAITING = "waiting"  # in the heap, until the rank itself finishes them
    CROSSING = "crossing"  # in the heap of a rank between two others, of another node, until it sends them on

    @property
    def is_heap(self) -> bool:
        """Whether they lie in memory that no caller sees."""
        return self in (Home.WAITING, Home.CROSSING)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one tensor, as many as a call says: a segment a source rank, with one writer, where a routing puts it.

    In one call segments are disjoint, which the laws of routings prove; from call to call another routing may put them
    anywhere, so then every access meets every other. The caller's memory of one call may be reused by the next.
    """

    name: str
    home: Home
    wave: int = 0  # of those that wait which ones, where they are finished wave after wave


@dataclass(frozen=True, slots=True)
class Words:
    """Small values, 16 bytes each: the number of the call and a value, stored and seen as one. A slot for every rank
    that writes, or for every lane of it. What is a rank's own no other writes.
    """

    name: str
    values: tuple[str, ...]
    a_lane: bool = False
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Counters:
    """They hold the number of the last call that came so far, and only grow. One writer each."""

    name: str
    is_shared: bool  # one for every lane of every rank; otherwise one, of the rank itself
    waves: int = 1  # so many of each, where a call comes in waves


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole buffer between two launches: copy 0 is the caller's own, others take turns. In memory of the rank alone,
    but where it is written by a tensor that lands: then in symmetric memory, and of the rank but for that launch.

    No launch writes where the caller's function may still read, so what travels on is read in one copy and written in
    another.
    """

    name: str
    blocks: int
    copy: int
    unit: Unit  # of its blocks

    def __hash__(self) -> int:
        """Of what nearly always tells them apart: every call looks its tensors up by these."""
        return hash((self.name, self.copy))


Memory: TypeAlias = Tensor | Rows | Words | Counters | Kept


def words_for(memory: Memory) -> str:
    """A memory as a message names it."""
    match memory:
        case Rows():
            return f"`{memory.name}` ({memory.home.value})"
        case Kept():
            return f"`{memory.name}` ({'given' if memory.copy == 0 else f'copy {memory.copy}'})"
        case _:
            return f"`{memory.name}`"
