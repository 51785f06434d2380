"""What a dispatch's kernel must leave on every rank, from the Routes alone, and Plans to run it by.

Assumes legal flows. Does not run anything (`commdsl.build.host_rows` does), and does not use torch's ops:
`commdsl.dispatch` has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commdsl import compiler
from commdsl.build.arena import Bytes
from commdsl.build.host_ranks import Kernel
from commdsl.build.host_rows import Results, RowsCall, checking
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.runs import Shipment
from commdsl.program.tiles import RowTable

TENSORS = ("q", "k", "v")


@dataclass(frozen=True, eq=False)
class Damaged(RowsCall):
    """A call in which one word of a rank's table is not what was made."""

    rank: int = 0
    word: int = 0
    bits: int = 0

    def tables(self) -> list[RowTable]:
        found = super().tables()
        found[self.rank].words[self.word] ^= np.uint32(self.bits)
        return found


# --- the oracle -------------------------------------------------------------------------------------------------------


def expected(flow: Shipment, inputs: Sequence[Bytes], dtype: str) -> list[Bytes]:
    """By rank what one tensor must hold: rows where their routes lead; copies summed in order, in float32, rounded
    once; zeros where nothing leads.
    """
    routes = flow.routes
    outputs = [np.zeros((int(rows), flow.width), np.uint8) for rows in flow.rows]
    if not flow.is_sum:
        for at in range(routes.num):
            outputs[routes.dest[at]][_rows(routes.dest_row[at], routes.length[at])] = _sent(flow, inputs, at)
        return outputs
    totals = [np.zeros((len(rows), flow.width // np.dtype(dtype).itemsize), np.float32) for rows in outputs]
    touched = [np.zeros((len(rows), 1), np.bool_) for rows in outputs]
    for at in np.argsort(routes.copy, kind="stable"):
        dest = routes.dest[at]
        rows = _rows(routes.dest_row[at] - routes.copy[at] * flow.rows[dest], routes.length[at])
        value = np.ascontiguousarray(_sent(flow, inputs, at)).view(dtype).astype(np.float32)
        totals[dest][rows] = np.where(touched[dest][rows], totals[dest][rows] + value, value)
        touched[dest][rows] = True
    return [total.astype(dtype).view(np.uint8).reshape(rows.shape) for total, rows in zip(totals, outputs, strict=True)]


def _rows(first: int, count: int) -> slice:
    return slice(int(first), int(first + count))


def _sent(flow: Shipment, inputs: Sequence[Bytes], at: int) -> Bytes:
    routes = flow.routes
    found: Bytes = inputs[routes.source[at]][_rows(routes.source_row[at], routes.length[at])]
    return found


def chained(calls: Sequence[RowsCall], dtype: str) -> Results:
    """By call, tensor and rank what must be there."""
    found: Results = []
    for call in calls:
        inputs = found[-1] if call.inputs is None else call.inputs
        found.append([expected(flow, given, dtype) for flow, given in zip(call.flows, inputs, strict=True)])
    return found


# --- Plans ------------------------------------------------------------------------------------------------------------


def launched(
    num_ranks: int, lanes: int = 3, tensors: tuple[str, ...] = TENSORS, transport: Transport = Transport.PEER
) -> Plan:
    """One text for both puts: which it is stands in the tables."""
    rows = "   ".join(f"rows {name}[T]" for name in tensors)
    text = f"""dispatch qkv for P ranks {{
      {rows}
      route home[S, C] for {", ".join(tensors)}
      place home by (source rank, shard)
      tune {{ sms {lanes}   threads 32   tile 256 B }}
    }}"""
    files = compiler.read_text(text, "by_hand.comm", Path())
    return compiler.check(files, ranks=num_ranks, transport=transport).plan


def program(of: Plan, dtype: str = "float32", *, sanitize: bool = False) -> Kernel:
    return checking(of, dtype, sanitize=sanitize)
