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
from commdsl.overlap.sharded import ShardedModule
from commdsl.overlap.splits import Split, split_of
from commdsl.runtime import collectives, given, groups, menu
from commdsl.runtime.reporting import reported


class ColumnParallelLinear(ShardedModule, torch.nn.Linear):
    """From this rank's rows to all rows of this rank's out_features / P: (n, ..., in) -> (P * n, ..., out / P). Without
    `sequence_parallel` every rank has all rows to begin with: (n, ..., in) -> (n, ..., out / P).

    `weight` (out / P, in) and `bias` (out / P,) are this rank's block of those of a torch.nn.Linear, and drawn as its
    block of those. `state_dict()` has the whole of both, as DTensors with placement Shard(0). With `parts=2` the whole
    weight is two of (out / 2, in), one behind the other, as a gate and the projection that it gates, and a rank's block
    has its block of the first before that of the second: each half of this rank's result is of one of them. A state
    dict then has (2, out / 2, in) with placement Shard(1), and (2, out / 2) of the bias.

    Gradients of parameters that all ranks have whole (norms, embeddings) are to be summed over the ranks where
    `sequence_parallel` is true: `sync_replicated(model)` does it. Raises ArgumentError where P * parts does not divide
    out_features, and for `keep_rows` where none are gathered.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = True,
        keep_rows: bool = False,
        parts: int = 1,
        group: Any = None,
        **made: Any,
    ) -> None:
        """`keep_rows`: as `all_gather_matmul` takes it; `parts`: number of equal parts of out_features, default: 1;
        `made`: device and dtype, as torch.nn.Linear takes them.
        """
        self.group_name, self.sequence_parallel = groups.name_of(group), sequence_parallel
        self.keep_rows = keep_rows
        if keep_rows and not sequence_parallel:
            raise ArgumentError("`keep_rows` keeps rows that are gathered: without `sequence_parallel` none are")
        self.parts = given.whole("parts", parts, 1)
        self._declare(dict.fromkeys(("weight", "bias"), Split(self.group_name, 0, parts)))
        super().__init__(in_features, _share("out_features", out_features, self.group_name, parts), bias, **made)

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                _draw_block(parameter, self.in_features)

    def extra_repr(self) -> str:
        parts = f", parts={self.parts}" if self.parts > 1 else ""
        return f"{super().extra_repr()}, {_said(self)}, keep_rows={self.keep_rows}{parts}"

    @reported("self")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more: dict[str, Any] = {"bias": self.bias, "group": self.group_name}
        if self.sequence_parallel:
            return all_gather_matmul(x, self.weight, keep_rows=self.keep_rows, **more)
        return replicated_matmul(x, self.weight, **more)


class RowParallelLinear(ShardedModule, torch.nn.Linear):
    """From all rows of this rank's in_features / P to its rows of the sum: (P * n, ..., in / P) -> (n, ..., out).
    Without `sequence_parallel` every rank has the whole sum: (n, ..., in / P) -> (n, ..., out).

    `weight` (out, in / P) is this rank's block of columns of a torch.nn.Linear's, and drawn as its block of those.
    `bias` (out / P,) is this rank's block of the bias, and gathered in each call: a gradient of all rows comes back to
    it, and no two ranks have the same number to keep alike. Without `sequence_parallel` `bias` (out,) is the whole,
    whose gradient all ranks have alike. Either begins as zero. `state_dict()` has DTensors: of the weight with
    placement Shard(1), of the bias with Shard(0); a whole bias is a plain tensor, as those of norms are.

    Gradients of parameters that all ranks have whole are summed as for `ColumnParallelLinear`. Raises ArgumentError
    where P does not divide in_features, and with a bias out_features.
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
        self._declare({"weight": Split(self.group_name, 1)})
        super().__init__(_share("in_features", in_features, self.group_name), out_features, bias, **made)
        if bias and sequence_parallel:
            block = _share("out_features", out_features, self.group_name)
            self._declare({"bias": Split(self.group_name, 0)})
            self.bias = torch.nn.Parameter(torch.zeros(block, **made))

    def reset_parameters(self) -> None:
        _draw_block(self.weight, self.in_features * menu.size(self.group_name))
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_said(self)}"

    @reported("self")
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`residual`, of the shape of the result, is added to it, in the kernel that makes it."""
        bias: torch.Tensor | None = self.bias
        if not self.sequence_parallel:
            return matmul_all_reduce(x, self.weight, bias=bias, residual=residual, group=self.group_name)
        if bias is not None:
            bias = collectives.all_gather(bias, self.group_name)
        return matmul_reduce_scatter(x, self.weight, bias=bias, residual=residual, group=self.group_name)


def _draw_block(parameter: torch.Tensor, features: int) -> None:
    """Draw this rank's block of the tensor that torch.nn.Linear draws for sums of so many features.

    The whole is drawn, for a moment, so that ranks seeded alike have blocks of one layer and draw the same afterwards.
    """
    split, bound = split_of(parameter), 1 / math.sqrt(max(features, 1))
    assert split is not None
    with torch.no_grad():
        whole = parameter.new_empty(split.flat_shape(parameter.shape)).uniform_(-bound, bound)
        parameter.copy_(split.cut(whole, parameter.shape))


def _said(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    ranks = groups.size_of(layer.group_name) or "unknown"  # in a process that has no such group
    return f"ranks={ranks}, sequence_parallel={layer.sequence_parallel}"


def _share(name: str, features: int, group_name: str, parts: int = 1) -> int:
    ranks = menu.size(group_name)
    if features % (ranks * parts):
        each = f" each of {parts} parts of" if parts > 1 else ""
        raise ArgumentError(f"{ranks} ranks share{each} `{name}` equally: {features} is no multiple of {ranks * parts}")
    return features // ranks
