"""Turns document lengths into this rank's Route: documents lie as given, their attention is balanced, the plan proved.

Assumes that every rank gives the same lengths: the plan is computed by each, and sent to none. A kernel holds ranks to
it: tables of other plans are told apart (C964). Does not move rows, nor make tables before a call asks for them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from commdsl import compiler
from commdsl.attention.machines import of_device
from commdsl.dispatch.limits import KEY_ROOM, QUERY_ROOM
from commdsl.dispatch.route import Route
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import Mask, Sharing
from commdsl.machine.errors import ArgumentError
from commdsl.planner import documents, packing
from commdsl.runtime import groups
from commdsl.runtime.launches import default_device
from commdsl.runtime.reporting import reported

KEPT = 64
"""So many Routes are remembered, with the tables that calls have asked for."""

Lengths: TypeAlias = tuple[tuple[int, ...], ...]


@reported()
def plan(
    lengths: Iterable[Iterable[int]],
    *,
    group: Any = None,
    causal: bool = True,
    sharing: str = "rank",
    device: torch.device | str | None = None,
) -> Route:
    """The Route of a balanced plan: `lengths[rank]` are the documents of each rank, in tokens, as they lie there. The
    same lengths on all ranks; those that were planned lately give the same Route again. The first call on a group is
    collective, as any first call is: who is near is agreed on. Later ones ask nobody.

    Documents stay where they are, and runs of their queries go where attention is least, with the keys they see. No
    rank receives more than `limits.QUERY_ROOM` times the rows of the fullest one in queries, `KEY_ROOM` times in keys,
    so that a `Dispatcher.for_tokens` of as many tokens has room for it. `causal`: a token sees its document up to
    itself; else all of it. `sharing`: "rank" sends a key once to each rank that needs it; "query" once for each shard
    of queries there, which `attention.varlen()` wants, and of which there may be any number: `Limits.of` says the room.
    Raises ArgumentError (C973).
    """
    name = groups.name_of(group)
    rank, ranks = groups.own_rank(name), groups.size_of(name)
    given = _lengths(lengths)
    if len(given) != ranks:
        raise ArgumentError(f"expected the documents of {ranks} ranks, a list each, got {len(given)} lists")
    if any(one < 0 for mine in given for one in mine):
        raise ArgumentError(f"a document has 0 tokens or more, not {min(map(min, filter(None, given)))}")
    if sharing not in _SHARING:
        raise ArgumentError(f'`sharing` is "rank" or "query", not {sharing!r}')
    where = default_device() if device is None else torch.device(device)
    mask = Mask.CAUSAL if causal else Mask.FULL
    return _known(given, rank, mask, _SHARING[sharing], where, groups.of(name, where).nodes)


_SHARING = {one.value: one for one in Sharing}


def _lengths(given: Iterable[Iterable[int]]) -> Lengths:
    try:
        return tuple(tuple(operator.index(one) for one in documents) for documents in given)
    except TypeError as error:
        example = "as in [[4096, 512], [2048]]"
        raise ArgumentError(f"expected a list of whole numbers for each rank, {example}: {error}") from None


def new_route(
    lengths: Lengths, rank: int, mask: Mask, sharing: Sharing, device: torch.device, nodes: tuple[int, ...]
) -> Route:
    """That of one rank of as many as there are `nodes`, each the number of that rank's, whether it was made before or
    not: a plan, and its proof.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    proved = compiler.prove_plan(_planned(lengths, mask, sharing, kind, nodes))
    return Route.of_plan(proved.plan, proved.routing, rank=rank, device=device)


_known = lru_cache(KEPT)(new_route)


def _planned(lengths: Lengths, mask: Mask, sharing: Sharing, kind: str, nodes: tuple[int, ...]) -> DispatchPlan:
    home = packing.place(lengths)
    rows = max(map(sum, lengths))
    shared = sharing is Sharing.RANK
    terms = packing.Terms("balanced", mask, QUERY_ROOM * rows, KEY_ROOM * rows if shared else None, sharing)
    machine = of_device(kind, nodes)
    return documents.balanced(home, machine.topology, documents.Goal(), terms)
