"""Turns a product and what travels for it into one after the other: the collective that a table chooses, and a product
of torch's.

Assumes matrices whose shapes fit. Does not choose; `auto` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from commdsl.runtime import collectives, menu
from commdsl.runtime.products import activated, multiplied
from commdsl.runtime.tensors import made_of

Tensor: TypeAlias = torch.Tensor
Way: TypeAlias = Callable[..., Tensor]


def gather_then_multiply(
    rows: Tensor,
    factor: Tensor,
    group_name: str | None = None,
    *scales: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """rows (n, K), factor (N, K) -> (P * n, N)."""
    return multiply(collectives.all_gather(rows, group_name), factor, *scales, bias=bias, activation=activation)


def multiply_then_reduce(
    rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """rows (n, K), factor (N, K) -> (n, N)."""
    found: Tensor = collectives.all_reduce(multiply(rows, factor, *scales), group=group_name)
    return found if bias is None else found.add_(bias)


def multiply_then_scatter(
    rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """rows (P * n, K), factor (N, K) -> (n, N)."""
    found: Tensor = collectives.reduce_scatter(multiply(rows, factor, *scales), group=group_name)
    return found if bias is None else found.add_(bias)


def multiply_then_exchange(
    rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """rows (n, K), factor (P * N, K) -> (P * n, N). As many products as ranks: what goes to one lies side by side."""
    ranks = menu.size(group_name)
    if scales or bias is not None:  # baddbmm may round what a bias is then added to
        biases = [None] * ranks if bias is None else bias.chunk(ranks)
        blocks = zip(factor.chunk(ranks), biases, strict=True)
        made = torch.cat([multiply(rows, one, *scales, bias=added) for one, added in blocks])
    else:
        made = torch.bmm(rows.expand(ranks, -1, -1), factor.unflatten(0, (ranks, -1)).mT).flatten(0, 1)
    found: Tensor = collectives.all_to_all(made, group=group_name)
    return found


def exchange_then_multiply(
    rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """rows (P * n, K), factor (P, N, K) -> (n, N)."""
    return multiply_there(collectives.all_to_all(rows, group=group_name), factor, *scales, bias=bias)


def multiply_there(there: Tensor, factor: Tensor, *scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """The rows of all ranks, or columns of all ranks by a factor for each: (P * n, K), (P, N, K) -> (n, N)."""
    if factor.dim() == 3:
        there, factor = side_by_side(there, len(factor)), factor.movedim(0, 1).flatten(1)
    return multiply(there, factor, *scales, bias=bias)


def side_by_side(blocks: Tensor, ranks: int) -> Tensor:
    """(P * n, ..., K) -> (n, ..., P * K): what came from each rank, as columns."""
    rows, *between, columns = blocks.shape
    apart = blocks.reshape(ranks, rows // ranks, *between, columns)
    return apart.movedim(0, -2).reshape(rows // ranks, *between, ranks * columns)


def multiply(
    rows: Tensor, factor: Tensor, *scales: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """rows (n, K), factor (N, K) -> (n, N); `scales` of float8, of both. Rounded once, behind what follows."""
    if not scales and activation is None:
        return torch.mm(rows, factor.t()) if bias is None else torch.addmm(bias, rows, factor.t())
    made = made_of(rows.dtype)
    if bias is None and activation is None:
        return multiplied(rows, factor, made, scales)
    wide = multiplied(rows, factor, torch.promote_types(made, torch.float32), scales)
    if bias is not None:
        wide += bias
    return activated(wide, activation).to(made)


WAYS: dict[str, Way] = {
    "all_gather_matmul": gather_then_multiply,
    "matmul_reduce_scatter": multiply_then_scatter,
    "matmul_all_reduce": multiply_then_reduce,
    "matmul_all_to_all": multiply_then_exchange,
    "all_to_all_matmul": exchange_then_multiply,
}
"""By operator of `PRODUCTS`."""
