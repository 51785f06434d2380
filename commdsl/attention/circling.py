"""Turns what the functions of Hamilton Attention are given into what the attention loop takes, or one line why not.

Assumes that all ranks are given the same cycles and mappings. Does not trust them: a schedule is made of the cycles and
proved, and mappings are held to what follows from the cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from commdsl.attention import hamilton, loop
from commdsl.attention.arguments import Asked, laid_out, rows_first, scaled
from commdsl.attention.hamilton import Looping
from commdsl.attention.masks import Mask
from commdsl.attention.peers import Place
from commdsl.attention.placement import placed
from commdsl.attention.planned import Rotation
from commdsl.attention.run import words
from commdsl.attention.ways import ALONE
from commdsl.machine.errors import ArgumentError
from commdsl.planner.tuning.selection import Candidate
from commdsl.runtime import given, menu
from commdsl.runtime.errors import GradientError, TensorError
from commdsl.runtime.load import load
from commdsl.runtime.timing import Timing

Tensor: TypeAlias = torch.Tensor
Cycles: TypeAlias = tuple[tuple[int, ...], ...]

DOCUMENT_NODE = 8
"""Ranks of a node where no mapping says."""

TEXT = """schedule attention_cycles for P ranks where P == {ranks} {{
  cycles C = {cycles}
  inout k[2 blocks, len(C) blocks]
  inout v[2 blocks, len(C) blocks]
  ensure rotation(k, v)

  yield attend(k, v)
  for s in 1 ..< P {{
    each r, c in C, h in 0 ..< 2 {{
      put k[h, c] -> k[h, c] @ c.next(r)
      put v[h, c] -> v[h, c] @ c.next(r)
    }}
    yield attend(k, v)
  }}
}}
"""


# --- what moves -------------------------------------------------------------------------------------------------------


def ring_op(ranks: int, placement: str, mask: Mask) -> Rotation:
    """The shipped ring; where every rank sees a part of what passes by, only that part passes."""
    if ranks == 1:
        return ALONE
    causal = int(placement == "zigzag" and mask.right == 0)
    return menu.loaded(Candidate("attention_ring", (("causal", causal),)), ranks)


@lru_cache(maxsize=64)
def cycles_op(cycles: Cycles) -> Rotation:
    """A schedule of these cycles, proved: the shipped one where they are its own."""
    ranks, count = len(cycles[0]), len(cycles)
    if ranks not in (4, 6) and [list(cycle) for cycle in cycles] == hamilton.gen_hamilton_circle(ranks)[:count]:
        return load("attention_hamilton", params={"K": count} if count < ranks - 1 else {}, ranks=ranks)
    written = " ".join(f"({' '.join(map(str, cycle))})" for cycle in cycles)
    return load({"attention_cycles.comm": TEXT.format(ranks=ranks, cycles=written)}, ranks=ranks)


# --- cycles and mappings ----------------------------------------------------------------------------------------------


def circles(
    place: Place,
    world_size: int,
    looping: Looping | None,
    out_mapping: Any,
    in_mapping: Any,
    source_rank_per_iter: Any = None,
) -> Cycles:
    """The cycles, once the tables are seen to follow from them."""
    same_size(place.name, world_size)
    cycles = _shipped(world_size) if looping is None else _cycles(world_size, looping)
    out, into, source = _tables(cycles)
    _same("out_mapping", out_mapping, out)
    _same("in_mapping", in_mapping, into)
    _same("source_rank_per_iter", source_rank_per_iter, source)
    return cycles


def same_size(group: Any, world_size: int | None) -> None:
    """Refuses a `world_size` that is given and is not the number of the group's ranks."""
    ranks = menu.size(group)
    if world_size is not None and (isinstance(world_size, bool) or world_size != ranks):
        raise ArgumentError(f"`world_size` is {world_size!r}, the group has {ranks} ranks")


def nodes(place: Place, inter_in_mapping: Any, inter_out_mapping: Any, out_mapping: Any, in_mapping: Any) -> Cycles:
    """The cycles that the outgoing mappings describe, once all four are seen to follow from them."""
    given = (inter_in_mapping, inter_out_mapping, out_mapping, in_mapping)
    try:
        rows = tuple(None if one is None else tuple(map(tuple, one)) for one in given)
        hash(rows)
    except TypeError:  # no tables: what is made of them says so
        return _nodes.__wrapped__(place.world_size, *given)
    return _nodes(place.world_size, *rows)


@lru_cache(maxsize=64)
def _nodes(ranks: int, inter_in_mapping: Any, inter_out_mapping: Any, out_mapping: Any, in_mapping: Any) -> Cycles:
    gpus = DOCUMENT_NODE if out_mapping is None else len(out_mapping)
    if inter_out_mapping is None:
        known = hamilton.gen_hamilton_circle_two_nodes(ranks, gpus)
        inter_out_mapping = hamilton.calculate_inter_node_mapping(known)[1]
    if out_mapping is None:
        out_mapping = hamilton.calculate_intra_node_out_mapping_two_nodes(hamilton.gen_hamilton_path_local(gpus))
    cycles = _cycles(ranks, hamilton.circles_of_nodes(out_mapping, inter_out_mapping))
    incoming, outgoing = hamilton.calculate_inter_node_mapping(cycles)
    _same("inter_in_mapping", inter_in_mapping, incoming)
    _same("inter_out_mapping", inter_out_mapping, outgoing)
    out, _, _ = _tables(cycles)
    for first in range(0, ranks, gpus):
        inside = [row[first : first + gpus] for row in out[first : first + gpus]]
        _same("out_mapping", out_mapping, inside)
        _same("in_mapping", in_mapping, [list(column) for column in zip(*inside, strict=True)])
    return cycles


@lru_cache(maxsize=64)
def _tables(cycles: Cycles) -> tuple[list[list[int]], list[list[int]], list[list[list[bool]]]]:
    return (
        hamilton.calculate_out_mapping_circle(cycles),
        hamilton.calculate_in_mapping_circle(cycles),
        hamilton.calculate_source_rank_per_iter(cycles),
    )


@lru_cache(maxsize=64)
def _shipped(ranks: int) -> Cycles:
    return _cycles(ranks, hamilton.gen_hamilton_circle(ranks))


def _cycles(ranks: int, looping: Looping) -> Cycles:
    try:
        cycles = tuple(tuple(rank.__index__() for rank in cycle) for cycle in looping)
    except (AttributeError, TypeError):
        raise ArgumentError(f"`looping` is a list of cycles, each a list of ranks, not {looping!r:.60}") from None
    _tables(cycles)  # which says where they are none
    if len(cycles[0]) != ranks:
        raise ArgumentError(f"the cycles are of {len(cycles[0])} ranks, the group has {ranks}")
    return cycles


def _same(name: str, said: Any, derived: Any) -> None:
    """Refuses a table that is given and differs from what follows from the cycles."""
    if said is None or said == derived:
        return
    try:
        found, wanted = np.array(said), np.array(derived)
    except ValueError:  # rows that are not equally long
        raise ArgumentError(f"`{name}` does not have the shape of the table of these cycles") from None
    if found.shape != wanted.shape:
        raise ArgumentError(f"`{name}` is of shape {found.shape}, by the cycles it is {wanted.shape}")
    wrong = np.argwhere(found != wanted)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ArgumentError(f"`{name}`{list(at)} is {found[at]}, by the cycles it is {wanted[at]}")


# --- numbers ----------------------------------------------------------------------------------------------------------


def mask(causal: bool, window_size: tuple[int, int]) -> Mask:
    """Of a window as flash attention counts it: keys before and after the query's own, -1 for all."""
    if not isinstance(causal, bool):
        raise ArgumentError(f"`causal` is True or False, not {causal!r}; `world_size` is given by name")
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or not all(hasattr(one, "__index__") and one >= -1 for one in window_size)
    ):
        raise ArgumentError(f"`window_size` is two whole numbers, -1 for no bound, not {window_size!r}")
    left, right = (None if one == -1 else int(one) for one in window_size)
    return Mask(left, 0 if causal else right)


# --- tensors ----------------------------------------------------------------------------------------------------------


def viewed(name: str, x: Tensor, layout: str) -> Tensor:
    """The rows first, (S, B, H, D)."""
    given.tensor(name, x)
    if x.ndim != 4:
        raise TensorError(f"`{name}` has 4 dimensions, {layout}, not {tuple(x.shape)}")
    return rows_first(x, layout)


def joined(name: str, pieces: Sequence[Tensor], count: int, layout: str, is_causal: bool) -> Tensor:
    """The rows of a list of pieces, (S, B, H, D); where each has rows of both halves, first all of the front half."""
    if isinstance(pieces, Tensor) or not isinstance(pieces, Sequence) or len(pieces) != count:
        found = f"{len(pieces)}" if isinstance(pieces, list | tuple) else f"`{type(pieces).__name__}`"
        raise TensorError(f"`{name}` is a list of a piece for each of {count} cycles, not {found}")
    rows = [viewed(name, piece, layout) for piece in pieces]
    if len({(one.shape[1:], one.dtype, one.device) for one in rows}) != 1:
        raise TensorError(f"`{name}`: pieces differ in their rows alone")
    if is_causal:
        odd = next((len(one) for one in rows if len(one) % 2), None)
        if odd is not None:
            raise TensorError(f"`{name}`: a piece is rows of the front half and as many of the back half, not {odd}")
        rows = [one[: len(one) // 2] for one in rows] + [one[len(one) // 2 :] for one in rows]
    return torch.cat(rows)


def forward(
    place: Place,
    op: Rotation,
    tensors: tuple[Tensor, Tensor, Tensor],
    placement: str,
    of_mask: Mask,
    scale: float | None,
    layout: str,
    timing: Timing | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of q, k and v, rows first, as the functions return them."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise GradientError("this forward has no gradient: call commdsl.attention.attention, or under torch.no_grad()")
    q, k, v = (one.contiguous() for one in tensors)
    lengths = (place.world_size * len(q),)
    asked = Asked(place.name, "", "", placement, None, of_mask.left, of_mask.right, scaled(scale), layout, "auto")
    out, lse = loop.forward(
        op,
        q,
        k,
        v,
        placement=placed(placement, place.world_size, lengths),
        mask=of_mask,
        scale=asked.scale,
        group=place.name,
        timing=timing,
        about=words(asked, lengths, (*q.shape[1:3], k.shape[2], q.shape[3])),
    )
    return laid_out(out, layout).contiguous(), lse
