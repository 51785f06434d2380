"""Turns a case into its proved schedule and Plan, once for all tests that need them.

Assumes nobody changes what is handed out. Does not hide a refusal: CommError comes through every time.
"""

from __future__ import annotations

from functools import cache

from collectives import Case

from commdsl import compiler
from commdsl.compiler import Checked
from commdsl.ir.schedules import Buffer, Schedule
from commdsl.language.kinds import BufferKind
from commdsl.machine.carriers import BULK, LINE, PACKET, Carrier

HOST_PROTOCOLS = (BULK, PACKET, LINE)
"""Those with kernels of their own on the host, where `tma` and `engine` are `bulk`."""


@cache
def proved(case: Case, protocol: Carrier = BULK) -> Checked:
    tune = {"protocol": protocol.name}
    return compiler.check(case.path, ranks=case.ranks, params=dict(case.params), tune=tune)


def given(schedule: Schedule) -> Buffer:
    """The one buffer that the caller fills."""
    (found,) = (b for b in schedule.buffers if b.kind in (BufferKind.INPUT, BufferKind.INOUT))
    return found


def result_name(schedule: Schedule) -> str:
    return next((b.name for b in schedule.buffers if b.kind is BufferKind.OUTPUT), given(schedule).name)
