"""Turns the ErrorRecords that kernels leave behind into one exception that names rank, step, peer and who is missing.

Assumes the record's layout in types.cuh. Does not decide what becomes of the heap: after a time-out it holds half a
call and has to be zeroed before the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from commdsl.machine.errors import Error
from commdsl.program.phases import Routed
from commdsl.program.plan import Plan

RECORD_BYTES = 64
_FORMAT = "<Q4i5Q"


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """What the first lane of a rank to give up wrote down."""

    code: int
    rank: int
    lane: int
    op: int  # which group of operations, or which phase; where rows are wrong, which run of the table
    peer: int
    expected: int
    seen: int
    round: int
    missing: tuple[int, ...]  # ranks that had not entered the round; ranks from 64 on are not looked at
    timeout_ns: int  # how long a wait of the call might take


def unpack(data: bytes | memoryview) -> ErrorRecord | None:
    """The record in 64 bytes, None where none was written."""
    code, rank, lane, op, peer, expected, seen, round_, missing, timeout_ns = struct.unpack(_FORMAT, data)
    if code == 0:
        return None
    absent = tuple(bit for bit in range(64) if missing >> bit & 1)
    return ErrorRecord(code, rank, lane, op, peer, expected, seen, round_, absent, timeout_ns)


class CommTimeout(Error, RuntimeError):  # noqa: N818 - a time-out is what it is called
    """A wait inside a kernel took longer than the time-out; picklable, so that ranks can pass it on."""

    def __init__(
        self, record: ErrorRecord, origin: str, missing: tuple[int, ...], seconds: float, awaited: str
    ) -> None:
        super().__init__(record, origin, missing, seconds, awaited)
        self.record = record
        self.origin = origin
        self.missing = missing
        self.seconds = seconds
        self.awaited = awaited

    def __str__(self) -> str:
        record = self.record
        waited = (
            f"rank {record.rank} waited {self.seconds:g} s for {self.awaited} at {self.origin}, "
            f"lane {record.lane}, round {record.round}: expected {record.expected}, seen {record.seen}"
        )
        if not self.missing:
            return f"{waited}; every rank had entered the call"
        ranks = ", ".join(str(rank) for rank in self.missing)
        return f"{waited}; {'rank' if len(self.missing) == 1 else 'ranks'} {ranks} never entered the call"


TIMED_OUT, BAD_TILE, BAD_COUNT, BAD_FINISH, BAD_TABLE, BAD_KEY, NO_ROOM, BAD_ORIGIN, BAD_MATE = range(1, 10)
DISAGREES, STOPPED, INTERRUPTED, GONE, BAD_LENGTH = range(10, 15)
"""`ErrorRecord.code`, as in types.cuh."""


def timeout_of(plan: Plan, records: Iterable[ErrorRecord | None], seconds: float) -> CommTimeout | None:
    """The exception that tells most: of all ranks' records, one that waits for a rank which is missing itself."""
    timed = (record for record in records if record is not None and record.code == TIMED_OUT)
    found = sorted(timed, key=lambda record: record.rank)
    if not found:
        return None
    reporters = {record.rank for record in found}
    absent = {rank for record in found for rank in record.missing if rank < plan.num_ranks}
    missing = tuple(sorted(absent - reporters))
    direct = [record for record in found if record.peer in missing]
    record = (direct or found)[0]
    own = plan.tiles is not None and record.peer == plan.num_ranks
    awaited = "its own tiles" if own else f"rank {record.peer}"
    return CommTimeout(record, origin_of(plan, record), missing, seconds, awaited)


def origin_of(plan: Plan, record: ErrorRecord) -> str:
    """The statement, or the phase, that a rank waits in."""
    if record.op < 0:
        return f"{plan.span}, where ranks tell each other of the call"
    if plan.is_static:
        ops = plan.moves.ops
        return str(plan.moves.origins[int(ops.origin[ops.leaders[record.op]])])
    phase = plan.comm.phases[record.op]
    assert isinstance(phase, Routed)
    return f"{plan.span}, {phase.description}"


def complaint(record: ErrorRecord, place: str = "") -> str:
    """What is wrong with a table, or with the rows that came, in words; `place`: where the run comes from."""
    if record.code == BAD_TILE:
        return (
            f"rank {record.rank} was to send rows up to {record.seen} to rank {record.peer}, which has room for "
            f"{record.expected}: run {record.op} of its table{place}"
        )
    if record.code == BAD_COUNT and record.op:
        return (
            f"rank {record.rank} expected {record.expected} bytes of rows across from rank {record.peer}, and "
            f"{record.seen} came"
        )
    if record.code == BAD_COUNT:
        return f"rank {record.rank} expected {record.expected} rows from rank {record.peer}, and {record.seen} came"
    if record.code == BAD_FINISH:
        return (
            f"rank {record.rank} was to finish rows up to {record.seen} of its own, and has room for "
            f"{record.expected}: finish {record.op} of its table"
        )
    if record.code == BAD_KEY:
        seen = record.seen - (record.seen >> 31 << 32)  # of 32 bits, with a sign
        return (
            f"key {record.peer} of row {record.op} of rank {record.rank} is {seen}, and keys are 0 ..< "
            f"{record.expected}, or {record.expected} for none"
        )
    if record.code == NO_ROOM and record.op:
        return f"{record.seen} rows came to rank {record.peer}, and {record.expected} of them are given to go back"
    if record.code == NO_ROOM:
        return f"{record.seen} rows go to rank {record.peer}, which has room for {record.expected}"
    if record.code == BAD_ORIGIN:
        return (
            f"row {record.op} of rank {record.rank} came from row place {record.seen} of rank {record.peer}, and there "
            f"are {record.expected} places"
        )
    if record.code == BAD_MATE:
        return (
            f"what rank {record.rank} received of row {record.op} of rank {record.peer} is to be added up with one "
            f"that is not among the {record.expected} that came"
        )
    part = "its words" if record.op else "its head"
    return (
        f"the table of rank {record.rank} is not what was made: {part} should give {record.expected}, and give "
        f"{record.seen}"
    )
