"""Turns a random dispatch plan into where every row comes from, by the simulation.

Assumes torch and `commdsl.dispatch`. Does not use a kernel, a group or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.dispatch_plans import followed
from commdsl import dispatch
from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import Longs
from commdsl.planner.chance import Draw, random_plan

NOT_WRITTEN = -1
"""In a map of rows: no row arrives here."""

Ids = torch.Tensor


# --- where rows come from ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Traced:
    """Per rank, the row that each of its rows is: a number among all ranks' rows, rank after rank; or NOT_WRITTEN.

    Queries and keys on the way there are numbered among the rows that were sent; on the way back among those received.
    """

    rows: tuple[int, ...]  # of each rank's tensors
    queries: tuple[Ids, ...]  # (received,) each
    queries_back: tuple[Ids, ...]  # (rows,)
    keys: tuple[Ids, ...]  # (received,); none where the plan has no keys
    keys_back: tuple[Ids, ...]  # (copies, rows)

    def to(self, device: torch.device | str) -> Traced:
        moved = (
            tuple(ids.to(device) for ids in part)
            for part in (self.queries, self.queries_back, self.keys, self.keys_back)
        )
        return Traced(self.rows, *moved)


@dataclass(frozen=True, eq=False)
class Case:
    """A plan with its metadata."""

    plan: DispatchPlan

    @cached_property
    def metadata(self) -> Any:
        """(fwd_q, rev_q, fwd_k | None, rev_k | None, attention | None) of all ranks."""
        return dispatch.from_plan(self.plan)

    @cached_property
    def traced(self) -> Traced:
        return simulated(self.metadata, self.rows)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.plan.shards.rows.tolist())

    @property
    def copies(self) -> int:
        fwd_k = self.metadata[2]
        return 1 if fwd_k is None else int(fwd_k.dst_rank.shape[2])

    def received(self, part: int) -> tuple[int, ...]:
        """Rows that each rank receives of queries (0) or of keys (1)."""
        metadata = self.metadata[2 * part]
        return (0,) * len(self.rows) if metadata is None else tuple(metadata.num_recv_tokens[:, -1].tolist())


def cases(draws: Iterable[Draw], seed: int) -> list[Case]:
    return [Case(random_plan(draw, seed + at)) for at, draw in enumerate(draws)]


def limits(found: Sequence[Case], widths: tuple[int, ...]) -> Any:
    """The least limits under which all of these run."""
    return dispatch.Limits(
        rows=max(max(case.rows) for case in found),
        queries=max(max(case.received(0)) for case in found),
        keys=max(max(case.received(1)) for case in found),
        copies=max(case.copies for case in found),
        widths=widths,
    )


def simulated(metadata: Any, rows: Sequence[int]) -> Traced:
    """By `orchestrate_simulate`, on tensors whose rows are their own numbers."""
    fwd_q, rev_q, fwd_k, rev_k, _ = metadata
    received = fwd_q.num_recv_tokens[:, -1].tolist()
    queries = _moved(fwd_q, rows, received)
    queries_back = _moved(rev_q, received, rows)
    if fwd_k is None:
        return Traced(tuple(rows), queries, queries_back, (), ())
    copies = fwd_k.dst_rank.shape[2]
    received = fwd_k.num_recv_tokens[:, -1].tolist()
    keys = _moved(fwd_k, rows, received)
    back = _moved(rev_k, received, [copies * length for length in rows])
    keys_back = tuple(ids.view(copies, length) for ids, length in zip(back, rows, strict=True))
    return Traced(tuple(rows), queries, queries_back, keys, keys_back)


def _moved(metadata: Any, rows_in: Sequence[int], rows_out: Sequence[int]) -> tuple[Ids, ...]:
    tensor = torch.full((len(rows_in), max(rows_in), 1), NOT_WRITTEN)
    for rank, ids in enumerate(_numbers(rows_in)):
        tensor[rank, : len(ids), 0] = ids
    output = torch.full((len(rows_out), max(rows_out), 1), NOT_WRITTEN)
    dispatch.orchestrate_simulate(tensor, output, metadata)
    return tuple(output[rank, :length, 0].clone() for rank, length in enumerate(rows_out))


def _numbers(rows: Sequence[int]) -> list[Ids]:
    bounds = np.concatenate([[0], np.cumsum(np.array(rows, np.int64))]).tolist()
    return [torch.arange(bounds[rank], bounds[rank + 1]) for rank in range(len(rows))]


def routed(plan: DispatchPlan) -> Traced:
    """By the plan's routes, without Metadata: the second opinion on `simulated`."""
    found, rows = routing(plan), plan.shards.rows
    received = found.queries.counts.sum(axis=1)
    queries = _tensors(followed(found.queries, rows, received))
    queries_back = _tensors(followed(found.queries_back, received, rows))
    if found.keys is None or found.keys_back is None:
        return Traced(tuple(rows.tolist()), queries, queries_back, (), ())
    copies = int(found.keys.copy.max(initial=0)) + 1
    received = found.keys.counts.sum(axis=1)
    keys = _tensors(followed(found.keys, rows, received))
    back = followed(found.keys_back, received, copies * rows)
    keys_back = _tensors([ids.reshape(copies, -1) for ids in back])
    return Traced(tuple(rows.tolist()), queries, queries_back, keys, keys_back)


def _tensors(maps: Iterable[Longs]) -> tuple[Ids, ...]:
    return tuple(torch.from_numpy(ids) for ids in maps)
