"""Turns a Plan and the bytes of a block into what a launch needs: slices, active lanes, rounds, the packed arguments.

Assumes a verified Plan. Does not allocate and does not launch; kernel.cuh repeats `piece_range` and `slice_range`
word for word, and both builds take lanes and rounds from here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.plan import Plan, Tensor

UNIT = 16
"""Bytes of a vector: chunks but the last of a block, and slices but the last of a chunk, are multiples of it."""

DEVICE_MIN_SLICE_BYTES = 8192
"""One 16-byte vector for each of 512 threads: with less, another lane only adds its flags."""

HOST_MIN_SLICE_BYTES = 1024
HOST_MAX_LANES = 2
"""A host lane is a thread: more of them than cores only switch, but two let lanes race each other under test."""

FLAG_AVERAGE = 1
"""Bit 0 of the kernel's flags: SCALE operations divide."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one call runs, equal on all ranks. No lanes: nothing to move, nothing to launch."""

    block_bytes: int
    active_lanes: int
    rounds: int


def piece_range(block_bytes: int, cut: int, piece: int) -> tuple[int, int]:
    """Bytes [first, last) of piece `piece` of a block cut into `cut`."""
    units = -(-block_bytes // UNIT)
    first = min(UNIT * (units * piece // cut), block_bytes)
    return first, min(UNIT * (units * (piece + 1) // cut), block_bytes)


def slice_range(chunk_bytes: int, active_lanes: int, lane: int) -> tuple[int, int]:
    """Bytes [first, last) of a chunk that lane `lane` of `active_lanes` owns."""
    share = lane_share(chunk_bytes, active_lanes)
    return min(lane * share, chunk_bytes), min((lane + 1) * share, chunk_bytes)


def lane_share(chunk_bytes: int, active_lanes: int) -> int:
    """The most bytes any lane owns of a chunk, rounded up to whole units."""
    units = -(-chunk_bytes // UNIT)
    return UNIT * -(-units // active_lanes)


def size_classes(plan: Plan) -> NDArray[np.int32]:
    """The distinct (cut, piece) of a Plan's operations, one a row."""
    return np.unique(np.stack((plan.ops.cut, plan.ops.piece), axis=1), axis=0)


def largest_chunk_bytes(plan: Plan, block_bytes: int) -> int:
    """The most bytes any operation moves, over all rounds and lanes."""
    ranges = (piece_range(block_bytes, int(cut), int(piece)) for cut, piece in size_classes(plan))
    return max((last - first for first, last in ranges), default=0)


def launch(plan: Plan, block_bytes: int, *, min_slice_bytes: int, max_lanes: int | None = None) -> Launch:
    """Lanes and rounds of a call on blocks of this size."""
    largest = largest_chunk_bytes(plan, block_bytes)
    if largest == 0:
        return Launch(block_bytes, 0, 0)
    lanes = plan.lanes if max_lanes is None else min(plan.lanes, max_lanes)
    active = min(lanes, max(1, -(-largest // min_slice_bytes)))
    rounds = -(-min(lane_share(largest, active), largest) // plan.tile_bytes)
    return Launch(block_bytes, active, rounds)


def host_launch(plan: Plan, block_bytes: int) -> Launch:
    """`launch` as the host build runs it."""
    return launch(plan, block_bytes, min_slice_bytes=HOST_MIN_SLICE_BYTES, max_lanes=HOST_MAX_LANES)


def tensor_bytes(tensor: Tensor, block_bytes: int) -> int:
    return tensor.blocks * block_bytes


def block_bytes_of(tensor: Tensor, nbytes: int) -> int:
    """The bytes of one block of a tensor of `nbytes`; ValueError when its blocks cannot be equal."""
    if nbytes % tensor.blocks:
        raise ValueError(f"`{tensor.name}` is {tensor.blocks} equal blocks, which {nbytes} bytes cannot be")
    return nbytes // tensor.blocks


@dataclass(frozen=True, slots=True)
class Arguments:
    """The Args struct of types.cuh for one rank and one call; addresses as that process sees them."""

    heaps: Sequence[int]  # by rank
    tensors: Sequence[int]  # in the order of Plan.tensors
    launch: Launch
    timeout_ns: int
    error: int
    rank: int
    average: bool

    def pack(self) -> bytes:
        words = (*self.heaps, *self.tensors, self.launch.block_bytes, self.timeout_ns, self.error)
        flags = FLAG_AVERAGE if self.average else 0
        return struct.pack(f"<{len(words)}Q4i", *words, self.rank, self.launch.active_lanes, self.launch.rounds, flags)


def arguments_bytes(plan: Plan) -> int:
    """The length of `Arguments.pack`."""
    return 8 * (plan.num_ranks + len(plan.tensors) + 3) + 16
