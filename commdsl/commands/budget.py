"""Turns what is asked for into what it would take, before any of it is spent: moves to prove, bytes to run.

Assumes that moves grow with the ranks as a power of them, seen at two small numbers; that a run's memory is a few times
its tensors. Both are estimates: they refuse what is out of reach. Does not promise that the rest
fits.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate

from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.output import bytes_text
from commdsl.ir import resolve
from commdsl.ir.resolve.budget import MOST_MOVES, MOST_RANKS_OF_MOVES, TURN, moves_of, rounded
from commdsl.language.diagnostics import CommError
from commdsl.language.records import dataclass
from commdsl.language.syntax import File, PlanDecl, ScheduleDecl
from commdsl.machine import memory
from commdsl.machine.topology import switch

FREE = 64
"""So many ranks nobody estimates."""

MOST_RANKS = 8192
"""A proof has tables of every rank with every other."""

SWEEP = 20 * MOST_MOVES
"""Of the proofs for several numbers of ranks, one after another: some minutes."""

SAMPLES = (range(16, 1, -1), range(32, 16, -1))
"""The numbers of ranks at which moves are counted: the largest of each that a schedule admits."""


@dataclass(frozen=True, slots=True)
class Power:
    """A number at some number of ranks, and the power of the ranks by which it grows."""

    ranks: int
    value: float
    power: float

    @staticmethod
    def through(few: int, small: int, more: int, large: int) -> Power:
        power = math.log(large / small) / math.log(more / few) if 0 < small < large else 0.0
        return Power(more, large, power)

    def at(self, ranks: int) -> float:
        return self.value * math.pow(ranks / self.ranks, self.power)


@dataclass(frozen=True, slots=True)
class Growth:
    """How what a schedule takes grows with its ranks."""

    moves: Power
    turns: Power

    def at(self, ranks: int) -> float:
        return self.moves.at(ranks) + TURN * self.turns.at(ranks)

    @property
    def fit(self) -> int:
        """The ranks that one proof has room for."""
        return _round_down(bisect(range(1, MOST_RANKS_OF_MOVES + 1), MOST_MOVES, key=lambda ranks: int(self.at(ranks))))


def refuse_many(files: tuple[File, ...], decl: object, ranks: Sequence[int], target: Target) -> None:
    """Raises UsageError where a proof, or all of them, would take more than is sensible; says what would fit."""
    most = max(ranks)
    if most <= FREE or isinstance(decl, PlanDecl):
        return
    if isinstance(decl, ScheduleDecl):
        growth = estimate(files, decl, target)
        if growth is not None:
            _refuse_growth(growth, decl.name.text, ranks)
    if most > MOST_RANKS:
        raise UsageError(f"--ranks {most}: more than are proved at once; --ranks {MOST_RANKS} would fit")


def _refuse_growth(growth: Growth, name: str, ranks: Sequence[int]) -> None:
    most = max(ranks)
    if growth.at(most) > MOST_MOVES:
        raise UsageError(
            f"--ranks {most}: `{name}` would have about {rounded(growth.at(most))} moves to prove, more than the "
            f"{MOST_MOVES:,} that are proved at once; --ranks {growth.fit} would fit"
        )
    sums = list(accumulate(map(growth.at, ranks)))
    if sums[-1] > SWEEP:
        raise UsageError(
            f"--ranks: `{name}` would have about {rounded(sums[-1])} moves to prove for {len(ranks)} numbers of ranks, "
            f"more than the {SWEEP:,} of one sweep; up to --ranks {ranks[bisect(sums, SWEEP) - 1]} would fit"
        )


def estimate(files: tuple[File, ...], decl: ScheduleDecl, target: Target) -> Growth | None:
    """None where that cannot be told."""
    found = [counted(files, decl, sample, target) for sample in SAMPLES]
    if None in found:
        return None
    (few, small), (more, large) = (one for one in found if one is not None)
    moves, turns = (Power.through(few, *ends[:1], more, *ends[1:]) for ends in zip(small, large, strict=True))
    return Growth(moves, turns)


def counted(
    files: tuple[File, ...], decl: ScheduleDecl, sample: Iterable[int], target: Target
) -> tuple[int, tuple[int, int]] | None:
    """The ranks of the sample that are admitted, and their moves and turns; None where that cannot be told."""
    for params in (dict(target.params), {}):
        for ranks in sample:
            if not resolve.admits(files, decl, ranks, switch(ranks)):
                continue
            try:
                return ranks, moves_of(resolve.resolve(files, decl, ranks, switch(ranks), params))
            except CommError:
                break  # parameters that are meant for more ranks
    return None


def refuse_large(needed: int, size: int, ranks: int) -> None:
    """Raises UsageError where a run of tensors of `size` bytes, which takes `needed` in all, has no room."""
    room = memory.room()
    if needed > room:
        fit = _in_words(size * room // needed)
        raise UsageError(
            f"--bytes {bytes_text(size)}: {ranks} ranks take about {bytes_text(needed)} of memory here, and "
            f"{bytes_text(room)} can be had; --bytes {fit} would fit"
        )


def _in_words(size: int) -> str:
    """A whole number of the largest unit that has two digits of it, as --bytes takes it."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= 10 * scale:
            return f"{size // scale}{unit}"
    return str(size)


def _round_down(number: float) -> int:
    """To two digits."""
    digits = int(10 ** max(int(math.log10(number)) - 1, 0))
    return int(number) // digits * digits
