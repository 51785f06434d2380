"""Turns what the yields of a schedule hand over, and a placement, into the calls of each visit on a rank; judges the
law that ties yields to the mask.

Assumes buffers of keys and values with blocks [2] or [2, K]: the halves of a rank's rows, each in K pieces of equally
many rows. A half that is shorter leaves rows empty, the front half its first ones and the back half its last, so that
the rows of a rank lie together. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from commdsl.attention.masks import Call, Mask, Rows, calls
from commdsl.attention.placement import Placement
from commdsl.runtime.errors import MaskError

HALVES = ("front", "back")
AT_ONCE = 1 << 22
"""So many pairs of runs are looked at in one pass."""


class Held(Protocol):
    """What one yield hands over, as `ir.held` has it: keys and values first."""

    @property
    def origin(self) -> tuple[NDArray[np.int32], ...]: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How a rank's rows lie in a buffer that travels."""

    placement: Placement
    pieces: int  # of a half

    @property
    def piece_rows(self) -> int:
        return -(-self.placement.half_rows // self.pieces)

    @property
    def rows(self) -> int:
        return 2 * self.pieces * self.piece_rows

    def first(self, rank: int) -> int:
        """The first row that is not empty; the rank's rows follow, front half and back half."""
        return self.pieces * self.piece_rows - sum(run.length for run in self.placement.runs[rank][0])

    def own(self, rank: int) -> Iterator[Rows]:
        """The runs of a rank, by their rows in such a buffer."""
        offset = self.first(rank)
        for run in (run for half in self.placement.runs[rank] for run in half):
            yield Rows(offset, run.document, run.begin, run.length)
            offset += run.length

    def chunks(self, rank: int) -> list[list[Rows]]:
        """The runs of each piece, the front half's first, by their rows in the piece."""
        found: list[list[Rows]] = [[] for _ in range(2 * self.pieces)]
        for one in self.own(rank):
            end = one.offset + one.length
            for chunk in range(one.offset // self.piece_rows, -(-end // self.piece_rows)):
                base = chunk * self.piece_rows
                first, last = max(one.offset, base), min(end, base + self.piece_rows)
                part = one.part(one.begin + first - one.offset, one.begin + last - one.offset)
                found[chunk].append(Rows(first - base, part.document, part.begin, part.length))
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Visits:
    """All visits of one rank: the calls of each, of local queries and rows of the visiting buffer; and the rows of the
    visitors that no call of the visit has. `home`: the rank's own rows in such a buffer.
    """

    layout: Layout
    home: slice
    calls: tuple[tuple[Call, ...], ...]
    unseen: tuple[tuple[slice, ...], ...]


def layout_of(name: str, held: Sequence[Held], placement: Placement) -> Layout:
    """Raises MaskError where the schedule's buffers are not halves of rows in pieces."""
    blocks = {origin.shape[1] for one in held for origin in one.origin[:2]}
    if not held or len(blocks) != 1 or max(blocks) % 2 or any(len(one.origin) < 2 for one in held):
        raise MaskError(f"`{name}` does not hand over keys and values as [2 blocks] or [2 blocks, K blocks]")
    if held[0].origin[0].shape[0] != placement.ranks:
        raise MaskError(f"`{name}` is of {held[0].origin[0].shape[0]} ranks, the placement of {placement.ranks}")
    return Layout(placement, max(blocks) // 2)


def visits(name: str, held: Sequence[Held], placement: Placement, mask: Mask, rank: int) -> Visits:
    """The visits of one rank, once the law is seen to hold for all ranks: raises MaskError."""
    layout = layout_of(name, held, placement)
    judge(name, held, layout, mask)
    first = layout.first(rank)
    queries = [replace(one, offset=one.offset - first) for one in layout.own(rank)]
    chunks = [layout.chunks(other) for other in range(placement.ranks)]
    made = []
    unseen = []
    for one in held:
        keys = list(_handed(layout, chunks, one.origin[0][rank]))
        made.append(calls(mask, queries, keys))
        unseen.append(tuple(_unseen(layout, one.origin[0][rank], made[-1])))
    return Visits(layout, slice(first, first + placement.rows(rank)), tuple(made), tuple(unseen))


def _handed(layout: Layout, chunks: list[list[list[Rows]]], origin: NDArray[np.int32]) -> Iterator[Rows]:
    for number, (rank, chunk) in enumerate(origin.tolist()):
        for one in chunks[rank][chunk] if rank >= 0 else ():
            yield Rows(number * layout.piece_rows + one.offset, one.document, one.begin, one.length)


def _unseen(layout: Layout, origin: NDArray[np.int32], made: Sequence[Call]) -> list[slice]:
    """Stretches of rows that visit and that no query sees; empty rows among them."""
    blank = np.repeat(origin[:, 0] >= 0, layout.piece_rows)
    for call in made:
        blank[call.keys[0] : call.keys[-1]] = False
    return stretches(blank)


def stretches(marked: NDArray[np.bool_]) -> list[slice]:
    """Where marks are, one after the other."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marked, [False])).astype(np.int8)))
    return [slice(first, end) for first, end in edges.reshape(-1, 2).tolist()]


# --- the law ----------------------------------------------------------------------------------------------------------


def judge(name: str, held: Sequence[Held], layout: Layout, mask: Mask) -> None:
    """Each pair of tokens that the mask admits meets in one visit: raises MaskError by the first piece that is not
    handed over once where one of its rows is seen.
    """
    ranks, chunks = layout.placement.ranks, 2 * layout.pieces
    times = np.zeros((ranks, ranks * chunks), np.int32)
    for one in held:
        origin = one.origin[0]
        if not np.array_equal(origin, one.origin[1]):
            raise MaskError(f"`{name}` hands over keys of one piece and values of another")
        rank, chunk = np.nonzero(origin[..., 0] >= 0)
        places = origin[rank, chunk]
        np.add.at(times, (rank, places[:, 0] * chunks + places[:, 1]), 1)
    seen = _seen(layout, mask)
    wrong = np.argwhere(seen & (times != 1))
    if len(wrong):
        rank, place = wrong[0].tolist()
        owner, chunk = divmod(place, chunks)
        half, piece = divmod(chunk, layout.pieces)
        which = f"piece {piece} of the {HALVES[half]} half" if layout.pieces > 1 else f"the {HALVES[half]} half"
        count = int(times[rank, place])
        found = "never" if count == 0 else f"{count} times"
        raise MaskError(
            f"`{name}` does not fit this mask on the placement `{layout.placement.name}`: on rank {rank} queries see "
            f"keys in {which} of rank {owner}, which visits it {found}, not once"
        )


def _seen(layout: Layout, mask: Mask) -> NDArray[np.bool_]:
    """(ranks, ranks * chunks): whether any query of a rank sees any row of a piece."""
    ranks, chunks = layout.placement.ranks, 2 * layout.pieces
    found = np.zeros((ranks, ranks * chunks), np.bool_)
    queries = _table((rank, one) for rank in range(ranks) for one in layout.own(rank))
    keys = _table(
        (rank * chunks + chunk, one)
        for rank in range(ranks)
        for chunk, rows in enumerate(layout.chunks(rank))
        for one in rows
    )
    for document in np.unique(queries[:, 1]).tolist():
        mine, theirs = queries[queries[:, 1] == document], keys[keys[:, 1] == document]
        step = max(1, AT_ONCE // len(mine))
        for first in range(0, len(theirs), step):
            part = theirs[first : first + step]
            meet = np.ones((len(mine), len(part)), np.bool_)
            if mask.left is not None:
                meet &= part[:, 3] - 1 - mine[:, 2, None] >= -mask.left
            if mask.right is not None:
                meet &= part[:, 2] - (mine[:, 3, None] - 1) <= mask.right
            row, column = np.nonzero(meet)
            found[mine[row, 0], part[column, 0]] = True
    return found


def _table(rows: Iterator[tuple[int, Rows]]) -> NDArray[np.int64]:
    """Where it is, document, begin and end of each run."""
    found = [(where, one.document, one.begin, one.end) for where, one in rows]
    return np.array(found, np.int64).reshape(-1, 4)
