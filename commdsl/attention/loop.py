"""Turns a schedule with yields, a placement and a mask into attention over the whole sequence, forward and backward.

Assumes that the schedule hands over keys and values as `pieces` says, by a function named `attend`. Any such schedule
will do: which piece of whose keys visits when stands in the table of what its yields hand over. Nothing here waits for
a GPU, and everything is allocated from the current stream: after a first call a CUDA graph may capture both ways.
Does not know layouts of the caller other than rows first, nor autograd.
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
from commdsl.attention.kernel import Kernel, Ready, Shape, ready
from commdsl.attention.masks import Mask
from commdsl.attention.merge import Merging, Partial, Summing, wide
from commdsl.attention.pieces import Visits, visits
from commdsl.attention.placement import Placement
from commdsl.runtime import groups
from commdsl.runtime.errors import GroupError, TensorError

KEPT = 256
"""So many combinations of op, group, placement, mask, kernel and shape are remembered."""


class Rotation(Protocol):
    """What is asked of an op: `commdsl.Op` has it."""

    name: str

    @property
    def num_inputs(self) -> int: ...

    def held(self, group: Any = None) -> Any: ...

    def visit(self, *arguments: Any, group: Any = None, **named: Any) -> Any: ...


def forward(
    op: Rotation,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    placement: Placement,
    mask: Mask,
    scale: float | None = None,
    group: Any = None,
    kernel: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys of all ranks: the output (rows, batch, heads, dim) in the dtype of
    q, and the natural log-sum-exp (batch, heads, rows) in float32, or float64 where q is.

    q (rows, batch, heads, dim), k and v (rows, batch, heads of keys, dim): the rank's rows by the placement, of one
    dtype, contiguous; heads is a multiple of the heads of keys. `scale`: of the scores, 1 / sqrt(dim) unless said.
    `kernel`: a name of `kernels.MENU`, or "auto" for the rule stated there. `options`: of the op's `visit`, `timeout`
    and `timing`. Queries that see no key have zeros, and -inf. Raises TensorError, ArgumentError, MaskError (the
    schedule does not fit the mask), and what `visit` raises.
    """
    plan = _plan(op, (q, k, v), placement, mask, group, kernel, False)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    queries = q.flatten(1, 2)
    merging = Merging(len(q), q.dtype)

    def attend(number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = _flat(keys, k), _flat(values, v)
        for work in plan.works[number]:
            one = work.ready
            parts = (queries[one.queries], keys[one.keys], values[one.keys])
            merging.add(Partial(one.queries, *plan.kernel.forward(*parts, one, scale)))

    op.visit(_travelling(k, plan), _travelling(v, plan), group=group, attend=attend, **options)
    out, lse = merging.result(queries, wide(q.dtype))
    return out.view(q.shape), lse.contiguous().view(*q.shape[1:3], len(q))


def backward(
    op: Rotation,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    placement: Placement,
    mask: Mask,
    scale: float | None = None,
    group: Any = None,
    kernel: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, in their shapes and dtypes, from that of the output and what `forward` returned.

    `op`: the schedule of the way back; it takes k and v, or k, v, dk and dv, and its last two results are dk and dv in
    float32. dq is summed in float32 (of float64, in float64) over the visits in their order, dk and dv as the schedule
    says. Two runs have the same bits, unless the kernel was named and is not exact. Raises as `forward`.
    """
    plan = _plan(op, (q, k, v), placement, mask, group, kernel, True)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    queries, outs, slopes = q.flatten(1, 2), out.flatten(1, 2), dout.contiguous().flatten(1, 2)
    sums = lse.flatten(0, 1)
    parts = {(rows.start, rows.stop): sums[:, rows].contiguous() for rows in plan.query_rows}
    gradients = Summing(len(q), q.dtype)

    def attend(number: int, keys: torch.Tensor, values: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        back = given or tuple(torch.empty_like(one, dtype=torch.float32) for one in (keys, values))
        sums_of_keys = [_flat(one, k) for one in back]
        keys, values = _flat(keys, k), _flat(values, v)
        for rows in () if given else plan.visits.unseen[number]:
            for one in sums_of_keys:
                one[rows] = 0
        for work in plan.works[number]:
            ready = work.ready
            own = ready.queries
            tensors = (slopes[own], queries[own], keys[ready.keys], values[ready.keys], outs[own])
            made = plan.kernel.backward(*tensors, parts[own.start, own.stop], ready, scale)
            gradients.add(own, made[0])
            for place, part in zip(sums_of_keys, made[1:], strict=True):
                _put(place, part, (Into(ready.keys, slice(None), False),) if given else work.into_keys)
        return back

    inputs = [_travelling(k, plan), _travelling(v, plan)]
    if op.num_inputs == 4:
        inputs += [torch.zeros_like(one, dtype=torch.float32) for one in inputs]
    *_, dk, dv = op.visit(*inputs, group=group, attend=attend, **options)
    return gradients.result(queries).view(q.shape), _home(dk, k, plan), _home(dv, v, plan)


def _travelling(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The tensor itself where no row is empty, else a copy with empty rows."""
    layout = plan.visits.layout
    if len(x) == layout.all_rows:
        return x
    padded = x.new_empty((layout.all_rows, *x.shape[1:]))
    padded[plan.visits.home] = x
    return padded


def _flat(one: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(rows, heads, dim): a batch is more heads."""
    return one.view(-1, like.shape[1] * like.shape[2], like.shape[3])


def _home(one: torch.Tensor, like: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A rank's own rows of what came back, in the shape and dtype of what it is the gradient of."""
    return _flat(one, like)[plan.visits.home].to(like.dtype).view(like.shape)


def _put(place: torch.Tensor, part: torch.Tensor, into: Sequence[Into]) -> None:
    for one in into:
        if one.is_first:
            place[one.rows].copy_(part[one.part])
        else:
            place[one.rows].add_(part[one.part])


# --- what is made once ------------------------------------------------------------------------------------------------


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
    query_rows: tuple[slice, ...]  # each that a call has


class _Same:
    """An object as a key that is equal to itself alone: a placement of many documents is long to compare."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _plan(
    op: Rotation,
    tensors: Sequence[torch.Tensor],
    placement: Placement,
    mask: Mask,
    group: Any,
    kernel: str,
    is_backward: bool,
) -> Plan:
    name = groups.name_of(group)
    rank = groups.rank_of(name)
    if rank is None or rank < 0:
        raise GroupError(f"this process is no rank of a process group named `{name}`")
    q = tensors[0]
    _check(op.name, tensors, placement.rows(rank) if rank < placement.ranks else -1)
    shape = Shape(q.dtype, q.shape[3])
    return _made(_Same(op), name, rank, _Same(placement), mask, kernel, q.device, shape, is_backward)


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
def _visits(op: _Same, name: str, rank: int, placement: _Same, mask: Mask) -> Visits:
    return visits(op.value.name, op.value.held(name), placement.value, mask, rank, False)


@lru_cache(KEPT)
def _made(
    op: _Same,
    name: str,
    rank: int,
    placement: _Same,
    mask: Mask,
    kernel: str,
    device: torch.device,
    shape: Shape,
    is_backward: bool,
) -> Plan:
    found = _visits(op, name, rank, placement, mask)
    asked = [call for made in found.calls for call in made]
    chosen = kernels.chosen(kernel, kernels.here(device), shape, asked, is_backward)
    works = []
    for made in found.calls:
        keys = np.zeros(found.layout.all_rows, np.bool_)
        of_visit = []
        for call in kernels.suited(chosen, shape, made):
            one = ready(call, device)
            of_visit.append(Work(one, _into(keys, one.keys)))
        works.append(tuple(of_visit))
    distinct = {(work.ready.queries.start, work.ready.queries.stop) for made in works for work in made}
    return Plan(
        found,
        chosen,
        tuple(works),
        tuple(slice(*pair) for pair in sorted(distinct)),
    )


def _into(touched: NDArray[np.bool_], rows: slice) -> tuple[Into, ...]:
    """Where the rows go, apart by whether they were touched before; they are now."""
    cuts = [0, *(np.flatnonzero(np.diff(touched[rows])) + 1).tolist(), rows.stop - rows.start]
    made = []
    for first, end in pairwise(cuts):
        place = slice(rows.start + first, rows.start + end)
        made.append(Into(place, slice(first, end), not touched[place.start]))
    touched[rows] = True
    return tuple(made)
