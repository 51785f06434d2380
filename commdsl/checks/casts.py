"""C323, C324: what travels in another element type does so in one, and a contract says how often that rounds.

Assumes indices in bounds, no overlapping writes, no undefined reads. Does not ask how far a result is off: how often
each contribution to it was rounded, and to what, decides that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, statement_key
from commdsl.ir.contracts import Contract
from commdsl.language.diagnostics import Diagnostic, Label

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


def mixed_casts(located: Located) -> Iterator[Diagnostic]:
    """C323, one message for each statement, or contract, that has another type than the first statement."""
    cast, told = located.schedule.cast, set[tuple[str, int, int]]()
    for _, _, moves in located.statements():
        other, span = moves.moves.cast, moves.moves.span
        if cast is None or other in (None, cast) or statement_key(span) in told:
            continue
        told.add(statement_key(span))
        help = f"write `as {cast.words}`, as further above"
        yield Diagnostic("C323", "two element types travel", Label(span, "another one here"), help=help)
    for contract in located.schedule.contracts:
        said = contract.rounding
        if cast is not None and said is not None and said.element != cast.element:
            label = Label(contract.span, f"moves travel as {cast.words}")
            help = f"write `rounded({cast.element}, {said.times})`"
            yield Diagnostic("C323", f"nothing is rounded to {said.element}", label, help=help)


def unsaid_roundings(located: Located) -> Iterator[Diagnostic]:
    """C324, for every contract that does not say how often its most rounded contribution is."""
    contracts = [contract for contract in located.schedule.contracts if contract.rotation is None]
    if located.schedule.cast is None and all(contract.rounding is None for contract in contracts):
        return
    counts = roundings(located)
    for contract in contracts:
        found = counts[located.contract_dests(contract)]
        said = 0 if contract.rounding is None else contract.rounding.times
        most = int(found.max(initial=0))
        if most != said:
            yield _miscounted(located, contract, int(found.argmax()) if len(found) else 0, (said, most))


def _miscounted(located: Located, contract: Contract, row: int, counts: tuple[int, int]) -> Diagnostic:
    said, most = counts
    where = located.name(int(located.contract_dests(contract)[row]))
    cast, mend = located.schedule.cast, "leave `rounded` out"
    if cast is not None and most:
        mend = f"write `rounded({cast.element}, {most})` behind it"
    times = {0: "never", 1: "once", 2: "twice"}.get(most, f"{most} times")
    what = "rounded on its way" if not said else f"rounded {times}, not as often as it says"
    label = f"the most rounded contribution to {where} is so {times}"
    return Diagnostic("C324", f"`{contract.name}` is {what}", Label(contract.span, label), help=mend)


def roundings(located: Located) -> Counts:
    """Of every location how often its most rounded contribution was."""
    counts, is_cast = np.zeros(located.size, np.int64), np.zeros(located.size, np.bool_)
    for step in located.steps:
        if not isinstance(step, LocatedStep):
            counts[step.writes], is_cast[step.writes] = 0, False
            continue
        results = [(moves.dest, _made(moves, counts, is_cast), left(moves, is_cast)) for moves in step.moves]
        for dest, made, cast in results:
            counts[dest], is_cast[dest] = made, cast
    return counts


def _made(moves: LocatedMoves, counts: Counts, is_cast: Mask) -> Counts:
    most: Counts = (counts[moves.sources] + rounded(moves, is_cast)).max(axis=1)
    return np.maximum(most, counts[moves.dest]) if moves.moves.accumulate else most


def rounded(moves: LocatedMoves, is_cast: Mask) -> Mask:
    """Which sources a statement rounds: those that a cast left have been. (n, k)"""
    if moves.moves.cast is None:
        return np.zeros(moves.sources.shape, np.bool_)
    valid = moves.moves.source_valid
    return ~is_cast[moves.sources] if valid is None else ~is_cast[moves.sources] & valid


def left(moves: LocatedMoves, is_cast: Mask) -> Mask:
    """Of every row of a statement whether what it writes is what a cast left. (n,)"""
    if not moves.moves.copies:
        return np.zeros(len(moves.dest), np.bool_)
    return is_cast[moves.sources[:, 0]] | (moves.moves.cast is not None)
