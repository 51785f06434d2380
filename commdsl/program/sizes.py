"""Turns a Plan and the bytes of a block into what a launch needs: slices, active lanes, rounds.

Assumes a verified Plan. Does not allocate and does not launch; lane.cuh repeats `piece_range` and `slice_range`
word for word, and both builds take lanes and rounds from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.lengths import place
from commdsl.ir.schedules import Ints
from commdsl.program.memory import Tensor
from commdsl.program.moves import UNIT, Moves

DEVICE_MIN_SLICE_BYTES = 8192
"""Of a lane that awaits flags: with less, another lane only adds its own."""

HOST_MIN_SLICE_BYTES = 1024
HOST_MAX_LANES = 2
"""A host lane is a thread: more of them than cores only switch, but two let lanes race each other under test."""

DEVICE_MIN_PART_BYTES = 2048
"""Of a row that lanes share: with less, what they tell each other takes longer than what they save."""

MOST_PARTS = 8
"""Lanes that share a row, as kMostParts in by_row.cuh: blocks of a cluster, which may always have so many."""

NO_SHARE = 1 << 62
"""The most that a lane owns of a chunk where only other ranks may know how much that is."""

STAGGERED = 4
"""Lanes start out of step, so that some use the links while others use their own memory."""


Blocks: TypeAlias = int | tuple[int, ...]
"""The bytes of every block; or where they have lengths of their own, each that a rank knows."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one call runs, equal on all ranks. No lanes: nothing to move."""

    block_bytes: int  # of the longest block
    active_lanes: int
    rounds: int
    share_bytes: int  # the most a lane owns of a chunk
    stagger_bytes: int = 0  # by how much less each of STAGGERED neighbours moves in its first round than the one before
    row_bytes: int = 0  # where lanes have whole rows of a block, or equal parts of one
    lengths: tuple[int, ...] = ()  # in bytes those that a rank knows, where blocks have lengths of their own

    def arguments(self) -> dict[str, int]:
        """What a kernel is told of it."""
        return {
            "block_bytes": self.block_bytes,
            "share_bytes": self.share_bytes,
            "stagger_bytes": self.stagger_bytes,
            "active_lanes": self.active_lanes,
            "rounds": self.rounds,
            "row_bytes": self.row_bytes,
        }

    def arguments_of(self, moves: Moves, rank: int) -> dict[str, int | Sequence[int]]:
        """As `arguments`, with what the kernel of one rank is told of lengths."""
        if moves.lengths is None:
            return {**self.arguments()}
        begins = [start for tensor in moves.tensors for start in block_begins(self.blocks_of(moves, tensor, rank))]
        return {**self.arguments(), "lengths": self.lengths, "begins": begins}

    def blocks_of(self, moves: Moves, tensor: Tensor, rank: int) -> list[int]:
        """The bytes of each block of a tensor of a rank, which the launch is of where lengths are known to few."""
        if tensor.lengths is None:
            return [self.block_bytes] * tensor.blocks
        return tensor.lengths.of_rank(moves.num_ranks, tensor.blocks, rank, self.lengths)

    @property
    def parts(self) -> int:
        """Lanes that share a row, neighbours: blocks of one cluster."""
        return self.row_bytes // self.share_bytes if 0 < self.share_bytes < self.row_bytes else 1

    def blocks(self, moves: Moves) -> int:
        """Thread blocks to start: never more than the SMs the Plan may use."""
        return min(self.active_lanes, moves.sms)

    def threads(self, moves: Moves) -> int:
        """Threads of a block: those of the lanes at work in the first, the fullest."""
        return moves.threads * -(-self.active_lanes // moves.sms)


def piece_range(block_bytes: int, cut: int, piece: int) -> tuple[int, int]:
    """Bytes [first, last) of piece `piece` of a block cut into `cut`."""
    units = -(-block_bytes // UNIT)
    first = min(UNIT * (units * piece // cut), block_bytes)
    return first, min(UNIT * (units * (piece + 1) // cut), block_bytes)


def chunk_range(blocks: Sequence[int], cut: int, chunk: int) -> tuple[int, int]:
    """Bytes [first, last) of a chunk of a tensor of blocks of so many bytes, each cut into `cut`."""
    block, piece = divmod(chunk, cut)
    begin = sum(blocks[:block])
    first, last = piece_range(blocks[block], cut, piece)
    return begin + first, begin + last


def block_begins(blocks: Sequence[int]) -> list[int]:
    """Where blocks begin that lie one behind another."""
    return [0, *accumulate(blocks)][: len(blocks)]


def first_blocks(moves: Moves) -> Ints:
    """Of each tensor its first block among those of all, and how many there are."""
    return np.cumsum([0, *(tensor.blocks for tensor in moves.tensors)]).astype(np.int32)


def known_lengths(moves: Moves) -> Ints:
    """Of each operation, which of the lengths that its rank knows its block has."""
    num_axes = 0 if moves.lengths is None else len(moves.lengths.axes)
    return place(moves.num_ranks, num_axes, moves.ops.actor, moves.ops.length)


def slice_range(chunk_bytes: int, share_bytes: int, lane: int) -> tuple[int, int]:
    """Bytes [first, last) of a chunk that a lane owns."""
    return min(lane * share_bytes, chunk_bytes), min((lane + 1) * share_bytes, chunk_bytes)


def lane_share(chunk_bytes: int, active_lanes: int, unit: int = UNIT) -> int:
    """The most bytes any lane owns of a chunk, rounded up to whole units."""
    units = -(-chunk_bytes // unit)
    return unit * -(-units // active_lanes)


def size_classes(moves: Moves) -> NDArray[np.int32]:
    """The distinct (cut, piece) of a Plan's operations, one a row."""
    return np.unique(np.stack((moves.ops.cut, moves.ops.piece), axis=1), axis=0)


def largest_chunk_bytes(moves: Moves, block_bytes: int) -> int:
    """The most bytes any operation moves, over all rounds and lanes; where lengths differ, of any piece."""
    if moves.lengths is not None:
        return UNIT * -(-block_bytes // (UNIT * moves.least_cut))
    ranges = (piece_range(block_bytes, int(cut), int(piece)) for cut, piece in size_classes(moves))
    return max((last - first for first, last in ranges), default=0)


def launch(
    moves: Moves, blocks: Blocks, row_bytes: int = 0, *, min_slice_bytes: int, max_lanes: int | None = None
) -> Launch:
    """Lanes and rounds of a call on blocks of this size, those of the longest where lengths differ; ValueError where 32
    bits cannot count a block's vectors, or where a block is not whole rows, if lanes are to have whole ones.
    """
    if moves.has_heads:
        return _paired(moves, blocks, moves.lanes if max_lanes is None else min(moves.lanes, max_lanes))
    if not isinstance(blocks, int):
        longest = launch(moves, max(blocks), min_slice_bytes=min_slice_bytes, max_lanes=max_lanes)
        return replace(longest, lengths=blocks)
    block_bytes = blocks
    if row_bytes and block_bytes % row_bytes:
        raise ValueError(f"a block of {block_bytes} bytes is not whole rows of {row_bytes}")
    if block_bytes > UNIT * (2**32 - 1):
        raise ValueError(f"a block of {block_bytes} bytes is more than {UNIT} * (2^32 - 1)")
    largest = largest_chunk_bytes(moves, block_bytes)
    if largest == 0:
        # Data that carries flags carries the call, too: a word of it is sent where there is nothing else.
        alone = int(moves.carrier.has_flags_in_data)
        return Launch(block_bytes, alone, alone, 0, row_bytes=row_bytes)
    lanes = moves.lanes if max_lanes is None else min(moves.lanes, max_lanes)
    unit = lcm(moves.unit, row_bytes or UNIT)
    active = min(lanes, max(1, -(-largest // max(min_slice_bytes, unit))))
    share = lane_share(largest, active, unit)
    if share <= moves.tile_bytes or moves.carrier.has_flags_in_data or active == 1:
        return Launch(block_bytes, active, -(-share // moves.tile_bytes), share, row_bytes=row_bytes)
    stagger = moves.tile_bytes // STAGGERED // moves.unit * moves.unit
    shortest = moves.tile_bytes - (STAGGERED - 1) * stagger
    return Launch(block_bytes, active, 1 - (shortest - share) // moves.tile_bytes, share, stagger, row_bytes)


def _paired(moves: Moves, blocks: Blocks, lanes: int) -> Launch:
    """Of a rank that knows the lengths of its pairs: alike on all ranks, but how many rounds there are at first."""
    lengths = (blocks,) if isinstance(blocks, int) else blocks
    share = lane_share(largest_chunk_bytes(moves, max(lengths)), lanes)
    stagger = moves.tile_bytes // STAGGERED // UNIT * UNIT
    shortest = moves.tile_bytes - (STAGGERED - 1) * stagger
    rounds = max(1, 1 - (shortest - share) // moves.tile_bytes)
    return Launch(max(lengths), lanes, rounds, NO_SHARE, stagger, lengths=lengths)


def round_range(moves: Moves, call: Launch, lane: int, number: int) -> tuple[int, int]:
    """Bytes [first, last) of a lane's slices that one round of a call moves."""
    early = lane % STAGGERED * call.stagger_bytes
    first = number * moves.tile_bytes - early if number else 0
    return min(first, call.share_bytes), min((number + 1) * moves.tile_bytes - early, call.share_bytes)


def device_launch(moves: Moves, blocks: Blocks, row_bytes: int = 0) -> Launch:
    """`launch` as the GPU build runs it: where data carries its flag, a word for every thread is enough for a lane."""
    least = moves.carrier.thread_bytes * moves.threads or DEVICE_MIN_SLICE_BYTES
    made = launch(moves, blocks, row_bytes, min_slice_bytes=least)
    block_bytes = made.block_bytes
    if row_bytes and block_bytes and (parts := _parts(moves, block_bytes // row_bytes, row_bytes)) > 1:
        share = row_bytes // parts
        return replace(made, active_lanes=block_bytes // share, rounds=-(-share // moves.tile_bytes), share_bytes=share)
    if moves.carrier.runs_on_sms:
        return made
    # The host says where a copy goes, once and for all replays of a graph: so every call starts with the same cells.
    return replace(made, rounds=-(-made.rounds // moves.rotation) * moves.rotation)


def _parts(moves: Moves, rows: int, row_bytes: int) -> int:
    """Lanes for each row, where the kernel's blocks are lanes and nothing else. At most half of the lanes are at work
    then: all clusters find SMs of one group at once.
    """

    def fits(parts: int) -> bool:
        part, left = divmod(row_bytes, parts)
        return left == part % moves.unit == 0 and part >= DEVICE_MIN_PART_BYTES and rows * parts <= moves.lanes // 2

    alone = not moves.carrier.has_flags_in_data or moves.lanes_per_block > 1
    return 1 if alone else next(filter(fits, (MOST_PARTS, 4, 2)), 1)


def host_launch(moves: Moves, blocks: Blocks, row_bytes: int = 0) -> Launch:
    """`launch` as the host build runs it."""
    return launch(moves, blocks, row_bytes, min_slice_bytes=HOST_MIN_SLICE_BYTES, max_lanes=HOST_MAX_LANES)


def tensor_bytes(tensor: Tensor, block_bytes: int) -> int:
    return tensor.blocks * block_bytes


def block_bytes_of(tensor: Tensor, nbytes: int) -> int:
    """The bytes of one block of a tensor of `nbytes`; ValueError when its blocks cannot be equal."""
    if nbytes % tensor.blocks:
        raise ValueError(f"`{tensor.name}` is {tensor.blocks} equal blocks, which {nbytes} bytes cannot be")
    return nbytes // tensor.blocks


def touched(moves: Moves, lanes: int) -> tuple[tuple[int, int], ...]:
    """The stretches of symmetric memory, first byte and length, that calls of no more than so many lanes touch."""
    lanes = min(lanes, moves.lanes)
    cells = range(moves.rotation * moves.num_cells)
    apart = moves.lanes * moves.slot_bytes
    return (
        (0, lanes * moves.flags_per_lane * 64),
        (moves.flags_bytes, lanes * 64),
        *((moves.cells_offset + cell * apart, lanes * moves.slot_bytes) for cell in cells),
    )
