"""The gallery of shipped schedules says what they cost."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from collectives import MAX_RANKS, SCHEDULES, cases, shipped
from proved import proved

ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
GALLERY = {
    match[1]: match.groups()[1:] for match in ROW.finditer((SCHEDULES / "README.md").read_text(encoding="utf-8"))
}


def test_the_gallery_lists_every_schedule() -> None:
    """Every shipped schedule has a row, and every row a schedule."""
    assert set(GALLERY) == {path.stem for path in shipped()}


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_costs(path: Path) -> None:
    """Steps and the loads of the busiest port and pair are what the formulas say, for every admitted rank count."""
    for ranks in range(2, MAX_RANKS + 1):
        for case in cases(path, ranks):
            report = proved(case).report
            known = {"P": ranks, "K": 8, **dict(case.params), "ceil": math.ceil, "log2": math.log2, "max": max}
            steps, port, pair = (eval(formula, {"__builtins__": {}}, known) for formula in GALLERY[path.stem])
            assert len(report.steps) == steps, case
            assert report.busiest_port is not None, case
            assert report.busiest_pair is not None, case
            assert report.busiest_port.blocks == pytest.approx(port), case
            assert report.busiest_pair.blocks == pytest.approx(pair), case
