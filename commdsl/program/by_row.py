"""The phase `ByRow`: a row-wise function that each lane applies to the rows it has moved, behind its moves.

Assumes nothing of the schedule. Does not wait for anybody: what a lane reads it has made itself, or the caller gave it.

A lane owns the same slice of every whole block, and all of its rounds are over when it comes here. In a launch of such
a Plan slices begin and end between rows (`program.sizes`), so a lane has all of a row that it has a part of. Or rows
are so few that each is cut into equal parts for lanes of one cluster of blocks, which tell each other what a row takes.
"""

from __future__ import annotations

from commdsl.ir.functions import ROWWISE, Extent
from commdsl.language.records import dataclass
from commdsl.program.moves import Origin


@dataclass(frozen=True, slots=True)
class ByRow:
    """Tensors are those of the `Moves` of the same role, by number."""

    function: str  # a name in `ir.functions.ROWWISE`
    rows: int  # what the moves leave: memory of one call, that no caller sees
    given: tuple[int, ...]
    results: tuple[int, ...]
    origin: Origin

    @property
    def row(self) -> int:
        """The tensor that is as long as a row."""
        return self.given[ROWWISE[self.function].row]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The tensors that are one number each."""
        extents = zip(self.given, ROWWISE[self.function].given, strict=True)
        return tuple(tensor for tensor, extent in extents if extent is Extent.NUMBER)
