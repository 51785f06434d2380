"""Turns the gradient of a result of an operator of ours into those of its rows and weights: in operators of ours, and
products of torch's.

Assumes what `keep` has kept. Does not register anything; `functional` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from commdsl.overlap.sequence import side_by_side
from commdsl.runtime import menu

Tensor: TypeAlias = torch.Tensor
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None]
"""Of x and of w."""


def padded(back: Callable[..., tuple[Any, ...]], ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    """None for all inputs but tensors: scales, too, are none where there are gradients."""
    return (*back(ctx, *gradients), *(None for _ in range(ctx.others)))


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Each for the gradient of the other alone."""
    x, w, ctx.group_name, *scales = inputs
    ctx.others = 1 + len(scales)
    of_x, of_w, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if of_w else None, w if of_x else None)


def keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """As `keep`, and of x the rows of all ranks."""
    made, rows = output
    keep(ctx, (rows, *inputs[1:]), made)
    ctx.set_materialize_grads(False)


def gather_back(ctx: Any, gradient: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    of_x = of_w = None
    if w is not None:
        of_x = torch.ops.commdsl_overlap.matmul_reduce_scatter(gradient, w.t(), ctx.group_name)
    if x is not None:
        of_w = _of_weights(gradient, _all_rows(x, ctx.group_name))
    return of_x, of_w


def return_back(ctx: Any, gradient: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    of_x = of_w = None
    if w is not None:
        of_x = torch.ops.commdsl_overlap.matmul_all_to_all(gradient, w.t(), ctx.group_name)
    if x is not None:
        of_w = _of_weights(gradient, _all_columns(x, ctx.group_name))
    return of_x, of_w


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
    of_results: Gradients,
    kept: tuple[Tensor | None, Tensor | None],
    operator: str,
    collective: str,
) -> Gradients:
    """Of the rows that were multiplied, and w; by what brings rows back multiplied, and what as they are."""
    (gradient, of_rows), (rows, w) = of_results, kept
    of_x = of_w = None
    if gradient is not None and w is not None:
        of_x = getattr(torch.ops.commdsl_overlap, operator)(gradient, w.t(), ctx.group_name)
    if gradient is not None and rows is not None:
        of_w = _of_weights(gradient, rows)
    if of_rows is not None and ctx.needs_input_grad[0]:
        back = getattr(torch.ops.commdsl_collectives, collective)(of_rows.contiguous(), ctx.group_name)
        of_x = back if of_x is None else of_x + back
    return of_x, of_w


def scatter_back(ctx: Any, gradient: Tensor) -> Gradients:
    """The gradients of all ranks are gathered once: w has them from what x needs them for."""
    x, w = ctx.saved_tensors
    if w is None:
        return None, _of_weights(_all_rows(gradient, ctx.group_name), x)
    if x is None:
        return torch.ops.commdsl_overlap.all_gather_matmul(gradient, w.t(), ctx.group_name), None
    of_x, rows = torch.ops.commdsl_overlap.all_gather_matmul_rows(gradient, w.t(), ctx.group_name)
    return of_x, _of_weights(rows, x)


def reduce_back(ctx: Any, gradient: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    of_x = None if w is None else torch.ops.commdsl_overlap.replicated_matmul(gradient, w.t(), ctx.group_name)
    return of_x, None if x is None else _of_weights(gradient, x)


def exchange_back(ctx: Any, gradient: Tensor) -> Gradients:
    """The gradient of all columns comes back once, for both."""
    x, w = ctx.saved_tensors
    if w is None:
        return None, _of_weights(_all_columns(gradient, ctx.group_name), x)
    if x is None:
        return torch.ops.commdsl_overlap.all_to_all_matmul(gradient, w.t(), ctx.group_name), None
    of_x, columns = torch.ops.commdsl_overlap.all_to_all_matmul_rows(gradient, w.t(), ctx.group_name)
    return of_x, _of_weights(side_by_side(columns, menu.size(ctx.group_name)), x)


def replicated_back(ctx: Any, gradient: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    of_x = None if w is None else torch.ops.commdsl_overlap.matmul_all_reduce(gradient, w.t(), ctx.group_name)
    return of_x, None if x is None else _of_weights(gradient, x)


def _all_rows(x: Tensor, group_name: str) -> Tensor:
    rows: Tensor = torch.ops.commdsl_collectives.all_gather(x.contiguous(), group_name)
    return rows


def _all_columns(x: Tensor, group_name: str) -> Tensor:
    """Of this rank's rows: (P * n, ..., K) -> (n, ..., P * K)."""
    return side_by_side(torch.ops.commdsl_collectives.all_to_all(x.contiguous(), group_name), menu.size(group_name))


def _of_weights(gradient: Tensor, rows: Tensor) -> Tensor:
    return torch.mm(gradient.flatten(0, -2).t(), rows.flatten(0, -2))
