"""Turns a Plan and the size of a call into what one rank starts for it where the copy engine makes the copies.

Assumes a Plan of the protocol `engine`, its flags proved. Does not start anything (`engine` does) and knows no address:
a place is a base, which is a rank's heap or behind these a tensor of the rank, and an offset.

The proof is about ranks that do one operation after another: wait, copy, signal. Here a rank's program falls into
*phases*, runs of operations of which first all wait, then all copy, then all signal. Rounds run on: a phase may end one
and begin the next, so that what came in is copied out while more is on its way. Copies of a phase that touch the same
bytes keep their order, in *waves*; those of one wave may run at once.

Against the program a wait comes earlier and a signal later, so whatever a flag ordered it still orders. Nor does a rank
wait for itself: a wait passes signals of later rounds than the one it waits for alone. For suppose that ranks wait in a
circle, each for a signal that the next one will raise after its own wait. If that signal comes after that wait in the
program, the wait is for the same round or an earlier one; if the wait was moved past it, for an earlier one. Around the
circle rounds never grow, so no wait was moved, and the program itself has the circle; which the proof excludes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from commdsl.program.moves import CELL, Moves
from commdsl.program.sizes import Launch, piece_range

STEP_UNIT = 4096
"""Bytes to which the parts of a chunk that rounds move are rounded up, where the tile is no smaller."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes to copy, to memory of rank `peer`; bases are counted ranks first, then tensors."""

    peer: int
    dest: tuple[int, int]  # base, offset
    source: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Flags:
    """The Turn struct of types.cuh: signals to raise, then waits, as ranges of positions."""

    signals: tuple[int, int]
    waits: tuple[int, int]
    entered: int
    advances: bool = False
    begins: bool = False

    def pack(self) -> bytes:
        return struct.pack("<7i", *self.signals, *self.waits, self.entered, self.advances, self.begins)


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
        steps += _waves(copies)
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
        self.backs = [ops.wait_rounds_back[ops.wait_begin[row] : ops.wait_begin[row + 1]] for row in self.begin[:-1]]
        self.signals = [bool(ops.signal_begin[end - 1] < ops.signal_begin[end]) for end in self.begin[1:]]
        even = -(-launch.share_bytes // max(launch.rounds, 1))
        self.step = min(moves.tile_bytes, -(-even // STEP_UNIT) * STEP_UNIT)

    @property
    def length(self) -> int:
        return len(self.backs)

    def round_of(self, position: int) -> int:
        """Rounds begun before this position."""
        return -(-position // max(self.length, 1))

    def any_wait(self, first: int, last: int) -> bool:
        return any(len(self.backs[position % self.length]) for position in range(first, last))

    def any_signal(self, first: int, last: int) -> bool:
        return any(self.signals[position % self.length] for position in range(first, last))

    def bounds(self) -> list[tuple[int, int]]:
        """The positions of each phase.

        A wait that may pass the signals before it does so if they end an earlier round. Those of its own round go out
        first: who forwards what they announce can begin.
        """
        cuts, held_back = [0], list[int]()  # the rounds of the signals of the phase
        for position in range(self.length * self.launch.rounds):
            round, group = divmod(position, self.length)
            backs = self.backs[group]
            if held_back and len(backs) and (round - int(backs.min()) >= held_back[0] or round == held_back[-1]):
                cuts.append(position)
                held_back = []
            if self.signals[group]:
                held_back.append(round)
        cuts.append(self.length * self.launch.rounds)
        return list(pairwise(cuts))

    def copies(self, position: int) -> Iterator[Copy]:
        """Those of one group in one round; none where nothing is left to move, or it is there already."""
        ops, (round, group) = self.moves.ops, divmod(position, self.length)
        leader = self.begin[group]
        cut = int(ops.cut[leader])
        first, last = piece_range(self.launch.block_bytes, cut, int(ops.piece[leader]))
        first = min(first + round * self.step, last)
        num_bytes = min(self.step, last - first)
        if not num_bytes:
            return
        at = int(ops.source_begin[leader])
        space, owner, index = int(ops.source_space[at]), int(ops.source_rank[at]), int(ops.source_index[at])
        source = self._cell(owner, index, round) if space == CELL else self._chunk(space, index // cut, first)
        for row in range(leader, self.begin[group + 1]):
            space, peer, index = int(ops.dest_space[row]), int(ops.dest_rank[row]), int(ops.dest_index[row])
            dest = self._cell(peer, index, round) if space == CELL else self._chunk(space, index // cut, first)
            if dest != source:
                yield Copy(peer, dest, source, num_bytes)

    def _cell(self, rank: int, index: int, round: int) -> tuple[int, int]:
        slot = round % self.moves.rotation * self.moves.num_cells + index
        return rank, self.moves.cells_offset + slot * self.moves.slot_bytes

    def _chunk(self, tensor: int, block: int, first: int) -> tuple[int, int]:
        """`first`: the byte of its block at which this round takes a chunk up."""
        return self.moves.num_ranks + self.same[tensor], block * self.launch.block_bytes + first


def _waves(copies: Iterator[Copy]) -> list[Wave]:
    waves: list[list[Copy]] = []
    for copy in copies:
        if not waves or any(_meet(copy, other) for other in waves[-1]):
            waves.append([])
        waves[-1].append(copy)
    return [tuple(wave) for wave in waves]


def _meet(one: Copy, other: Copy) -> bool:
    """Whether one of them writes what the other reads or writes."""
    pairs = ((one.dest, other.dest), (one.dest, other.source), (one.source, other.dest))
    return any(a[0] == b[0] and a[1] < b[1] + other.num_bytes and b[1] < a[1] + one.num_bytes for a, b in pairs)
