"""Accesses of phases to memory: which memory, on which ranks, and when in a call.

Assumes nothing of a phase; each says all stores of its body itself, so proofs and checks know of no other. Does not
know who waits for whom (`proof.events` does).
"""

from __future__ import annotations

from enum import Enum

from commdsl.language.records import dataclass
from commdsl.program.memory import Home, Memory, Rows


class Ranks(Enum):
    """Which ranks, for one of them."""

    OWN = "its own rank"
    OTHERS = "all other ranks"
    ALL = "all ranks"

    @property
    def code(self) -> str:
        """The same in a kernel's text."""
        return f"commdsl::Ranks::k{self.name.capitalize()}"


@dataclass(frozen=True, slots=True)
class Touch:
    """Reads or writes memory on some ranks: writes go to the writer's own segment, reads and what is OWN to all of it.

    Of two touches in one call the one with the lower `turn` comes first; those of one turn touch different bytes.
    """

    memory: Memory
    on: Ranks
    writes: bool
    turn: int

    @property
    def where(self) -> tuple[Ranks, bool, int]:
        """All but the memory."""
        return self.on, self.writes, self.turn


def reads(*rows: Rows | None, turn: int = 1) -> tuple[Touch, ...]:
    """Reads of rows that the rank has; those that are None are left out."""
    return tuple(Touch(one, Ranks.OWN, False, turn) for one in rows if one is not None)


def writes(*rows: Rows | None) -> tuple[Touch, ...]:
    """Writes to segments of the writer's own, on any rank. Rows wait before they are finished; the caller's tensors
    change before a call, and are read after it.
    """
    return tuple(Touch(one, Ranks.ALL, True, 0 if one.home.is_heap else 1) for one in rows if one is not None)


def makes(*rows: Rows, turn: int = 1) -> tuple[Touch, ...]:
    """Writes to rows of the rank itself."""
    return tuple(Touch(one, Ranks.OWN, True, turn) for one in rows)


def region(memory: Memory) -> Memory | tuple[Home, int] | None:
    """Equal of memories that may be the same bytes: the caller's may, as one call's result is given to another."""
    return ((memory.home, memory.wave) if memory.home.is_heap else None) if isinstance(memory, Rows) else memory
