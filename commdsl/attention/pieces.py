"""Turns what the yields of a schedule hand over, and a placement, into the calls of each visit on a rank; judges the
law that ties yields to the mask.

Assumes one of two forms. *Halves*: keys and values with blocks [2] or [2, K], the halves of a rank's rows, each in K
pieces of equally many rows; queries stay at home. *Heads*: queries, keys and values with blocks [U], the heads of the
ranks of a group, all rows of a rank each. A half that is shorter than the longest leaves rows empty, the front half its
first ones and the back half its last, so that the rows of a rank lie together. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
    """What one yield hands over, as `ir.held` has it: keys and values first, of heads behind queries."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def origin(self) -> tuple[NDArray[np.int32], ...]: ...


@dataclass(frozen=True, eq=False, slots=True)
class Shown:
    """A Held with origins of one's own."""

    reads: tuple[str, ...]
    origin: tuple[NDArray[np.int32], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of ranks lie in buffers that travel: in chunks of `rows` rows."""

    placement: Placement
    chunks: int
    rows: int
    by_heads: bool

    @property
    def all_rows(self) -> int:
        """Of a buffer."""
        return self.chunks * self.rows

    @property
    def keys(self) -> int:
        """Which of the tensors that a yield hands over is the keys."""
        return 1 if self.by_heads else 0

    def first(self, rank: int) -> int:
        """The first row of a rank that is not empty, in its own buffer, or of heads in each block."""
        half = self.rows // 2 if self.by_heads else self.all_rows // 2
        return half - sum(run.length for run in self.placement.runs[rank][0])

    def own(self, rank: int) -> Iterator[Rows]:
        """The runs of a rank, by their rows there."""
        offset = self.first(rank)
        for run in (run for half in self.placement.runs[rank] for run in half):
            yield Rows(offset, run.document, run.begin, run.length)
            offset += run.length

    def pieces(self, rank: int) -> list[list[Rows]]:
        """The runs of each chunk, by their rows in it."""
        if self.by_heads:
            return [list(self.own(rank))] * self.chunks
        found: list[list[Rows]] = [[] for _ in range(self.chunks)]
        for one in self.own(rank):
            end = one.offset + one.length
            for chunk in range(one.offset // self.rows, -(-end // self.rows)):
                base = chunk * self.rows
                part = one.part(
                    one.begin + max(base - one.offset, 0), one.begin + min(end, base + self.rows) - one.offset
                )
                found[chunk].append(replace(part, offset=part.offset - base))
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Visits:
    """All visits of one rank: the calls of each, of rows of queries and rows of the visiting buffer; and of each the
    rows of that buffer that visit, empty ones among them.
    """

    layout: Layout
    home: slice  # the rank's own rows in such a buffer, or of heads in each block
    query_rows: int
    calls: tuple[tuple[Call, ...], ...]
    fresh: tuple[tuple[slice, ...], ...]


def layout_of(name: str, held: Sequence[Held], placement: Placement, by_heads: bool) -> Layout:
    """Raises MaskError where the schedule's buffers have neither form, or it is of other ranks."""
    tensors = 3 if by_heads else 2
    blocks = {origin.shape[1] for one in held for origin in one.origin[:tensors]}
    few = any(len(one.origin) < tensors for one in held)
    if not held or few or len(blocks) != 1 or (max(blocks) % 2 and not by_heads):
        raise MaskError(f"`{name}` does not hand over keys and values as [2 blocks] or [2 blocks, K blocks]")
    if held[0].origin[0].shape[0] != placement.ranks:
        raise MaskError(f"`{name}` is of {held[0].origin[0].shape[0]} ranks, the placement of {placement.ranks}")
    chunks = max(blocks)
    rows = 2 * placement.half_rows if by_heads else -(-placement.half_rows // (chunks // 2))
    return Layout(placement, chunks, rows, by_heads)


def visits(name: str, held: Sequence[Held], placement: Placement, mask: Mask, rank: int, by_heads: bool) -> Visits:
    """The visits of one rank, once the law is seen to hold for all ranks: raises MaskError."""
    layout = layout_of(name, held, placement, by_heads)
    judge(name, held, layout, mask)
    queries = _queries(layout, held, rank)
    pieces: dict[int, list[list[Rows]]] = {}
    made = []
    fresh = []
    for one in held:
        origin = one.origin[layout.keys][rank]
        made.append(calls(mask, queries, _handed(layout, pieces, origin)))
        fresh.append(tuple(stretches(np.repeat(origin[:, 0] >= 0, layout.rows))))
    first, rows = layout.first(rank), placement.rows(rank)
    return Visits(layout, slice(first, first + rows), layout.all_rows if by_heads else rows, tuple(made), tuple(fresh))


def _queries(layout: Layout, held: Sequence[Held], rank: int) -> list[Rows]:
    """The runs of a rank's queries: its own, counted from the first; of heads those of the group, as they arrived."""
    if layout.by_heads:
        return list(_handed(layout, {}, held[0].origin[0][rank]))
    first = layout.first(rank)
    return [replace(one, offset=one.offset - first) for one in layout.own(rank)]


def _handed(layout: Layout, pieces: dict[int, list[list[Rows]]], origin: NDArray[np.int32]) -> Iterator[Rows]:
    """The runs of what is in a buffer. `pieces`: of ranks that were asked for before."""
    for number, (rank, chunk) in enumerate(origin.tolist()):
        if rank >= 0:
            if rank not in pieces:
                pieces[rank] = layout.pieces(rank)
            for one in pieces[rank][chunk]:
                yield replace(one, offset=number * layout.rows + one.offset)


def as_kept(held: Sequence[Held], kept: Sequence[str]) -> list[Held]:
    """The table of a way back that is given what visits of the way forth had, in buffers of these names: chunk c of
    rank r is there what rank c of its group gave for the heads of rank r.
    """
    found: list[Held] = []
    for one in held:
        origins = []
        for name, origin in zip(one.reads, one.origin, strict=True):
            blocks = origin.shape[1]
            rank, chunk = origin[..., 0], origin[..., 1]
            moved = np.stack((rank // blocks * blocks + chunk, rank % blocks), axis=-1)
            origins.append(np.where(origin < 0, origin, moved) if name in kept else origin)
        found.append(Shown(one.reads, tuple(origins)))
    return found


def stretches(marked: NDArray[np.bool_]) -> list[slice]:
    """Where marks are, one after the other."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marked, [False])).astype(np.int8)))
    return [slice(first, end) for first, end in edges.reshape(-1, 2).tolist()]


# --- the law ----------------------------------------------------------------------------------------------------------


def judge(name: str, held: Sequence[Held], layout: Layout, mask: Mask) -> None:
    """Each pair of tokens that the mask admits meets in one visit: raises MaskError by the first piece that is not
    handed over once where one of its rows is seen.
    """
    ranks, chunks = layout.placement.ranks, layout.chunks
    times = np.zeros((ranks, ranks * chunks), np.int32)
    for one in held:
        origin = one.origin[layout.keys]
        if not np.array_equal(origin, one.origin[layout.keys + 1]):
            raise MaskError(f"`{name}` hands over keys of one piece and values of another")
        rank, chunk = np.nonzero(origin[..., 0] >= 0)
        places = origin[rank, chunk]
        np.add.at(times, (rank, places[:, 0] * chunks + places[:, 1]), 1)
    seen = _seen(layout, held, mask)
    if layout.by_heads:
        _judge_heads(name, held[0].origin[0], layout)
        seen &= np.arange(ranks * chunks) % chunks == held[0].origin[0][:, :1, 1]
    wrong = np.argwhere(seen & (times != 1))
    if len(wrong):
        rank, place = wrong[0].tolist()
        count = int(times[rank, place])
        found = "never" if count == 0 else f"{count} times"
        raise MaskError(
            f"`{name}` does not fit this mask on the placement `{layout.placement.name}`: on rank {rank} queries see "
            f"keys in {_which(layout, place)}, which visits it {found}, not once"
        )


def _which(layout: Layout, place: int) -> str:
    owner, chunk = divmod(place, layout.chunks)
    if layout.by_heads:
        return f"block {chunk} of the heads of rank {owner}"
    half, piece = divmod(chunk, layout.chunks // 2)
    words = f"the {HALVES[half]} half of rank {owner}"
    return f"piece {piece} of {words}" if layout.chunks > 2 else words


def _judge_heads(name: str, origin: NDArray[np.int32], layout: Layout) -> None:
    """Each block of queries goes to one rank, and a rank has those of one block of heads."""
    one_block = bool((origin[..., 1] == origin[:, :1, 1]).all())
    places = np.sort(origin[..., 0].astype(np.int64) * layout.chunks + origin[..., 1], axis=None)
    if not one_block or not np.array_equal(places, np.arange(len(places))):
        raise MaskError(f"`{name}` does not hand over the queries of each rank's heads once, those of one rank's heads")


def _seen(layout: Layout, held: Sequence[Held], mask: Mask) -> NDArray[np.bool_]:
    """(ranks, ranks * chunks): whether any query of a rank sees any row of a chunk."""
    ranks, chunks = layout.placement.ranks, layout.chunks
    found = np.zeros((ranks, ranks * chunks), np.bool_)
    queries = _by_document((rank, one) for rank in range(ranks) for one in _queries(layout, held, rank))
    keys = _by_document(
        (rank * chunks + chunk, one)
        for rank in range(ranks)
        for chunk, rows in enumerate(layout.pieces(rank))
        for one in rows
    )
    for document, mine in queries.items():
        theirs = keys[document]
        step = max(1, AT_ONCE // len(mine))
        for first in range(0, len(theirs), step):
            part = theirs[first : first + step]
            meet = np.ones((len(mine), len(part)), np.bool_)
            if mask.left is not None:
                meet &= part[:, 2] - 1 - mine[:, 1, None] >= -mask.left
            if mask.right is not None:
                meet &= part[:, 1] - (mine[:, 2, None] - 1) <= mask.right
            row, column = np.nonzero(meet)
            found[mine[row, 0], part[column, 0]] = True
    return found


def _by_document(rows: Iterator[tuple[int, Rows]]) -> dict[int, NDArray[np.int64]]:
    """Of each document where its runs are, their begins and ends."""
    table = np.array([(one.document, where, one.begin, one.end) for where, one in rows], np.int64).reshape(-1, 4)
    table = table[np.argsort(table[:, 0], kind="stable")]
    names, counts = np.unique(table[:, 0], return_counts=True)
    ends = list(accumulate(counts.tolist()))
    return {name: table[end - count : end, 1:] for name, count, end in zip(names.tolist(), counts, ends, strict=True)}
