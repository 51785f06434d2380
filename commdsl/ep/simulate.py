"""What a dispatch by keys means, on arrays of all ranks: where every row goes, and what comes back.

Assumes legal keys, and numpy alone. Does not know a Plan: it is written from the words of the contract, for clarity,
and shares nothing with what it judges. Places of a rank are sorted by (key, source rank, row); a row that has a key
twice is there twice, in the order of its keys. The first entry of a row on a rank is that of its least key number
there, by which row and rank know each other where it travels once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int32]
Array: TypeAlias = NDArray[Any]
Rounded: TypeAlias = Callable[[Array], Array]  # of float32 to float32

PADDING = 2**64 - 1
"""The origin of a place that has no row."""


@dataclass(frozen=True, eq=False)
class Received:
    """What one rank holds after the way there: R places, those between two keys' rows included."""

    rows: tuple[Array, ...]  # by tensor, (R, ...)
    counts: NDArray[np.int32]  # rows by the rank's own keys, in their order, and by source rank
    offsets: NDArray[np.int32]  # by own key: where its rows end, with what is behind them up to the next key's
    origins: NDArray[np.uint64]  # (R,): entry, source rank << 32, slot << 48, is the first << 63; or PADDING
    mates: NDArray[np.int32]  # (P, most rows of a rank, K): by source rank and row the places here of its keys, or -1
    index: NDArray[np.int32]  # (R,): the place of the row's first key here; -1 where there is no row
    values: NDArray[np.float32] | None  # (R,): beside each row; 0 where there is none
    places: NDArray[np.int32]  # (T, K): where the rank's own rows are, each on the rank of its key; -1 if dropped

    @property
    def entries(self) -> NDArray[np.int64]:
        """Of each place that has a row: the place, source rank, row, and which of the row's keys."""
        a_row = self.mates.shape[2]
        words = [(at, word) for at, word in enumerate(self.origins.tolist()) if word != PADDING]
        found = [(at, word >> 32 & 0xFFFF, *divmod(word & 0xFFFFFFFF, a_row)) for at, word in words]
        return np.array(found, np.int64).reshape(-1, 4)


def dispatch(
    keys: Sequence[Keys],
    tensors: Sequence[Sequence[Array]],
    rank_of: Sequence[int],
    values: Sequence[NDArray[np.float32]] | None = None,
    aligned: int = 1,
    node: int | None = None,
) -> list[Received]:
    """`keys`: by rank (T, K), numbers below len(rank_of), or that for none. `tensors`: by tensor, rank (T, ...).
    `values`: by rank (T, K). The rows of each key begin at a multiple of `aligned`. Slots are counted in nodes of
    `node` ranks, all of them unless said.
    """
    ranks = len(keys)
    begins = [rank - rank % (node or ranks) for rank in range(ranks)]  # of each rank's node
    places = [np.full(own.shape, -1, np.int32) for own in keys]
    laid = [_laid(keys, [key for key in range(len(rank_of)) if rank_of[key] == rank], aligned) for rank in range(ranks)]
    for entries, _, _ in laid:
        for place, entry in enumerate(entries):
            if entry is not None:
                source, row, which = entry
                places[source][row, which] = place
    found = []
    for rank, (entries, counts, offsets) in enumerate(laid):
        size, a_row = len(entries), keys[0].shape[1]
        rows = tuple(np.zeros((size, *one[rank].shape[1:]), one[rank].dtype) for one in tensors)
        beside = None if values is None else np.zeros(size, np.float32)
        origins, index = np.full(size, PADDING, np.uint64), np.full(size, -1, np.int32)
        mates = np.full((ranks, max(map(len, keys)), a_row), -1, np.int32)
        for place, entry in enumerate(entries):
            if entry is None:
                continue
            source, row, which = entry
            ranks_of_row = [rank_of[key] if 0 <= key < len(rank_of) else None for key in keys[source][row].tolist()]
            here = [number for number, of in enumerate(ranks_of_row) if of == rank]
            slot = len({of for of in ranks_of_row if of is not None and begins[rank] <= of < rank})
            is_first = which == here[0]
            origins[place] = row * a_row + which | source << 32 | slot << 48 | is_first << 63
            index[place] = places[source][row, here[0]]
            mates[source, row, which] = place
            for mine, theirs in zip(rows, tensors, strict=True):
                mine[place] = theirs[source][row]
            if beside is not None and values is not None:
                beside[place] = values[source][row, which]
        found.append(Received(rows, counts, offsets, origins, mates, index, beside, places[rank]))
    return found


def quantised(rows: Array, stretch: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows (T, H) of float32, or of what is exact in it, as float8_e4m3fn by their bits; scales (T, ceil(H / stretch)).

    The scale of a stretch is the largest magnitude of its finite values / 448 in float32, no less than the smallest
    normal float32, and 1 where that largest is zero. Each value is divided by it, in float32, and is rounded to the
    nearest of float8, the even one of two as near, 448 at most. What is not finite becomes a NaN, 0x7f.
    """
    wide = rows.astype(np.float32)
    finite = np.isfinite(wide)
    count, columns = wide.shape
    scales = np.ones((count, -(-columns // stretch)), np.float32)
    codes = np.empty(wide.shape, np.uint8)
    # Finite magnitudes by their bits: 2 ** -9 times an eighth's number below 2 ** -6, and (8 + digit) / 8 above.
    known = [
        digit * 2.0**-9 if power == 0 else (8 + digit) / 8 * 2.0 ** (power - 7)
        for power in range(16)
        for digit in range(8)
    ]
    table = np.array(known[:127])  # the last is the NaN
    for at in range(scales.shape[1]):
        part = slice(at * stretch, min((at + 1) * stretch, columns))
        largest = np.where(finite[:, part], np.abs(wide[:, part]), np.float32(0)).max(axis=1, initial=0)
        scale = np.maximum(largest / np.float32(448), np.finfo(np.float32).tiny)
        scales[:, at] = np.where(largest == 0, np.float32(1), scale)
        with np.errstate(invalid="ignore", over="ignore"):
            quotient = wide[:, part] / scales[:, at : at + 1]
        away = np.abs(np.where(finite[:, part], np.abs(quotient), 0)[..., None].astype(np.float64) - table)
        near = away.argmin(axis=-1)  # the lesser of two as near, whose bits may be odd
        tied = np.minimum(near + 1, len(table) - 1)
        is_tied = np.take_along_axis(away, near[..., None], -1) == np.take_along_axis(away, tied[..., None], -1)
        near = np.where(is_tied[..., 0] & (near % 2 == 1), tied, near)
        codes[:, part] = np.where(finite[:, part], near | np.signbit(quotient) << 7, 0x7F)
    return codes, scales


Entry: TypeAlias = tuple[int, int, int]
"""Source rank, row, and which of its keys."""


def _laid(
    keys: Sequence[Keys], own: Sequence[int], aligned: int
) -> tuple[list[Entry | None], NDArray[np.int32], NDArray[np.int32]]:
    """What lies at each place of a rank, with its counts and offsets."""
    entries: list[Entry | None] = []
    counts, offsets = np.zeros((len(own), len(keys)), np.int32), np.zeros(len(own), np.int32)
    for local, key in enumerate(own):
        for source, theirs in enumerate(keys):
            where = np.argwhere(theirs == key).tolist()  # by row, then by which of its keys
            counts[local, source] = len(where)
            entries += [(source, row, which) for row, which in where]
        while len(entries) % aligned:
            entries.append(None)
        offsets[local] = len(entries)
    return entries, counts, offsets


def combine(
    rows: Sequence[Array],
    received: Sequence[Received],
    keys: Sequence[Keys],
    weights: Sequence[Array] | None,
    *,
    once: bool = False,
    node: int | None = None,
    rounded: Rounded | None = None,
) -> list[Array]:
    """By rank (T, ...): for each row the sum of what came back for it, times its weights if there are, in float32,
    rounded once; zero for a row of no key. `rows`: by rank what became of the rows it received; weights by rank (T, K).

    Over its keys in their order; with `once` over the ranks that have some of them in theirs, of which each adds up its
    own, in the order of the keys, and rounds; with `node` over nodes of so many ranks, each of which adds up its ranks'
    sums, in the order of the ranks, and rounds. `rounded`: to numbers of an element type that numpy does not have.
    """
    like = rows[0]
    narrow = rounded or (lambda row: row.astype(like.dtype).astype(np.float32))
    came: list[dict[tuple[int, int], tuple[int, Array]]] = [{} for _ in keys]
    for rank, held in enumerate(received):
        for at, source, row, which in held.entries.tolist():
            came[source][row, which] = rank, rows[rank][at].astype(np.float32)
    found = []
    for source, own in enumerate(keys):
        result = np.zeros((len(own), *like.shape[1:]), np.float32)
        for row in range(len(own)):
            terms = [
                (which, *came[source][row, which]) for which in range(own.shape[1]) if (row, which) in came[source]
            ]
            if weights is not None:
                terms = [(which, rank, term * np.float32(weights[source][row, which])) for which, rank, term in terms]
            if once:
                ranks = sorted({rank for _, rank, _ in terms})
                sums = [narrow(_added([term for _, of, term in terms if of == rank])) for rank in ranks]
                parts = (
                    sums
                    if node is None
                    else [
                        narrow(_added([one for rank, one in zip(ranks, sums, strict=True) if rank // node == which]))
                        for which in sorted({rank // node for rank in ranks})
                    ]
                )
            else:
                parts = [term for _, _, term in terms]
            if parts:
                result[row] = _added(parts)
        found.append(result.astype(like.dtype))
    return found


def _added(terms: Sequence[Array]) -> Array:
    """In float32, one after another."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def combine_values(values: Sequence[Array], received: Sequence[Received], keys: Sequence[Keys]) -> list[Array]:
    """By rank (T, K): the number of each key's place, zero for a key that is none. `values`: by rank (R,)."""
    found = [np.zeros(own.shape, np.float32) for own in keys]
    for rank, held in enumerate(received):
        for at, source, row, which in held.entries.tolist():
            found[source][row, which] = values[rank][at]
    return found
