"""ThreadSanitizer on the emitted kernel: silent on Plans that are right, loud on Plans that lack a wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plans
import pytest
from plans import changed
from test_host_build import BYTES, Options, element, random_bytes, run, small

from commdsl import checks, compiler
from commdsl.build import host_run
from commdsl.language.diagnostics import Severity
from commdsl.machine.resources import data_dir
from commdsl.program.plan import Plan


def without_wait(plan: Plan, wait: int) -> Plan:
    """The Plan without one row of its table of waits."""
    ops = plan.moves.ops
    kept = np.arange(len(ops.wait_peer)) != wait
    columns = {
        name: getattr(ops, name)[kept] for name in ("wait_peer", "wait_ordinal", "wait_rounds_back", "wait_reason")
    }
    begin = ops.wait_begin - (ops.wait_begin > wait)
    return changed(plan, ops=replace(ops, wait_begin=begin.astype(np.int32), **columns))


@pytest.mark.parametrize("family", sorted(plans.FAMILIES))
@pytest.mark.parametrize("ranks", [2, 3])
def test_right_plans_are_silent(family: str, ranks: int) -> None:
    """Three calls of several rounds on two lanes, ranks starting late: no report."""
    plan = small(plans.build(*plans.FAMILIES[family](ranks, 1, True)[:3], rotation=1))
    blocks = plan.moves.tensors[0].blocks
    calls = [random_bytes(ranks, blocks * 2600, seed) for seed in range(3)]
    calls = [[array.view(np.int32) for array in arrays] for arrays in calls]
    run(plan, calls, element("int32"), "sum", Options(sanitize=True, max_delay=0.003))


def test_every_missing_wait_is_caught() -> None:
    """Without any one of its waits a pull all-reduce races, and in every run: what a late poll sees does not count."""
    plan = small(plans.build(*plans.pull_allreduce(2, 1, True)[:3], rotation=1))
    calls = [[array.view(np.int32) for array in random_bytes(2, 2600, seed)] for seed in range(3)]
    for wait in range(len(plan.moves.ops.wait_peer)):
        with pytest.raises(host_run.DataRaceError):
            run(without_wait(plan, wait), calls, element("int32"), "sum", Options(sanitize=True, timeout=5))


def test_shipped_schedule_without_a_wait() -> None:
    """The ring all-reduce without one of its waits is refused by the proof, and races when it is run all the same."""
    path = data_dir("schedules") / "collectives" / "allreduce_ring.comm"
    proved = compiler.check(path, ranks=3)
    plan = small(proved.plan)
    calls = [[array.view(np.int32) for array in random_bytes(3, 3000, seed)] for seed in range(3)]
    for wait in range(int(plan.moves.ops.wait_begin[plan.moves.ops.rank_begin[1]])):
        broken = without_wait(plan, wait)
        assert any(found.severity is Severity.ERROR for found in checks.check_plan(proved.schedule, broken))
        with pytest.raises(host_run.DataRaceError):
            run(broken, calls, element("int32"), "sum", Options(sanitize=True, timeout=5))


def test_a_report_names_the_accesses() -> None:
    """The exception carries ThreadSanitizer's own words."""
    plan = changed(small(plans.build(*plans.direct_alltoall(2, 1, False)[:3], rotation=1)), has_reduction=False)
    broken = without_wait(plan, 0)
    with pytest.raises(host_run.DataRaceError, match=r"data race(.|\n)*run_body"):
        run(broken, [random_bytes(2, 2600, 1)], BYTES, "sum", Options(sanitize=True))


def test_only_threads_can_be_sanitized() -> None:
    """ThreadSanitizer cannot see across processes, so the combination is refused."""
    plan = changed(small(plans.build(*plans.direct_alltoall(2, 1, False)[:3], rotation=1)), has_reduction=False)
    with pytest.raises(ValueError, match="one process"):
        run(plan, [random_bytes(2, 16, 1)], BYTES, "sum", Options(sanitize=True, mode="processes"))
