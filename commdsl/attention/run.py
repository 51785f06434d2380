"""Turns a call of attention into what runs it: ops of both ways, placement and mask; made once for each kind of call.

Assumes arguments that `arguments` wrote, and that all ranks call alike: what they say goes into the digest that travels
with every transfer, so ranks that differ are told both sides (C964). Does not know autograd; `torch_ops` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from commdsl.attention import auto, gathering, loop, ways
from commdsl.attention import placement as placements
from commdsl.attention.arguments import AUTOS, Asked, check, laid_out, read_placement, read_tuning, rows_first
from commdsl.attention.auto import Sizes
from commdsl.attention.machines import of_device
from commdsl.attention.masks import Mask
from commdsl.attention.planned import Rotation
from commdsl.attention.sequence import document_lengths
from commdsl.attention.ways import Way
from commdsl.runtime import groups, menu
from commdsl.runtime.errors import TensorError

Tensor: TypeAlias = torch.Tensor

_LOGGER = logging.getLogger("commdsl")

KEPT = 256
"""So many kinds of call are remembered: each has a placement, which many documents make long."""


@dataclass(frozen=True, eq=False, slots=True)
class Bound:
    """All of a call but its tensors."""

    there: Rotation
    back: Callable[[], Rotation]
    rows: int  # of this rank
    settings: dict[str, Any]  # of the loop


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *said: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output in the layout of q, the log-sum-exp (batch, heads, rows), and what else the way back is given. Where
    heads are exchanged for rows, that has the log-sum-exp of other rows, and there is none of the own: (0).
    """
    asked = Asked(*said)
    check(q, k, v, asked.layout)
    bound = _bound(asked, q, k, cu_seqlens)
    q, k, v = (rows_first(one, asked.layout).contiguous() for one in (q, k, v))
    out, lse, kept = loop.attended(bound.there, q, k, v, **bound.settings)
    return laid_out(out, asked.layout), lse.new_empty(0) if kept else lse, list(kept)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    *said: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their layout."""
    asked = Asked(*said)
    bound = _bound(asked, q, k, cu_seqlens)
    dout, q, k, v, out = (rows_first(one, asked.layout).contiguous() for one in (dout, q, k, v, out))
    dq, dk, dv = loop.backward(bound.back(), dout, q, k, v, out, lse.contiguous(), kept, **bound.settings)
    return laid_out(dq, asked.layout), laid_out(dk, asked.layout), laid_out(dv, asked.layout)


def _bound(asked: Asked, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Bound:
    rank, ranks = groups.own_rank(asked.group), menu.size(asked.group)
    rows, batch, heads, dim = rows_first(q, asked.layout).shape
    length = asked.length if asked.length is not None or cu_seqlens is not None else rows * ranks
    lengths = document_lengths(length, cu_seqlens)
    shape = (batch, heads, rows_first(k, asked.layout).shape[2], dim)
    made = _made(asked, lengths, ranks, rank, shape, q.dtype, q.device)
    if rows != made.rows:
        where = made.settings["placement"].name
        raise TensorError(
            f"`attention`: by the placement `{where}` rank {rank} of {ranks} has {made.rows} of {sum(lengths)} tokens, "
            f"and q, {tuple(q.shape)}, has {rows} rows (layout {asked.layout}): `length` is the number of tokens of "
            "all ranks, which have equally many unless it or `cu_seqlens` says"
        )
    return made


@lru_cache(maxsize=KEPT)
def _made(
    asked: Asked,
    lengths: tuple[int, ...],
    ranks: int,
    rank: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Bound:
    placement = placements.placed(read_placement(asked.placement), ranks, lengths)
    mask = Mask(asked.left, asked.right)
    there, back = ways.pair(_schedule(asked, lengths, ranks, shape, dtype, device), mask, placement)
    settings: dict[str, Any] = {"placement": placement, "mask": mask, "scale": asked.scale, "group": asked.group}
    about = words(asked, lengths, shape)
    return Bound(there, back, placement.rows(rank), {**settings, "kernel": asked.kernel, "about": about})


def words(asked: Asked, lengths: tuple[int, ...], shape: tuple[int, int, int, int]) -> str:
    """Return the words of the settings that the schedule does not have and all ranks must agree on."""
    seen = "all" if asked.left is asked.right is None else f"{_side(asked.left)} before and {_side(asked.right)} after"
    batch, heads, key_heads, dim = shape
    scale = dim**-0.5 if asked.scale is None else asked.scale
    sizes = f"batch {batch}, {heads}:{key_heads} heads of {dim}, scale {scale!r}"
    return f"attention over {gathering.words(lengths, asked.placement)}, each seeing {seen}, {sizes}"


def _side(distance: int | None) -> str:
    return "all" if distance is None else str(distance)


def _schedule(
    asked: Asked,
    lengths: tuple[int, ...],
    ranks: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Way:
    """The one that was asked for, or is chosen, with how it is tuned; what the call tunes stands in place of that, but
    for where visitors land, which goes with whatever carries them.
    """
    tuned = read_tuning(asked.tune)
    if ranks == 1 or asked.schedule not in AUTOS:
        return ways.read(asked.schedule, tuned, tuned)
    batch, heads, kv_heads, dim = shape
    machine = of_device(menu.name_of_device(device), groups.of(asked.group, device).nodes)
    placement = read_placement(asked.placement)
    sizes = Sizes(
        auto.coarse(lengths) if isinstance(placement, str) else lengths,
        heads,
        kv_heads,
        dim,
        batch,
        dtype.itemsize,
        Mask(asked.left, asked.right),
        placement,
        *AUTOS[asked.schedule],
    )
    found = auto.choose(machine, ranks, sizes)
    _LOGGER.debug("attention over %d tokens on %d ranks runs %s", sum(lengths), ranks, found)
    # How far a window reaches follows from the lengths themselves (`ways.fitted`).
    params = tuple((name, value) for name, value in found.params if name not in ways.REACH)
    chosen = (dict(found.tune) | tuned, dict(found.tune_backward) | tuned)
    return Way(found.schedule, params, *(chosen if {*tuned} <= {"landing"} else (tuned, tuned)))
