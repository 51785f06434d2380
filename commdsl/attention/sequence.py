"""Turns a whole sequence into the rows of a rank, the rows of all ranks into the sequence, and says their positions.

Assumes that all ranks have the same placement and documents. Does not say which tokens a rank has: `placement` does.
Only slices and copies of torch and one all-gather: nothing here waits for a GPU, unless `cu_seqlens` lies on one, and
`torch.compile` takes it whole, each length anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any, TypeAlias

import torch

from commdsl.attention import placement as placements
from commdsl.attention.arguments import placement_text, read_placement
from commdsl.attention.gathering import gathered
from commdsl.attention.placement import Placement
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import given, groups, menu
from commdsl.runtime.errors import TensorError
from commdsl.runtime.reporting import reported

Ends: TypeAlias = "Sequence[int] | torch.Tensor | None"
"""Where documents begin in a packed sequence, and where the last ends: [0, 5, 12] are two, of 5 and 7 tokens."""


def shard_sequence(
    x: torch.Tensor, dim: int, group: Any = None, placement: str | Placement = "zigzag", cu_seqlens: Ends = None
) -> torch.Tensor:
    """This rank's tokens of a sequence that every rank has whole along dimension `dim`: a new tensor.

    Any length will do, also fewer tokens than ranks: a rank may have one more than another, or none at all. Of a packed
    sequence every document is cut for itself. The gradient of x is that of the own tokens, and zero elsewhere.
    `cu_seqlens` is read on the host. Raises TensorError, ArgumentError, GroupError.
    """
    dim = _dimension("shard_sequence", x, dim)
    rank, ranks = _place(group)
    lengths = document_lengths(x.shape[dim], cu_seqlens)
    own = placements.slices(_placed(placement, ranks, lengths), lengths, rank)
    return _taken(x, dim, own)


@reported()
def unshard_sequence(
    x: torch.Tensor,
    dim: int,
    group: Any = None,
    placement: str | Placement = "zigzag",
    length: int | None = None,
    cu_seqlens: Ends = None,
) -> torch.Tensor:
    """The whole sequence, on every rank, of the rows that `shard_sequence` gave each: a collective.

    `length`: the tokens of the whole; unless it or `cu_seqlens` says, every rank has as many as this one. Ranks that
    then differ are told so (C964). The gradient of a rank's rows is the sum over the ranks of what each has for them.
    Raises TensorError, ArgumentError, GroupError.
    """
    dim = _dimension("unshard_sequence", x, dim)
    rank, ranks = _place(group)
    if length is None and cu_seqlens is None:
        length = x.shape[dim] * ranks
    lengths = document_lengths(length, cu_seqlens)
    chosen = _placed(placement, ranks, lengths)
    if x.shape[dim] != chosen.rows(rank):
        raise TensorError(
            f"`unshard_sequence`: rank {rank} has {chosen.rows(rank)} of {sum(lengths)} tokens by the placement "
            f"`{chosen.name}`, and dimension {dim} of x is {x.shape[dim]}"
        )
    most = max(chosen.rows(one) for one in range(ranks))
    front = x.movedim(dim, 0)
    if len(front) < most:
        front = torch.cat((front, front.new_zeros(most - len(front), *front.shape[1:])))
    rows = gathered(front.contiguous(), group, dim, lengths, placement_text(placement))
    # Where each stretch of the sequence lies among the rows of all ranks.
    where = []
    for one in range(ranks):
        at = one * most
        for begin, size in placements.slices(chosen, lengths, one):
            where.append((begin, at, size))
            at += size
    whole = _taken(rows, 0, [(at, size) for _, at, size in sorted(where)])
    return whole.movedim(0, dim).contiguous()


def positions(
    length: int | None,
    group: Any = None,
    placement: str | Placement = "zigzag",
    cu_seqlens: Ends = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The position in its document of each of this rank's tokens, as rotary embeddings want them: int64, (rows,).

    `length`: the tokens of the whole sequence; None where `cu_seqlens` says. On the processor unless `device` says.
    Raises ArgumentError, GroupError.
    """
    rank, ranks = _place(group)
    halves = _placed(placement, ranks, document_lengths(length, cu_seqlens)).runs[rank]
    found = [torch.arange(run.begin, run.begin + run.length, device=device) for half in halves for run in half]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def document_lengths(length: int | None, cu_seqlens: Ends) -> tuple[int, ...]:
    """The tokens of each document; of a sequence that is not packed, its own. Raises ArgumentError."""
    if isinstance(length, int) and torch.compiler.is_dynamo_compiling():
        length = index(length)  # a number from here on: each length is a graph of its own
    elif length is not None:
        length = given.whole("length", length, 0)
    if cu_seqlens is None:
        if length is None:
            raise ArgumentError("either `length` or `cu_seqlens` says how many tokens there are")
        return (length,)
    said = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    if not isinstance(said, Sequence) or not all(hasattr(end, "__index__") for end in said):
        raise ArgumentError(f"`cu_seqlens` is a list or a vector of whole numbers, not {_short(said)}")
    ends = [int(end) for end in said]
    if not ends or ends[0] != 0 or any(begin > end for begin, end in pairwise(ends)):
        raise ArgumentError(f"`cu_seqlens` begins with 0 and never goes down, not {_short(ends)}")
    if length is not None and ends[-1] != length:
        raise ArgumentError(f"`cu_seqlens` ends with {ends[-1]}, and there are {length} tokens")
    return tuple(end - begin for begin, end in pairwise(ends))


def _place(group: Any) -> tuple[int, int]:
    """This process's rank in a group, and its size."""
    return groups.own_rank(groups.name_of(group)), menu.size(group)


def _placed(placement: str | Placement, ranks: int, lengths: Sequence[int]) -> Placement:
    if torch.compiler.is_dynamo_compiling():
        if isinstance(placement, str):
            return placements.named(placement, ranks, lengths)  # torch traces through a cache, and says so
        placement = read_placement(placement_text(placement))  # of numbers that do not change
    return placements.placed(placement, ranks, lengths)


def _dimension(name: str, x: torch.Tensor, dim: int) -> int:
    given.tensor(name, x)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ArgumentError(f"`{name}`: `dim` is a dimension of x, {-x.ndim} to {x.ndim - 1}, not {dim!r}")
    return dim % x.ndim


def _taken(x: torch.Tensor, dim: int, chosen: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Stretches of a dimension, one after the other; by one `split`, whose gradient is made in one pass."""
    order = sorted(range(len(chosen)), key=lambda number: chosen[number])
    sizes: list[int] = []
    pieces: dict[int, int] = {}
    at = 0
    for number in order:
        begin, size = chosen[number]
        if begin > at:
            sizes.append(begin - at)
        pieces[number] = len(sizes)
        sizes.append(size)
        at = begin + size
    sizes.append(x.shape[dim] - at)
    cut = x.split(sizes, dim)
    return torch.cat([cut[pieces[number]] for number in range(len(chosen))] or [cut[0].narrow(dim, 0, 0)], dim)


def _short(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 60 else f"{text[:60]}..."
