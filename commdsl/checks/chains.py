"""C592: a product multiplies what another product made.

Assumes indices in bounds, no overlapping writes, no undefined reads. Does not judge other limits of the kernels;
`ir.products` does. It comes before contracts are compared: the factors of both products arrive in the result, and
contracts that name one of them would each be told that the other one is wrong. Results that end with a bias, an
activation or a residual are for `epilogues` to judge.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep
from commdsl.ir.functions import PLAIN
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.source import Span


def chained_products(located: Located) -> Iterator[Diagnostic]:
    """Yield one message, for the first product whose rows another product made."""
    if not located.schedule.has_products:
        return
    maker = np.zeros(located.size, np.int32)  # of each location, which statement of those below multiplied; 0: none
    spans: list[Span] = []
    for step in located.steps:
        if not isinstance(step, LocatedStep):
            maker[step.writes] = 0
            continue
        for moves in step.moves:
            rows = maker[moves.sources].max(axis=1)
            if moves.factors is not None and rows.any():
                yield _diagnostic(located, step, moves, int(rows.argmax()), spans[int(rows.max()) - 1])
                return
        made = [(moves.dest, _maker(moves, maker, spans)) for moves in step.moves]
        for dest, new in made:
            maker[dest] = new


def _maker(moves: LocatedMoves, maker: NDArray[np.int32], spans: list[Span]) -> NDArray[np.int32]:
    """Return which product made what a statement writes."""
    if moves.moves.epilogue != PLAIN:
        return np.zeros(len(moves.dest), np.int32)
    if moves.factors is not None:
        spans.append(moves.moves.span)
        return np.full(len(moves.dest), len(spans), np.int32)
    made: NDArray[np.int32] = maker[moves.sources].max(axis=1)
    return np.maximum(made, maker[moves.dest]) if moves.moves.accumulate else made


def _diagnostic(located: Located, step: LocatedStep, moves: LocatedMoves, row: int, made_by: Span) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    return Diagnostic(
        "C592",
        "no kernel runs this product",
        Label(moves.moves.span, f"{who}: {located.name(int(moves.sources[row, 0]))} is what another product made"),
        (Label(made_by, "made here"),),
        notes=("the products of a schedule are independent of one another: none waits for the result of another",),
        help="end the schedule with the first product, and write a second one that is called with its result",
    )
