"""Turns document lengths into a Placement: which tokens each rank has, in which order.

Assumes documents that lie one after the other, the stream. Any length and any number of ranks will do: what cannot be
cut equally is cut to within one token. Does not move anything (`sequence` does).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

from commdsl.machine.errors import ArgumentError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `begin` to `begin + length` of a document; a rank has them one after the other."""

    document: int
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Placement:
    """`runs[rank][half]`: the tokens of a rank in the order of its rows, the front half's and then the back half's.

    No run is empty; a half may have none.
    """

    name: str
    runs: tuple[tuple[tuple[Run, ...], tuple[Run, ...]], ...]

    @property
    def ranks(self) -> int:
        return len(self.runs)

    def rows(self, rank: int) -> int:
        """How many tokens a rank has."""
        return sum(run.length for half in self.runs[rank] for run in half)

    @property
    def half_rows(self) -> int:
        """The rows of the longest half of any rank."""
        return max(self._half_rows())

    def reach(self, distance: int | None) -> int:
        """In how many halves before a half of rows, or after it, tokens may be that are so far from one of its own;
        None: however far. Counted by the shortest half, whatever documents there are: each reach is a kernel, with
        symmetric memory of its own.
        """
        most, shortest = 2 * self.ranks, min(self._half_rows())
        return most if distance is None or not shortest else min(-(-distance // shortest), most)

    def _half_rows(self) -> Iterator[int]:
        return (sum(run.length for run in half) for halves in self.runs for half in halves)


@dataclass(frozen=True, eq=False, slots=True)
class Same(Generic[T]):
    """An object as a key that is equal to itself alone: a placement of many documents is long to hash and compare."""

    value: T

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def zigzag(ranks: int, lengths: Sequence[int]) -> Placement:
    """Every document is cut into 2 P parts, equal to within one token; rank r has part r in its front half and part
    2 P - 1 - r in its back half. Under a causal mask all ranks then have the same work.

    Which parts have the token more goes on from document to document, so that all halves are equal to within one
    token, however many documents there are.
    """
    ranks, lengths = _sizes(ranks, lengths)
    parts = 2 * ranks
    runs: list[list[Run]] = [[] for _ in range(parts)]
    first = 0
    for document, length in enumerate(lengths):
        least, more = divmod(length, parts)
        begin = 0
        for part in range(parts):
            size = least + ((part - first) % parts < more)
            if size:
                runs[part].append(Run(document, begin, size))
            begin += size
        first = (first + more) % parts
    return Placement("zigzag", tuple((tuple(runs[r]), tuple(runs[parts - 1 - r])) for r in range(ranks)))


def contiguous(ranks: int, lengths: Sequence[int]) -> Placement:
    """All documents, one after the other, are cut into P equal to within one token; each rank's part is cut in two."""
    ranks, lengths = _sizes(ranks, lengths)
    starts = tuple(accumulate(lengths, initial=0))
    least, more = divmod(starts[-1], ranks)
    ends = list(accumulate((least + (rank < more) for rank in range(ranks)), initial=0))
    halves = []
    for begin, end in pairwise(ends):
        middle = (begin + end + 1) // 2
        halves.append((_between(starts, begin, middle), _between(starts, middle, end)))
    return Placement("contiguous", tuple(halves))


def _sizes(ranks: int, lengths: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Refuses what is no number of ranks, or no list of lengths."""
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"`ranks` is a whole number from 1 on, not {ranks!r:.60}")
    if not isinstance(lengths, list | tuple) or not all(hasattr(one, "__index__") and one >= 0 for one in lengths):
        raise ArgumentError(f"`lengths` are the tokens of each document, as in [5, 7], not {lengths!r:.60}")
    return ranks, lengths


PLACEMENTS = ("zigzag", "contiguous")


def placed(placement: str | Placement, ranks: int, lengths: Sequence[int]) -> Placement:
    """The placement of that name, or the given one once it is seen to hold every token of these documents once.

    Raises ArgumentError.
    """
    if isinstance(placement, Placement):
        _check(Same(placement), ranks, tuple(lengths))
        return placement
    return _kept(placement, ranks, tuple(lengths))


def named(name: str, ranks: int, lengths: Sequence[int]) -> Placement:
    """As `placed`, made anew."""
    if name not in PLACEMENTS:
        known = ", ".join(f'"{one}"' for one in PLACEMENTS)
        raise ArgumentError(f"`placement` is one of {known} or a Placement, not {name!r}")
    return zigzag(ranks, lengths) if name == "zigzag" else contiguous(ranks, lengths)


def slices(placement: Placement, lengths: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """First token in the stream and number of tokens, in the order of a rank's rows; what is adjacent is one."""
    starts = tuple(accumulate(lengths, initial=0))
    found: list[tuple[int, int]] = []
    for run in (run for half in placement.runs[rank] for run in half):
        begin = starts[run.document] + run.begin
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + run.length)
        else:
            found.append((begin, run.length))
    return found


@lru_cache(maxsize=64)
def _kept(name: str, ranks: int, lengths: tuple[int, ...]) -> Placement:
    return named(name, ranks, lengths)


def _between(starts: Sequence[int], begin: int, end: int) -> tuple[Run, ...]:
    """The runs of the stream from `begin` to `end`."""
    found = []
    for document in range(bisect_right(starts, begin) - 1, len(starts) - 1):
        if starts[document] >= end:
            break
        inner, outer = max(begin, starts[document]), min(end, starts[document + 1])
        if inner < outer:
            found.append(Run(document, inner - starts[document], outer - inner))
    return tuple(found)


@lru_cache(maxsize=64)
def _check(given: Same[Placement], ranks: int, lengths: tuple[int, ...]) -> None:
    placement = given.value
    if placement.ranks != ranks:
        raise ArgumentError(
            f"the placement `{placement.name}` is one of {placement.ranks} ranks, the group has {ranks}"
        )
    runs = sorted((run.document, run.begin, run.length) for halves in placement.runs for half in halves for run in half)
    reached = [0] * len(lengths)
    for document, begin, length in runs:
        if not 0 <= document < len(lengths) or length < 1 or begin != reached[document]:
            raise ArgumentError(_wrong(placement, f"the run of {length} tokens from {begin} of document {document}"))
        reached[document] = begin + length
    for document, (found, length) in enumerate(zip(reached, lengths, strict=True)):
        if found != length:
            raise ArgumentError(_wrong(placement, f"document {document} of {length} tokens, of which it has {found},"))


def _wrong(placement: Placement, what: str) -> str:
    return f"the placement `{placement.name}` has every token of every document once: {what} breaks that"
