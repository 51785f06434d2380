"""Attention from its definition, over a whole sequence in float64: what every rank's part is held against.

Assumes small sequences: all scores are made at once. Uses nothing of commdsl.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def admitted(length: int, left: int | None, right: int | None, ends: Sequence[int] | None) -> torch.Tensor:
    """Which keys (columns) each query (row) sees: of its own document, so far before it and so far after."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    cuts = list(ends) if ends is not None else [0, length]
    for begin, end in pairwise(cuts):
        for query in range(begin, end):
            first = begin if left is None else max(begin, query - left)
            last = end if right is None else min(end, query + right + 1)
            seen[query, first:last] = True
    return seen


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (batch, rows, heads, dim) and log-sum-exp (batch, heads, rows) of q (batch, rows, heads, dim), k and v
    (batch, rows, heads of keys, dim); queries that see nothing have zeros and -inf.
    """
    serves = q.shape[2] // k.shape[2]
    k, v = (one.double().repeat_interleave(serves, 2) for one in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    share = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    return torch.einsum("bhqk,bkhd->bqhd", share, v), lse
