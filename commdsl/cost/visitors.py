"""Turns a schedule with yields into a table: a row per visit, a column per rank, in a cell whose chunks it is handed.

Assumes a checked schedule. Shows as many ranks as the width holds and the first and last of many visits, and says what
it left out. Does not know what moves between them; `timeline` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.cost.timeline import MAX_RANKS, Row, aligned
from commdsl.ir.held import held
from commdsl.ir.schedules import Ints, Schedule, Yield

MOST_VISITS = 20
NOBODY = "·"


def visitors(schedule: Schedule, width: int = 100) -> str:
    """The table, at most `width` columns wide where one rank fits; empty where no visit is handed what was given."""
    rows = list(_rows(schedule))
    if len(rows) > MOST_VISITS:
        left_out = len(rows) - MOST_VISITS
        shown: list[Row | str] = [*rows[: MOST_VISITS - 2], f"… {left_out} more rows", *rows[-2:]]
        return "\n".join(aligned(shown, schedule.num_ranks, width))
    return "\n".join(aligned(rows, schedule.num_ranks, width)) if rows else ""


def _rows(schedule: Schedule) -> Iterator[Row]:
    """For every visit a row for each origin that its buffers have: keys and values together are one."""
    dims = {buffer.name: buffer.dims for buffer in schedule.buffers}
    steps = [step for step in schedule.steps if isinstance(step, Yield)]
    for number, (step, one) in enumerate(zip(steps, held(schedule), strict=True)):
        origins: dict[bytes, tuple[list[str], tuple[str, ...]]] = {}
        for name, origin in zip(one.reads, one.origin, strict=True):
            owner = origin[:MAX_RANKS, :, 0]
            if (owner >= 0).any():
                cells = tuple(cell(chunks, dims[name]) for chunks in owner)
                origins.setdefault(origin.tobytes(), ([], cells))[0].append(name)
        bindings = " ".join(f"{name}={value}" for name, value in step.bindings)
        for names, cells in origins.values():
            yield Row(f"{number:>3} {bindings}".rstrip(), ", ".join(names), cells)


def cell(owner: Ints, dims: tuple[int, ...]) -> str:
    """`3` where all chunks are of rank 3, `3 ·` where the second is none; pieces that differ by rank one by one. What
    is the same in every block, as front and back, is said once.
    """
    blocks = owner.reshape(-1, dims[-1] if dims else 1)
    if len(blocks) > 1 and (blocks == blocks[0]).all():
        blocks = blocks[:1]
    return " | ".join(_pieces(block.tolist()) for block in np.atleast_2d(blocks))


def _pieces(owners: list[int]) -> str:
    words = [str(owner) if owner >= 0 else NOBODY for owner in owners]
    return words[0] if len(set(words)) == 1 else " ".join(words)
