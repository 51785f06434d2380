"""Turns `Metadata` of all ranks into nothing, or into a `MetadataError` that names the first place where it is wrong.

Assumes Metadata of all ranks. Does not know topology, bandwidth or the sizes of buffers, and reads no rows. What may
differ without changing a row is allowed: padding may be wider, and shards without rows come back in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.checks import route_laws
from commdsl.dispatch import attention_laws, layout
from commdsl.dispatch.compute import refuse_routes
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.form import Columns, refuse, tables
from commdsl.dispatch.metadata import AttentionLayout, Metadata
from commdsl.ir.routes import NOWHERE, Longs, Mask, Routes, Shards, back, running_sum
from commdsl.runtime.given import instance


def validate(
    fwd_q: Metadata,
    rev_q: Metadata,
    fwd_k: Metadata | None = None,
    rev_k: Metadata | None = None,
    attention: AttentionLayout | None = None,
    *,
    mask: Mask | None = None,
) -> None:
    """Proves that the numbers are those of one dispatch: `validate(*dispatch.from_plan(plan), mask=plan.mask)`.

    The laws: shapes and bounds; padding is -1, 0, 0; what is sent to a rank tiles its rows, without gap or overlap;
    rows received, by source and in all, are those sent; the way back brings every row to where it came from; masks and
    lengths of the way back are those of the way there; keys and values are shards of the same lengths as queries. With
    `attention`, every query finds its own keys among those that it sees, shards of a document follow each other in one
    order everywhere, and no key travels unseen. With a `mask`, too, each query sees its document up to its own end
    (CAUSAL), or all that any other query of it sees (FULL).

    int64 or normalised tensors; those on a GPU are copied to the host. Raises MetadataError (C960, a ValueError), which
    names the field, rank, shard and replica, what was expected there and what stands there. Writes nothing.
    """
    queries = tables("fwd_q", fwd_q)
    query_routes, shards = _forward(queries)
    _reverse(tables("rev_q", rev_q), queries, query_routes, shards)
    if fwd_k is None or rev_k is None:
        for name, given in (("fwd_k", fwd_k), ("rev_k", rev_k), ("attention", attention)):
            if given is not None:
                law = "keys have a way there and a way back, and attention needs keys"
                raise MetadataError(law, field=name, expected="None", got=type(given).__name__)
        return
    keys = tables("fwd_k", fwd_k)
    _same_shards(queries, keys)
    key_routes, _ = _forward(keys)
    _reverse(tables("rev_k", rev_k), keys, key_routes, shards)
    if attention is not None:
        instance("attention", attention, AttentionLayout)
        attention_laws.judge(attention, query_routes, key_routes, shards, mask)


def _forward(tables: Columns) -> tuple[Routes, Shards]:
    """The routes of a way there, proved to tile their destinations and to be as many rows as it says."""
    for field, given in (("seq_recv_mask", tables.sent), ("recv_seq_lens", tables.sent_length)):
        if given is not None:
            raise MetadataError("only a way back has it", field=f"{tables.name}.{field}", expected=None, got="a tensor")
    shards = layout.padded(tables.length)
    copies = tables.dest.shape[2]
    routes = layout.routes_of(tables.dest.reshape(-1, copies), tables.row.reshape(-1, copies), shards)
    law = "what a rank receives lies there without gap or overlap"
    gaps = route_laws.not_tiling(routes, route_laws.landed(routes))
    refuse_routes(gaps, routes, tables.length.shape[1], f"{tables.name}.dst_offset", law)
    _counts(tables, routes.counts)
    return routes, shards


def _counts(tables: Columns, expected: Longs) -> None:
    for i, j in np.argwhere(tables.counts != expected)[:1].tolist():
        raise MetadataError(
            "a rank receives what is sent to it",
            field=f"{tables.name}.num_recv_tokens",
            rank=i,
            source=j,
            expected=int(expected[i, j]),
            got=int(tables.counts[i, j]),
        )


def _reverse(tables: Columns, there: Columns, routes: Routes, shards: Shards) -> None:
    """Raises MetadataError unless `tables` is the way back of `there`, whose routes are `routes`."""
    if tables.copies is not None:
        law = "what comes back has one destination"
        raise MetadataError(law, field=f"{tables.name}.dst_rank", expected="(W, S)", got=tables.dest.shape)
    _counts(tables, routes.counts.T)
    arrived = np.bincount(routes.dest, minlength=shards.num_ranks).astype(np.int64)
    law = "every shard that a rank receives comes back from it"
    refuse(tables.num_seqs != arrived, tables.num_seqs, f"{tables.name}.num_seqs", arrived, law)
    real = np.arange(tables.length.shape[1]) < tables.num_seqs[:, None]
    stays = real & (tables.dest[..., 0] < 0)
    refuse(stays, tables.dest[..., 0], f"{tables.name}.dst_rank", f"0 ..< {shards.num_ranks}", law)
    _rows_back(tables, real, back(routes, shards))
    if there.copies is None:
        expected: dict[str, Longs | None] = {"seq_recv_mask": None, "recv_seq_lens": None}
    else:
        expected = {"seq_recv_mask": (there.dest >= 0).astype(np.int64), "recv_seq_lens": there.length}
    for field, got in (("seq_recv_mask", tables.sent), ("recv_seq_lens", tables.sent_length)):
        wanted, field = expected[field], f"{tables.name}.{field}"
        if wanted is None and got is None:
            continue
        if wanted is None or got is None or wanted.shape != got.shape:
            shapes = [None if table is None else table.shape for table in (wanted, got)]
            law = "the way back of copies, and no other, says which were sent"
            raise MetadataError(law, field=field, expected=shapes[0], got=shapes[1])
        refuse(wanted != got, got, field, wanted, f"it says what {there.name} says")


def _rows_back(tables: Columns, real: NDArray[np.bool_], expected: Routes) -> None:
    """Raises MetadataError unless the `real` rows of `tables` are those of `expected`, in the order they lie."""
    rank, shard = np.nonzero(real)
    length, dest, row = (table[rank, shard] for table in (tables.length, tables.dest[..., 0], tables.row[..., 0]))
    order = _lying(rank, running_sum(rank, length), length, dest, row)
    wanted = _lying(expected.source, expected.source_row, expected.length, expected.dest, expected.dest_row)
    columns = {
        "seq_len": (expected.length[wanted], length[order]),
        "dst_rank": (expected.dest[wanted], dest[order]),
        "dst_offset": (expected.dest_row[wanted], row[order]),
    }
    wrong = {name: np.flatnonzero(left != right)[:1].tolist() for name, (left, right) in columns.items()}
    # The first row that is wrong, and there the first field: a wrong length moves all rows after it.
    for at, name in sorted((places[0], name) for name, places in wrong.items() if places)[:1]:
        left, right = columns[name]
        raise MetadataError(
            "rows come back to where they came from",
            field=f"{tables.name}.{name}",
            rank=int(rank[order[at]]),
            shard=int(shard[order[at]]),
            expected=int(left[at]),
            got=int(right[at]),
        )


def _lying(rank: Longs, begin: Longs, length: Longs, dest: Longs, row: Longs) -> Longs:
    """The order of runs on their ranks, the same whatever the order of those without rows was.

    Runs stand by rank and first row; only those that begin at one row, as runs without rows do, are sorted.
    """
    tied = np.zeros(len(rank), np.bool_)
    tied[1:] = (rank[1:] == rank[:-1]) & (begin[1:] == begin[:-1])
    group = np.cumsum(~tied)
    tied[:-1] |= tied[1:]
    some = np.flatnonzero(tied)
    order = np.arange(len(rank))
    order[some] = some[np.lexsort((row[some], dest[some], length[some] > 0, group[some]))]
    return order


def _same_shards(queries: Columns, keys: Columns) -> None:
    """Raises MetadataError unless keys and values are of the shards of the queries."""
    if queries.copies is not None:
        law = "a query shard whose keys follow it goes to one rank"
        raise MetadataError(law, field="fwd_q.dst_rank", expected="(W, S)", got=queries.dest.shape)
    if keys.copies is None:
        raise MetadataError("a key shard has copies", field="fwd_k.dst_rank", expected="(W, S, C)", got="(W, S)")
    if keys.length.shape != queries.length.shape:
        law = "keys are shards of the same rows as queries"
        raise MetadataError(law, field="fwd_k.seq_len", expected=queries.length.shape, got=keys.length.shape)
    law = "keys are shards of the same rows as queries"
    refuse(keys.length != queries.length, keys.length, "fwd_k.seq_len", queries.length, law)
    # A last shard without rows may be sent as a query and not as a key, or the other way round: it counts where it is.
    extra = _is_last_unsent(keys, queries) | _is_last_unsent(queries, keys)
    refuse(extra, keys.num_seqs, "fwd_k.num_seqs", queries.num_seqs, law)


def _is_last_unsent(one: Columns, other: Columns) -> NDArray[np.bool_]:
    """(W,): whether a Metadata counts more shards of a rank than the other, and the last of them goes nowhere."""
    more = np.flatnonzero(one.num_seqs > other.num_seqs)
    found = np.zeros(len(one.num_seqs), np.bool_)
    found[more] = (one.dest[more, one.num_seqs[more] - 1] == NOWHERE).all(axis=1)
    return found
