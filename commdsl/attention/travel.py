"""Turns a rank's rows into tensors that travel, and what comes back into rows: as `pieces` lays them out.

Assumes rows first: (rows, batch, heads, dim), contiguous. Does not look at values: rows that are empty hold anything.
"""

from __future__ import annotations

import torch

from commdsl.attention.planned import Plan
from commdsl.runtime.errors import TensorError


def flat(one: torch.Tensor) -> torch.Tensor:
    """(rows, heads, dim) of (..., batch, heads, dim): a batch is more heads."""
    batch, heads, dim = one.shape[-3:]
    return one.view(-1, batch * heads, dim)


def travelling(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The tensor itself where no row is empty, else a copy with empty rows."""
    rows = plan.visits.layout.all_rows
    if len(x) == rows:
        return x
    padded = x.new_empty((rows, *x.shape[1:]))
    padded[plan.visits.home] = x
    return padded


def home(one: torch.Tensor, like: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A rank's own rows of what came back, in the dtype of what it is the gradient of."""
    return one[plan.visits.home].to(like.dtype)


def heads_travelling(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """(blocks, rows, batch, heads of a block, dim): block d has the heads of rank d of a group."""
    layout = plan.visits.layout
    rows, batch, heads, dim = x.shape
    if heads % layout.chunks:
        raise TensorError(f"{heads} heads are not a multiple of the {layout.chunks} ranks that share them")
    each = heads // layout.chunks
    blocks = x.new_empty((layout.chunks, layout.rows, batch, each, dim))
    blocks[:, plan.visits.home] = x.view(rows, batch, layout.chunks, each, dim).permute(2, 0, 1, 3, 4)
    return blocks


def heads_home(one: torch.Tensor, like: torch.Tensor, plan: Plan) -> torch.Tensor:
    """As `home`, of blocks of heads."""
    return one[:, plan.visits.home].permute(1, 2, 0, 3, 4).to(like.dtype).reshape(like.shape)
