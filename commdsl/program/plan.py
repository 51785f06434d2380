"""What is launched: memory, roles, and each role's phases in order, for one number of ranks.

Assumes nothing of the file it comes from. Does not derive what follows what (`lower`), does not prove it (`proof`) and
does not print it (`build.emit`). A role's phases run one after another; roles run side by side. Everything that one
rank waits for and another tells stands in a phase: in the tables of `Moves`, or as a `Tell` and a `Meet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TypeAlias, TypeVar, assert_never

from commdsl.language.diagnostics import InternalError
from commdsl.language.records import dataclass
from commdsl.language.source import Span
from commdsl.program.agree import AGREEING_BLOCKS, Agree
from commdsl.program.by_row import ByRow
from commdsl.program.halves import Halves, halves_of, kept_by
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.launches import touches as touches_between
from commdsl.program.memory import Counters, Kept, Memory, Rows, Tensor, Transport, Words
from commdsl.program.moves import Moves
from commdsl.program.phases import Push, PushAgain, PushBack, PushByKey, Routed
from commdsl.program.tasks import Tasks
from commdsl.program.tile_tasks import Tiles

Phase: TypeAlias = Moves | ByRow | Tiles | Routed | Launch | Visit | Tasks | Return

One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Role:
    """Who runs, on every rank alike: lanes on SMs; for the caller, on its stream, there are none."""

    name: str
    lanes: int
    sms: int  # thread blocks, one an SM; the lanes are spread over them
    threads: int  # of a lane
    phases: tuple[Phase, ...]

    @property
    def lanes_per_block(self) -> int:
        return -(-self.lanes // self.sms)

    @property
    def routed(self) -> tuple[Routed, ...]:
        """Its phases that are proved by region."""
        return tuple(phase for phase in self.phases if isinstance(phase, Routed))

    @property
    def is_caller(self) -> bool:
        return self.lanes == 0

    @property
    def computes(self) -> bool:
        return any(isinstance(phase, Tiles) for phase in self.phases)


@dataclass(frozen=True, eq=False)
class Plan:
    name: str
    num_ranks: int
    params: tuple[tuple[str, int], ...]
    topology: str
    contract: str  # the first contract's name: "allreduce", ...; "dispatch" for a routing
    roles: tuple[Role, ...]
    tile_bytes: int  # of data, that a lane moves at once
    span: Span = field(repr=False)
    transport: Transport = Transport.PEER
    agree: Agree = field(kw_only=True)  # the role beside `roles`: it touches nothing that they do
    stamped: bool = field(default=False, kw_only=True)  # built to say when what it does begins and ends

    @cached_property  # as are its moves: loops over operations ask for both
    def phases(self) -> tuple[Phase, ...]:
        """Of all roles, in order."""
        return tuple(phase for role in self.roles for phase in role.phases)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Whatever a phase touches, each once."""
        return tuple(dict.fromkeys(memory for phase in self.phases for memory in memory_of(phase)))

    @cached_property
    def moves(self) -> Moves:
        """The phase of static operations, in a Plan that has one."""
        return _only(self.phases, Moves, self.name)

    @property
    def tiles(self) -> Tiles | None:
        """What is computed beside the moves, in a Plan with a role that does."""
        return next((phase for phase in self.phases if isinstance(phase, Tiles)), None)

    @property
    def by_row(self) -> ByRow | None:
        """What lanes make of the rows they moved, in a Plan whose lanes do."""
        return next((phase for phase in self.phases if isinstance(phase, ByRow)), None)

    @property
    def has_reduction(self) -> bool:
        """Whether chunks are combined on the way, by any of its moves."""
        return any(one.has_reduction for one in self._all_moves)

    @property
    def asks(self) -> bool:
        """Whether a call says how it is combined, by any of them."""
        return any(one.asks for one in self._all_moves)

    @property
    def _all_moves(self) -> Iterator[Moves]:
        moves = (phase.moves if isinstance(phase, Launch) else phase for phase in self.phases)
        return (one for one in moves if isinstance(one, Moves))

    @property
    def push(self) -> Push:
        """The phase that sends rows, in a Plan that has one."""
        return _only(self.phases, Push, self.name)

    @property
    def push_by_key(self) -> PushByKey:
        """The phase that sends rows to the ranks of their keys, in a Plan that has one."""
        return _only(self.phases, PushByKey, self.name)

    @property
    def push_back(self) -> PushBack:
        """The phase that sends back what became of rows, in a Plan that has one."""
        return _only(self.phases, PushBack, self.name)

    @property
    def push_again(self) -> PushAgain:
        """The phase that sends rows to places that are known, in a Plan that has one."""
        return _only(self.phases, PushAgain, self.name)

    @property
    def halves(self) -> Halves | None:
        """The phases of its two launches, where a call may be made of two: those of rows that go by keys, and back."""
        if self.is_static:
            return None
        return halves_of(self.comm.routed, self.num_ranks)

    @property
    def key_positions(self) -> tuple[int, ...]:
        """In a Plan of rows that go by keys, or come back, where each key stands among all; in others none."""
        found = (phase.key_positions for role in self.roles for phase in role.routed)
        return next(filter(None, found), ())

    @property
    def is_static(self) -> bool:
        """Whether it moves chunks by tables of its own, not rows by a routing that comes with a call."""
        return self.is_visited or any(isinstance(phase, Moves) for phase in self.phases)

    @property
    def is_visited(self) -> bool:
        """Whether its caller computes between launches: then each of them is a Plan of its own (`visited`)."""
        return any(isinstance(phase, Launch | Visit | Tasks | Return) for phase in self.phases)

    @cached_property
    def launched(self) -> Mapping[Moves, Plan]:
        """What is launched between visits, each once, as a Plan of its own."""
        every = dict.fromkeys(phase.moves for phase in self.phases if isinstance(phase, Launch))
        return {moves: self._of(moves) for moves in every}

    def _of(self, moves: Moves) -> Plan:
        role = Role(self.comm.name, moves.lanes, moves.sms, moves.threads, (moves,))
        return replace(self, name=moves.name, roles=(role,), tile_bytes=moves.tile_bytes, agree=Agree(moves.heard))

    @property
    def lanes_tell(self) -> bool:
        """Whether what its lanes send tells of the call: the first word of every operation carries its digest."""
        return self.is_static and not self.is_visited and self.tiles is None and self.moves.carrier.has_flags_in_data

    @property
    def agreeing(self) -> str:
        """How it is found out that a rank makes another call."""
        return "the first word of every operation carries the call" if self.lanes_tell else str(self.agree)

    @property
    def agreeing_blocks(self) -> int:
        """Thread blocks beside those of the roles."""
        return 0 if self.lanes_tell else AGREEING_BLOCKS

    @property
    def comm(self) -> Role:
        """The role whose lanes move data."""
        found = [role for role in self.roles if not role.is_caller and not role.computes]
        if len(found) != 1:
            raise InternalError(f"`{self.name}` has {len(found)} roles that move data, expected one")
        return found[0]

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory per rank; rows that wait lie behind it."""
        return heap_layout(self).size


@dataclass(frozen=True, slots=True)
class HeapLayout:
    """What lies where in every rank's symmetric memory, in bytes. Rows that wait, and results, lie behind `size`."""

    offsets: tuple[tuple[Memory, int], ...]
    size: int


LINE = 64
"""Bytes of a cache line: what one rank writes shares none with what another writes."""


def heap_layout(plan: Plan) -> HeapLayout:
    """Words and counters one after another, each writer's in lines of its own; `Moves` say what they have."""
    if plan.is_visited:
        moves = dict.fromkeys(phase.moves for phase in plan.phases if isinstance(phase, Launch))
        return HeapLayout((), sum(one.symmetric_bytes for one in moves))
    if plan.is_static:
        return HeapLayout((), plan.moves.symmetric_bytes)
    offsets: list[tuple[Memory, int]] = []
    at = 0
    for memory in (*plan.memory, *_of_halves(plan)):
        match memory:
            case Words():
                offsets.append((memory, at))
                at += (1 if memory.is_own else plan.num_ranks) * slot_bytes(memory, plan.comm.lanes)
            case Counters():
                offsets.append((memory, at))
                at += memory.waves * plan.num_ranks * plan.comm.lanes * LINE if memory.is_shared else LINE
            case Rows() | Tensor() | Kept():
                pass
            case _:
                assert_never(memory)
    return HeapLayout(tuple(offsets), at)


def _of_halves(plan: Plan) -> tuple[Words, ...]:
    """What the first of two launches leaves to the second."""
    kept = kept_by(plan.comm.routed, plan.num_ranks)
    return () if kept is None else (kept,)


def slot_bytes(words: Words, lanes: int) -> int:
    """Of one rank's words on another."""
    return -(-16 * len(words.values) * (lanes if words.a_lane else 1) // LINE) * LINE


def memory_of(phase: Phase) -> tuple[Memory, ...]:
    match phase:
        case Moves() | Tiles():
            return phase.tensors
        case ByRow():  # those of the moves before it
            return ()
        case Tasks(rows):
            return tuple(kept for task in rows for kept in (*task.reads, *task.writes))
        case Launch() | Visit() | Return():
            return tuple(touch.memory for touch in touches_between(phase))
        case _:
            return tuple(touch.memory for touch in phase.touches) + phase.waits_for


def _only(phases: tuple[Phase, ...], kind: type[One], name: str) -> One:
    found = [phase for phase in phases if isinstance(phase, kind)]
    if len(found) != 1:
        raise InternalError(f"`{name}` has {len(found)} phases `{kind.__name__}`, expected one")
    return found[0]
