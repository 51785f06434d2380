"""Turns rows and weights into what an operator makes of them: by the program that is chosen for such tensors, or by
what travels and a product of torch's, one after the other.

Assumes tensors with which torch has nothing else to do. Does not choose; `programs` does. What makes calls on tensors
of some kinds is looked for once: on the way to it nothing else is asked than whether it is still there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from commdsl.overlap import shapes
from commdsl.overlap.programs import EXCHANGE, GATHER, REDUCE, RETURN, SCATTER, operands, program, program_with_rows
from commdsl.overlap.sequence import WAYS, multiply_there
from commdsl.runtime import collectives, given, groups
from commdsl.runtime.calls import MAX_KEPT
from commdsl.runtime.kept import keep
from commdsl.runtime.products import Multiplying
from commdsl.runtime.tensors import check_scales

Tensor: TypeAlias = torch.Tensor
Shape: TypeAlias = list[Any]

AS_ASKED = given.asked("sum", None, None)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What made a call, which its op keeps, or None, where one was made after the other, for a group that this finds;
    and the shapes of the results.
    """

    call: weakref.ref[Multiplying] | None
    owner: Callable[[], object]
    shapes: Sequence[Shape]


class Run:
    """One operator: of x, w, the name of a group, and two scales or none."""

    def __init__(
        self,
        product: str,
        shape: Callable[[Tensor, Tensor, str], Shape],
        shape_of_rows: Callable[[Tensor, str], Shape] | None = None,
    ) -> None:
        """`product`: of `PRODUCTS`; `shape`: of the result, refuses what is no product; `shape_of_rows`: of those that
        came, where they are a second result.
        """
        self._product, self._shape, self._shape_of_rows = product, shape, shape_of_rows
        self._seen: dict[Hashable, _Seen] = {}

    def __call__(self, x: Tensor, w: Tensor, group_name: str, *scales: Tensor | None) -> Any:
        given = [one for one in scales if one is not None]
        key = (group_name, len(given), x.dtype, x.device, x.shape, w.dtype, w.device, w.shape)
        seen = self._seen.get(key)
        behind = groups.resolve(group_name)[1]
        if seen is None or behind is None or seen.owner() is not behind:
            return self._first(key, x, w, group_name, given)
        call = None if seen.call is None else seen.call()
        if seen.call is not None and (call is None or not call.serves(behind)):
            return self._first(key, x, w, group_name, given)
        if given:
            check_scales(self._product, x, w, given)
        rows, factor = operands(self._product, x, w, group_name)
        if call is None:
            return _shaped(self._one_after_the_other(rows, factor, group_name, given), seen.shapes, x)
        return _shaped(call((rows, factor, *given)), seen.shapes, x)

    def _first(self, key: Hashable, x: Tensor, w: Tensor, group_name: str, scales: Sequence[Tensor]) -> Any:
        """Of such tensors, as far as is known."""
        wanted = [self._shape(x, w, group_name)]
        if self._shape_of_rows is not None:
            wanted.append(self._shape_of_rows(x, group_name))
        check_scales(self._product, x, w, scales)
        rows, factor = operands(self._product, x, w, group_name)
        find = program if self._shape_of_rows is None else program_with_rows
        op = find(self._product, rows, factor, group_name)
        owner = groups.owner_of(group_name)
        if op is None:
            keep(self._seen, key, _Seen(None, owner, wanted), MAX_KEPT)
            return _shaped(self._one_after_the_other(rows, factor, group_name, scales), wanted, x)
        inputs = (rows, factor, *scales)
        call = op.bound(inputs, group_name, AS_ASKED)
        assert isinstance(call, Multiplying)
        if not call.compares:  # which ranks do on the way
            keep(self._seen, key, _Seen(weakref.ref(call), owner, wanted), MAX_KEPT)
        return _shaped(call(inputs), wanted, x)

    def _one_after_the_other(
        self, rows: Tensor, factor: Tensor, group_name: str, scales: Sequence[Tensor]
    ) -> list[Tensor]:
        if self._shape_of_rows is None:
            return [WAYS[self._product](rows, factor, group_name, *scales)]
        bring = collectives.all_gather if self._product == GATHER else collectives.all_to_all
        there = bring(rows, group=group_name)
        return [multiply_there(there, factor, *scales), there]


def _shaped(made: Sequence[Tensor], wanted: Sequence[Shape], x: Tensor) -> Any:
    """Matrices as x has its rows. No views, as torch sees it: of one that a Function returns it
    refuses changes in place, as of a bias that is added.
    """
    if x.dim() != 2:
        made = [_unsafe_view(one, shape) for one, shape in zip(made, wanted, strict=True)]
    return made[0] if len(made) == 1 else tuple(made)


_unsafe_view: Callable[[Tensor, list[Any]], Tensor] = torch.ops.aten._unsafe_view.default


def _replicated_matmul(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    shape = shapes.replicated(x, w)
    found: Tensor = _shaped([torch.mm(x.flatten(0, -2), w.t())], (shape,), x)
    return found


RUNS: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": Run(GATHER, shapes.gathered),
    "all_gather_matmul_rows": Run(GATHER, shapes.gathered, shapes.rows_of),
    "matmul_reduce_scatter": Run(SCATTER, shapes.scattered),
    "matmul_all_reduce": Run(REDUCE, shapes.reduced),
    "matmul_all_to_all": Run(EXCHANGE, shapes.exchanged),
    "all_to_all_matmul": Run(RETURN, shapes.returned),
    "all_to_all_matmul_rows": Run(RETURN, shapes.returned, shapes.columns_of),
    "replicated_matmul": _replicated_matmul,
}
"""By operator, what it does."""
