"""Turns linear layers into ones whose weights lie on all ranks: tensor parallelism, between activations whose rows lie
on all ranks, too (sequence parallelism), or that all ranks have alike.

Assumes that every rank makes the same layers and calls, seeded alike, and that rows are dimension 0 of what they are
called with. Does not move anything itself; `functional` does.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from commdsl.machine.errors import ArgumentError
from commdsl.overlap.functional import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    replicated_matmul,
)
from commdsl.runtime import collectives, groups, menu


class ColumnParallelLinear(torch.nn.Linear):
    """From this rank's rows to all rows of this rank's out_features / P: (n, ..., in) -> (P * n, ..., out / P). Without
    `sequence_parallel` every rank has all rows to begin with: (n, ..., in) -> (n, ..., out / P).

    `weight` (out / P, in) and `bias` (out / P,) are this rank's block of those of a torch.nn.Linear, drawn as large as
    those. Raises ArgumentError where P does not divide out_features, and for `keep_rows` where none are gathered.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = True,
        keep_rows: bool = False,
        group: Any = None,
        **made: Any,
    ) -> None:
        """`keep_rows`: as `all_gather_matmul` takes it; `made`: device and dtype, as torch.nn.Linear takes them."""
        self.group_name, self.sequence_parallel = groups.name_of(group), sequence_parallel
        self.keep_rows = keep_rows
        if keep_rows and not sequence_parallel:
            raise ArgumentError("`keep_rows` keeps rows that are gathered: without `sequence_parallel` none are")
        super().__init__(in_features, _share("out_features", out_features, self.group_name), bias, **made)

    def reset_parameters(self) -> None:
        _draw_block(self.weight, self.in_features, self.group_name)
        if self.bias is not None:
            _draw_block(self.bias, self.in_features, self.group_name)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_said(self)}, keep_rows={self.keep_rows}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"bias": self.bias, "group": self.group_name}
        if self.sequence_parallel:
            return all_gather_matmul(x, self.weight, keep_rows=self.keep_rows, **given)
        return replicated_matmul(x, self.weight, **given)


class RowParallelLinear(torch.nn.Linear):
    """From all rows of this rank's in_features / P to its rows of the sum: (P * n, ..., in / P) -> (n, ..., out).
    Without `sequence_parallel` every rank has the whole sum: (n, ..., in / P) -> (n, ..., out).

    `weight` (out, in / P) is this rank's block of columns of a torch.nn.Linear's, drawn as large as those. `bias`
    (out / P,) is this rank's block of the bias, and gathered in each call: a gradient of all rows comes back to it, and
    no two ranks have the same number to keep alike. Without `sequence_parallel` `bias` (out,) is the whole, whose
    gradient all ranks have alike. Either begins as zero. Raises ArgumentError where P does not divide in_features, and
    with a bias out_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = True,
        group: Any = None,
        **made: Any,
    ) -> None:
        """`made`: device and dtype, as torch.nn.Linear takes them."""
        self.group_name, self.sequence_parallel = groups.name_of(group), sequence_parallel
        super().__init__(_share("in_features", in_features, self.group_name), out_features, bias, **made)
        if bias and sequence_parallel:
            block = _share("out_features", out_features, self.group_name)
            self.bias = torch.nn.Parameter(torch.zeros(block, **made))

    def reset_parameters(self) -> None:
        _draw_block(self.weight, self.in_features * menu.size(self.group_name), self.group_name)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_said(self)}"

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`residual`, of the shape of the result, is added to it, in the kernel that makes it."""
        bias: torch.Tensor | None = self.bias
        if not self.sequence_parallel:
            return matmul_all_reduce(x, self.weight, bias=bias, residual=residual, group=self.group_name)
        if bias is not None:
            bias = collectives.all_gather(bias, self.group_name)
        return matmul_reduce_scatter(x, self.weight, bias=bias, residual=residual, group=self.group_name)


def _draw_block(one: torch.Tensor, features: int, group_name: str) -> None:
    """As torch.nn.Linear draws for sums of so many features, the blocks of all ranks one after the other, of which this
    rank's is kept: ranks that are seeded alike, as they are unless told otherwise, have different blocks, and draw the
    same afterwards.
    """
    own, bound = groups.own_rank(group_name), 1 / math.sqrt(max(features, 1))
    for rank in range(menu.size(group_name)):
        torch.nn.init.uniform_(one if rank == own else torch.empty_like(one), -bound, bound)


def _said(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    ranks = groups.size_of(layer.group_name) or "unknown"  # in a process that has no such group
    return f"ranks={ranks}, sequence_parallel={layer.sequence_parallel}"


def _share(name: str, features: int, group_name: str) -> int:
    ranks = menu.size(group_name)
    if features % ranks:
        raise ArgumentError(f"{ranks} ranks share `{name}` equally: {features} is no multiple of {ranks}")
    return features // ranks
