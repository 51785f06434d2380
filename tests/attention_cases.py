"""Lists the shipped schedules of attention with the numbers of ranks and the parameters they are tested with, and says
which piece of whose keys each has to bring to which rank.

Assumes nothing of the schedules' own conditions: what they are for is stated here a second time, in other words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from collectives import SCHEDULES

FOLDER = SCHEDULES / "attention"


@dataclass(frozen=True)
class Case:
    """A schedule and its way back, on so many ranks."""

    name: str
    ranks: int
    params: tuple[tuple[str, int], ...] = ()

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.comm"

    @property
    def back(self) -> Path:
        return FOLDER / f"{self.name}_backward.comm"

    @property
    def of(self) -> dict[str, int]:
        return dict(self.params)

    def __str__(self) -> str:
        return "-".join([self.name.removeprefix("attention_"), str(self.ranks), *(f"{a}{b}" for a, b in self.params)])


def cases(ranks: int) -> Iterator[Case]:
    """Every schedule that there is for so many ranks, with every number of pieces at an end or in the middle, nodes of
    every size, windows of a part of a rank, of one and of several.
    """
    nodes = [m for m in range(2, ranks) if ranks % m == 0]
    counts = sorted({1, ranks // 2, ranks - 1})
    for causal in (0, 1):
        if ranks == 2:
            yield _case("pair", ranks, causal=causal)
        yield from (_case("direct", ranks, K=count, causal=causal) for count in counts)
        yield _case("ring", ranks, causal=causal)
        yield from (_case("double_ring", ranks, m=m, causal=causal) for m in nodes)
    if ranks not in (4, 6):
        yield from (_case("hamilton", ranks, K=count) for count in counts)
    yield from (_case("paths", ranks, m=m) for m in nodes if m % 2 == 0)
    yield from (_case("window", ranks, B=b, A=a) for b, a in ((0, 0), (1, 0), (2, 0), (3, 2), (1, 1), (2 * ranks, 0)))
    yield _case("ulysses", ranks)
    yield from (_case("ulysses_ring", ranks, U=m) for m in nodes)


def _case(name: str, ranks: int, **params: int) -> Case:
    return Case(f"attention_{name}", ranks, tuple(params.items()))


def pieces(case: Case) -> int:
    """In how many pieces a half is."""
    of = case.of
    if case.name == "attention_double_ring":
        return of["m"] - 1
    return of.get("K", of.get("m", 1)) if "window" not in case.name else 1


def chunks(case: Case) -> int:
    """Of the keys of a rank: pieces of both halves, or the heads of as many ranks as exchange them."""
    if "ulysses" in case.name:
        return case.of.get("U", case.ranks)
    return 2 * pieces(case)


def brings(case: Case, rank: int, owner: int, chunk: int) -> bool:
    """Whether a chunk of the owner's keys visits the rank.

    Of zigzag placement a rank's front half are rows `rank` of 2 P parts, its back half rows 2 P - 1 - rank; rows attend
    to none behind them. Of a window of halves in order, rows attend to B before their own and to A behind.
    """
    if "ulysses" in case.name:
        return chunk == rank % chunks(case)
    half, ranks = chunk // pieces(case), case.ranks
    if case.of.get("causal"):
        queries = (rank, 2 * ranks - 1 - rank)
        keys = (owner, 2 * ranks - 1 - owner)[half]
        return any(keys <= one for one in queries)
    if case.name == "attention_window":
        before, behind = case.of["B"], case.of["A"]
        own = (2 * rank, 2 * rank + 1)
        return any(-before <= 2 * owner + half - one <= behind for one in own)
    return True
