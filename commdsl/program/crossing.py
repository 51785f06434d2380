"""Turns rows that cross once per node into the memory in which they wait on the rank that sends them on.

Assumes a legal phase. Does not say what becomes of them (`phases`), nor where its memory begins.

There, a rank sends on what its likes of the other nodes send, the ranks of its own number there; back, what its node
has for each of these and for itself. Each has a segment of its own, in which every row of it has its place, whether it
comes or not: for all of them there is room, so none ever waits for room.
"""

from __future__ import annotations

from collections.abc import Sequence

from commdsl.language.records import dataclass
from commdsl.program.phases import Each, PushBack, Pushing
from commdsl.program.plan import Plan

NUMBER_BYTES = 4
"""Of a key, of a place, of a value; of what is told of a row on its way back."""

LINE = 256


@dataclass(frozen=True, slots=True)
class Crossing:
    """Memories one behind another; without any nothing crosses."""

    widths: tuple[int, ...]  # bytes of one row in each
    rows: int  # of a segment
    segments: int

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(map(self._size, self.widths))

    def _size(self, width: int) -> int:
        return -(-width * self.rows * self.segments // LINE) * LINE

    def arguments(self, begin: int) -> dict[str, int | Sequence[int]]:
        """What a kernel is told of it: where each memory begins, the first at `begin`, and how many rows a rank has."""
        found = [begin]
        for width in self.widths:
            found.append(found[-1] + self._size(width))
        return {"crossing": found[:-1], "crossing_rows": self.rows} if self.widths else {}


def crossing_of(push: Pushing, num_ranks: int, widths: Sequence[int], keys: int, rows: int) -> Crossing:
    """`widths`: bytes of a row of each tensor as it travels, scales too; `keys`: of a row; `rows`: of a rank."""
    if push.crossing is None:
        return Crossing((), 0, 0)
    nodes, told = num_ranks // push.node, (NUMBER_BYTES * keys,) * (push.num_crossing - len(widths))
    if isinstance(push, PushBack):
        return Crossing((*(width * min(keys, push.node) for width in widths), NUMBER_BYTES), rows, nodes)
    return Crossing((*widths, *told), rows, nodes - 1)


def waiting_a_row(back: Plan, keys: int) -> int:
    """On a way back, places that wait on a rank for each of its rows: one for each key, or rank or node that may have
    some of them.
    """
    push = back.push_back
    most = {Each.RANK: back.num_ranks, Each.NODE: back.num_ranks // (push.node or 1)}
    return min(most.get(push.each, keys), keys)
