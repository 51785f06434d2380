"""Phases of a program with compute between its steps: launches of moves, the caller's visits, and the end of a call.

Assumes the caller's stream, and one beside it for launches; each runs what it has in order. Does not order one beside
the other: that is what `after` says, `lower` derives it and `proof` judges it.

The steps between two yields are a *segment*. A launch runs all rounds of one before the caller computes on what it
brought. Segments with the same tables are one `Moves`, launched again on other copies of the buffers, or on other
buffers, so neither a kernel nor the heap grows with the number of steps. A rank's buffers are touched by that rank
alone, and by peers within one of its launches (what they put goes into cells, or lands between two operations of the
owner, which C212 proves): so an event from stream to stream is all that launches and visits need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, assert_never

from commdsl.ir.functions import PLAIN
from commdsl.ir.schedules import Yield
from commdsl.language.records import dataclass
from commdsl.program.memory import Kept, Rights
from commdsl.program.moves import Moves
from commdsl.program.phases import Ranks
from commdsl.program.tasks import Counter, Product, Stored, Task
from commdsl.program.touches import Touch


@dataclass(frozen=True, slots=True)
class Launch:
    """All rounds of moves, on whole buffers: those that its tensors are, the read ones and the written ones in order.

    `turn` is where the schedule has it among launches and visits. `after`: so many phases of the caller are over by
    then; 0: whatever the launch before waited for. `opens`: so many are over when it tells its peers that they may put
    to what lands, no more than `after`; what the rest wrote it waits for behind that, as it alone reads it.
    """

    moves: Moves
    reads: tuple[Kept, ...]
    writes: tuple[Kept, ...]
    turn: int
    after: int
    opens: int

    @property
    def is_split(self) -> bool:
        """Whether it has an opening, then copies to where they belong, and an end. Cells are used again from call to
        call.
        """
        return not self.moves.carrier.runs_on_sms and self.moves.num_cells == 0

    @property
    def lands(self) -> tuple[Kept, ...]:
        """What peers put to."""
        written = (tensor for tensor in self.moves.tensors if tensor.access is Rights.WRITE)
        return tuple(kept for tensor, kept in zip(written, self.writes, strict=True) if tensor.lands)

    @property
    def operands(self) -> tuple[Kept, ...]:
        """What each tensor of its moves is."""
        read, written = iter(self.reads), iter(self.writes)
        return tuple(next(read if one.access is Rights.READ else written) for one in self.moves.tensors)

    @property
    def moved(self) -> Kept:
        """One of the buffers that are moved or added: they are all made of the same, but for sums of another type."""
        return next(one for one, of in zip(self.operands, self.moves.tensors, strict=True) if not of.is_sum)


@dataclass(frozen=True, slots=True)
class Visit:
    """What the caller computes at a yield. `after`: so many launches are over by then; 0: as for the visit before."""

    name: str | None  # of its function; None: it is handed one buffer, and writes none
    reads: tuple[Kept, ...]
    writes: tuple[Kept, ...]
    turn: int
    after: int
    step: Yield


@dataclass(frozen=True, slots=True)
class Return:
    """The end of a call: the caller is given results, and may write to whatever the call had."""

    reads: tuple[Kept, ...]
    frees: tuple[Kept, ...]
    turn: int
    after: int  # as of a visit


Between: TypeAlias = Launch | Visit | Task | Return


def touches(phase: Between | Product) -> tuple[Touch, ...]:
    """What a phase reads and writes."""
    writes = phase.frees if isinstance(phase, Return) else phase.writes
    read = tuple(Touch(kept, Ranks.OWN, False, phase.turn) for kept in phase.reads)
    return read + tuple(Touch(kept, Ranks.OWN, True, phase.turn) for kept in writes)


def opening(launch: Launch) -> tuple[Touch, ...]:
    """What may be written once a launch has told its peers so."""
    return tuple(Touch(kept, Ranks.OWN, True, launch.turn) for kept in launch.lands)


def described(phase: Between, number: int, caller: str = "visit") -> str:
    """`launch 1 of ring_segment1: kv 0 -> kv 1`, with what it comes after. `caller`: a phase of the caller's."""
    match phase:
        case Launch():
            what = f"launch {number} of {phase.moves.name}: {_names(phase.reads)} -> {_names(phase.writes)}"
            what += f"  after {caller} {phase.after - 1}" if phase.after else ""
            opens = f"after {caller} {phase.opens - 1}" if phase.opens else "at once"
            return what + (f", opens {opens}" if phase.opens < phase.after else "")
        case Visit():
            words = "" if phase.name is None else f" {phase.name}"
            what = f"visit {number}{words}: {_names(phase.reads)}"
            what += f" -> {_names(phase.writes)}" if phase.writes else ""
        case Task():
            return _task(phase, number)
        case Return():
            what = f"return: {_names(phase.reads)}"
        case _:
            assert_never(phase)
    return what + (f"  after launch {phase.after - 1}" if phase.after else "")


def _task(task: Task, number: int) -> str:
    """`task 2 matmul: x 0 by w 0 (after launch 1) + s 1 (after launch 0) -> y 1 with bias`."""
    terms = [f"{_names((one.rows,))} by {_names((one.factor,))}{_waits(one.waits)}" for one in task.products]
    terms += [_names((kept,)) for kept in task.added]
    epilogue = replace(PLAIN, bias=0 if task.bias else None, residual=0 if task.residual else None)
    words = replace(epilogue, activation=task.activation).words
    pushed = "" if task.push is None else f"  in place of the copies of launch {task.push}, when peers are ready"
    return f"task {number} {task.name}: {' + '.join(terms)}{_waits(task.waits)} -> {_names(task.writes)}{words}{pushed}"


def _waits(waits: tuple[Counter, ...]) -> str:
    named = [f"task {one.task}" if isinstance(one, Stored) else f"launch {one.launch}" for one in waits]
    return f" (after {' and '.join(named)})" if named else ""


def _names(kept: tuple[Kept, ...]) -> str:
    return ", ".join(f"{one.name} {one.copy}" for one in kept) or "nothing"
