"""Turns a `cycles` declaration into a CycleSet: the literal rows, or those of a generator.

Assumes `names` found nothing wrong. Does not prove the cycles Hamiltonian or arc-disjoint; `checks.cycles` does.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.resolve.budget import STATEMENT
from commdsl.ir.resolve.evaluate import Scope
from commdsl.ir.resolve.faults import Poisoned
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.schedules import CycleSet, Ints
from commdsl.language import syntax as syn
from commdsl.machine.cycles import NoDecompositionError, hamilton, paths, ring, through_nodes

MOST_RANKS = 2**11  # their cycles have some millions of arcs
DIRECT = (
    "let every rank put its pieces straight to the others, which uses every link for any number of ranks: "
    "`each r, p in 0 ..< P - 1 { put kv[p] -> cur[p] @ (r + 1 + (s + p) % (P - 1)) % P }`"
)


def cycle_set(decl: syn.CyclesDecl, binding: Binding, scope: Scope) -> CycleSet:
    """The cycles of one declaration; raises Poisoned when there are none."""
    name = decl.name.text
    match decl.value:
        case syn.CycleLiteral(is_open, cycles):
            rows = [(row, cycle) for cycle in cycles for row in _listed(cycle, binding, scope)]
            if not rows:
                binding.faults.fail("C121", "a set of no cycles", decl.span, "every range is empty")
            length = len(rows[0][0])
            for row, cycle in rows:
                if len(row) != length:
                    label = f"{len(row)} ranks here, {length} in the first"
                    help = f"each lists all ranks from 0 to {binding.num_ranks - 1} once"
                    what = "the cycles of a set are of one length"
                    binding.faults.fail("C121", what, cycle.ranks[0].span, label, help=help)
            orders = np.stack([row for row, _ in rows])
            return CycleSet(name, orders, closed=not is_open, span=decl.span)
        case syn.CycleGenerator(generator, arguments):
            numbers = [binding.evaluator.constant(argument, scope) for argument in arguments]
            try:
                orders = _generated(generator.text, *(numbers or [binding.num_ranks]))
            except NoDecompositionError as error:
                help = DIRECT if generator.text == "hamilton" else ""
                binding.faults.fail(
                    "C404", f"`{generator.text}` has no cycles for this number", decl.value.span, str(error), help=help
                )
            is_open = generator.text == "paths" and len(numbers) == 1
            return CycleSet(name, orders, closed=not is_open, span=decl.span)


def _listed(cycle: syn.ListedCycle, binding: Binding, scope: Scope) -> list[Ints]:
    """The ranks as written; with `for` those of each combination of the names but the last, which goes along one."""
    rows = binding.rows(cycle.binders, None, scope)
    if not rows.count:
        return []
    columns = [binding.column(rank, rows.scope(scope), (rows.count,)) for rank in cycle.ranks]
    visits = np.stack(columns, axis=1)
    outer = [rows.values(binder.name.text) for binder in cycle.binders[:-1]]
    turns = np.any([np.diff(values) != 0 for values in outer], axis=0) if outer else np.zeros(rows.count - 1, bool)
    ends = np.flatnonzero(turns) + 1
    binding.budget.spend(len(ends) + 1, STATEMENT, "cycles", cycle.span)
    return [part.ravel() for part in np.split(visits, ends)]


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
