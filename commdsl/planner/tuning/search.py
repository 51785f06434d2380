"""Turns measurements of candidates into the rows of a table: a coarse grid, refined around its winners, then settled.

Assumes a measure that gives every rank the same numbers, so that all ranks search alike. Does not know how a candidate
is run; does not stop in the middle of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from typing import Protocol, TypeAlias

from commdsl.machine.carriers import Carrier
from commdsl.planner.tuning.search_space import Family, families_with, first_candidates, in_range, neighbours
from commdsl.planner.tuning.selection import Candidate, Measured, Row

MOST_COARSE = 7
"""Sizes at which the grid is measured; the others follow from their neighbours."""

HOPELESS = 1.5
"""A candidate so much slower than the best at a size is not looked at there again."""

CONTENDERS = 4
"""So many are measured at every size in the end, and `SEEDS` at a size are refined."""

SEEDS = 2
ROUNDS = 2

SETTLED = 1.02
"""A row keeps the candidate of the row before it within this: fewer ops to set up, and noise makes no rows."""

SHARES = {"coarse": 0.5, "refine": 0.8}
"""Of a collective's time, when a stage ends at the latest."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a candidate has no times."""

    reason: str


Times: TypeAlias = dict[int, float]
"""Microseconds by size."""


class Bench(Protocol):
    """What the search needs of the machine. Every rank gets the same answers."""

    def announce(self, candidates: tuple[Candidate, ...]) -> None:
        """These are measured next."""
        ...

    def measure(self, candidate: Candidate, sizes: tuple[int, ...]) -> Times | Failure: ...

    def spent(self) -> float:
        """The share of this collective's time that has passed."""
        ...


@dataclass
class Search:
    """One collective on its way to rows."""

    collective: str
    ranks: int
    sizes: tuple[int, ...]
    carriers: tuple[Carrier, ...]
    bench: Bench
    watch: Callable[[str, int, int], None]  # stage, done, of how many
    own: tuple[Family, ...] = ()  # a user's schedules, measured beside the shipped ones
    only: tuple[Candidate, ...] = ()  # nothing else is measured, and these at every size
    times: dict[Candidate, Times] = field(default_factory=dict)
    failures: dict[Candidate, Failure] = field(default_factory=dict)
    skipped: int = 0  # for want of time

    def run(self) -> tuple[Row, ...]:
        """The rows; empty where no candidate could be measured."""
        if self.only:
            self._measure("all", dict.fromkeys(self.only, self.sizes))
            return self._rows()
        coarse = self._coarse_sizes()
        first = first_candidates(self.families, self.carriers, self.own)
        self._measure("coarse", dict.fromkeys(first, coarse))
        for _ in range(ROUNDS):
            self._measure("refine", self._refinement(coarse))
        self._measure("settle", self._settlement(coarse))
        return self._rows()

    @property
    def families(self) -> tuple[Family, ...]:
        return families_with(self.collective, self.own)

    def _coarse_sizes(self) -> tuple[int, ...]:
        step = -(-len(self.sizes) // MOST_COARSE)
        return tuple(sorted({*self.sizes[::step], self.sizes[-1]}))

    # --- stages -------------------------------------------------------------------------------------------------------

    def _measure(self, stage: str, wanted: dict[Candidate, tuple[int, ...]]) -> None:
        """Measures what is not known yet, while there is time; the last stage takes what it needs."""
        missing = {candidate: self._missing(candidate, sizes) for candidate, sizes in wanted.items()}
        left = [candidate for candidate, sizes in missing.items() if sizes and candidate not in self.failures]
        self.bench.announce(tuple(left))
        for done, candidate in enumerate(left):
            self.watch(stage, done, len(left))
            if self.times and self.bench.spent() > SHARES.get(stage, math.inf):
                self.skipped += len(left) - done
                break
            found = self.bench.measure(candidate, missing[candidate])
            if isinstance(found, Failure):
                self.failures[candidate] = found
            else:
                self.times.setdefault(candidate, {}).update(found)
        self.watch(stage, len(left), len(left))

    def _missing(self, candidate: Candidate, sizes: Iterable[int]) -> tuple[int, ...]:
        known = self.times.get(candidate, {})
        return tuple(
            size
            for size in sorted(set(sizes))
            if size not in known and (self.only or in_range(self.families, candidate, size, self.carriers))
        )

    def _refinement(self, coarse: tuple[int, ...]) -> dict[Candidate, tuple[int, ...]]:
        """The neighbours of the best at each size, to be measured there and at the sizes beside it."""
        wanted: dict[Candidate, tuple[int, ...]] = {}
        beside = {size: coarse[max(index - 1, 0) : index + 2] for index, size in enumerate(coarse)}
        lists = [
            [(size, candidate) for seed in self._contenders(size)[:SEEDS] for candidate in neighbours(seed)]
            for size in coarse
        ]
        # In turns, so that no size is left out when time runs short.
        for size, candidate in filter(None, chain.from_iterable(zip_longest(*lists))):
            wanted[candidate] = (*wanted.get(candidate, ()), *beside[size])
        return wanted

    def _settlement(self, coarse: tuple[int, ...]) -> dict[Candidate, tuple[int, ...]]:
        """The best of the coarse sizes around each size."""
        wanted: dict[Candidate, tuple[int, ...]] = {}
        for size in self.sizes:
            around = [max((one for one in coarse if one <= size), default=coarse[0]),
                      min((one for one in coarse if one >= size), default=coarse[-1])]  # fmt: skip
            for near in sorted(set(around)):
                for candidate in self._contenders(near)[:CONTENDERS]:
                    wanted[candidate] = (*wanted.get(candidate, ()), size)
        return wanted

    def _contenders(self, size: int) -> list[Candidate]:
        """Who was measured at a size and is not hopeless there, the best first."""
        ranked = self._ranked(size)
        return [candidate for us, candidate in ranked if us <= HOPELESS * ranked[0][0]]

    def _ranked(self, size: int) -> list[tuple[float, Candidate]]:
        found = [(times[size], candidate) for candidate, times in self.times.items() if size in times]
        return sorted(found, key=lambda pair: (pair[0], str(pair[1])))

    # --- the outcome --------------------------------------------------------------------------------------------------

    def _rows(self) -> tuple[Row, ...]:
        found: list[tuple[int, Candidate, Measured]] = []
        for size in self.sizes:
            ranked = self._ranked(size)
            if not ranked:
                continue
            kept = [pair for pair in ranked if found and pair[1] == found[-1][1] and pair[0] <= SETTLED * ranked[0][0]]
            us, candidate = (kept or ranked)[0]
            others = [pair for pair in ranked if pair[1] != candidate]
            second_us, second = others[0] if others else (0.0, None)
            found.append((size, candidate, Measured(size, us, len(ranked), second, second_us)))
        ends: list[int | None] = [math.isqrt(here[0] * there[0]) for here, there in pairwise(found)]
        return tuple(
            Row(end, candidate, measured)
            for end, (_, candidate, measured) in zip([*ends, None] if found else [], found, strict=True)
        )
