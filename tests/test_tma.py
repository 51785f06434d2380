"""The protocol `tma`: a Plan as `bulk` has it, kernels that NVRTC takes, shared memory that fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plans
import pytest
from collectives import shipped
from plans import changed

from commdsl import compiler
from commdsl.build import nvrtc
from commdsl.build.emit import defines, emit
from commdsl.machine.carriers import BULK, TMA
from commdsl.machine.config import from_environment
from commdsl.program.memory import Transport
from commdsl.program.moves import BLOCK_SHARED_BYTES, MOST_STAGE_BYTES, Ops
from commdsl.program.plan import Plan
from commdsl.program.verify import MOST_BARRIERS, verify

TUNE = {"protocol": "tma", "sms": 16, "lanes": 32, "threads": 256}
SCHEDULES = [path for path in shipped() if path.stem in ("allgather_direct", "allreduce_ring", "allreduce_twoshot")]


def plan_of(path: Path, **tune: int | str) -> Plan:
    return compiler.compile(path, ranks=4, tune=tune).plan


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_the_plan_is_that_of_bulk(path: Path) -> None:
    """Every table, every cell and every flag are those of `bulk`."""
    tma, bulk = plan_of(path, **TUNE), plan_of(path, **{**TUNE, "protocol": "bulk"})
    for field in Ops.__dataclass_fields__:
        assert np.array_equal(getattr(tma.moves.ops, field), getattr(bulk.moves.ops, field)), field
    assert (tma.symmetric_bytes, tma.moves.alias_safe) == (bulk.symmetric_bytes, bulk.moves.alias_safe)
    assert (tma.moves.shared_bytes > 0, bulk.moves.shared_bytes) == (True, 0)


@pytest.mark.parametrize("lanes", range(1, MOST_BARRIERS))
def test_stages_fit(lanes: int) -> None:
    """However many lanes share a block, its shared memory holds the stages of all, each in whole lines."""
    made = plans.build(*plans.ring_allgather(2, 2, False)[:3], rotation=2)
    made = changed(made, carrier=TMA, lanes=lanes, sms=1, threads=32)
    verify(made)
    assert 0 < made.moves.shared_bytes <= BLOCK_SHARED_BYTES
    assert 1024 <= made.moves.stage_bytes <= MOST_STAGE_BYTES
    assert made.moves.stage_bytes % 128 == 0


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("sms", [16, 32])
@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_cubin(path: Path, sms: int, rank: int | None) -> None:
    """NVRTC takes the text, with lanes that share a block and without, for all ranks and for one."""
    compiled = compiler.compile(path, ranks=4, tune={**TUNE, "sms": sms})
    macros = defines(compiled.plan, "bfloat16", "sum", rank)
    cubin = nvrtc.build(compiled.emitted, macros, from_environment()).read_bytes()
    assert cubin.startswith(b"\x7fELF")


def test_nvshmem_moves_tiles_itself() -> None:
    """A schedule tuned to `tma` is `bulk` where NVSHMEM moves the data."""
    compiled = compiler.compile(SCHEDULES[0], ranks=4, transport=Transport.NVSHMEM, tune=TUNE)
    assert compiled.plan.moves.carrier == BULK
    assert emit(compiled.plan).digest == compiled.emitted.digest
