"""Turns partial results of attention, each over some of the keys, into what attention over all of them gives, and
partial gradients of queries into the whole.

Assumes rows of queries first, as kernels return them: outputs of (rows, heads, dim), and natural log-sum-exps of
(heads, rows) in float32, or float64 where the outputs are. Does not know which keys a partial is over: that no key is
counted twice is for the calls to say (`masks`). On a GPU one kernel does it (`runtime.merging`), and it allocates only
what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commdsl.runtime import merging

AT_ONCE = 8
"""So many partials are kept, and merged in one pass."""

ON_GPU = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernel merges; the rest, as on the processor, by torch's operations."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of some rows of queries over some keys: `out` (rows, heads, dim), `lse` (heads, rows)."""

    rows: slice
    out: torch.Tensor
    lse: torch.Tensor


def merged(partials: Sequence[Partial], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (rows, heads, dim) of that dtype, rounded once, and log-sum-exps (heads, rows).

    Rows without a partial are zeros, and their log-sum-exp is -inf.
    """
    first = partials[0]
    if len(partials) == 1 and first.out.shape[0] == rows and first.out.dtype == dtype:
        return first.out, first.lse
    if first.out.is_cuda and all(one.out.dtype in ON_GPU for one in partials):
        return by_kernel(partials, rows, dtype)
    return _merged(partials, rows, dtype)


def by_kernel(partials: Sequence[Partial], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `merged`, by one launch on the current stream. A first partial that is float32 may come of others."""
    first = partials[0]
    parts = [merging.Part(one.rows.start, one.out[:, None], one.lse[None]) for one in partials]
    running = parts.pop(0) if first.out.dtype == torch.float32 != partials[-1].out.dtype else None
    out = first.out.new_empty((rows, *first.out.shape[1:]), dtype=dtype)
    lse = first.lse.new_empty((first.lse.shape[0], rows))
    merging.merge(parts, running, out[:, None], lse[None])
    return out, lse


def _merged(partials: Sequence[Partial], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    first = partials[0]
    heads, dim = first.out.shape[1:]
    most = first.lse.new_full((heads, rows), -torch.inf)
    for one in partials:
        part = most[:, one.rows]
        torch.maximum(part, one.lse, out=part)
    most.masked_fill_(most == -torch.inf, 0.0)
    total, out = torch.zeros_like(most), first.lse.new_zeros((rows, heads, dim))
    for one in partials:
        weight = torch.exp(one.lse - most[:, one.rows])
        total[:, one.rows] += weight
        out[one.rows].addcmul_(one.out.to(out.dtype), weight.T.unsqueeze(-1))
    out /= torch.where(total == 0, 1.0, total).T.unsqueeze(-1)
    return out.to(dtype), most + total.log()


class Merging:
    """Partials as they come, no more of them kept than are merged in one pass."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._partials: list[Partial] = []

    def add(self, partial: Partial) -> None:
        if len(self._partials) == AT_ONCE:
            out, lse = merged(self._partials, self._rows, partial.lse.dtype)
            self._partials = [Partial(slice(0, self._rows), out, lse)]
        self._partials.append(partial)

    def result(self, like: torch.Tensor, lse_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """As `merged`; where there is no partial at all, of the shape of these queries, (rows, heads, dim)."""
        if self._partials:
            return merged(self._partials, self._rows, self._dtype)
        lse = like.new_full((like.shape[1], like.shape[0]), -torch.inf, dtype=lse_dtype)
        return like.new_zeros(like.shape, dtype=self._dtype), lse


class Summing:
    """Gradients of rows of queries, (rows, heads, dim) each, as they come: summed in that order, in float32, or float64
    where they are, and rounded once.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._parts: list[tuple[slice, torch.Tensor]] = []

    def add(self, rows: slice, part: torch.Tensor) -> None:
        if len(self._parts) == AT_ONCE:
            self._parts = [(slice(0, self._rows), summed(self._parts, self._rows, wide(part.dtype)))]
        self._parts.append((rows, part))

    def result(self, like: torch.Tensor) -> torch.Tensor:
        """Rows of which nothing came are zeros; where nothing came at all, of the shape of `like`."""
        if self._parts:
            return summed(self._parts, self._rows, self._dtype)
        return like.new_zeros(like.shape, dtype=self._dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of it are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def summed(parts: Sequence[tuple[slice, torch.Tensor]], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Parts of (rows, heads, dim) to the whole, (rows, heads, dim), each sum from zero in the order given."""
    first = parts[0][1]
    if first.is_cuda and all(part.dtype in ON_GPU for _, part in parts):
        return summed_by_kernel(parts, rows, dtype)
    total = first.new_zeros((rows, *first.shape[1:]), dtype=wide(first.dtype))
    for place, part in parts:
        total[place] += part
    return total.to(dtype)


def summed_by_kernel(parts: Sequence[tuple[slice, torch.Tensor]], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """As `summed`, by one launch on the current stream. A first part that is float32 may come of others."""
    first = parts[0][1]
    given = [merging.Part(place.start, part[:, None]) for place, part in parts]
    running = given.pop(0) if first.dtype == torch.float32 != parts[-1][1].dtype else None
    out = first.new_empty((rows, *first.shape[1:]), dtype=dtype)
    merging.merge(given, running, out[:, None], None)
    return out
