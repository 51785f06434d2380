"""Turns what one dispatch of Experts leaves on a rank into its parts: the rows that came, the routing for the way back.

Assumes one call. Does not make or move anything; `experts` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Handle:
    """The routing of one dispatch, which `combine` and `dispatch_again` need. `keys` must not change until then."""

    keys: torch.Tensor  # (T, K)
    counts: torch.Tensor
    origins: torch.Tensor  # (R,) int64, of each place: entry t * K + k in bits 0-31, source rank in 32-47, in 48-54 how
    # many ranks with keys of the row are lower than this one, of its node where rows go once per node; the sign: it is
    # the row's first here. -1: it has no row
    offsets: torch.Tensor
    places: torch.Tensor  # (T, K) int32: where each row of this rank is on the rank of its key, -1 if dropped
    mates: torch.Tensor | None = None  # (P, Limits.rows, K) int32: by source rank and row the places
    # here of its keys, -1 of one that is elsewhere; behind a rank's rows nothing is written
    values: torch.Tensor | None = None  # beside each row, where they travel


@dataclass(frozen=True, eq=False)
class Received:
    """What a rank holds after a call there: R = Limits.received places, of which the first offsets[-1] count.

    Behind the rows of each key come rows of zeros up to a multiple of what the dispatch says (`aligned`).
    """

    rows: Any  # a tensor, or a tuple of them as was sent; by index only the places that `index` names have their row.
    # For one that travels in float8: Quantised, rows in float8 and their scales
    counts: torch.Tensor  # (E / P, P) int32: rows by the rank's own keys, in their order, and by source rank
    offsets: torch.Tensor  # (E / P,) int32: where the rows of each key end, with what is behind them
    values: torch.Tensor | None  # (R,) float32, where the dispatch has a value beside each row
    index: torch.Tensor | None  # (R,) int32, where it goes by index: the place that has the row, -1 for none
    handle: Handle
