"""Turns a candidate for products beside what travels into its times on this machine, as `runtime.measure` does for
collectives.

Assumes what that assumes. Does not decide what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from commdsl.overlap.auto import OPERATORS, PIECES, Operator
from commdsl.overlap.programs import EXCHANGE, REDUCE, RETURN
from commdsl.overlap.sequence import WAYS
from commdsl.planner.tuning.selection import SEQUENCE, Candidate
from commdsl.runtime.load import load
from commdsl.runtime.measure import Inputs, Loaded, Machine

Tensor: TypeAlias = torch.Tensor


@dataclass
class Products(Machine):
    """Of one operator, its weights of `columns` times `depth` for each rank; a size is that of the larger side of what
    travels.
    """

    depth: int = 0
    columns: int = 0

    @property
    def called(self) -> Operator:
        return OPERATORS[self.collective]

    def announce(self, candidates: tuple[Candidate, ...]) -> None:
        """Nothing is built ahead: a kernel is of one shape, and few candidates have one."""

    def _load(self, candidate: Candidate) -> Loaded:
        if candidate.schedule == SEQUENCE:
            return Sequence(self.collective)
        params, tune = dict(candidate.params), dict(candidate.tune)
        return load(candidate.schedule, params=params, ranks=self.ranks, tune=tune)

    def _inputs(self, nbytes: int, rank: int) -> Inputs:
        """A rank's rows and weights: as many rows as come to that size, or a few less so that every piece has equally
        many. Whole numbers, few enough that sums of products are exact.
        """
        width = self.depth if self.called.gathers else self.columns
        share = max(nbytes // (width * self.dtype.itemsize * self.ranks * PIECES[-1]), 1) * PIECES[-1]
        rows = share * self.ranks if self.called.all_rows else share
        columns = self.columns * self.ranks if self.called.all_columns else self.columns
        dice = torch.Generator(self.device).manual_seed(rank)
        shapes = (rows, self.depth), (*([self.ranks] if self.called.all_depths else []), columns, self.depth)
        made = (torch.randint(-1, 2, one, generator=dice, device=self.device) for one in shapes)
        return tuple(one.to(self.dtype) for one in made)

    def _wanted(self, given: list[Inputs], rank: int) -> Tensor:
        if self.collective == RETURN:
            blocks = [x.chunk(self.ranks)[rank] for x, _ in given]
            return torch.stack([torch.mm(x, w.t()) for x, w in zip(blocks, given[rank][1], strict=True)]).sum(0)
        if self.called.gathers:
            return torch.mm(torch.cat([x for x, _ in given]), given[rank][1].t())
        if self.collective == EXCHANGE:
            return torch.cat([torch.mm(x, w.chunk(self.ranks)[rank].t()) for x, w in given])
        is_whole = self.collective == REDUCE
        parts = [torch.mm(x if is_whole else x.chunk(self.ranks)[rank], w.t()) for x, w in given]
        return torch.stack(parts).float().sum(0).to(self.dtype)


@dataclass(frozen=True)
class Sequence:
    """The collective and the product one after the other, in place of an op."""

    operator: str

    def __call__(self, *inputs: Tensor) -> Tensor:
        return WAYS[self.operator](*inputs)

    def synchronize(self) -> None:
        """The collective has an op of its own, which says what is wrong with the next call."""

    def release(self) -> None:
        """It keeps nothing of its own."""
