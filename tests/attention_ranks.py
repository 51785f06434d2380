"""Turns a table of what visits whom into an op that runs it, without any communication: ranks are threads, and every
visit is cut from the pieces that all ranks gave; and what attention over the whole sequence is, in float64.

Assumes tables in which no chunk visits a rank twice. What a visit must not read is filled with NaN.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commdsl.attention.masks import Mask
from commdsl.attention.placement import Placement
from commdsl.runtime import groups


@dataclass(frozen=True, eq=False)
class Shown:
    origin: tuple[np.ndarray, ...]
    reads: tuple[str, ...] = ("k", "v")
    writes: tuple[str, ...] = ()


def shown(origin: np.ndarray) -> Shown:
    return Shown((origin.astype(np.int32),) * 2)


def rotation(ranks: int, chunks: int, seed: int | None = None) -> list[Shown]:
    """Each chunk visits every rank: one rank on in every visit, or in an order of its own from the second visit on."""
    random = np.random.default_rng(seed)
    found = np.zeros((ranks, ranks, chunks, 2), int)
    for chunk in range(chunks):
        ahead = np.arange(ranks) if seed is None else np.r_[0, 1 + random.permutation(ranks - 1)]
        for step, distance in enumerate(ahead):
            found[step, :, chunk, 0] = (np.arange(ranks) - distance) % ranks
            found[step, :, chunk, 1] = chunk
    return [shown(one) for one in found]


class Simulated:
    """As `loop.Rotation`. `carries`: gradients of keys travel with them; else each visit writes its own, summed at the
    owner in the order of the visits.
    """

    def __init__(self, table: Sequence[Shown], carries: bool = False, name: str = "simulated") -> None:
        self.name = self.shown = name
        self._table = table
        self._ranks, self._chunks = table[0].origin[0].shape[:2]
        self._carries = carries
        self._barrier = threading.Barrier(self._ranks, timeout=60)
        self._board: dict[Any, Any] = {}

    @property
    def input_names(self) -> tuple[str, ...]:
        return ("k", "v", "dk", "dv") if self._carries else ("k", "v")

    def held(self, group: Any = None) -> list[Shown]:
        return list(self._table)

    def lands(self, group: Any = None) -> bool:
        return False

    def visit(self, *given: torch.Tensor, group: Any = None, attend: Any = None, last: int | None = None) -> Any:
        rank = groups.rank_of(groups.name_of(group))
        chunks = [one.view(self._chunks, -1, *one.shape[1:]) for one in given]
        self._board[rank] = chunks
        self._barrier.wait()
        sums = [torch.zeros_like(one, dtype=torch.float32) for one in chunks[:2]]
        for number, one in enumerate(self._table):
            origin = [tuple(pair) for pair in one.origin[0][rank].tolist()]
            handed = [self._gathered(origin, at).view(given[at].shape) for at in range(len(given))]
            made = handed[2:] or [torch.full_like(one, torch.nan, dtype=torch.float32) for one in handed]
            if "out" in inspect.signature(attend).parameters:
                attend(number, *handed, out=tuple(made))
            else:
                attend(number, *handed)
                continue
            for at, part in enumerate(made):
                for chunk, (owner, place) in enumerate(origin):
                    if owner >= 0 and self._carries:
                        self._board[owner][2 + at][place] = part.view(chunks[0].shape)[chunk]
                    elif owner >= 0:
                        self._board[rank, number, at, owner, place] = part.view(chunks[0].shape)[chunk].clone()
            self._barrier.wait()
        found = chunks[2:] if self._carries else sums
        for key, part in sorted(((k, p) for k, p in self._board.items() if isinstance(k, tuple)), key=lambda x: x[0]):
            if key[3] == rank:
                sums[key[2]][key[4]] += part
        self._barrier.wait()
        return [one.view(given[0].shape) for one in found]

    def _gathered(self, origin: list[tuple[int, int]], at: int) -> torch.Tensor:
        like = self._board[0][at]
        found = torch.full_like(like, torch.nan)
        for chunk, (owner, place) in enumerate(origin):
            if owner >= 0:
                found[chunk] = self._board[owner][at][place]
        return found


# --- the whole --------------------------------------------------------------------------------------------------------


def told(placement: Placement, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Document and position of each row of a rank."""
    runs = [run for half in placement.runs[rank] for run in half]
    document = [torch.full((run.length,), run.document) for run in runs]
    position = [torch.arange(run.begin, run.begin + run.length) for run in runs]
    nothing = torch.empty(0, dtype=torch.int64)
    return torch.cat([nothing, *document]), torch.cat([nothing, *position])


def whole(
    placement: Placement, mask: Mask, q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor], scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Softmax attention of all ranks' rows in float64: output (rows, batch, heads, dim), log-sum-exp (batch, heads,
    rows), by rank; rows that see nothing are zero and -inf.
    """
    where = [told(placement, rank) for rank in range(placement.ranks)]
    key_document, key_position = (torch.cat([one[at] for one in where]) for at in range(2))
    serves = q[0].shape[2] // k[0].shape[2]
    keys, values = (torch.cat(one).double().repeat_interleave(serves, 2) for one in (k, v))
    outs, sums = [], []
    for (document, position), query in zip(where, q, strict=True):
        distance = key_position[None, :] - position[:, None]
        seen = document[:, None] == key_document[None, :]
        if mask.left is not None:
            seen &= distance >= -mask.left
        if mask.right is not None:
            seen &= distance <= mask.right
        scores = torch.einsum("qbhd,kbhd->bhqk", query.double(), keys) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        share = torch.softmax(scores, -1).masked_fill(~seen.any(1)[:, None], 0.0)
        outs.append(torch.einsum("bhqk,kbhd->qbhd", share, values))
        sums.append(torch.logsumexp(scores, -1))
    return outs, sums


def random_rows(placement: Placement, batch: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> list[Any]:
    """Of each rank a tensor (rows, batch, heads, dim)."""
    torch.manual_seed(seed)
    return [torch.randn(placement.rows(rank), batch, heads, dim).to(dtype) for rank in range(placement.ranks)]
