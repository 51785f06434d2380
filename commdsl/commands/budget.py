"""Turns what is asked for into what it would take, before any of it is spent: moves to prove, bytes to run.

Assumes that moves grow with the ranks as a power of them, seen at two small numbers; that a run's memory is a few times
its tensors. Both are estimates: they refuse what is out of reach. Does not promise that the rest
fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.output import bytes_text
from commdsl.ir import resolve
from commdsl.ir.resolve.parameters import admits
from commdsl.ir.schedules import Schedule, Step
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import File, PlanDecl, ScheduleDecl
from commdsl.machine import memory
from commdsl.machine.topology import switch

FREE = 64
"""So many ranks nobody estimates."""

MOST_RANKS = 8192
"""A proof has tables of every rank with every other."""

MOST_MOVES = 5_000_000
"""Of chunks and contributions: some minutes, and some gigabytes."""

SAMPLES = (range(16, 1, -1), range(32, 16, -1))
"""The numbers of ranks at which moves are counted: the largest of each that a schedule admits."""


def refuse_many(files: tuple[File, ...], decl: object, ranks: int, target: Target) -> None:
    """Raises UsageError where a proof would take more than is sensible; says what would fit."""
    if ranks <= FREE or isinstance(decl, PlanDecl):
        return
    if isinstance(decl, ScheduleDecl):
        moves, fit = estimate(files, decl, ranks, target)
        if moves > MOST_MOVES:
            raise UsageError(
                f"--ranks {ranks}: `{decl.name.text}` would have about {_rounded(moves)} moves to prove, more than the "
                f"{MOST_MOVES:,} that are proved at once; --ranks {min(fit, MOST_RANKS)} would fit"
            )
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: more than are proved at once; --ranks {MOST_RANKS} would fit")


def estimate(files: tuple[File, ...], decl: ScheduleDecl, ranks: int, target: Target) -> tuple[float, int]:
    """The moves of so many ranks, and how many ranks have MOST_MOVES; (0, 0) where that cannot be told."""
    (few, small), (more, large) = (counted(files, decl, sample, target) for sample in SAMPLES)
    if not 0 < small < large:
        return 0.0, 0
    power = math.log(large / small) / math.log(more / few)
    return large * (ranks / more) ** power, _round_down(more * (MOST_MOVES / large) ** (1 / power))


def counted(files: tuple[File, ...], decl: ScheduleDecl, sample: Iterable[int], target: Target) -> tuple[int, int]:
    """The ranks of the sample that are admitted, and the moves that they make; (1, 0) where that cannot be told."""
    for params in (dict(target.params), {}):
        for ranks in sample:
            if not admits(decl, ranks, switch(ranks)):
                continue
            try:
                return ranks, moves_of(resolve.resolve(files, decl, ranks, switch(ranks), params))
            except CommError:
                break  # parameters that are meant for more ranks
    return 1, 0


def moves_of(schedule: Schedule) -> int:
    """Chunks that are moved, and contributions that are promised."""
    steps = (statement for step in schedule.steps if isinstance(step, Step) for statement in step.moves)
    moved = [statement.source_rank.size for statement in steps]
    promised = [contract.dest_rank.size + contract.source_rank.size for contract in schedule.contracts]
    return sum(moved) + sum(promised)


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


def _rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"
