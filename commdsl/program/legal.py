"""What a law on a Plan comes to: it holds, or InternalError says which one does not, and where.

Assumes nothing. Does not state laws: `verify` and its parts do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.language.diagnostics import InternalError

Mask = NDArray[np.bool_]


def law(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise InternalError(f"the Plan is not legal: {message}")


def each(legal: Mask, what: str, law: str) -> None:
    """All rows are legal, or the message names the first that is not."""
    if not legal.all():
        row = int(np.argmin(legal))
        raise InternalError(f"the Plan is not legal: {what} {row} of {len(legal)}: {law}")


def within(values: Ints, stop: int, what: str, law: str, start: int = 0) -> None:
    """Range test by extremes first, which needs no temporary on big tables."""
    if len(values) and (int(values.min()) < start or int(values.max()) >= stop):
        each((values >= start) & (values < stop), what, f"{law} within {start} ..< {stop}")
