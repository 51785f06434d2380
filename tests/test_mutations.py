"""No mutant of a shipped schedule slips through: it is refused, or it is proved and still does what is promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from collectives import Case, main_case, make_inputs, mismatch, shipped
from mutants import Mutant, mutants
from proved import HOST_PROTOCOLS, given, result_name

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.emit import emit
from commdsl.compiler import Checked
from commdsl.ir import interpret
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.carriers import Carrier
from commdsl.machine.dtypes import INT64

ELEMENTS = 2 * 120  # two 16-byte units for every chunk of the finest cut
"""Enough for every chunk to hold something: an empty chunk would hide a fault."""


def ranks_for(path: Path) -> int:
    """The fewest ranks on which every loop of the schedule runs more than once."""
    return {"hamilton": 5, "level": 6}.get(path.stem.split("_")[-1], 4)


def judged(case: Case, checked: Checked) -> str:
    """What is wrong with the results of a mutant that was proved, or nothing."""
    schedule, plan = checked.schedule, checked.plan
    inputs = make_inputs(case.ranks, given(schedule).blocks * ELEMENTS)
    result = interpret.run(schedule, {given(schedule).name: inputs}, INT64, "sum")
    ran = host_run.run(plan, emit(plan), {given(schedule).name: inputs}, INT64, calls=2)
    steps = [np.split(stacked, schedule.num_yields) for stacked in ran.yields]
    for outputs, yields in ((result.outputs, result.yields), (ran.outputs, list(zip(*steps, strict=True)))):
        held = outputs.get(result_name(schedule), [])
        fault = mismatch(case.collective, inputs, held, yields, ELEMENTS, dict(case.params))
        if fault:
            return fault
    return ""


def proved(case: Case, mutant: Mutant, protocol: Carrier) -> Checked | None:
    """The mutant as the compiler sees it, or None when it is refused."""
    try:
        files = compiler.read_text(mutant.text, "mutant.comm", case.path.parent)
        return compiler.check(files, ranks=case.ranks, params=dict(case.params), tune={"protocol": protocol.name})
    except CommError:
        return None


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_mutants(path: Path, tally: Callable[[str, Counter[str]], None]) -> None:
    """Every mutant is refused, or oracle and kernel still give the collective's result; the protocols take turns."""
    case = main_case(path, ranks_for(path))
    assert case is not None
    (declared,) = compiler.declared(compiler.read(path), ScheduleDecl)
    counts: Counter[str] = Counter()
    for mutant, protocol in zip(mutants(declared), cycle(HOST_PROTOCOLS), strict=False):
        checked = proved(case, mutant, protocol)
        counts["refused" if checked is None else "equivalent"] += 1
        if checked is not None:
            where = f"{path.name}:{mutant.line} {mutant.kind} `{mutant.what}`"
            print(f"proved: {where}")
            assert not judged(case, checked), f"slipped through: {where}"
    print(f"{case}: {counts['refused']} refused, {counts['equivalent']} equivalent")
    tally("mutants", counts)
    assert counts["refused"] > counts["equivalent"]
