"""Turns a schedule with yields, a placement and a mask into attention over the whole sequence, forward and backward.

Assumes that the schedule hands over keys and values as `pieces` says, by a function named `attend`. Any such schedule
will do: which piece of whose keys visits when stands in the table of what its yields hand over. Nothing here waits for
a GPU, and everything is allocated from the current stream: after a first call a CUDA graph may capture both ways.
Does not know layouts of the caller other than rows first, nor autograd.

Where queries travel, and heads are exchanged for rows (Ulysses), the schedule takes q, k and v, in blocks of heads. Its
way back takes the gradient g of the output and, of k, v, qh, kh and vh, what it names: those with an h are what visits
had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commdsl.attention.masks import Mask
from commdsl.attention.merge import Merging, Partial, Summing, wide
from commdsl.attention.placement import Placement
from commdsl.attention.planned import Into, Plan, Rotation, by_heads, plan_of
from commdsl.attention.travel import flat, heads_home, heads_travelling, home, travelling

Tensors = tuple[torch.Tensor, ...]


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
    and `timing`. Queries that see no key have zeros, and -inf. Where heads are exchanged for rows the log-sum-exp is of
    the heads and rows that this rank computed on. Raises TensorError, ArgumentError, MaskError (the schedule does not
    fit the mask), and what `visit` raises.
    """
    told = {"placement": placement, "mask": mask, "scale": scale, "group": group, "kernel": kernel}
    out, lse, _ = attended(op, q, k, v, **told, **options)
    return out, lse


def attended(
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
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """As `forward`, and what else `backward` is given: nothing, unless heads are exchanged for rows."""
    plan = plan_of(op, (q, k, v), placement, mask, group, kernel, backward=False)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    merging = Merging(plan.visits.query_rows, q.dtype)

    def work(number: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        for one in plan.works[number]:
            ready = one.ready
            parts = (queries[ready.queries], keys[ready.keys], values[ready.keys])
            merging.add(Partial(ready.queries, *plan.kernel.forward(*parts, ready, scale)))

    if not by_heads(op):
        own = flat(q)

        def attend(number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            work(number, own, flat(keys), flat(values))

        op.visit(travelling(k, plan), travelling(v, plan), group=group, attend=attend, last=0, **options)
        out, lse = merging.result(own, wide(q.dtype))
        return out.view(q.shape), _by_batch(lse, q.shape[1]), ()

    kept: list[torch.Tensor] = []

    def attend_heads(number: int, *handed: torch.Tensor, out: torch.Tensor | None = None) -> None:
        queries, keys, values = handed
        work(number, flat(queries), flat(keys), flat(values))
        if out is not None:
            found, lse = merging.result(flat(queries), wide(q.dtype))
            flat(out).copy_(found)
            given = (queries, keys, values)
            kept.extend(one.clone() for one in given) if op.lands(group) else kept.extend(given)
            kept.extend((out, lse.contiguous()))

    given = (heads_travelling(one, plan) for one in (q, k, v))
    gone = op.visit(*given, group=group, attend=attend_heads, **options)
    return heads_home(gone, q, plan), _by_batch(kept[4], q.shape[1]), tuple(kept)


def backward(
    op: Rotation,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: Sequence[torch.Tensor] = (),
    *,
    placement: Placement,
    mask: Mask,
    scale: float | None = None,
    group: Any = None,
    kernel: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, in their shapes and dtypes, from that of the output and what `forward` returned, or
    `attended`.

    `op`: the schedule of the way back; it takes k and v, or k, v, dk and dv, and its last two results are dk and dv in
    float32. dq is summed in float32 (of float64, in float64) over the visits in their order, dk and dv as the schedule
    says: what a visit finds has the type of its place, so where that is the kernel's own only the kernel rounds it, and
    what several calls of a visit find about the same keys is added in float32 before. Two runs have the same bits,
    unless the kernel was named and is not exact. Raises as `forward`.
    """
    plan = plan_of(op, (q, k, v), placement, mask, group, kernel, backward=True)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dout = dout.contiguous()
    if by_heads(op):
        return _backward_of_heads(op, plan, scale, (dout, q, k, v), kept, group, options)
    own = _Way(plan, scale, flat(q), flat(out), lse.flatten(0, 1))
    slopes = flat(dout)

    def attend(
        number: int, keys: torch.Tensor, values: torch.Tensor, *given: torch.Tensor, out: tuple[torch.Tensor, ...]
    ) -> None:
        for place, before in zip(out, given, strict=False):
            if place.data_ptr() != before.data_ptr():
                place.copy_(before)
        own.visit(number, slopes, flat(keys), flat(values), [flat(one) for one in out], is_more=bool(given))

    inputs = [travelling(k, plan), travelling(v, plan)]
    if len(op.input_names) == 4:
        inputs += [torch.zeros_like(one, dtype=torch.float32) for one in inputs]
    dk, dv = op.visit(*inputs, group=group, attend=attend, last=2, **options)
    return own.gradient().view(q.shape), home(dk, k, plan), home(dv, v, plan)


def _backward_of_heads(
    op: Rotation,
    plan: Plan,
    scale: float,
    tensors: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    group: Any,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout, q, k, v = tensors
    qh, kh, vh, oh, lse = kept
    own = _Way(plan, scale, flat(qh), flat(oh), lse)
    writes = [one.writes for one in op.held(group)]

    def attend(number: int, *handed: torch.Tensor, out: tuple[torch.Tensor, ...]) -> None:
        _, keys, values, slopes = handed
        places = dict(zip(writes[number], out, strict=True))
        dq = next((places.pop(name) for name in writes[number] if name.startswith("dq")), None)
        own.visit(number, flat(slopes), flat(keys), flat(values), [flat(one) for one in places.values()], is_more=False)
        if dq is not None:
            flat(dq).copy_(own.gradient())

    known = {"qh": lambda: qh, "kh": lambda: kh, "vh": lambda: vh}
    known |= {"g": lambda: heads_travelling(dout, plan)}
    known |= {"k": lambda: heads_travelling(k, plan), "v": lambda: heads_travelling(v, plan)}
    given = [known[name]() for name in op.input_names]
    *_, dq, dk, dv = op.visit(*given, group=group, attend=attend, **options)
    return heads_home(dq, q, plan), heads_home(dk, k, plan), heads_home(dv, v, plan)


class _Way:
    """The way back on one rank: the sum of dq over its visits, and what each finds about its keys."""

    def __init__(self, plan: Plan, scale: float, queries: torch.Tensor, outs: torch.Tensor, lse: torch.Tensor) -> None:
        self._plan = plan
        self._scale = scale
        self._queries = queries
        self._outs = outs
        self._sums = {(rows.start, rows.stop): lse[:, rows].contiguous() for rows in plan.query_rows}
        self._gradients = Summing(len(queries), queries.dtype)

    def gradient(self) -> torch.Tensor:
        """Of the queries, over the visits so far."""
        return self._gradients.result(self._queries)

    def visit(
        self,
        number: int,
        slopes: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        places: Sequence[torch.Tensor],
        *,
        is_more: bool,
    ) -> None:
        """Puts what this visit finds about its keys to these places; `is_more`: adds it to what is there."""
        plan, works = self._plan, self._plan.works[number]
        sums = list(places)
        if any(not into.is_first for work in works for into in work.into_keys):  # else nothing is rounded twice
            sums = [one if one.dtype in WIDE else torch.empty_like(one, dtype=torch.float32) for one in places]
        for rows in () if is_more else plan.unseen[number]:
            for one in sums:
                one[rows] = 0
        for work in works:
            ready = work.ready
            own = ready.queries
            tensors = (slopes[own], self._queries[own], keys[ready.keys], values[ready.keys], self._outs[own])
            made = plan.kernel.backward(*tensors, self._sums[own.start, own.stop], ready, self._scale)
            self._gradients.add(own, made[0])
            for one, part in zip(sums, made[1:], strict=True):
                _put(one, part, (Into(ready.keys, slice(None), False),) if is_more else work.into_keys)
        for place, one in zip(places, sums, strict=True):
            if place is not one:
                place.copy_(one)


WIDE = (torch.float32, torch.float64)


def _by_batch(lse: torch.Tensor, batch: int) -> torch.Tensor:
    """(heads of all the batch, rows) as (batch, heads, rows)."""
    return lse.contiguous().view(batch, lse.shape[0] // batch, lse.shape[1])


def _put(place: torch.Tensor, part: torch.Tensor, into: Sequence[Into]) -> None:
    for one in into:
        if one.is_first:
            place[one.rows].copy_(part[one.part])
        else:
            place[one.rows].add_(part[one.part])
