"""Turns a product and what travels for it into one after the other: the collective that a table chooses, and a product
of torch's.

Assumes matrices whose shapes fit. Does not choose; `auto` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch

from commdsl.overlap.epilogue import NONE, Epilogue
from commdsl.runtime import collectives, menu
from commdsl.runtime.products import activated, multiplied
from commdsl.runtime.tensors import made_of

Tensor: TypeAlias = torch.Tensor
Way: TypeAlias = Callable[..., Tensor]


def gather_then_multiply(rows: Tensor, factor: Tensor, group_name: str | None = None, end: Epilogue = NONE) -> Tensor:
    """rows (n, K), factor (N, K) -> (P * n, N)."""
    return multiply(collectives.all_gather(rows, group_name), factor, end)


def multiply_then_reduce(rows: Tensor, factor: Tensor, group_name: str | None = None, end: Epilogue = NONE) -> Tensor:
    """rows (n, K), factor (N, K) -> (n, N)."""
    return _added(collectives.all_reduce(multiply(rows, factor, end.of_products), group=group_name), end)


def multiply_then_scatter(rows: Tensor, factor: Tensor, group_name: str | None = None, end: Epilogue = NONE) -> Tensor:
    """rows (P * n, K), factor (N, K) -> (n, N)."""
    return _added(collectives.reduce_scatter(multiply(rows, factor, end.of_products), group=group_name), end)


def _added(found: Tensor, end: Epilogue) -> Tensor:
    """To sums over the ranks what is in each of them once, one after the other."""
    for one in (end.bias, end.matrix):
        if one is not None:
            found += one
    return found


def multiply_then_exchange(rows: Tensor, factor: Tensor, group_name: str | None = None, end: Epilogue = NONE) -> Tensor:
    """rows (n, K), factor (P * N, K) -> (P * n, N). As many products as ranks: what goes to one lies side by side."""
    ranks = menu.size(group_name)
    if end.is_plain:
        made = torch.bmm(rows.expand(ranks, -1, -1), factor.unflatten(0, (ranks, -1)).mT).flatten(0, 1)
    else:  # baddbmm may round what a bias is then added to
        biases = [None] * ranks if end.bias is None else end.bias.chunk(ranks)
        blocks = zip(factor.chunk(ranks), biases, strict=True)
        made = torch.cat([multiply(rows, one, replace(end, bias=added)) for one, added in blocks])
    found: Tensor = collectives.all_to_all(made, group=group_name)
    return found


def exchange_then_multiply(rows: Tensor, factor: Tensor, group_name: str | None = None, end: Epilogue = NONE) -> Tensor:
    """rows (P * n, K), factor (P, N, K) -> (n, N)."""
    return multiply_there(collectives.all_to_all(rows, group=group_name), factor, end)


def multiply_there(there: Tensor, factor: Tensor, end: Epilogue = NONE) -> Tensor:
    """The rows of all ranks, or columns of all ranks by a factor for each: (P * n, K), (P, N, K) -> (n, N)."""
    if factor.dim() == 3:
        there, factor = side_by_side(there, len(factor)), factor.movedim(0, 1).flatten(1)
    return multiply(there, factor, end)


def side_by_side(blocks: Tensor, ranks: int) -> Tensor:
    """(P * n, ..., K) -> (n, ..., P * K): what came from each rank, as columns."""
    rows, *between, columns = blocks.shape
    apart = blocks.reshape(ranks, rows // ranks, *between, columns)
    return apart.movedim(0, -2).reshape(rows // ranks, *between, ranks * columns)


def multiply(rows: Tensor, factor: Tensor, end: Epilogue = NONE) -> Tensor:
    """rows (n, K), factor (N, K) -> (n, N). Rounded once, behind what follows."""
    bias, residual, scales, activation = end.bias, end.matrix, end.scales, end.activation
    if not scales and activation is None and (bias is None or residual is None):
        added = residual if bias is None else bias
        return torch.mm(rows, factor.t()) if added is None else torch.addmm(added, rows, factor.t())
    made = made_of(rows.dtype)
    if bias is None and residual is None and activation is None:
        return multiplied(rows, factor, made, scales)
    wide = multiplied(rows, factor, torch.promote_types(made, torch.float32), scales)
    if bias is not None:
        wide += bias
    wide = activated(wide, activation)
    return (wide if residual is None else wide.add_(residual)).to(made)


WAYS: dict[str, Way] = {
    "all_gather_matmul": gather_then_multiply,
    "matmul_reduce_scatter": multiply_then_scatter,
    "matmul_all_reduce": multiply_then_reduce,
    "matmul_all_to_all": multiply_then_exchange,
    "all_to_all_matmul": exchange_then_multiply,
}
"""By operator of `PRODUCTS`."""
