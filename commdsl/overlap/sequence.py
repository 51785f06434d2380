"""Turns a product and what travels for it into one after the other: the collective that a table chooses, and a product
of torch's.

Assumes matrices whose shapes fit. Does not choose; `auto` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from commdsl.runtime import collectives, menu
from commdsl.runtime.products import multiplied
from commdsl.runtime.tensors import made_of

Tensor: TypeAlias = torch.Tensor
Way: TypeAlias = Callable[..., Tensor]


def gather_then_multiply(rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor) -> Tensor:
    """rows (n, K), factor (N, K) -> (P * n, N)."""
    return multiply(collectives.all_gather(rows, group_name), factor, *scales)


def multiply_then_reduce(rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor) -> Tensor:
    """rows (n, K), factor (N, K) -> (n, N)."""
    found: Tensor = collectives.all_reduce(multiply(rows, factor, *scales), group=group_name)
    return found


def multiply_then_scatter(rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor) -> Tensor:
    """rows (P * n, K), factor (N, K) -> (n, N)."""
    found: Tensor = collectives.reduce_scatter(multiply(rows, factor, *scales), group=group_name)
    return found


def multiply_then_exchange(rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor) -> Tensor:
    """rows (n, K), factor (P * N, K) -> (P * n, N). As many products as ranks: what goes to one lies side by side."""
    ranks = menu.size(group_name)
    if scales:
        made = torch.cat([multiply(rows, one, *scales) for one in factor.chunk(ranks)])
    else:
        made = torch.bmm(rows.expand(ranks, -1, -1), factor.unflatten(0, (ranks, -1)).mT).flatten(0, 1)
    found: Tensor = collectives.all_to_all(made, group=group_name)
    return found


def exchange_then_multiply(rows: Tensor, factor: Tensor, group_name: str | None = None, *scales: Tensor) -> Tensor:
    """rows (P * n, K), factor (P, N, K) -> (n, N)."""
    return multiply_there(collectives.all_to_all(rows, group=group_name), factor, *scales)


def multiply_there(there: Tensor, factor: Tensor, *scales: Tensor) -> Tensor:
    """The rows of all ranks, or columns of all ranks by a factor for each: (P * n, K), (P, N, K) -> (n, N)."""
    if factor.dim() == 3:
        there, factor = side_by_side(there, len(factor)), factor.movedim(0, 1).flatten(1)
    return multiply(there, factor, *scales)


def side_by_side(blocks: Tensor, ranks: int) -> Tensor:
    """(P * n, ..., K) -> (n, ..., P * K): what came from each rank, as columns."""
    rows, *between, columns = blocks.shape
    apart = blocks.reshape(ranks, rows // ranks, *between, columns)
    return apart.movedim(0, -2).reshape(rows // ranks, *between, ranks * columns)


def multiply(rows: Tensor, factor: Tensor, *scales: Tensor) -> Tensor:
    """rows (n, K), factor (N, K) -> (n, N); `scales` of float8, of both."""
    if not scales:
        return torch.mm(rows, factor.t())
    return multiplied(rows, factor, made_of(rows.dtype), scales)


WAYS: dict[str, Way] = {
    "all_gather_matmul": gather_then_multiply,
    "matmul_reduce_scatter": multiply_then_scatter,
    "matmul_all_reduce": multiply_then_reduce,
    "matmul_all_to_all": multiply_then_exchange,
    "all_to_all_matmul": exchange_then_multiply,
}
"""By operator of `PRODUCTS`."""
