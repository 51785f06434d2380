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

from commdsl.ir.functions import GATED
from commdsl.machine.errors import ArgumentError
from commdsl.overlap import shapes
from commdsl.overlap.epilogue import Epilogue
from commdsl.overlap.programs import (
    EXCHANGE,
    GATHER,
    REDUCE,
    RETURN,
    SCATTER,
    operands,
    program,
    program_with_rows,
)
from commdsl.overlap.sequence import WAYS, multiply, multiply_there
from commdsl.runtime import collectives, given, groups
from commdsl.runtime.calls import MAX_KEPT
from commdsl.runtime.kept import keep
from commdsl.runtime.products import Multiplying
from commdsl.runtime.tensors import check_scales, made_of

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
    """One operator: of x, w, the name of a group, and what its products end with."""

    def __init__(
        self,
        product: str,
        shape: Callable[[Tensor, Tensor, str], Shape],
        shape_of_rows: Callable[[Tensor, str], Shape] | None = None,
    ) -> None:
        """`product`: of `PRODUCTS`; `shape`: of the product, refuses what is none; `shape_of_rows`: of those that came,
        where they are a second result.
        """
        self._product, self._shape, self._shape_of_rows = product, shape, shape_of_rows
        self._seen: dict[Hashable, _Seen] = {}

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        group_name: str,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale_x: Tensor | None = None,
        scale_w: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        scales: tuple[Tensor, ...] = ()
        if scale_x is not None or scale_w is not None:
            scales = tuple(one for one in (scale_x, scale_w) if one is not None)
        added = (
            None if bias is None else (bias.dtype, bias.device, bias.shape),
            None if residual is None else (residual.dtype, residual.device, residual.shape),
        )
        key = (group_name, len(scales), x.dtype, x.device, x.shape, w.dtype, w.device, w.shape, added, activation)
        seen = self._seen.get(key)
        behind = groups.resolve(group_name)[1]
        if seen is None or behind is None or seen.owner() is not behind:
            return self._first(key, x, w, group_name, Epilogue(bias, residual, scales, activation))
        call = None if seen.call is None else seen.call()
        if seen.call is not None and (call is None or not call.serves(behind)):
            return self._first(key, x, w, group_name, Epilogue(bias, residual, scales, activation))
        if scales:
            check_scales(self._product, x, w, scales)
        rows, factor = operands(self._product, x, w, group_name)
        if call is None:
            found = self._one_after_the_other(rows, factor, group_name, Epilogue(bias, residual, scales, activation))
            return _shaped(found, seen.shapes, x)
        inputs: tuple[Tensor, ...] = (rows, factor, *scales)
        if bias is not None or residual is not None:
            inputs = (rows, factor, *Epilogue(bias, residual, scales).tensors)
        return _shaped(call(inputs), seen.shapes, x)

    def _wanted(self, x: Tensor, w: Tensor, group_name: str, epilogue: Epilogue) -> list[Shape]:
        """The shapes of the results. Refuses what is no product, and what none ends with."""
        made = self._shape(x, w, group_name)
        if epilogue.activation is not None and self._shape_of_rows is not None:
            raise ArgumentError(f"`{self._product}` that returns rows takes no activation")
        shapes.check_epilogue(self._product, x, w, made, epilogue)
        if epilogue.activation == GATED:
            made[-1] = made[-1] // 2
        return [made] if self._shape_of_rows is None else [made, self._shape_of_rows(x, group_name)]

    def fake(
        self,
        x: Tensor,
        w: Tensor,
        group_name: str,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale_x: Tensor | None = None,
        scale_w: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        """What a call gives, of tensors without data."""
        shape, *of_rows = self._wanted(x, w, group_name, Epilogue(bias, residual, (), activation))
        made = x.new_empty(shape, dtype=made_of(x.dtype))
        return (made, x.new_empty(of_rows[0])) if of_rows else made

    def _first(self, key: Hashable, x: Tensor, w: Tensor, group_name: str, epilogue: Epilogue) -> Any:
        """Of such tensors, as far as is known."""
        wanted = self._wanted(x, w, group_name, epilogue)
        check_scales(self._product, x, w, epilogue.scales)
        rows, factor = operands(self._product, x, w, group_name)
        find = program if self._shape_of_rows is None else program_with_rows
        op = find(self._product, rows, factor, group_name, epilogue.params)
        owner = groups.owner_of(group_name)
        if op is None:
            keep(self._seen, key, _Seen(None, owner, wanted), MAX_KEPT)
            return _shaped(self._one_after_the_other(rows, factor, group_name, epilogue), wanted, x)
        inputs = (rows, factor, *epilogue.tensors)
        call = op.bound(inputs, group_name, AS_ASKED)
        assert isinstance(call, Multiplying)
        if not call.compares:  # which ranks do on the way
            keep(self._seen, key, _Seen(weakref.ref(call), owner, wanted), MAX_KEPT)
        return _shaped(call(inputs), wanted, x)

    def _one_after_the_other(self, rows: Tensor, factor: Tensor, group_name: str, epilogue: Epilogue) -> list[Tensor]:
        if self._shape_of_rows is None:
            return [WAYS[self._product](rows, factor, group_name, epilogue)]
        bring: dict[bool, Callable[..., Any]] = {True: collectives.all_gather, False: collectives.all_to_all}
        there = bring[self._product == GATHER](rows, group=group_name)
        return [multiply_there(there, factor, epilogue), there]


def _shaped(made: Sequence[Tensor], wanted: Sequence[Shape], x: Tensor) -> Any:
    """Matrices as x has its rows. No views, as torch sees it: of one that a Function returns it
    refuses changes in place, as of a bias that is added.
    """
    if x.dim() != 2:
        made = [_unsafe_view(one, shape) for one, shape in zip(made, wanted, strict=True)]
    return made[0] if len(made) == 1 else tuple(made)


_unsafe_view: Callable[[Tensor, list[Any]], Tensor] = torch.ops.aten._unsafe_view.default


class Replicated:
    """The operator to which nothing travels."""

    def __call__(self, x: Tensor, w: Tensor, group_name: str, bias: Tensor | None = None) -> Tensor:
        shape = self._shape(x, w, bias)
        found: Tensor = _shaped([multiply(x.flatten(0, -2), w, Epilogue(bias))], (shape,), x)
        return found

    def fake(self, x: Tensor, w: Tensor, group_name: str, bias: Tensor | None = None) -> Tensor:
        """As that of `Run`."""
        return x.new_empty(self._shape(x, w, bias))

    def _shape(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Shape:
        shape = shapes.replicated(x, w)
        shapes.check_epilogue("replicated_matmul", x, w, shape, Epilogue(bias))
        return shape


RUNS: dict[str, Run | Replicated] = {
    "all_gather_matmul": Run(GATHER, shapes.gathered),
    "all_gather_matmul_rows": Run(GATHER, shapes.gathered, shapes.rows_of),
    "matmul_reduce_scatter": Run(SCATTER, shapes.scattered),
    "matmul_all_reduce": Run(REDUCE, shapes.reduced),
    "matmul_all_to_all": Run(EXCHANGE, shapes.exchanged),
    "all_to_all_matmul": Run(RETURN, shapes.returned),
    "all_to_all_matmul_rows": Run(RETURN, shapes.returned, shapes.columns_of),
    "replicated_matmul": Replicated(),
}
"""By operator, what it does."""
