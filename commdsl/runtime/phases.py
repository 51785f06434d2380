"""Turns a Plan and the size of a call into what one rank starts for it where the copy engine makes the copies.

Assumes a Plan of the protocol `engine`, its flags proved. Does not start anything (`engine` does) and knows no address:
a place is a base, which is a rank's heap, a tensor of the rank, or where one that lands is on any rank, and an offset.

The proof is about ranks that do one operation after another: wait, copy, signal. Here a rank's program falls into
*phases*, runs of operations of which first all wait, then all copy, then all signal. Rounds run on: a phase may end one
and begin the next, so that what came in is copied out while more is on its way. Copies of a phase that touch the same
bytes keep their order, in *waves*; those of one wave may run at once.

Against the program a wait comes earlier and a signal later, so whatever a flag ordered it still orders. Nor do ranks
wait for each other: a wait passes signals of later rounds than the one it waits for, and of that round those that
nobody needs in the wait's own round yet. For suppose that ranks wait in a circle, each for a signal that the next one
will raise after its own wait. Take for each wait the round that it waits for, then its own, and compare them with those
of the wait before it in the circle, whose signal it holds up. If it comes before that signal in the program, neither
round is later than the signal's, and so than those of the wait before. If it was moved past the signal, it waits for
an earlier round than the signal's; or for that one, itself in an earlier round than anybody who needs the signal. So
around the circle the pair never grows, no wait was moved, and the program itself has the circle; which the proof
excludes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from commdsl.program.moves import CELL, Moves, OpKind
from commdsl.program.sizes import Launch, piece_range

NEVER = 1 << 30
"""In how many rounds a signal is needed that nobody waits for."""

TOLD = 32
"""Where the word to tell is in a Turn, as `Flags.pack` has it."""

STEP_UNIT = 4096
"""Bytes to which the parts of a chunk that rounds move are rounded up, where the tile is no smaller."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes to copy, to memory of rank `peer`. Bases are counted ranks first, then tensors, then for each tensor that
    lands where it is on every rank.
    """

    peer: int
    dest: tuple[int, int]  # base, offset
    source: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Flags:
    """The Turn struct of types.cuh, without a word to tell: signals to raise, then waits, as ranges of positions."""

    signals: tuple[int, int]
    waits: tuple[int, int]
    entered: int
    advances: bool = False
    begins: bool = False

    def pack(self) -> bytes:
        return struct.pack("<7i4xQ", *self.signals, *self.waits, self.entered, self.advances, self.begins, 0)


Wave: TypeAlias = tuple[Copy, ...]


def phases(moves: Moves, rank: int, launch: Launch, same: Sequence[int]) -> tuple[Flags | Wave, ...]:
    """What a rank starts, in order. `same`: for each tensor the first one that is the same memory."""
    program = _Program(moves, rank, launch, tuple(same))
    bounds = program.bounds()
    steps: list[Flags | Wave] = []
    raised, last_flags = (0, 0), 0
    for first, last in bounds:
        if program.any_signal(*raised) or program.any_wait(first, last):
            last_flags = len(steps)
            steps.append(Flags(raised, (first, last), program.round_of(last)))
        copies = (copy for position in range(first, last) for copy in program.copies(position))
        steps += (_joined(wave, program.first_landing) for wave in _waves(copies))
        raised = (first, last)
    if program.any_signal(*raised) or not any(isinstance(step, Flags) for step in steps):
        last_flags = len(steps)
        steps.append(Flags(raised, (0, 0), launch.rounds))
    final = steps[last_flags]
    assert isinstance(final, Flags)
    steps[last_flags] = replace(final, advances=True)
    start = next(at for at, step in enumerate(steps) if isinstance(step, Flags))
    first_flags = steps[start]
    assert isinstance(first_flags, Flags)
    steps[start] = replace(first_flags, begins=True)
    return tuple(steps)


class _Program:
    """A rank's operations through all rounds of a call: operation i of n in round r has position r * n + i."""

    def __init__(self, moves: Moves, rank: int, launch: Launch, same: tuple[int, ...]) -> None:
        ops = moves.ops
        first, last = np.searchsorted(ops.leaders, ops.rank_begin[rank : rank + 2]).tolist()
        self.moves = moves
        self.launch = launch
        self.same = same
        self.begin = [*ops.leaders[first:last].tolist(), int(ops.rank_begin[rank + 1])]  # of each group, in rows
        waits = ((ops.wait_begin[row], ops.wait_begin[row + 1]) for row in self.begin[:-1])
        self.backs = [np.unique(ops.wait_rounds_back[first:end]).tolist() for first, end in waits]
        raised = ((ops.signal_begin[end - 1], ops.signal_begin[end]) for end in self.begin[1:])
        needs, before = _needs(moves, rank), ops.signal_begin[ops.rank_begin[rank]]
        # By group how many rounds later the first of its signals is needed; None: it has none.
        self.needs = [min(needs[first - before : end - before], default=None) for first, end in raised]
        self.sends_on = _sends_on(moves)
        self.landing = [space for space, tensor in enumerate(moves.tensors) if tensor.lands]
        self.first_landing = moves.num_ranks + len(moves.tensors)
        even = -(-launch.share_bytes // max(launch.rounds, 1))
        self.step = min(moves.tile_bytes, -(-even // STEP_UNIT) * STEP_UNIT)

    @property
    def length(self) -> int:
        return len(self.backs)

    def round_of(self, position: int) -> int:
        """Rounds begun before this position."""
        return -(-position // max(self.length, 1))

    def any_wait(self, first: int, last: int) -> bool:
        return any(self.backs[position % self.length] for position in range(first, last))

    def any_signal(self, first: int, last: int) -> bool:
        return any(self.needs[position % self.length] is not None for position in range(first, last))

    def bounds(self) -> list[tuple[int, int]]:
        """The positions of each phase.

        A wait passes the signals before it where it may; but where ranks send on what they got, signals of the wait's
        own round go out first: who forwards what they announce can begin.
        """
        cuts, held_back = [0], dict[int, int]()  # by round of the phase's signals, in how many rounds one is needed
        for position in range(self.length * self.launch.rounds):
            round, group = divmod(position, self.length)
            backs, need = self.backs[group], self.needs[group]
            if backs and ((self.sends_on and round in held_back) or not _passes(round, backs, held_back)):
                cuts.append(position)
                held_back = {}
            if need is not None:
                held_back[round] = min(need, held_back.get(round, need))
        cuts.append(self.length * self.launch.rounds)
        return list(pairwise(cuts))

    def copies(self, position: int) -> Iterator[Copy]:
        """Those of one group in one round; none where nothing is left to move, or it is there already."""
        ops, (round, group) = self.moves.ops, divmod(position, self.length)
        leader = self.begin[group]
        if ops.kind[leader] == OpKind.HOLD:
            return
        cut = int(ops.cut[leader])
        first, last = piece_range(self.launch.block_bytes, cut, int(ops.piece[leader]))
        first = min(first + round * self.step, last)
        num_bytes = min(self.step, last - first)
        if not num_bytes:
            return
        at = int(ops.source_begin[leader])
        space, owner, index = int(ops.source_space[at]), int(ops.source_rank[at]), int(ops.source_index[at])
        source = self._place(space, owner, index, cut, (round, first))
        for row in range(leader, self.begin[group + 1]):
            space, peer, index = int(ops.dest_space[row]), int(ops.dest_rank[row]), int(ops.dest_index[row])
            dest = self._place(space, peer, index, cut, (round, first))
            if dest != source:
                yield Copy(peer, dest, source, num_bytes)

    def _place(self, space: int, rank: int, index: int, cut: int, at: tuple[int, int]) -> tuple[int, int]:
        """`at`: the round, and the byte of its block at which it takes a chunk up."""
        round, first = at
        if space == CELL:
            slot = round % self.moves.rotation * self.moves.num_cells + index
            return rank, self.moves.cells_offset + slot * self.moves.slot_bytes
        base = self.moves.num_ranks + self.same[space]
        if space in self.landing:
            base = self.first_landing + self.landing.index(space) * self.moves.num_ranks + rank
        return base, index // cut * self.launch.block_bytes + first


def _passes(round: int, backs: Sequence[int], held_back: Mapping[int, int]) -> bool:
    """Whether waits for signals of so many rounds back may pass these signals."""
    waits = [(round - back, back) for back in backs]
    return all(
        of < raised or (of == raised and back < need) for raised, need in held_back.items() for of, back in waits
    )


def _needs(moves: Moves, rank: int) -> list[int]:
    """For each signal of a rank how many rounds later somebody first waits for it, or for one that follows it."""
    ops, found, counts = moves.ops, list[int](), Counter[int]()
    first, end = ops.signal_begin[ops.rank_begin[rank : rank + 2]].tolist()
    for peer in ops.signal_peer[first:end].tolist():
        counts[peer] += 1
        begin, stop = ops.wait_begin[ops.rank_begin[peer : peer + 2]].tolist()
        mine = begin + np.flatnonzero(ops.wait_peer[begin:stop] == rank)
        later = ops.wait_ordinal[mine] < counts[peer]  # such a wait is for it in the round after
        found.append(int((ops.wait_rounds_back[mine] + later).min(initial=NEVER)))
    return found


def _sends_on(moves: Moves) -> bool:
    """Whether any rank puts somewhere else what was put to it."""
    ops = moves.ops
    came = np.array([tensor.lands for tensor in moves.tensors] + [True])  # the last entry stands for a cell
    far = np.flatnonzero((ops.kind != OpKind.HOLD) & (ops.dest_rank != ops.actor))
    return bool(came[ops.source_space[ops.source_begin[ops.leader_of[far]]]].any())


def _waves(copies: Iterator[Copy]) -> list[list[Copy]]:
    waves: list[list[Copy]] = []
    for copy in copies:
        if not waves or any(_meet(copy, other) for other in waves[-1]):
            waves.append([])
        waves[-1].append(copy)
    return waves


def _joined(wave: list[Copy], first_landing: int) -> Wave:
    """What lands beside what lies beside it at its source, too, is one copy with it."""
    found: list[Copy] = []
    for copy in wave:
        before = next((at for at, one in enumerate(found) if _goes_on(one, copy)), None)
        if before is None or copy.dest[0] < first_landing:
            found.append(copy)
        else:
            found[before] = replace(found[before], num_bytes=found[before].num_bytes + copy.num_bytes)
    return tuple(found)


def _goes_on(one: Copy, other: Copy) -> bool:
    """Whether the second begins where the first ends, at both ends."""
    pairs = (one.dest, other.dest), (one.source, other.source)
    return all(a[0] == b[0] and a[1] + one.num_bytes == b[1] for a, b in pairs)


def _meet(one: Copy, other: Copy) -> bool:
    """Whether one of them writes what the other reads or writes."""
    pairs = ((one.dest, other.dest), (one.dest, other.source), (one.source, other.dest))
    return any(a[0] == b[0] and a[1] < b[1] + other.num_bytes and b[1] < a[1] + one.num_bytes for a, b in pairs)
