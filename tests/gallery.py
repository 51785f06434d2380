"""Turns a row of the gallery of shipped schedules into what a case of it costs: steps, and loads of the busiest port
and pair, in blocks.

Assumes formulas in the names that `schedules/README.md` states. Does not know the report that is held against them.
"""

from __future__ import annotations

import math
import re

from collectives import SCHEDULES, Case

ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
GALLERY = {
    match[1]: match.groups()[1:] for match in ROW.finditer((SCHEDULES / "README.md").read_text(encoding="utf-8"))
}


def costs(case: Case) -> tuple[float, float, float]:
    """Steps, blocks that the busiest port sends, blocks that the busiest pair carries."""
    known = {"P": case.ranks, "K": 8, **dict(case.params), "ceil": math.ceil, "log2": math.log2, "max": max}
    steps, port, pair = (eval(formula, {"__builtins__": {}}, known) for formula in GALLERY[case.name])
    return steps, port, pair
