"""No mutant of a schedule of attention slips through: it is refused, or every rank is handed what it needs, once, and
what is found about a piece comes home to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from attention_cases import FOLDER, Case, cases
from attention_oracle import mismatch
from mutants import mutants

from commdsl import compiler
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import ScheduleDecl

FORWARDS = ("attention_ring_backward", "attention_double_ring_backward")
"""Keys that are forwarded go all the way around."""


NAMES = sorted(path.stem for path in FOLDER.glob("attention_*.comm"))


@cache
def forms() -> dict[str, Case]:
    """Of each schedule, there or back, a case on the fewest ranks on which its loops turn more than once."""
    found: dict[str, Case] = {}
    for ranks in (4, 5, 6, 2):
        for case in {case.name: case for case in cases(ranks)}.values():
            found.setdefault(case.path.stem, case)
            forwards = case.back.stem in FORWARDS
            params = tuple(one for one in case.params if not (forwards and one[0] == "causal"))
            found.setdefault(case.back.stem, replace(case, params=params))
    return found


def judged(case: Case, text: str) -> str | None:
    """What is wrong with what was proved; None where it is refused."""
    try:
        files = compiler.read_text(text, "mutant.comm", FOLDER)
        checked = compiler.check(files, ranks=case.ranks, params=case.of)
    except CommError:
        return None
    assert isinstance(checked, compiler.CheckedSchedule)
    return mismatch(case, checked.schedule) if checked.schedule.rotations else ""


@pytest.mark.parametrize("name", NAMES)
def test_as_shipped(name: str) -> None:
    """The oracle finds the shipped ones right."""
    assert judged(forms()[name], (FOLDER / f"{name}.comm").read_text(encoding="utf-8")) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_mutants(name: str, tally: Callable[[str, Counter[str]], None]) -> None:
    """Moves dropped, doubled or changed, and yields whose buffers stand in another order."""
    (declared,) = compiler.declared(compiler.read(FOLDER / f"{name}.comm"), ScheduleDecl)
    counts: Counter[str] = Counter()
    for mutant in mutants(declared):
        fault = judged(forms()[name], mutant.text)
        assert not fault, f"slipped through: {name}:{mutant.line} {mutant.kind} `{mutant.what}`: {fault}"
        counts["refused" if fault is None else "equivalent"] += 1
    tally("mutants of attention", counts)
    assert counts["refused"] > counts["equivalent"]
