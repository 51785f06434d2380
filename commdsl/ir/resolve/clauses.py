"""C301 and C315: what a clause of `ensure` names is there, and it says something: rows, and sums of something.

Assumes the arrays of one clause, a row for each combination of its binders. Does not look at the steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.bounds import outside
from commdsl.ir.resolve.faults import Poisoned
from commdsl.ir.resolve.rows import Binding, Rows
from commdsl.ir.schedules import Ints
from commdsl.ir.words import bindings_text, ranks_text
from commdsl.language import syntax as syn
from commdsl.language.records import dataclass
from commdsl.language.source import Span


@dataclass(frozen=True, eq=False)
class NamedRows:
    """The combinations of the binders of a contract, with the rank of each, which its first binder names."""

    contract: syn.GeneralContract
    rows: Rows
    actor: Ints  # (n,)

    def where(self, row: int) -> str:
        others = tuple((binder.name.text, self.rows.value(binder.name.text, row)) for binder in self.binders[1:])
        return f"rank {int(self.actor[row])}{bindings_text(others)}"

    @property
    def binders(self) -> tuple[syn.Binder, ...]:
        return self.contract.binders


def check_rows(named: NamedRows, binding: Binding) -> None:
    """C315 where nothing is left to say."""
    if named.rows.count:
        return
    span = named.contract.span if named.contract.where is None else named.contract.where.span
    what = f"false on every one of {binding.num_ranks} ranks" if named.contract.where else "its ranges are empty"
    help = "mend the condition, or say with `where` behind `ranks` for how many ranks the schedule is"
    binding.faults.fail("C315", "a contract that says nothing", span, what, help=help)


def check_side(
    named: NamedRows, ref: syn.Ref, rank: Ints, chunk: Ints, valid: NDArray[np.bool_] | None, binding: Binding
) -> None:
    """C301 where one side of a clause names a rank or a chunk that is not there."""
    found = outside(binding.buffers[ref.buffer.text], binding.num_ranks, rank, chunk, valid)
    if found is not None:
        binding.faults.add(found.diagnostic(ref.span, named.where(found.row)))
        raise Poisoned


def check_sums(named: NamedRows, span: Span, is_there: NDArray[np.bool_], binding: Binding) -> None:
    """C315 where a row's list has nothing in it; `is_there`: whether it has, by row."""
    empty = np.flatnonzero(~is_there)
    if len(empty):
        label = f"{named.where(int(empty[0]))}: nothing to sum"
        help = _mend(named, is_there, binding.num_ranks)
        binding.faults.fail("C315", "a sum of nothing", span, label, help=help)


def _mend(named: NamedRows, is_there: NDArray[np.bool_], num_ranks: int) -> str:
    """A condition that leaves out just the ranks without a sum, if they are the first, the last or a single one."""
    if not is_there.any():
        return "every sum is empty: mend the range or the condition of the list"
    without = np.setdiff1d(named.actor, named.actor[is_there])
    if len(without) != len(np.unique(named.actor[~is_there])):
        return "leave the case out with `where`"
    name, first, last = named.binders[0].name.text, int(without[0]), int(without[-1])
    is_range = len(without) == last - first + 1
    if first == 0 and is_range:
        others = f"{name} > {last}"
    elif last == num_ranks - 1 and is_range:
        others = f"{name} < {first}"
    elif first == last:
        others = f"{name} != {first}"
    else:
        return "leave these ranks out with `where`"
    return f"leave {ranks_text(without)} out: `where {others}`"
