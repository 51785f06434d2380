"""Turns a case into the calls that are timed: our dispatches, and NCCL's all-to-all on sorted rows.

Assumes one process per GPU. Every contender is called in both ways and is given what it needs beforehand: ours its
tables, NCCL its rows sorted by destination. Does not count the sorting, nor the unsorting that NCCL's result would
still need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.dispatch_plans import KEY_BYTES, QUERY_BYTES, Case, Sorted, followed
from benchmarks.dispatch_report import APART, TOGETHER, Way
from benchmarks.measure import Bench, Contender
from benchmarks.report import Kind
from benchmarks.turns import Made
from commdsl import dispatch

DTYPE = torch.bfloat16
FORMS = {"kv": (KEY_BYTES,), "k+v": (KEY_BYTES // 2, KEY_BYTES // 2)}
"""Keys and values as one tensor, or as two of half the width."""

Tensors = list[torch.Tensor]


@dataclass
class Stage:
    """One case on this rank: the rows of all ranks, by number, and what follows from them."""

    bench: Bench
    case: Case

    @cached_property
    def metadata(self) -> Any:
        return dispatch.from_plan(self.case.plan)

    @cached_property
    def route(self) -> Any:
        fwd_q, rev_q, fwd_k, rev_k, _ = self.metadata
        return dispatch.Route(fwd_q, rev_q, fwd_k, rev_k, rank=self.bench.rank, device=self.bench.device)

    @cached_property
    def sorted(self) -> tuple[Sorted, Sorted]:
        """Of queries and of keys."""
        found, rows = self.case.routing, self.case.plan.shards.rows
        assert found.keys is not None
        return Sorted.of(found.queries, rows, self.bench.rank), Sorted.of(found.keys, rows, self.bench.rank)

    @cached_property
    def arriving(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the query and key rows that this rank receives, in their order."""
        found, rows = self.case.routing, self.case.plan.shards.rows
        assert found.keys is not None
        both = (followed(routes, rows, routes.counts.sum(axis=1)) for routes in (found.queries, found.keys))
        queries, keys = (torch.from_numpy(ids[self.bench.rank]).to(self.bench.device) for ids in both)
        return queries, keys

    @property
    def own(self) -> torch.Tensor:
        """Numbers of this rank's rows."""
        rows = self.case.plan.shards.rows
        base = int((np.cumsum(rows) - rows)[self.bench.rank])
        return torch.arange(base, base + int(rows[self.bench.rank]), device=self.bench.device)

    def made(self, ids: torch.Tensor, nbytes: int, part: int) -> torch.Tensor:
        """Rows by number: what they hold follows from the number, so any rank makes any other's."""
        width = nbytes // DTYPE.itemsize
        columns = torch.arange(width, device=self.bench.device, dtype=torch.int32) * 7919 + 104729 * part
        found = torch.empty(len(ids), width, dtype=torch.int16, device=self.bench.device)
        for begin in range(0, len(ids), 8192):  # bounds the memory of what lies between
            rows = ids[begin : begin + 8192].to(torch.int32)[:, None] * 40503
            mixed = rows + columns
            found[begin : begin + 8192] = (mixed ^ (mixed >> 11)).to(torch.int16) & 0x3FFF  # finite, of one sign
        return found.view(DTYPE)


def wrong(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> torch.Tensor:
    bad = [(one.view(torch.int16) != other.view(torch.int16)).any() for one, other in zip(got, want, strict=True)]
    return torch.stack(bad).any()


def prepared(bench: Bench, case: Case) -> Stage:
    """With everything made that is made once: metadata, tables, sorted rows."""
    stage = Stage(bench, case)
    assert stage.route is not None
    assert stage.sorted is not None
    assert stage.arriving is not None
    return stage


# --- ours -------------------------------------------------------------------------------------------------------------


def sender(bench: Bench, case: Case, name: str) -> Any:
    """A dispatcher for a case. Collective. Every call that a graph captures keeps its results."""
    put, form = name.split()
    found = case.routing
    assert found.keys is not None
    most = dispatch.Limits(
        rows=int(case.plan.shards.rows.max()),
        queries=int(found.queries.counts.sum(axis=1).max()),
        keys=int(found.keys.counts.sum(axis=1).max()),
        copies=int(found.keys.copy.max()) + 1,
        widths=(QUERY_BYTES, *FORMS[form]),
    )
    return dispatch.Dispatcher(most, group=bench.group, device=bench.device, put=put, results=2 + case.calls)


def ours(stage: Stage, sender: Any, name: str, way: Way) -> Made:
    widths = (QUERY_BYTES, *FORMS[name.split()[1]])
    here, there = [stage.own] * 3, [stage.arriving[0], stage.arriving[1], stage.arriving[1]]
    given, awaited = (here, there) if way is Way.THERE else (there, here)
    tensors = [stage.made(given[part], nbytes, part) for part, nbytes in enumerate(widths)]
    kept: Tensors = []

    def call(_: int) -> torch.Tensor:
        kept[:] = moved(sender, tensors, stage.route, way)
        return kept[0]

    def is_wrong() -> torch.Tensor:
        want = [stage.made(awaited[part], nbytes, part) for part, nbytes in enumerate(widths)]
        if way is Way.BACK:
            want[1:] = [_times(rows, _copies(stage)) for rows in want[1:]]
        return wrong(kept, want)

    return Contender(name, Kind.OURS, call, release=kept.clear), is_wrong


def moved(sender: Any, tensors: Tensors, route: Any, way: Way) -> Tensors:
    """One op for all the tensors."""
    move = sender.dispatch_qkv if way is Way.THERE else sender.collect_qkv
    q, k, v = (*tensors, None)[:3]
    return [one for one in move(q, k, v, route) if one is not None]


def _copies(stage: Stage) -> torch.Tensor:
    """(rows, 1): how often each of this rank's key rows went out, and so comes back."""
    plan, keys = stage.case.plan, stage.case.routing.keys
    assert keys is not None
    by_shard = np.bincount(keys.shard, minlength=plan.shards.num)
    mine = plan.shards.rank == stage.bench.rank
    return torch.from_numpy(np.repeat(by_shard[mine], plan.shards.length[mine])).to(stage.bench.device)[:, None]


def _times(rows: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """So many equal copies added up in float32 one by one, rounded once."""
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for copy in range(int(copies.max().item()) if copies.numel() else 0):
        total += torch.where(copies > copy, rows.float(), 0.0)
    return total.to(rows.dtype)


# --- peers ------------------------------------------------------------------------------------------------------------


def nccl_apart(stage: Stage, way: Way) -> Made:
    """One call for the queries and one for keys and values, which are one tensor."""
    sources, results, splits, want = [], [], [], []
    for part, (tables, nbytes) in enumerate(zip(stage.sorted, (QUERY_BYTES, KEY_BYTES), strict=True)):
        leaving, arriving = _ends(stage, tables)
        if way is Way.BACK:
            leaving, arriving = arriving, leaving
        sources.append(stage.made(leaving, nbytes, part))
        want.append(stage.made(arriving, nbytes, part))
        results.append(torch.empty_like(want[-1]))
        splits.append((tables.received, tables.sent) if way is Way.THERE else (tables.sent, tables.received))

    def call(_: int) -> torch.Tensor:
        for result, source, (received, sent) in zip(results, sources, splits, strict=True):
            dist.all_to_all_single(result, source, received, sent, group=stage.bench.group)
        return results[0]

    return Contender(APART, Kind.PEER, call), lambda: wrong(results, want)


def nccl_together(stage: Stage, way: Way) -> Made:
    """One call on one buffer: what goes to a rank are its queries, then its keys and values."""
    buffers: list[torch.Tensor] = []
    counts: list[list[int]] = []
    for side in ("sent", "received"):
        parts, sizes = [], []
        ends = [_ends(stage, tables)[side == "received"] for tables in stage.sorted]
        blocks = [ids.split(getattr(tables, side)) for ids, tables in zip(ends, stage.sorted, strict=True)]
        for queries, keys in zip(*blocks, strict=True):
            both = [stage.made(queries, QUERY_BYTES, 0).flatten(), stage.made(keys, KEY_BYTES, 1).flatten()]
            parts += both
            sizes.append(sum(len(one) for one in both))
        buffers.append(torch.cat(parts))
        counts.append(sizes)
    (source, want), (sent, received) = (buffers, counts) if way is Way.THERE else (buffers[::-1], counts[::-1])
    result = torch.empty_like(want)

    def call(_: int) -> torch.Tensor:
        dist.all_to_all_single(result, source, received, sent, group=stage.bench.group)
        return result

    return Contender(TOGETHER, Kind.PEER, call), lambda: wrong([result], [want])


def _ends(stage: Stage, tables: Sorted) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the rows that leave, by destination, and of those that arrive, by source."""
    return (
        torch.from_numpy(tables.rows).to(stage.bench.device) + stage.own[0],
        torch.from_numpy(tables.arriving).to(stage.bench.device),
    )
