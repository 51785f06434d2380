"""Turns lengths and destinations of shards into `Metadata`: for queries, for keys and values, for the attention there.

Assumes tables of all ranks, equal on each, int64. Does not decide where shards go (`generate`, or a plan does). Nothing
loops over shards. The laws are those of DistCA's `inplace_metadata.py` (hao-ai-lab/DistCA, August 2025), with these
differences, each a correction: rows received are counted by their true source; every table of counts has its column of
totals; padding writes nothing; num_seqs counts shards up to the last real one, so that a shard without rows between
others costs no other its place; there is no least number of destinations, of documents or of rows.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, overload

import numpy as np
import torch

from commdsl.checks import route_laws
from commdsl.dispatch import layout
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.metadata import AttentionLayout, Metadata
from commdsl.ir.routes import NOWHERE, Longs, Routes, Shards, back, query_routes, running_count, running_sum
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import given

Intermediates: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def exclusive_cumsum(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The sum of all entries before each, along `dim`: the shape of `tensor`, whole numbers as int64. Raises
    TensorError (C951), ArgumentError (C973).
    """
    given.argument("tensor", tensor)
    most, axis = max(tensor.dim(), 1), None if isinstance(dim, bool) else given.index(dim)
    if axis is None or not -most <= axis < most or tensor.dtype == torch.bool:
        found = "a tensor of bool" if tensor.dtype == torch.bool else given.shown(dim)
        raise ArgumentError(f"`dim` is a dimension, {-most} to {most - 1}, of a tensor of numbers, not {found}")
    return tensor.cumsum(dim) - tensor


@overload
def compute_metadata(
    seq_len: torch.Tensor, global_dispatch: torch.Tensor, return_intermediate: Literal[False] = False
) -> tuple[Metadata, Metadata]: ...


@overload
def compute_metadata(
    seq_len: torch.Tensor, global_dispatch: torch.Tensor, return_intermediate: Literal[True]
) -> tuple[Metadata, Metadata, Intermediates]: ...


def compute_metadata(
    seq_len: torch.Tensor, global_dispatch: torch.Tensor, return_intermediate: bool = False
) -> tuple[Metadata, Metadata] | tuple[Metadata, Metadata, Intermediates]:
    """The way there and the way back of shards of `seq_len` (W, S) rows that go to the ranks `global_dispatch`, (W, S)
    or, with C copies, (W, S, C); -1 where there is none. Rows lie at a destination in the order of (rank, shard, copy).

    The way back of copies goes to (C, rows) of the source rank, one whole tensor after another. With
    `return_intermediate` also: rows to each rank (W, S, C, W), 0 or 1 for the same (W, S, C, W), shards received (W,).
    All tensors are on the device of `seq_len`.

    Raises MetadataError for shapes that do not fit, negative lengths and ranks that do not exist.
    """
    length, dest = layout.longs(seq_len, "seq_len"), layout.longs(global_dispatch, "global_dispatch")
    copies = _judged(length, dest)
    shards = layout.padded(length)
    flat = dest.reshape(shards.num, 1 if copies is None else copies)
    routes = query_routes(shards, flat)
    there = layout.forward(shards, routes, _real((length > 0) | (flat >= 0).any(1).reshape(length.shape)), copies)
    there, returning = (one.to(seq_len.device) for one in (there, layout.reverse(back(routes, shards), there)))
    if not return_intermediate:
        return there, returning
    ranks = shards.num_ranks
    seq_to_dst = np.zeros((*length.shape, flat.shape[1], ranks), np.int64)
    seq_to_dst.reshape(-1, flat.shape[1], ranks)[routes.shard, routes.copy, routes.dest] = 1
    tokens = seq_to_dst * length[:, :, None, None]
    assert returning.num_seqs is not None
    rows, shards_sent = (torch.from_numpy(table).to(seq_len.device) for table in (tokens, seq_to_dst))
    return there, returning, (rows, shards_sent, returning.num_seqs.clone())


def compute_attn_layout_seqlens(
    seq_shard_len: torch.Tensor, seq_shard_cumsum: torch.Tensor, dispatch: torch.Tensor
) -> AttentionLayout:
    """What the query shards that each rank receives attend to; all (W, S). `seq_shard_len` are rows of a shard,
    `seq_shard_cumsum` rows of its document up to and with it, `dispatch` ranks, -1 for none. On the device of
    `seq_shard_len`.

    Raises MetadataError for shapes that do not fit, negative lengths and ranks that do not exist.
    """
    query, key = layout.longs(seq_shard_len, "seq_shard_len"), layout.longs(seq_shard_cumsum, "seq_shard_cumsum")
    dest = layout.longs(dispatch, "dispatch")
    _shape(dest, query.shape, "dispatch")
    _shape(key, query.shape, "seq_shard_cumsum")
    _judged(query, dest, "seq_shard_len", "dispatch")
    flat = dest.reshape(-1)
    sent = np.flatnonzero(flat >= 0)
    to = flat[sent]
    slot = running_count(to)
    made = layout.attention(len(dest), to, slot, query.reshape(-1)[sent], key.reshape(-1)[sent], None)
    return made.to(seq_shard_len.device)


def compute_metadata_kv(
    kv_to_q_mapping: torch.Tensor,
    kv_to_q_rank: torch.Tensor,
    kv_context_size: torch.Tensor,
    q_to_num_kv_seq: torch.Tensor,
    q_to_num_kv_token: torch.Tensor,
    seq_len: torch.Tensor,
    num_seqs: torch.Tensor,
    q_dispatch: torch.Tensor,
    q_seq_to_dst: torch.Tensor,
    max_num_local_seqs: int,
) -> tuple[Metadata, Metadata]:
    """The way there and the way back of key/value shards, of which copy c serves the query kv_to_q_mapping[.., c].

    Tables of W ranks, S = `max_num_local_seqs` shards, C copies: `kv_to_q_mapping` (W, S, C, 2) rank and number of the
    query that a copy serves, -1 for none; `kv_to_q_rank` (W, S, C) which of the query's key/value shards it is;
    `kv_context_size` (W, S) rows of the document before the shard; `q_to_num_kv_seq` and `q_to_num_kv_token` (W, S) key
    shards and rows that a query needs; `seq_len` (W, S); `num_seqs` (W,) shards of each rank, no fewer than are used;
    `q_dispatch` (W, S) and, the same as zeros and ones, `q_seq_to_dst` (W, S, W). On a destination the queries' keys
    lie one after another. All tensors are on the device of `seq_len`.

    Raises MetadataError where the tables disagree, so that keys of a query would leave a gap or overlap.
    """
    length, dest = layout.longs(seq_len, "seq_len"), layout.longs(q_dispatch, "q_dispatch")
    _judged(length, dest, "seq_len", "q_dispatch")
    shape = (len(length), int(max_num_local_seqs))
    mapping, position = layout.longs(kv_to_q_mapping, "kv_to_q_mapping"), layout.longs(kv_to_q_rank, "kv_to_q_rank")
    copies = mapping.shape[2] if mapping.ndim == 4 else 0
    tables = {"kv_context_size": kv_context_size, "q_to_num_kv_seq": q_to_num_kv_seq}
    tables["q_to_num_kv_token"] = q_to_num_kv_token
    context, shards_asked, rows_asked = (layout.longs(table, name) for name, table in tables.items())
    for name, table in (*tables.items(), ("seq_len", seq_len), ("q_dispatch", q_dispatch)):
        _shape(table, shape, name)
    _shape(mapping, (*shape, copies, 2), "kv_to_q_mapping")
    _shape(position, (*shape, copies), "kv_to_q_rank")
    _one_hot(layout.longs(q_seq_to_dst, "q_seq_to_dst"), dest)
    shards = layout.padded(length)
    routes = _key_routes(shards, mapping, position, context, shards_asked, rows_asked, dest)
    there = layout.forward(shards, routes, _counted(num_seqs, length, dest, routes), copies)
    return there.to(seq_len.device), layout.reverse(back(routes, shards), there).to(seq_len.device)


def _key_routes(
    shards: Shards,
    mapping: Longs,
    position: Longs,
    context: Longs,
    shards_asked: Longs,
    rows_asked: Longs,
    dest: Longs,
) -> Routes:
    """Routes of the key/value shards, proved to tile their destinations in the order the tables say."""
    ranks, width, copies = position.shape
    _asked_by_queries(mapping)
    home, asks = dest.reshape(-1), np.flatnonzero(dest.reshape(-1) >= 0)
    row, place = np.zeros(shards.num, np.int64), np.zeros(shards.num, np.int64)
    row[asks] = running_sum(home[asks], rows_asked.reshape(-1)[asks])
    place[asks] = running_sum(home[asks], shards_asked.reshape(-1)[asks])
    flat = mapping.reshape(shards.num, copies, 2)
    shard, copy = np.nonzero(flat[..., 0] >= 0)
    query = flat[shard, copy, 0] * width + flat[shard, copy, 1]
    sent = home[query] >= 0
    shard, copy, query = shard[sent], copy[sent], query[sent]
    routes = Routes(
        ranks,
        shards.rank[shard],
        shards.row[shard],
        home[query],
        row[query] + context.reshape(-1)[shard],
        shards.length[shard],
        shard,
        copy,
        place[query] + position.reshape(shards.num, copies)[shard, copy],
    )
    order = route_laws.landed(routes)
    gaps, unplaced = route_laws.not_tiling(routes, order), route_laws.not_placed(routes, order)
    refuse_routes(gaps, routes, width, "kv_context_size", "keys of a query leave no gap")
    refuse_routes(unplaced, routes, width, "kv_to_q_rank", "key shards lie in document order")
    return routes


def _asked_by_queries(mapping: Longs) -> None:
    """Raises MetadataError unless `mapping` (W, S, C, 2) names shards of queries, or none."""
    ranks, width = mapping.shape[:2]
    legal = (mapping >= -1) & (mapping < np.array([ranks, width])) & ((mapping >= 0) == (mapping[..., :1] >= 0))
    for i, j, c in np.argwhere(~legal.all(3))[:1].tolist():
        raise MetadataError(
            "there is no such query",
            field="kv_to_q_mapping",
            rank=i,
            shard=j,
            replica=c,
            got=tuple(mapping[i, j, c].tolist()),
            expected=f"rank 0 ..< {ranks} and shard 0 ..< {width}, or -1",
        )


def refuse_routes(wrong: route_laws.Offences, routes: Routes, width: int, field: str, law: str) -> None:
    """Raises MetadataError for the first of the offending rows of `routes`, whose ranks have `width` shards each."""
    if not len(wrong):
        return
    row = int(wrong.row[0])
    raise MetadataError(
        law,
        field=field,
        rank=int(routes.source[row]),
        shard=int(routes.shard[row]) % width,
        replica=int(routes.copy[row]),
        expected=int(wrong.expected[0]),
        got=int(wrong.got[0]),
    )


def _judged(length: Longs, dest: Longs, lengths: str = "seq_len", dispatch: str = "global_dispatch") -> int | None:
    """The number of copies, None for a table without; raises MetadataError for what cannot be a table of shards."""
    if length.ndim != 2:
        raise MetadataError("lengths are by rank and shard", field=lengths, expected="(W, S)", got=length.shape)
    if dest.ndim not in (2, 3) or dest.shape[:2] != length.shape:
        expected = "({0}, {1}) or ({0}, {1}, C)".format(*length.shape)
        raise MetadataError("a shard has its destinations", field=dispatch, expected=expected, got=dest.shape)
    for i, j in np.argwhere(length < 0)[:1].tolist():
        raise MetadataError(
            "no length is negative", field=lengths, rank=i, shard=j, expected="0 or more", got=int(length[i, j])
        )
    for i, j, *copy in np.argwhere((dest < NOWHERE) | (dest >= len(length)))[:1].tolist():
        raise MetadataError(
            "there is no such rank",
            field=dispatch,
            rank=i,
            shard=j,
            replica=copy[0] if copy else None,
            expected=f"-1 ..< {len(length)}",
            got=int(dest[(i, j, *copy)]),
        )
    return dest.shape[2] if dest.ndim == 3 else None


def _shape(table: torch.Tensor | Longs, expected: tuple[int, ...], field: str) -> None:
    if tuple(table.shape) != tuple(expected):
        raise MetadataError("tables are of one plan", field=field, expected=tuple(expected), got=tuple(table.shape))


def _one_hot(table: Longs, dest: Longs) -> None:
    """Raises MetadataError unless `table` (W, S, W) says what `dest` (W, S) says."""
    expected = dest[..., None] == np.arange(len(dest))
    _shape(table, expected.shape, "q_seq_to_dst")
    for i, j, k in np.argwhere(table != expected)[:1].tolist():
        raise MetadataError(
            f"q_seq_to_dst says of rank {k} what q_dispatch says",
            field="q_seq_to_dst",
            rank=i,
            shard=j,
            expected=int(expected[i, j, k]),
            got=int(table[i, j, k]),
        )


def _counted(num_seqs: torch.Tensor, length: Longs, dest: Longs, routes: Routes) -> Longs:
    """(W,): shards up to and with the last of a rank that has rows, as `compute_metadata` counts them, or keys that are
    sent; MetadataError where `num_seqs` leaves out one of them.
    """
    given = layout.longs(num_seqs, "num_seqs")
    _shape(given, (len(length),), "num_seqs")
    used = ((length > 0) | (dest >= 0)).reshape(-1)
    used[routes.shard] = True
    least = _real(used.reshape(length.shape))
    for i in np.flatnonzero((given < least) | (given > length.shape[1]))[:1].tolist():
        raise MetadataError(
            "every shard is counted",
            field="num_seqs",
            rank=i,
            expected=f"{least[i]} to {length.shape[1]}",
            got=int(given[i]),
        )
    return least


def _real(used: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Longs:
    """(W,): shards up to and with the last that is used."""
    last = (used * np.arange(1, used.shape[1] + 1)).max(axis=1, initial=0)
    return np.asarray(last, np.int64)
