"""Turns a Plan into what is wrong with its symmetric memory: more than a device gives, or cells nobody uses.

Assumes a Plan that `verify` passed. Does not judge when a cell may be written again: that is a matter of order, and
`proof.synchronization` proves it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.program.launches import Launch
from commdsl.program.moves import CELL
from commdsl.program.plan import Plan
from commdsl.program.proof.rounds import Round

HEAP_BYTES = 1 << 30
"""Symmetric memory a rank gives: the heap that NVSHMEM makes unless told otherwise, shared by all loaded ops."""


def memory(schedule: Schedule, found: Round) -> Iterator[Diagnostic]:
    """The cells are all used, and fit in a device's heap."""
    moves = found.moves
    used = np.zeros(moves.num_cells, np.bool_)
    used[moves.ops.dest_index[moves.ops.dest_space == CELL]] = True
    if not used.all():
        yield Diagnostic(
            "C342",
            f"cell {int(np.argmin(used))} of `{moves.name}` is never written",
            Label(schedule.span, f"its Plan has {moves.num_cells} cells, of which {int(used.sum())} are written"),
            help="the compiler numbers the cells, so this is its fault: report it with this file",
        )
    if moves.symmetric_bytes > HEAP_BYTES:
        cells = f"{moves.num_cells} {'cell' if moves.num_cells == 1 else 'cells'}"
        copies = f"{moves.rotation} {'copy' if moves.rotation == 1 else 'copies'}"
        yield Diagnostic(
            "C341",
            f"`{moves.name}` needs {_size(moves.symmetric_bytes)} of symmetric memory on every rank",
            Label(schedule.span, f"a device gives {_size(HEAP_BYTES)}"),
            notes=(f"{cells} in {copies}, for {moves.lanes} lanes a tile of {_size(moves.tile_bytes)} each",),
            help="a smaller `tile` or fewer `lanes` in `tune`",
        )


def memory_of_launches(schedule: Schedule, plan: Plan) -> Iterator[Diagnostic]:
    """What all launches have together fits, too."""
    if plan.symmetric_bytes > HEAP_BYTES:
        count = len({phase.moves for phase in plan.phases if isinstance(phase, Launch)})
        yield Diagnostic(
            "C341",
            f"the launches of `{plan.name}` need {_size(plan.symmetric_bytes)} of symmetric memory on every rank",
            Label(schedule.span, f"a device gives {_size(HEAP_BYTES)}"),
            notes=(f"between its yields are {count} segments of different tables, with memory of their own each",),
            help="a smaller `tile` or fewer `lanes` in `tune`",
        )


def _size(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more, to one digit."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes} bytes"
