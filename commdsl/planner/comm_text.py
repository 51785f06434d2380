"""Turns a DispatchPlan into `.comm` text in the one canonical form: what `resolve` makes of it is the same plan.

Assumes a plan that `checks` accepts. Writes numbers only: loops and equal cuts that a text had are written out, but for
`repeat` around equal documents in a row. Does not write a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from commdsl.ir.plans import DispatchPlan, Piece
from commdsl.ir.routes import NOWHERE, Sharing


def comm_text(plan: DispatchPlan, comment: Sequence[str] = ()) -> str:
    """The declaration, after the lines of a comment."""
    lines = [f"# {line}".rstrip() for line in comment]
    lines += [f"plan {plan.name} for {plan.num_ranks} ranks {{", *_settings(plan)]
    docs = list(_docs(plan))
    ranks = plan.shards.rank.tolist()
    for rank, group in groupby(zip(plan.pieces, docs, strict=True), key=lambda pair: ranks[pair[0].first_shard]):
        lines += [f"  rank {rank} {{", *_block([text for _, text in group]), "  }"]
    return "\n".join([*lines, "}", ""])


def _settings(plan: DispatchPlan) -> Iterator[str]:
    if plan.mask is not None:
        yield f"  {plan.mask.value}"
    if plan.sharing is Sharing.RANK:
        yield "  send once per rank"
    if plan.copies is not None:
        yield f"  copies {plan.copies}"
    if plan.query_capacity is not None:
        yield f"  capacity {plan.query_capacity} queries"
    if plan.key_capacity is not None:
        yield f"  capacity {plan.key_capacity} keys"


def _block(docs: Sequence[str]) -> Iterator[str]:
    """A line a document; a document without a name that comes several times in a row is written once."""
    for text, group in groupby(docs):
        times = len(list(group))
        yield f"    {text}" if times == 1 else f"    repeat {times} {{ {text} }}"


def _docs(plan: DispatchPlan) -> Iterator[str]:
    lengths = plan.shards.length.tolist()
    dests = plan.dest.tolist()
    for piece in plan.pieces:
        mine = slice(piece.first_shard, piece.first_shard + piece.num_shards)
        yield _doc(piece, lengths[mine], [_dest(ranks) for ranks in dests[mine]])


def _doc(piece: Piece, lengths: list[int], dests: list[str]) -> str:
    name = f" {piece.name}" if piece.name else ""
    cut = f" as {' '.join(map(str, lengths))}" if len(lengths) > 1 else ""
    where = dests[0] if len(set(dests)) == 1 else " ".join(dests)
    return f"doc{name} {sum(lengths)}{cut} -> {where}"


def _dest(ranks: list[int]) -> str:
    """One destination of a shard."""
    found = [rank for rank in ranks if rank != NOWHERE]
    if not found:
        return "none"
    return str(found[0]) if len(found) == 1 else f"[{' '.join(map(str, found))}]"
