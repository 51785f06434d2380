"""Turns a plan into the `Metadata` of its queries, keys and values.

Assumes a plan that `checks` proved, or one drawn by `generate`. Does not prove it again; `validator` judges the result.
"""

from __future__ import annotations

import numpy as np

from commdsl import compiler
from commdsl.dispatch import layout
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.metadata import AttentionLayout, QKVMetadata
from commdsl.ir.plans import DispatchPlan, Routing, routing
from commdsl.ir.routes import Longs, Routes
from commdsl.language.syntax import PlanDecl
from commdsl.runtime.load import Where, find


def load_plan(path: Where, name: str | None = None) -> QKVMetadata:
    """`from_plan` of a plan of a `.comm` file, or of a shipped one by its name ("balanced_16k"): the plan of that name,
    or the only one. Raises CommError with every fault, FileNotFoundError.
    """
    files = compiler.read(find(path))
    return from_plan(compiler.check_plan(files, compiler.choose_kind(files, name, PlanDecl)).plan)


def from_plan(plan: DispatchPlan) -> QKVMetadata:
    """`Metadata` of all ranks, int64, on the host. Without a mask there are no keys, and a shard that the plan sends to
    several ranks has its copies in fwd_q; with one, fwd_q is (W, S) and fwd_k (W, S, copies of the plan, or as many as
    the plan needs). Raises MetadataError where the plan allows fewer copies than it needs.
    """
    routes = routing(plan)
    num_seqs = np.diff(plan.shards.begin)
    slots = None
    if routes.keys is None and (plan.dest.shape[1] > 1 or (plan.copies or 1) > 1):
        slots = _copies(plan, routes.queries)
    fwd_q = layout.forward(plan.shards, routes.queries, num_seqs, slots)
    rev_q = layout.reverse(routes.queries_back, fwd_q)
    if routes.keys is None or routes.keys_back is None:
        return QKVMetadata(fwd_q, rev_q, None, None, None)
    fwd_k = layout.forward(plan.shards, routes.keys, num_seqs.copy(), _copies(plan, routes.keys))
    return QKVMetadata(fwd_q, rev_q, fwd_k, layout.reverse(routes.keys_back, fwd_k), _attention(plan, routes))


def _copies(plan: DispatchPlan, routes: Routes) -> int:
    """The copies of a shard that the tables have room for."""
    needed = int(routes.copy.max(initial=0)) + 1
    if plan.copies is None:
        return max(needed, int(plan.dest.shape[1]))
    if plan.copies < needed:
        row = int(routes.copy.argmax())
        shard = int(routes.shard[row])
        raise MetadataError(
            "the plan allows fewer copies of a shard than it needs",
            field="copies",
            rank=int(plan.shards.rank[shard]),
            shard=int(plan.shards.local[shard]),
            expected=f"{needed} or more",
            got=plan.copies,
        )
    return plan.copies


def _attention(plan: DispatchPlan, routes: Routing) -> AttentionLayout:
    """Where each query shard finds what it attends to."""
    assert routes.stretches is not None
    queries, stretches = routes.queries, routes.stretches
    seen: Longs = queries.shard
    return layout.attention(
        plan.num_ranks,
        queries.dest,
        queries.place,
        queries.length,
        stretches.length[seen],
        stretches.row[seen],
    )
