"""Turns a `cycles` declaration into a CycleSet: the literal rows, or those of a generator.

Assumes `names` found nothing wrong. Does not prove the cycles Hamiltonian or arc-disjoint; `checks.cycles` does.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.resolve.evaluate import Evaluator, Scope
from commdsl.ir.resolve.faults import Faults, Poisoned
from commdsl.ir.schedules import CycleSet, Ints
from commdsl.language import syntax as syn
from commdsl.machine.cycles import NoDecompositionError, hamilton, paths, ring, through_nodes

MOST_RANKS = 2**11  # their cycles have some millions of arcs
DIRECT = (
    "let every rank put its pieces straight to the others, which uses every link for any number of ranks: "
    "`each r, p in 0 ..< P - 1 { put kv[p] -> cur[p] @ (r + 1 + (s + p) % (P - 1)) % P }`"
)


def cycle_set(decl: syn.CyclesDecl, evaluator: Evaluator, scope: Scope, ranks: int, faults: Faults) -> CycleSet:
    """The cycles of one declaration; raises Poisoned when there are none."""
    name = decl.name.text
    match decl.value:
        case syn.CycleLiteral(cycles):
            rows = [[evaluator.constant(rank, scope) for rank in cycle] for cycle in cycles]
            for row, cycle in zip(rows, cycles, strict=True):
                if len(row) != len(rows[0]):
                    label = f"{len(row)} ranks here, {len(rows[0])} in the first"
                    help = f"each lists all ranks from 0 to {ranks - 1} once"
                    faults.fail("C121", "the cycles of a set are of one length", cycle[0].span, label, help=help)
            return CycleSet(name, np.array(rows, np.int32), closed=True, span=decl.span)
        case syn.CycleGenerator(generator, arguments):
            numbers = [evaluator.constant(argument, scope) for argument in arguments]
            try:
                orders = _generated(generator.text, *(numbers or [ranks]))
            except NoDecompositionError as error:
                help = DIRECT if generator.text == "hamilton" else ""
                faults.fail(
                    "C404", f"`{generator.text}` has no cycles for this number", decl.value.span, str(error), help=help
                )
            is_open = generator.text == "paths" and len(numbers) == 1
            return CycleSet(name, orders, closed=not is_open, span=decl.span)


def _generated(generator: str, number: int, nodes: int | None = None) -> Ints:
    ranks = number * (1 if nodes is None else nodes)
    if not 1 <= ranks <= MOST_RANKS:
        raise NoDecompositionError(f"expected 1 to {MOST_RANKS} ranks, got {ranks}")
    match generator:
        case "ring":
            return ring(number)
        case "hamilton":
            return hamilton(number)
        case "paths":
            return paths(number) if nodes is None else through_nodes(number, nodes)
        case _:
            raise Poisoned
