"""Turns a phase of routed rows into what it reads and writes: each memory, on which ranks, and when in a call.

Assumes phases as the Plan has them. Says every store of a phase's body: proofs and laws know of no other. Does not know
who waits for whom (`proof.events` does).
"""

from __future__ import annotations

from typing import assert_never

from commdsl.language.records import dataclass
from commdsl.program.memory import Counters, Home, Memory, Rows, Words
from commdsl.program.phases import (
    AddUp,
    Count,
    FillByKey,
    Finish,
    FinishBack,
    Forward,
    Host,
    Meet,
    Push,
    PushAgain,
    PushBack,
    PushByKey,
    PushStraight,
    Ranks,
    Read,
    Routed,
    Tell,
)


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


def touches(phase: Routed) -> tuple[Touch, ...]:
    """What a phase reads and writes."""
    match phase:
        case Host():
            return tuple(Touch(rows, Ranks.OWN, not phase.is_after, 3 * phase.is_after) for rows in phase.rows)
        case Tell():
            return (Touch(phase.what, phase.to, True, 1 if _is_own(phase.what) else 0),)
        case Meet():
            return (Touch(phase.what, Ranks.OWN, False, 1),) if isinstance(phase.what, Words) else ()
        case Read():
            return (Touch(phase.what, Ranks.OWN, False, 0 if _is_own(phase.what) else 1),)
        case Push() | PushStraight():
            return (*_reads(*phase.given), *_writes(*phase.to))
        case Finish():
            left = () if phase.left is None else touches(phase.left)
            return (*_reads(*phase.waiting), *(Touch(rows, Ranks.OWN, True, 1) for rows in phase.to), *left)
        case Count():
            return _reads(phase.keys)
        case PushByKey():
            reads = _reads(*phase.given, phase.keys, *(() if phase.value is None else (phase.value,)))
            own = tuple(Touch(rows, Ranks.OWN, True, 1) for rows in (phase.counts, phase.offsets, phase.places))
            return (*reads, *_writes(*phase.to), *own, *_writes(*_if(phase.crossing)))
        case PushAgain():
            reads = _reads(phase.given, phase.keys, phase.places, phase.origins, phase.offsets, phase.counts)
            return (*reads, *_writes(phase.to, *_if(phase.crossing)))
        case Forward():
            return (*_reads(phase.crossing), *_writes(*phase.to))
        case FillByKey():
            # From rows that have come to places that nobody else writes: behind the push, before the caller.
            reads = tuple(Touch(rows, Ranks.OWN, False, 2) for rows in (*phase.to, phase.origins, phase.mates))
            return (*reads, *(Touch(rows, Ranks.OWN, True, 2) for rows in phase.to))
        case PushBack():
            more = (*_if(phase.mates), *_if(phase.weights), *_if(phase.keys))
            read = _reads(phase.given, phase.origins, phase.offsets, *more)
            return (*read, *_writes(phase.to if phase.crossing is None else phase.crossing))
        case AddUp():
            return (*_reads(phase.crossing, phase.keys), *_writes(phase.to))
        case FinishBack():
            read = _reads(phase.waiting, phase.keys, *_if(phase.weights))
            return (*read, Touch(phase.to, Ranks.OWN, True, 1))
        case _:
            assert_never(phase)


def _reads(*rows: Rows) -> tuple[Touch, ...]:
    return tuple(Touch(one, Ranks.OWN, False, 1) for one in rows)


def _writes(*rows: Rows) -> tuple[Touch, ...]:
    """To segments of the writer's own, on any rank."""
    return tuple(Touch(one, Ranks.ALL, True, _turn(one)) for one in rows)


def _if(rows: Rows | None) -> tuple[Rows, ...]:
    return () if rows is None else (rows,)


def _is_own(what: Words | Counters) -> bool:
    """A number of the rank's own is read where a call begins, and advanced where it ends."""
    return isinstance(what, Counters) and not what.is_shared


def _turn(rows: Rows) -> int:
    """Rows wait before they are finished; the caller's tensors change before a call, and are read after it."""
    return 0 if rows.home.is_heap else 1


def region(memory: Memory) -> Memory | tuple[Home, int] | None:
    """Equal of memories that may be the same bytes: the caller's may, as one call's result is given to another."""
    return ((memory.home, memory.wave) if memory.home.is_heap else None) if isinstance(memory, Rows) else memory
