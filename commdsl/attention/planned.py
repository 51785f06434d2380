"""Turns an op, a placement, a mask and a kernel into all that is done at the visits of one rank, but for the data.

Assumes tensors with rows first. It is made once and kept: calls, slices, tables on the device, and where gradients are
summed. Does not run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from commdsl.attention import kernels
from commdsl.attention.kernel import Kernel, Ready, Shape, ready, shape_of
from commdsl.attention.masks import Mask
from commdsl.attention.pieces import Visits, as_kept, stretches, visits
from commdsl.attention.placement import Placement, Same
from commdsl.runtime import groups
from commdsl.runtime.errors import TensorError

KEPT_HEADS = ("qh", "kh", "vh")
"""What the way back of schedules that exchange heads for rows may be given: what visits of the way forth had."""

KEPT = 256
"""So many combinations of op, group, placement, mask, kernel and shape are remembered."""


class Rotation(Protocol):
    """What is asked of an op: `commdsl.Op` has it."""

    name: str
    shown: str
    input_names: tuple[str, ...]

    def lands(self, group: Any = None) -> bool: ...

    def held(self, group: Any = None) -> Any: ...

    def visit(self, *arguments: Any, group: Any = None, **named: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Into:
    """Rows of what a call makes, to rows of where it is summed; `is_first`: nothing is there yet."""

    rows: slice
    part: slice
    is_first: bool


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A call, and where its gradients go."""

    ready: Ready
    into_keys: tuple[Into, ...]  # of the visit's own


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """All that is done at the visits of one rank, but for the data."""

    visits: Visits
    kernel: Kernel
    works: tuple[tuple[Work, ...], ...]
    unseen: tuple[tuple[slice, ...], ...]  # rows that visit, and that no call of the visit has
    query_rows: tuple[slice, ...]  # each that a call has


def by_heads(op: Rotation) -> bool:
    """Whether queries travel, and heads are exchanged for rows; else keys and values visit by halves."""
    return "q" in op.input_names or "g" in op.input_names


def plan_of(
    op: Rotation,
    tensors: Sequence[torch.Tensor],
    placement: Placement,
    mask: Mask,
    group: Any,
    kernel: str,
    *,
    backward: bool,
) -> Plan:
    """Raises TensorError, GroupError, MaskError, ArgumentError."""
    name = groups.name_of(group)
    rank = groups.own_rank(name)
    q = tensors[0]
    where = Same(placement)
    _check(op.shown, tensors, _rows(where, rank))
    shape = shape_of(q, tensors[1])
    return _made(Same(op), name, rank, where, mask, kernel, q.device, shape, backward)


def _check(name: str, tensors: Sequence[torch.Tensor], rows: int) -> None:
    """Refuses what no kernel is given."""
    q, k, v = tensors
    for word, one in zip("qkv", tensors, strict=True):
        if one.dim() != 4 or not one.is_contiguous():
            raise TensorError(f"`{name}`: {word} is (rows, batch, heads, dim) and contiguous, not {tuple(one.shape)}")
        if (one.dtype, one.device) != (q.dtype, q.device):
            raise TensorError(f"`{name}`: {word} is {one.dtype} on {one.device}, q {q.dtype} on {q.device}")
        if len(one) != rows:
            raise TensorError(f"`{name}`: by the placement this rank has {rows} rows, {word} has {len(one)}")
    if k.shape != v.shape or (k.shape[1], k.shape[3]) != (q.shape[1], q.shape[3]):
        raise TensorError(f"`{name}`: k is {tuple(k.shape)} and v {tuple(v.shape)}, where q is {tuple(q.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise TensorError(f"`{name}`: {q.shape[2]} heads of queries are not a multiple of {k.shape[2]} of keys")


@lru_cache(KEPT)
def _rows(placement: Same[Placement], rank: int) -> int:
    """Of a rank by the placement; no number of rows where it has none such."""
    return placement.value.rows(rank) if rank < placement.value.ranks else -1


@lru_cache(KEPT)
def _visits(op: Same[Rotation], name: str, rank: int, placement: Same[Placement], mask: Mask) -> Visits:
    heads, held = by_heads(op.value), op.value.held(name)
    if heads:
        held = as_kept(held, [name for name in KEPT_HEADS if name in op.value.input_names])
    return visits(op.value.name, held, placement.value, mask, rank, heads)


@lru_cache(KEPT)
def _made(
    op: Same[Rotation],
    name: str,
    rank: int,
    placement: Same[Placement],
    mask: Mask,
    kernel: str,
    device: torch.device,
    shape: Shape,
    backward: bool,
) -> Plan:
    found = _visits(op, name, rank, placement, mask)
    asked = [call for made in found.calls for call in made]
    chosen = kernels.chosen(kernel, kernels.here(device), shape, asked, backward)
    works, unseen = [], []
    for made, fresh in zip(found.calls, found.fresh, strict=True):
        keys = np.zeros(found.layout.all_rows, np.bool_)
        of_visit = []
        for call in kernels.suited(chosen, shape, made):
            one = ready(call, device)
            of_visit.append(Work(one, _into(keys, one.keys)))
        works.append(tuple(of_visit))
        blank = np.zeros_like(keys)
        for rows in fresh:
            blank[rows] = ~keys[rows]
        unseen.append(tuple(stretches(blank)))
    distinct = {(work.ready.queries.start, work.ready.queries.stop) for made in works for work in made}
    query_rows = tuple(slice(*pair) for pair in sorted(distinct))
    return Plan(found, chosen, tuple(works), tuple(unseen), query_rows)


def _into(touched: NDArray[np.bool_], rows: slice) -> tuple[Into, ...]:
    """Where the rows go, apart by whether they were touched before; they are now."""
    cuts = [0, *(np.flatnonzero(np.diff(touched[rows])) + 1).tolist(), rows.stop - rows.start]
    made = []
    for first, end in pairwise(cuts):
        place = slice(rows.start + first, rows.start + end)
        made.append(Into(place, slice(first, end), not touched[place.start]))
    touched[rows] = True
    return tuple(made)
