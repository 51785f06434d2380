"""Turns a Plan into the numbers that its kernel is built with: sizes, forms of its phases, where memory lies.

Assumes a proved Plan. Does not know what the bodies make of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.program.actors import printed
from commdsl.program.memory import Words
from commdsl.program.moves import KIND_OF, STAGE_MARKS_BYTES, STAGES
from commdsl.program.plan import Plan, heap_layout
from commdsl.program.stages import WARP_STAGE_BYTES, carries, warp_stages
from commdsl.program.waves import num_waves


def static_constants(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Type, name and value of each, of a Plan that moves chunks."""
    moves, ops = plan.moves, printed(plan)
    yield "i32", "kNumRanks", moves.num_ranks
    yield "i32", "kNumTensors", len(moves.tensors)
    yield "bool", "kLands", int(moves.lands)
    yield "bool", "kCasts", int(moves.casts is not None)
    yield "bool", "kHasLengths", int(moves.lengths is not None)
    yield "bool", "kHasHeads", int(moves.has_heads)
    yield "i32", "kNamed", sum(1 << KIND_OF[name] for name in moves.named[0 if moves.asks else 1 :])
    yield "u64", "kSums", sum(1 << space for space, tensor in enumerate(moves.tensors) if tensor.is_sum)
    yield "u64", "kNumCells", moves.num_cells
    yield "u64", "kRotation", moves.rotation
    yield "u64", "kLanes", moves.lanes
    yield "u64", "kTileBytes", moves.tile_bytes
    yield "u64", "kSlotBytes", moves.slot_bytes
    yield "u64", "kFlagsPerLane", moves.flags_per_lane
    yield "u64", "kFlagsBytes", moves.flags_bytes
    yield "u64", "kCellsOffset", moves.cells_offset
    if moves.carrier.stages_in_shared:
        yield "u64", "kStages", STAGES
        yield "u64", "kStageBytes", moves.stage_bytes
        yield "u64", "kMarksBytes", STAGE_MARKS_BYTES
    yield "i32", "kMostSources", int(np.diff(ops.source_begin).max(initial=0))
    yield "i32", "kMostDests", int((np.arange(ops.num_ops) - ops.leader_of).max(initial=0)) + 1
    if plan.tiles is not None:
        yield "i32", "kMoveBlocks", plan.comm.sms
        yield "i32", "kTileBlocks", plan.tiles.sms


def routed_constants(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """As `static_constants`, of a Plan of rows."""
    layout = heap_layout(plan)
    yield "i32", "kNumRanks", plan.num_ranks
    yield "i32", "kKeys", len(plan.key_positions)
    yield "bool", "kIsCut", int(plan.halves is not None)
    for phase in plan.comm.routed:
        yield from phase.constants(plan.num_ranks, num_waves(plan.comm.routed))
    yield "u64", "kLanes", plan.comm.lanes
    if carries(plan):
        yield "u64", "kStages", warp_stages(plan)
        yield "u64", "kStageBytes", WARP_STAGE_BYTES
        yield "u64", "kMarksBytes", STAGE_MARKS_BYTES
    for memory, _ in layout.offsets:
        if memory.name == "addresses" and isinstance(memory, Words):
            yield "i32", "kAddressWords", len(memory.values)
        if memory.name == "kept" and isinstance(memory, Words):
            yield "i32", "kKeptWords", len(memory.values)
    for memory, at in layout.offsets:
        yield "u64", f"k{memory.name.capitalize()}At", at
