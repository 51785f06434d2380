"""Turns sizes into random lengths of documents and a random causal dispatch of them, for tests and measurements.

Assumes the default generator of torch: the same seed gives the same numbers. Does not balance; `planner` does.
"""

from __future__ import annotations

import numpy as np
import torch

from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.metadata import QKVMetadata
from commdsl.dispatch.planned import from_plan
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import Longs, Mask, Shards, Sharing, running_count
from commdsl.language.source import Source, Span
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import given

MOST_ROWS = 2**31 - 1
"""Of all sequences of a rank together."""


def gen_seq_lens(world_size: int, num_seqs: int, total_len: int) -> torch.Tensor:
    """(world_size, num_seqs) int32: random lengths, `total_len` rows in each row of the table.

    Each is at least 1 where total_len >= num_seqs. Draws as upstream does, and where its lengths are positive these are
    the same. Raises MetadataError for negative numbers, for rows with no sequence to hold them, and for more rows than
    int32 holds.
    """
    _at_least(world_size, 1, "world_size")
    _at_least(total_len, 0, "total_len")
    _at_least(num_seqs, 1 if total_len else 0, "num_seqs")
    if total_len > MOST_ROWS:
        raise MetadataError("lengths are int32", field="total_len", expected=f"at most {MOST_ROWS}", got=total_len)
    if not num_seqs:
        return torch.zeros(world_size, 0, dtype=torch.int32)
    weight = torch.rand(world_size, num_seqs) + 0.25 / num_seqs
    share = weight / weight.sum(dim=1, keepdim=True)
    lengths = torch.round(share * total_len).to(torch.int64)
    lengths[:, -1] += total_len - lengths.sum(dim=1)
    least = 1 if total_len >= num_seqs else 0
    # The rounding of many short sequences can leave the last with less than nothing: such rows of the table are cut
    # anew, at ends that never fall.
    poor = (lengths < least).any(dim=1)
    ends = torch.floor(share[poor].to(torch.float64).cumsum(1) * (total_len - least * num_seqs)).to(torch.int64)
    ends = ends.clamp(max=total_len - least * num_seqs)
    ends[:, -1] = total_len - least * num_seqs
    lengths[poor] = torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1])) + least
    return lengths.to(torch.int32)


def create_qkv_dispatch(world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int) -> QKVMetadata:
    """A random causal dispatch: on each of W ranks `num_seqs` documents of `total_seq_len` rows in all, each in 1, 2,
    4, ... or `max_cp_degree` equal shards that go to different ranks, as long as there are any. Keys and values travel
    once per query.

    Returns fwd_q, rev_q (W, S) and fwd_k, rev_k (W, S, max_cp_degree) and the attention layout. Raises MetadataError
    unless max_cp_degree divides total_seq_len, and is a power of two.
    """
    _at_least(world_size, 1, "world_size")
    _at_least(num_seqs, 1, "num_seqs")
    _at_least(max_cp_degree, 1, "max_cp_degree")
    _at_least(total_seq_len, 0, "total_seq_len")
    if total_seq_len % max_cp_degree:
        law = "the rows of a rank are cut into that many equal shards"
        expected = f"divisible by max_cp_degree, {max_cp_degree}"
        raise MetadataError(law, field="total_seq_len", expected=expected, got=total_seq_len)
    if max_cp_degree & (max_cp_degree - 1):
        law = "documents are cut in half, and in half again"
        raise MetadataError(law, field="max_cp_degree", expected="a power of two", got=max_cp_degree)
    lengths = gen_seq_lens(world_size, num_seqs, total_seq_len // max_cp_degree).to(torch.int64) * max_cp_degree
    degree = 2 ** torch.randint(0, max_cp_degree.bit_length(), (world_size, num_seqs))
    ranks = torch.rand(world_size, num_seqs, world_size).argsort(dim=2)
    tables = lengths.flatten().numpy(), degree.flatten().numpy(), ranks.flatten(0, 1).numpy()
    return from_plan(_plan(*tables, copies=max_cp_degree))


def _plan(lengths: Longs, degree: Longs, ranks: Longs, copies: int) -> DispatchPlan:
    """Documents of `lengths` (n,), n / W a rank, each in `degree` (n,) shards for one of its `ranks` (n, W) after the
    other, and from the first again.
    """
    world_size = ranks.shape[1]
    document = np.repeat(np.arange(len(lengths)), degree)
    position = running_count(document)
    length = (lengths // degree)[document]
    home = document // (len(lengths) // world_size)
    here = Span(Source("random", ""), 0, 0)
    return DispatchPlan(
        name="random",
        num_ranks=world_size,
        shards=Shards(world_size, home, length),
        document=document,
        position=position,
        context=position * length,
        dest=ranks[document, position % world_size][:, None],
        mask=Mask.CAUSAL,
        sharing=Sharing.QUERY,
        copies=copies,
        query_capacity=None,
        key_capacity=None,
        names=("",) * len(lengths),
        piece=document,
        spans=(here,) * len(lengths),
        span=here,
    )


def _at_least(number: int, least: int, field: str) -> None:
    if isinstance(number, bool) or given.index(number) is None:
        raise ArgumentError(f"`{field}` is a whole number, not {given.shown(number)}")
    if number < least:
        raise MetadataError("the size is too small", field=field, expected=f"{least} or more", got=number)
