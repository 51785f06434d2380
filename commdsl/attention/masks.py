"""Turns a mask and the tokens that rows hold into calls of an attention kernel: rectangles of queries and keys.

Assumes that no token is in two of the queries' rows, nor in two of the keys' rows. The calls are disjoint, and together
they are the mask: a pair is in one of them where the mask admits it, and in none where it does not. Does not know which
kernels there are: some do not take every call (`kernels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Longs: TypeAlias = NDArray[np.int64]

MAX_GAP = 256
"""So many rows may lie between sequences of a call: they cost time."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: those of its own document, at most `left` tokens before it and `right` after it.

    None: any number. `Mask()` is full, `Mask(right=0)` causal, `Mask(left=W - 1, right=0)` a window of W tokens.
    """

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `offset ..< offset + length` of a tensor: as many tokens of a document, from position `begin` on."""

    offset: int
    document: int
    begin: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.length

    def part(self, first: int, end: int) -> Rows:
        """The rows of positions `first ..< end`."""
        return Rows(self.offset + first - self.begin, self.document, first, end - first)


@dataclass(frozen=True, slots=True)
class Call:
    """Sequences of queries, each beside a sequence of keys: the rows between one cut and the next, of both tensors.
    Either may be empty; queries beside no keys are zeros, with a log-sum-exp of -inf.

    Of a sequence of m queries and n keys, query i sees the keys j with -left <= j - i - (n - m) <= right: the last
    query's own key is the last one, as flash attention counts windows. None: no bound.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    left: int | None
    right: int | None

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """Whether it is a lower triangle, of as many keys as queries: what every kernel calls causal."""
        pairs = zip(_lengths(self.queries), _lengths(self.keys), strict=True)
        square = all(m == n for m, n in pairs if m and n)
        return self.left is None and self.right == 0 and square

    @property
    def is_packed(self) -> bool:
        """Whether it has several sequences."""
        return len(self.queries) > 2

    @property
    def has_gaps(self) -> bool:
        """Whether it has queries beside no keys."""
        return 0 in _lengths(self.keys)

    def admits(self) -> Iterator[tuple[int, int, int, int, int | None, int | None]]:
        """Each sequence that is not empty: its queries, its keys, and the least and the most that j - i may be, of rows
        counted from its first ones.
        """
        for (first, end), (key, key_end) in zip(pairwise(self.queries), pairwise(self.keys), strict=True):
            if first == end or key == key_end:
                continue
            shift = (key_end - key) - (end - first)
            low = None if self.left is None else shift - self.left
            high = None if self.right is None else shift + self.right
            yield first, end, key, key_end, low, high


def calls(mask: Mask, queries: Iterable[Rows], keys: Iterable[Rows]) -> tuple[Call, ...]:
    """Calls that are the mask exactly, by their first query. Those of several documents with like bounds are one, where
    their rows follow each other.
    """
    by_document: dict[int, tuple[list[Rows], list[Rows]]] = {}
    for at, rows in enumerate((queries, keys)):
        for one in joined(rows):
            by_document.setdefault(one.document, ([], []))[at].append(one)
    found = [call for pair in by_document.values() for call in _document(mask, *pair)]
    return tuple(sorted(_packed(found), key=lambda call: (call.queries, call.keys)))


def joined(rows: Iterable[Rows]) -> list[Rows]:
    """The same rows by offset, as few runs as there can be; none of them empty."""
    found: list[Rows] = []
    for one in sorted((one for one in rows if one.length), key=lambda one: one.offset):
        last = found[-1] if found else None
        if last and (last.offset + last.length, last.document, last.end) == (one.offset, one.document, one.begin):
            found[-1] = replace(last, length=last.length + one.length)
        else:
            found.append(one)
    return found


def meet(mask: Mask, queries: Rows, keys: Rows) -> bool:
    """Whether the mask admits any pair of these rows."""
    low, high = keys.begin - (queries.end - 1), keys.end - 1 - queries.begin
    same = queries.document == keys.document and queries.length > 0 and keys.length > 0
    return same and not _is_outside(mask, low, high)


def pairs(mask: Mask, query: Longs, queries: Longs, key: Longs, keys: Longs) -> Longs:
    """How many pairs of these runs, by first position and length, the mask admits: of each query the keys up to `right`
    behind it, less those before `left` ahead of it.
    """
    whole = queries * keys
    ahead = whole if mask.right is None else _below(query + mask.right + 1 - key, queries, keys)
    behind = 0 * whole if mask.left is None else _below(query - mask.left - key, queries, keys)
    return np.maximum(ahead - behind, 0)


def _below(first: Longs, count: Longs, most: Longs) -> Longs:
    """The sum of x clipped to 0 .. most, over `count` numbers x from `first` on."""
    return _sum(first + count, most) - _sum(first, most)


def _sum(end: Longs, most: Longs) -> Longs:
    """As `_below`, from 0 to below `end`."""
    rising = np.clip(end, 0, most + 1)
    total: Longs = rising * (rising - 1) // 2 + np.maximum(end - most - 1, 0) * most
    return total


def _is_outside(mask: Mask, low: int, high: int) -> bool:
    """Whether no distance of `low .. high` is admitted."""
    return (mask.left is not None and high < -mask.left) or (mask.right is not None and low > mask.right)


def _document(mask: Mask, queries: list[Rows], keys: list[Rows]) -> Iterator[Call]:
    """Of one document: bands by themselves, triangles along the diagonal, then rectangles, the largest first."""
    if mask.left is None and mask.right is not None:  # cut like the keys, so that what is left of a run is a square
        queries = _cut(queries, keys, -mask.right)
        keys = _cut(keys, queries, mask.right)
    cells = {
        (i, j): call
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if (call := _cell(mask, query, key)) is not None
    }
    for i, j in [*cells]:
        whole = (cells[i, j].queries, cells[i, j].keys) == (_span(queries, i, 1), _span(keys, j, 1))
        if not whole or not (cells[i, j].is_full or cells[i, j].is_causal):
            yield cells.pop((i, j))
    for i, j in [place for place, call in cells.items() if call.is_causal]:
        if (i, j) in cells:
            yield _triangle(cells, queries, keys, i, j)
    while cells:
        yield _rectangle(cells, queries, keys)


def _cut(rows: list[Rows], like: list[Rows], shift: int) -> list[Rows]:
    """The rows, cut where the others, moved on by so many tokens, begin and end."""
    cuts = sorted({edge + shift for one in like for edge in (one.begin, one.end)})
    found = []
    for one in rows:
        edges = [one.begin, *(cut for cut in cuts if one.begin < cut < one.end), one.end]
        found += [one.part(first, end) for first, end in pairwise(edges)]
    return found


def _cell(mask: Mask, query: Rows, key: Rows) -> Call | None:
    """What the mask admits of these rows: as few queries and keys as there can be, bounds only where they bound."""
    if not meet(mask, query, key):
        return None
    first, end, key_first, key_end = query.begin, query.end, key.begin, key.end
    if mask.right is not None:
        first, key_end = max(first, key_first - mask.right), min(key_end, end + mask.right)
    if mask.left is not None:
        end, key_first = min(end, key_end + mask.left), max(key_first, first - mask.left)
    query, key = query.part(first, end), key.part(key_first, key_end)
    shift = key.end - query.end  # of the last key from the last query
    left = None if mask.left is None else mask.left + shift
    right = None if mask.right is None else mask.right - shift
    return Call(
        (query.offset, query.offset + query.length),
        (key.offset, key.offset + key.length),
        None if left is not None and left >= key.length - 1 else left,
        None if right is not None and right >= query.length - 1 else right,
    )


Cells: TypeAlias = dict[tuple[int, int], Call]
"""What is still to be covered, by the numbers of a run of queries and a run of keys."""


def _follows(rows: Sequence[Rows], number: int) -> bool:
    """Whether the run begins in the row in which the one before it ends."""
    before = rows[number - 1] if 0 < number < len(rows) else None
    return before is not None and before.offset + before.length == rows[number].offset


def _triangle(cells: Cells, queries: Sequence[Rows], keys: Sequence[Rows], i: int, j: int) -> Call:
    """The longest triangle from this one on; what it covers is gone."""
    n = 1
    while _follows(queries, i + n) and _follows(keys, j + n):
        corner = cells.get((i + n, j + n))
        below = [cells.get((i + n, j + at)) for at in range(n)]
        if corner is None or not corner.is_causal or not all(one is not None and one.is_full for one in below):
            break
        if any((i + at, j + n) in cells for at in range(n)):
            break
        n += 1
    for row in range(n):
        for column in range(row + 1):
            del cells[i + row, j + column]
    return Call(_span(queries, i, n), _span(keys, j, n), None, 0)


def _rectangle(cells: Cells, queries: Sequence[Rows], keys: Sequence[Rows]) -> Call:
    """The largest rectangle that grows from a corner, first along one side, then along the other; it is gone."""
    best: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    for i, j in cells:
        above, before = (i - 1, j) in cells and _follows(queries, i), (i, j - 1) in cells and _follows(keys, j)
        if above or before:
            continue  # it grows from a corner
        for wide_first in (True, False):
            m, n = _grown(cells, queries, keys, (i, j), wide_first)
            rows, columns = _span(queries, i, m), _span(keys, j, n)
            best = max(best, ((rows[1] - rows[0]) * (columns[1] - columns[0]), -i, -j, m, n))
    _, i, j, m, n = best
    i, j = -i, -j
    for row in range(i, i + m):
        for column in range(j, j + n):
            del cells[row, column]
    return Call(_span(queries, i, m), _span(keys, j, n), None, None)


def _grown(
    cells: Cells, queries: Sequence[Rows], keys: Sequence[Rows], corner: tuple[int, int], wide_first: bool
) -> tuple[int, int]:
    (i, j), m, n = corner, 1, 1
    for wide in (wide_first, not wide_first):
        if wide:
            while _follows(keys, j + n) and all((i + at, j + n) in cells for at in range(m)):
                n += 1
        else:
            while _follows(queries, i + m) and all((i + m, j + at) in cells for at in range(n)):
                m += 1
    return m, n


def _span(rows: Sequence[Rows], first: int, count: int) -> tuple[int, int]:
    last = rows[first + count - 1]
    return rows[first].offset, last.offset + last.length


def _packed(found: list[Call]) -> list[Call]:
    """Calls of like bounds as one, where the queries of one begin where those of another end, and so do its keys, or
    close behind: what lies between is a sequence without keys, and one without queries.
    """
    by_bounds: dict[tuple[int | None, int | None, bool], list[Call]] = {}
    for call in found:
        by_bounds.setdefault((call.left, call.right, call.is_causal), []).append(call)
    made: list[Call] = []
    for alike in by_bounds.values():
        chains: list[list[Call]] = []
        for call in sorted(alike, key=lambda call: (call.queries, call.keys)):
            behind = [(_gap(chain[-1], call), number) for number, chain in enumerate(chains)]
            gap, number = min(((gap, number) for gap, number in behind if gap is not None), default=(None, 0))
            if gap is None:
                chains.append([call])
            else:
                chains[number].append(call)
        made += [_chained(chain) for chain in chains]
    return made


def _gap(before: Call, call: Call) -> int | None:
    """The rows between two calls; None where they do not follow each other closely."""
    queries, keys = call.queries[0] - before.queries[-1], call.keys[0] - before.keys[-1]
    return queries + keys if 0 <= queries <= MAX_GAP and 0 <= keys <= MAX_GAP else None


def _chained(chain: Sequence[Call]) -> Call:
    queries, keys = list(chain[0].queries), list(chain[0].keys)
    for call in chain[1:]:
        if call.queries[0] > queries[-1]:
            queries.append(call.queries[0])
            keys.append(keys[-1])
        if call.keys[0] > keys[-1]:
            queries.append(queries[-1])
            keys.append(call.keys[0])
        queries += call.queries[1:]
        keys += call.keys[1:]
    return replace(chain[0], queries=tuple(queries), keys=tuple(keys))


def _lengths(cuts: tuple[int, ...]) -> list[int]:
    return [end - first for first, end in pairwise(cuts)]
