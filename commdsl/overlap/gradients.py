"""Turns the gradient of a result of an operator of ours into those of its rows, weights and bias: in operators of ours,
and products and sums of torch's.

Assumes what `keep` has kept. Does not register anything; `functional` does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import torch

from commdsl.overlap.sequence import side_by_side
from commdsl.runtime import collective_ops, menu
from commdsl.runtime.errors import GradientError
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, of w and of a bias."""

BIAS, RESIDUAL = 3, 4
"""Where these are among the inputs of an operator, which may end before them. Nothing behind them has a gradient."""


@reported(lambda _, ctx, *others: ctx.group_name, lambda *_: "the gradient of a product")
def padded(back: Callable[..., Gradients], ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    """None for all inputs but tensors: scales, too, are none where there are gradients. A residual has that of the
    result to which it is added.
    """
    of_x, of_w, of_bias = back(ctx, *gradients)
    beside = [of_bias, gradients[0] if _is_needed(ctx, RESIDUAL) else None]
    inputs = len(ctx.needs_input_grad)
    return of_x, of_w, None, *(*beside, *[None] * inputs)[: inputs - BIAS]


def _is_needed(ctx: Any, at: int) -> bool:
    """The gradient of an input that may not be there."""
    return True in ctx.needs_input_grad[at : at + 1]


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Each for the gradient of the other alone."""
    x, w, ctx.group_name, *beside = inputs
    if any(isinstance(one, str) for one in beside):
        raise GradientError("an activation has a gradient where torch makes it: call the operator without it first")
    of_x, of_w, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if of_w else None, w if of_x else None)


def keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """As `keep`, and of x the rows of all ranks."""
    made, rows = output
    keep(ctx, (rows, *inputs[1:]), made)
    ctx.set_materialize_grads(False)


class Direct(torch.autograd.Function):
    """A call of an operator that has gradients, where torch's dispatcher has nothing else to do: it takes the host as
    long as the call does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        group_name: str,
        bias: Tensor | None,
        residual: Tensor | None,
        run: Callable[..., Any],
        ways: tuple[Callable[..., Gradients], Callable[..., None]],
        call: Callable[..., Any],
    ) -> Any:
        """`run` makes the call; `ways`: of its gradients, and to keep what they need; `call` makes calls in them."""
        with torch._C._AutoDispatchBelowAutograd():  # nothing in it has a gradient of its own
            made = run(x, w, group_name, bias) if residual is None else run(x, w, group_name, bias, residual)
        (ctx.back, keeps), ctx.call = ways, call
        keeps(ctx, (x, w, group_name, bias, residual), made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return padded(ctx.back, ctx, *gradients)


def gather_back(ctx: Any, gradient: Tensor) -> Gradients:
    return _brought_back(ctx, gradient, "matmul_reduce_scatter", _all_rows)


def return_back(ctx: Any, gradient: Tensor) -> Gradients:
    return _brought_back(ctx, gradient, "matmul_all_to_all", _all_columns)


def _brought_back(ctx: Any, gradient: Tensor, operator: str, brought: Callable[[Any, Tensor], Tensor]) -> Gradients:
    """Of an operator that multiplies what `brought` makes of x; `operator` multiplies on the way back."""
    x, w = ctx.saved_tensors
    of_x = None if w is None else _called(ctx, operator, gradient, w.t())
    return of_x, None if x is None else _of_weights(gradient, brought(ctx, x)), _of_bias(ctx, gradient)


def reduce_back(ctx: Any, gradient: Tensor) -> Gradients:
    """A bias that all ranks have alike is in all rows that they have alike."""
    x, w = ctx.saved_tensors
    of_x = None if w is None else _called(ctx, "replicated_matmul", gradient, w.t())
    of_w = None
    if x is not None:
        of_w = _of_both(ctx, gradient, x) if torch.is_grad_enabled() else _of_weights(gradient, x)
    return of_x, of_w, _of_bias(ctx, gradient)


def replicated_back(ctx: Any, gradient: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    of_x = None if w is None else _called(ctx, "matmul_all_reduce", gradient, w.t())
    of_w = None
    if x is not None:
        of_w = _of_both(ctx, x, gradient).t() if torch.is_grad_enabled() else _of_weights(gradient, x)
    return of_x, of_w, _of_bias(ctx, gradient)


def _of_both(ctx: Any, shared: Tensor, own: Tensor) -> Tensor:
    """Rows that are the same on all ranks, transposed, times this rank's own, where this is to have a gradient: that of
    what is shared comes from all ranks.
    """
    rows, factor = (_matrix(one).t() for one in (shared, own))
    made: Tensor = _called(ctx, "replicated_matmul", rows, factor)
    return made


def rows_back(ctx: Any, gradient: Tensor | None, of_rows: Tensor | None) -> Gradients:
    """Of what gathers. None: nothing is made of that result."""
    rows, w = ctx.saved_tensors
    return _with_rows_back(ctx, (gradient, of_rows), (rows, w), "matmul_reduce_scatter", "reduce_scatter")


def return_rows_back(ctx: Any, gradient: Tensor | None, of_rows: Tensor | None) -> Gradients:
    columns, w = ctx.saved_tensors
    rows = None if columns is None else side_by_side(columns, menu.size(ctx.group_name))
    return _with_rows_back(ctx, (gradient, of_rows), (rows, w), "matmul_all_to_all", "all_to_all")


def _with_rows_back(
    ctx: Any,
    of_results: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor | None, Tensor | None],
    operator: str,
    collective: str,
) -> Gradients:
    """Of the rows that were multiplied, w and a bias; by what brings rows back multiplied, and what as they are."""
    (gradient, of_rows), (rows, w) = of_results, kept
    of_x = of_w = None
    if gradient is not None and w is not None:
        of_x = _called(ctx, operator, gradient, w.t())
    if gradient is not None and rows is not None:
        of_w = _of_weights(gradient, rows)
    if of_rows is not None and ctx.needs_input_grad[0]:
        back = _moved(ctx, collective, of_rows)
        of_x = back if of_x is None else of_x + back
    return of_x, of_w, None if gradient is None else _of_bias(ctx, gradient)


def scatter_back(ctx: Any, gradient: Tensor) -> Gradients:
    x, _ = ctx.saved_tensors
    of_x, there = _sent_back(ctx, gradient, ("all_gather_matmul", "all_gather"), x is not None)
    return of_x, None if there is None else _of_weights(there, x), _of_bias(ctx, gradient)


def exchange_back(ctx: Any, gradient: Tensor) -> Gradients:
    """A bias is in columns of this rank's rows that all ranks have."""
    x, _ = ctx.saved_tensors
    has_bias = _is_needed(ctx, BIAS)
    of_x, there = _sent_back(ctx, gradient, ("all_to_all_matmul", "all_to_all"), x is not None or has_bias)
    if there is None:
        return of_x, None, None
    columns = side_by_side(there, menu.size(ctx.group_name))
    return of_x, None if x is None else _of_weights(columns, x), _of_bias(ctx, columns)


def _sent_back(
    ctx: Any, gradient: Tensor, ways: tuple[str, str], is_needed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Of x, and the gradients of all ranks where these are needed, too: they come once. `ways`: the operator that
    brings them multiplied, the collective that brings them as they are.
    """
    (operator, collective), (_, w) = ways, ctx.saved_tensors
    if w is None:
        return None, _moved(ctx, collective, gradient) if is_needed else None
    if not is_needed:
        return _called(ctx, operator, gradient, w.t()), None
    of_x, there = _called(ctx, f"{operator}_rows", gradient, w.t())
    return of_x, there


def _called(ctx: Any, operator: str, x: Tensor, w: Tensor) -> Any:
    """By torch's dispatcher, where that called what this is a gradient of."""
    if hasattr(ctx, "call"):
        return ctx.call(operator, x, w, ctx.group_name)
    return getattr(torch.ops.commdsl_overlap, operator)(x, w, ctx.group_name)


def _moved(ctx: Any, collective: str, x: Tensor) -> Tensor:
    made: Tensor = getattr(collective_ops.ops(x), collective)(x.contiguous(), ctx.group_name)
    return made


def _all_rows(ctx: Any, x: Tensor) -> Tensor:
    return _moved(ctx, "all_gather", x)


def _all_columns(ctx: Any, x: Tensor) -> Tensor:
    """Of this rank's rows: (P * n, ..., K) -> (n, ..., P * K)."""
    return side_by_side(_moved(ctx, "all_to_all", x), menu.size(ctx.group_name))


def _of_weights(gradient: Tensor, rows: Tensor) -> Tensor:
    return torch.mm(_matrix(gradient).t(), _matrix(rows))


def _of_bias(ctx: Any, gradient: Tensor) -> Tensor | None:
    """Of what is in each of these rows: summed in float32 or wider, rounded once."""
    if not _is_needed(ctx, BIAS):
        return None
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return _matrix(gradient).sum(0, dtype=wide).to(gradient.dtype)


def _matrix(rows: Tensor) -> Tensor:
    """By a word that torch knows, too, where autograd makes several gradients at once: `flatten` is none."""
    return rows if rows.dim() == 2 else rows.reshape(prod(rows.shape[:-1]), rows.shape[-1])
