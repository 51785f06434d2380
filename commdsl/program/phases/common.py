"""The common part of phases that are proved by region: who acts, and their defaults.

Assumes that a phase says all of itself that differs: its name and description, its memory accesses, its kernel
arguments and constants, the call of its body. Does not order phases.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from typing import Self, TypeAlias

from commdsl.language.records import dataclass
from commdsl.program.memory import Counters, Rows, Transport, Words

Held: TypeAlias = tuple[str, ...]
"""What came to a memory, in words: the tensor and what was done with its rows on the way."""

Ways: TypeAlias = defaultdict[Rows, set[Held]]
"""By memory what its rows are; several ways may lead to one."""

Constant: TypeAlias = tuple[str, str, int]
"""Type, name and value of a number that a kernel is built with."""


class Actor(Enum):
    """Which threads of a rank."""

    CALLER = "the stream"
    FIRST = "lane 0"
    LANES = "every lane"


@dataclass(frozen=True, slots=True)
class Field:
    """A member of the struct of a kernel's arguments: one number, or an array of them."""

    name: str
    count: int | None = None  # None: no array
    type: str = "u64"
    is_address: bool = False

    @property
    def width(self) -> int:
        return 1 if self.count is None else self.count


def addresses(*names: str) -> tuple[Field, ...]:
    """Fields that are addresses."""
    return tuple(Field(name, is_address=True) for name in names)


KEYS = (*addresses("keys"), Field("num_rows"), Field("keys_a_row"))
MATES = (Field("most_rows"),)  # that a rank may have: mates of all ranks' rows lie side by side


class Phase:
    """Defaults of all phases. None has the name of a phase's field, whose default it would be."""

    __slots__ = ()
    peers = ""  # the struct of what a lane knows of its peers, where the phase decides it
    pushes = False  # it is the one phase that pushes rows
    sends_by_key = False  # it sends rows to peers by keys, or back: a call can be two launches, cut behind it
    is_keyed = False  # it is of rows that go by keys, or come back

    @property
    def header(self) -> str:
        """The file of the device code that the push of a Plan takes."""
        return ""

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        """The kernel arguments that it takes."""
        return ()

    def constants(self, num_ranks: int, waves: int) -> tuple[Constant, ...]:
        """The constants that its body is built with, of `waves` in all."""
        return ()

    def kept(self, num_ranks: int) -> tuple[str, ...]:
        """The words that a lane leaves to the second of two launches, but for the number of lanes."""
        return ()

    def carry(self, held: Ways) -> None:
        """Add to each memory what comes to it, made of what came to others before."""

    @property
    def waits_for(self) -> tuple[Words | Counters, ...]:
        """What it waits for, whether or not it reads it."""
        return ()

    @property
    def details(self) -> tuple[str, ...]:
        """Lines that say what is done with rows, for a person."""
        return ()

    @property
    def key_positions(self) -> tuple[int, ...]:
        """By key, its place among all; none in a phase without a table of them."""
        return ()

    @property
    def adds_up(self) -> bool:
        """Whether warps add rows up, which pass through stages of shared memory."""
        return False

    @property
    def waves(self) -> int:
        """The most waves that a call has by it."""
        return 1

    @property
    def sends_wave(self) -> bool:
        """Whether a wave is sent by it, in a Plan that has waves."""
        return False

    @property
    def ends_wave(self) -> bool:
        """Whether it waits for a wave, or finishes it."""
        return False

    def of_wave(self, wave: int) -> Self:
        """The phase with the counters and the memory of one wave for those of all."""
        return self


class ByLanes(Phase):
    """A phase of all lanes."""

    __slots__ = ()

    @property
    def by(self) -> Actor:
        return Actor.LANES


class Keyed(ByLanes):
    """A phase of rows that go by keys, or come back."""

    __slots__ = ()
    is_keyed = True

    @property
    def name(self) -> str:
        """What it is called; default: push."""
        return "push"

    def call(self, number: int, wave: str) -> str:
        """The call of its body, which is named after it."""
        return f"commdsl::{self.name.replace(' ', '_')}(here, peers);"


def listed(rows: tuple[Rows, ...]) -> str:
    """The names of rows."""
    return ", ".join(one.name for one in rows)


def crossing_fields(crossing: Rows | None, number: int) -> tuple[Field, ...]:
    """Offsets in every heap of what crosses between nodes, and for how many rows of each source there is room."""
    return () if crossing is None else (Field("crossing", number), Field("crossing_rows"))


def node_constants(node: int, crossing: Rows | None, number: int) -> tuple[Constant, ...]:
    """Ranks of a node, and in how many memories what crosses lies; where rows go straight there is one node."""
    return ("i32", "kNode", node), *(() if crossing is None else (("i32", "kCrossing", number),))
