"""Turns routes into `Metadata` and the `AttentionLayout`, and `Metadata` back into the routes that it names.

Assumes numbers on the host. Does not judge them: routes made of corrupted Metadata are as wrong as it is, and
`route_laws` finds out.
"""

from __future__ import annotations

import numpy as np
import torch

from commdsl.checks.route_laws import in_order
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.metadata import AttentionLayout, Metadata
from commdsl.ir.routes import NOWHERE, Longs, Routes, Shards, first_equal

INTEGERS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.uint32, torch.uint64)


def longs(numbers: torch.Tensor, field: str) -> Longs:
    """A tensor of whole numbers as an int64 array. Raises MetadataError for anything else."""
    judge(numbers, field)
    found: Longs = numbers.detach().cpu().to(torch.int64).numpy()
    return found


def judge(numbers: torch.Tensor, field: str) -> None:
    """Raises MetadataError unless these are whole numbers in a tensor that has them, on whatever device."""
    if not isinstance(numbers, torch.Tensor):
        law = "a table is a tensor: write torch.tensor(...), or torch.from_numpy(...)"
        raise MetadataError(law, field=field, expected="torch.Tensor", got=type(numbers).__name__)
    if numbers.is_meta or numbers.layout is not torch.strided:
        got = "meta" if numbers.is_meta else numbers.layout
        raise MetadataError("a table has all its numbers", field=field, expected="a dense tensor", got=got)
    if numbers.dtype not in INTEGERS:
        raise MetadataError("this is a table of whole numbers", field=field, expected="int64", got=numbers.dtype)


def padded(lengths: Longs) -> Shards:
    """The shards of a table (W, S): every cell is one, padding has no rows."""
    ranks, width = lengths.shape
    return Shards(ranks, np.repeat(np.arange(ranks), width), lengths.reshape(-1))


def received(counts: Longs) -> tuple[torch.Tensor, tuple[int, ...]]:
    """(W, W + 1): counts with their sums as the last column, and the sums on the host."""
    total = counts.sum(axis=1)
    return torch.from_numpy(np.concatenate([counts, total[:, None]], axis=1)), tuple(total.tolist())


def forward(shards: Shards, routes: Routes, num_seqs: Longs, copies: int | None) -> Metadata:
    """The way there. `copies` None: one destination a shard, tables (W, S); otherwise (W, S, copies)."""
    width = int(np.diff(shards.begin).max(initial=0))
    slots = 1 if copies is None else copies
    cell = shards.rank * width + shards.local
    at = cell[routes.shard] * slots + routes.copy
    dest = np.full(shards.num_ranks * width * slots, NOWHERE, np.int64)
    row = np.zeros_like(dest)
    dest[at], row[at] = routes.dest, routes.dest_row
    length = np.zeros(shards.num_ranks * width, np.int64)
    length[cell] = shards.length
    shape = (shards.num_ranks, width) if copies is None else (shards.num_ranks, width, copies)
    counts, total = received(routes.counts)
    return Metadata(
        dst_rank=torch.from_numpy(dest.reshape(shape)),
        dst_offset=torch.from_numpy(row.reshape(shape)),
        seq_len=torch.from_numpy(length.reshape(shape[:2])),
        num_recv_tokens=counts,
        num_seqs=torch.from_numpy(num_seqs),
        world_size=shards.num_ranks,
        num_total_recv_tokens=total,
    )


def reverse(returning: Routes, there: Metadata) -> Metadata:
    """The way back of `there`: `returning` by rank and place, as `routes.back` gives it."""
    ranks = returning.num_ranks
    num_seqs = np.bincount(returning.source, minlength=ranks)
    begin = np.cumsum(num_seqs) - num_seqs
    shape = (ranks, int(num_seqs.max(initial=0)))
    at = returning.source * shape[1] + np.arange(returning.num) - begin[returning.source]
    dest, row, length = (np.full(shape, fill, np.int64) for fill in (NOWHERE, 0, 0))
    dest.reshape(-1)[at], row.reshape(-1)[at], length.reshape(-1)[at] = (
        returning.dest,
        returning.dest_row,
        returning.length,
    )
    counts, total = received(returning.counts)
    copied = there.dst_rank.dim() == 3
    return Metadata(
        dst_rank=torch.from_numpy(dest),
        dst_offset=torch.from_numpy(row),
        seq_len=torch.from_numpy(length),
        num_recv_tokens=counts,
        seq_recv_mask=there.dst_rank >= 0 if copied else None,
        recv_seq_lens=there.seq_len.clone() if copied else None,
        num_seqs=torch.from_numpy(num_seqs.astype(np.int64)),
        world_size=ranks,
        num_total_recv_tokens=total,
    )


def attention(ranks: int, dest: Longs, slot: Longs, query: Longs, key: Longs, begin: Longs | None) -> AttentionLayout:
    """The layout of n query shards that are sent: `slot` is a shard's number on its destination, `query` and `key` the
    rows of it and of what it sees, `begin` where the keys begin (None: one query's after the other's).
    """
    num = np.bincount(dest, minlength=ranks).astype(np.int64)
    tables = np.zeros((3, ranks, int(num.max(initial=0))), np.int64)
    tables[0, dest, slot], tables[1, dest, slot] = query, key
    sums = tables[:2].cumsum(axis=2)
    tables[2, dest, slot] = sums[1, dest, slot] - key if begin is None else begin
    most = tables[:2].max(axis=2, initial=0)
    return AttentionLayout(
        torch.from_numpy(sums[0]),
        torch.from_numpy(sums[1]),
        torch.from_numpy(most[0]),
        torch.from_numpy(most[1]),
        torch.from_numpy(num),
        torch.from_numpy(tables[2]),
    )


def routes_of(dest: Longs, row: Longs, shards: Shards) -> Routes:
    """The routes that tables name: `dest` and `row` are (n, copies), by shard of `shards`."""
    shard, copy = np.nonzero(dest >= 0)
    to, at, length = dest[shard, copy], row[shard, copy], shards.length[shard]
    order = in_order(to, at, length)
    place = np.empty(len(to), np.int64)
    place[order] = np.arange(len(to)) - first_equal(to[order])
    return Routes(shards.num_ranks, shards.rank[shard], shards.row[shard], to, at, length, shard, copy, place)
