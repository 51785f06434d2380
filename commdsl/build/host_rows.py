"""Turns calls of a dispatch into what its kernel leaves on every rank, by running it on host ranks.

Assumes legal flows. Calls follow each other on one heap, and nothing joins the ranks in between. Does not say what must
come out; callers compare. What runs is `host_ranks`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from commdsl.build.arena import LINE, Bytes
from commdsl.build.emit import emit
from commdsl.build.host_ranks import Kernel, Running, Seats, Values, built, run_ranks, seats
from commdsl.machine.config import Config
from commdsl.program.plan import Plan
from commdsl.program.runs import Shipment
from commdsl.program.tiles import RowTable, table

Results: TypeAlias = list[list[list[Bytes]]]
"""By call, tensor and rank: (rows, width)."""


@dataclass(frozen=True, eq=False)
class RowsCall:
    """One call on all ranks."""

    flows: tuple[Shipment, ...]
    inputs: Sequence[Sequence[Bytes]] | None  # by tensor, then rank: (rows, width); None: what the call before left
    packed: bool
    lanes: tuple[int, ...]  # by rank
    tile_bytes: int = 256
    slot: int | None = None  # results lie in that of the memories which calls share; None: in memory of their own

    def tables(self) -> list[RowTable]:
        """What each rank's kernel reads."""
        return [
            table(self.flows, rank, packed=self.packed, tile_bytes=self.tile_bytes) for rank in range(len(self.lanes))
        ]


def checking(
    plan: Plan, dtype: str = "", *, mode: str = "threads", sanitize: bool = False, config: Config | None = None
) -> Kernel:
    """The kernel that looks itself whether a table stays within its tensors. `dtype`: of what is summed, "" if nothing
    is.
    """
    macros = (*((f"COMMDSL_DTYPE={dtype}",) if dtype else ()), "COMMDSL_CHECK=1")
    return built(plan, emit(plan), macros, mode=mode, sanitize=sanitize, config=config)


def run_calls(
    kernel: Kernel, calls: Sequence[RowsCall], running: Running | None = None, config: Config | None = None
) -> Results:
    """What lies in the results' memory when all calls are over. Raises as `run_ranks` does."""
    if not calls:
        return []
    plan = kernel.plan
    tables = [call.tables() for call in calls]
    waiting = [0] * len(plan.push.given)
    for call, row in zip(calls, tables, strict=True):
        for tensor, flow in enumerate(call.flows):
            waiting[tensor] = max(waiting[tensor], row[0].waiting_rows[tensor] * flow.width)
    ends = np.cumsum([-(-size // LINE) * LINE for size in (plan.symmetric_bytes, *waiting)]).tolist()
    where = seats(plan, ends[-1])
    outputs = _results(where, plan, calls)
    values: list[list[Values]] = []
    inputs: list[list[int]] = []
    for number, (call, row) in enumerate(zip(calls, tables, strict=True)):
        if call.inputs is None:
            inputs, counts = outputs[number - 1], [flow.rows for flow in calls[number - 1].flows]
        else:
            inputs = [_given(where, tensor, given) for tensor, given in enumerate(call.inputs)]
            counts = [np.array([len(rows) for rows in given]) for given in call.inputs]
        rooms = [size // max(flow.width, 1) for size, flow in zip(waiting, call.flows, strict=False)]
        values.append(
            [
                {
                    "waiting": ends[:-1],
                    "waiting_rows": rooms,
                    "table": where.room.put(row[rank].words.view(np.uint8), f"the table of rank {rank}"),
                    "inputs": [place[rank] for place in inputs],
                    "outputs": [place[rank] for place in outputs[number]],
                    "row_bytes": [flow.width for flow in call.flows],
                    "input_rows": [int(count[rank]) for count in counts],
                    "output_rows": [int(flow.rows[rank]) for flow in call.flows],
                    "active_lanes": call.lanes[rank],
                }
                for rank in range(plan.num_ranks)
            ]
        )
    data = run_ranks(kernel, where, values, running or Running(), config)
    return [
        [
            [_at(data, at, int(flow.rows[rank]), flow.width) for rank, at in enumerate(places)]
            for flow, places in zip(call.flows, row, strict=True)
        ]
        for call, row in zip(calls, outputs, strict=True)
    ]


def _given(where: Seats, tensor: int, given: Sequence[Bytes]) -> list[int]:
    """Rows off their alignment, each rank's otherwise."""
    return [where.room.put(rows, f"tensor {tensor} of rank {rank}", shift=2 * rank) for rank, rows in enumerate(given)]


def _results(where: Seats, plan: Plan, calls: Sequence[RowsCall]) -> list[list[list[int]]]:
    """Offsets by call, tensor and rank, off their alignment; those of one slot are as large as the largest of them."""
    sizes: dict[tuple[int | None, int, int, int], int] = {}
    keys = []
    for number, call in enumerate(calls):
        which = (call.slot, -1 if call.slot is not None else number)
        keys.append([[(*which, tensor, rank) for rank in range(plan.num_ranks)] for tensor in range(len(call.flows))])
        for tensor, flow in enumerate(call.flows):
            for rank in range(plan.num_ranks):
                key = keys[-1][tensor][rank]
                sizes[key] = max(sizes.get(key, 0), int(flow.rows[rank]) * flow.width)
    places = {
        key: where.room.poisoned(size, f"result {key[2]} of rank {key[3]}", shift=2 * key[3] + 6)
        for key, size in sizes.items()
    }
    return [[[places[key] for key in row] for row in call] for call in keys]


def _at(data: Bytes, at: int, rows: int, width: int) -> Bytes:
    return data[at : at + rows * width].reshape(rows, width).copy()
