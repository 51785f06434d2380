"""Turns a Plan into the shared memory that its blocks have on a GPU for bulk copies: stages that lanes, or warps, fill
in turn.

Assumes a GPU whose blocks may have so much (`BLOCK_SHARED_BYTES`); others run the same text without. Does not know what
passes through.
"""

from __future__ import annotations

from commdsl.program.moves import STAGE_MARKS_BYTES
from commdsl.program.plan import Plan

WARP_STAGE_BYTES = 2048
"""What a warp loads at once: four words of each of its threads."""

BLOCK_STAGES = 80
"""Of all warps of a block, 160 KB: what a lane knows of rows and peers lies beside them."""

MOST_WARP_STAGES = 8


def carries(plan: Plan) -> bool:
    """Whether warps add rows up, which pass through stages of their own."""
    return not plan.is_static and any(phase.adds_up for phase in plan.comm.routed)


def warp_stages(plan: Plan) -> int:
    """Of each warp: some are filled while another is added."""
    return min(MOST_WARP_STAGES, max(2, BLOCK_STAGES // _warps(plan)))


def shared_bytes(plan: Plan) -> int:
    """Of a block, beside what its kernel has by itself."""
    if plan.is_static:
        return plan.moves.shared_bytes
    return _warps(plan) * (STAGE_MARKS_BYTES + warp_stages(plan) * WARP_STAGE_BYTES) if carries(plan) else 0


def _warps(plan: Plan) -> int:
    return max(1, plan.comm.threads // 32)
