"""Turns the ErrorRecords that kernels leave behind into one exception that names rank, step, peer and who is missing.

Assumes the record's layout in types.cuh. Does not decide what becomes of the heap: after a time-out it holds half a
call and has to be zeroed before the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from commdsl.program.plan import Plan

RECORD_BYTES = 64
_FORMAT = "<Q4i4Q8x"


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """What the first lane of a rank to give up wrote down."""

    rank: int
    lane: int
    op: int  # which group of Plan.ops
    peer: int
    expected: int
    seen: int
    round: int
    missing: tuple[int, ...]  # ranks that had not entered the round; ranks from 64 on are not looked at


def unpack(data: bytes | memoryview) -> ErrorRecord | None:
    """The record in 64 bytes, None where none was written."""
    code, rank, lane, op, peer, expected, seen, round_, missing = struct.unpack(_FORMAT, data)
    if code == 0:
        return None
    absent = tuple(bit for bit in range(64) if missing >> bit & 1)
    return ErrorRecord(rank, lane, op, peer, expected, seen, round_, absent)


class CommTimeout(RuntimeError):  # noqa: N818 - a time-out is what it is called
    """A wait inside a kernel took longer than the time-out; picklable, so that ranks can pass it on."""

    def __init__(self, record: ErrorRecord, origin: str, missing: tuple[int, ...], seconds: float) -> None:
        super().__init__(record, origin, missing, seconds)
        self.record = record
        self.origin = origin
        self.missing = missing
        self.seconds = seconds

    def __str__(self) -> str:
        record = self.record
        waited = (
            f"rank {record.rank} waited {self.seconds:g} s for rank {record.peer} at {self.origin}, "
            f"lane {record.lane}, round {record.round}: expected {record.expected}, seen {record.seen}"
        )
        if not self.missing:
            return f"{waited}; every rank had entered the call"
        ranks = ", ".join(str(rank) for rank in self.missing)
        return f"{waited}; {'rank' if len(self.missing) == 1 else 'ranks'} {ranks} never entered the call"


def timeout_of(plan: Plan, records: Iterable[ErrorRecord | None], seconds: float) -> CommTimeout | None:
    """The exception that tells most: of all ranks' records, one that waits for a rank which is missing itself."""
    found = sorted((record for record in records if record is not None), key=lambda record: record.rank)
    if not found:
        return None
    reporters = {record.rank for record in found}
    missing = tuple(sorted({rank for record in found for rank in record.missing} - reporters))
    direct = [record for record in found if record.peer in missing]
    record = (direct or found)[0]
    origin = plan.origins[int(plan.ops.origin[plan.ops.leaders[record.op]])]
    return CommTimeout(record, str(origin), missing, seconds)
