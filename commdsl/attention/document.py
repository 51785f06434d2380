"""Turns calls of Hamilton Attention, by its names and signatures, into calls of the attention loop.

Assumes that every rank has as many rows as the others, in the order of the placement that a function names; the README
of this folder lists where it differs from the document. Does not compute or move anything: `loop` does, and what moves
is the schedule of the cycles that are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commdsl.attention import arguments, circling
from commdsl.attention.hamilton import Looping
from commdsl.attention.peers import Place
from commdsl.runtime import given
from commdsl.runtime.errors import TensorError
from commdsl.runtime.reporting import reported
from commdsl.runtime.timing import CallTimes, Timing

Tensor: TypeAlias = torch.Tensor
Chunks: TypeAlias = Sequence[Tensor]
Result: TypeAlias = tuple[Tensor, Tensor]
Profiled: TypeAlias = tuple[Tensor, Tensor, CallTimes]
Pairs: TypeAlias = Sequence[tuple[int, int]]

NO_WINDOW = (-1, -1)


def _update_out_and_lse(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> Result:
    """Attention over the keys of two blocks, from attention over each: new `out` and `lse`, in float32.

    `out` and `block_out` are (B, S, H, D), `block_lse` as flash attention gives it, (B, H, S), and `lse` that or
    (B, S, H, 1), as ring-flash-attention keeps it; it comes back as it was. No exponential of a large number is taken.
    A row that has seen no key, of log-sum-exp -inf, is the other block's; of two such rows one remains.
    """
    for name, one in (("out", out), ("lse", lse), ("block_out", block_out), ("block_lse", block_lse)):
        given.argument(name, one)
    kept = (*out.shape[:3], 1) if lse.ndim == 4 else (*block_lse.shape,)
    if out.ndim != 4 or out.shape != block_out.shape or (*lse.shape,) != kept or _turned(out) != (*block_lse.shape,):
        raise TensorError(
            f"`out` and `block_out` are (B, S, H, D), `block_lse` (B, H, S), `lse` that or (B, S, H, 1), not "
            f"{(*out.shape,)}, {(*block_out.shape,)}, {(*block_lse.shape,)} and {(*lse.shape,)}"
        )
    is_kept = lse.ndim == 4
    old, new = lse.float(), block_lse.float()
    new = new.transpose(-2, -1).unsqueeze(-1) if is_kept else new
    weight = torch.where(new == -torch.inf, 0.0, torch.sigmoid(new - old))
    along = weight if is_kept else weight.transpose(-2, -1).unsqueeze(-1)
    return torch.lerp(out.float(), block_out.float(), along), torch.logaddexp(old, new)


def _turned(out: Tensor) -> tuple[int, ...]:
    """(B, H, S) of (B, S, H, D)."""
    return out.shape[0], out.shape[2], out.shape[1]


# --- rings ------------------------------------------------------------------------------------------------------------


@reported("process_group")
def ring_attention_forward_flash_attn(
    process_group: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    dropout_p: float = 0,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Result:
    """Attention of a sequence that is cut into as many parts as there are ranks, of which each has one, in order.

    q: (B, S, H, D), this rank's part; k, v: (B, S, Hkv, D), H a multiple of Hkv. `softmax_scale`: None for D ** -0.5.
    `window_size`: how many keys before and after its own a query sees, -1 for all; counted in the whole sequence.
    `deterministic`: True or False, as every call is; `alibi_slopes` are refused unless None. Returns the output, (B, S,
    H, D) of q's dtype, and the natural log-sum-exp, (B, H, S) in float32, or in float64 where q is. No gradient; a call
    under autograd is what `commdsl.attention.attention` is for. Raises TensorError, ArgumentError, GroupError.
    """
    arguments.refuse({"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "deterministic": deterministic})
    return _ring(process_group, (q, k, v), "contiguous", causal, window_size, softmax_scale, None)


@reported("process_group")
def zigzag_ring_attention_forward_flash_attn(
    process_group: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    dropout_p: float = 0,
    causal: bool = True,
    window_size: tuple[int, int] = NO_WINDOW,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Result:
    """As `ring_attention_forward_flash_attn`, of a sequence in 2 P parts, of which rank r has part r and then part
    2 P - 1 - r (`shard_sequence`): under a causal mask all ranks have the same work.

    Also without one.
    """
    arguments.refuse({"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "deterministic": deterministic})
    return _ring(process_group, (q, k, v), "zigzag", causal, window_size, softmax_scale, None)


@reported("process_group")
def ring_attention_forward_flash_attn_profile(
    process_group: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    dropout_p: float = 0,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    world_size: int | None = None,
) -> Profiled:
    """`ring_attention_forward_flash_attn`, and the times of this call on this rank.

    `world_size`: None, or the number of the group's ranks; another is refused.
    """
    arguments.refuse({"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "deterministic": deterministic})
    circling.same_size(process_group, world_size)
    timing = _timing(q)
    out, lse = _ring(process_group, (q, k, v), "contiguous", causal, window_size, softmax_scale, timing)
    return out, lse, timing.times()


@reported("process_group")
def zigzag_ring_attention_forward_flash_attn_profile(
    process_group: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    dropout_p: float = 0,
    causal: bool = True,
    window_size: tuple[int, int] = NO_WINDOW,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    world_size: int | None = None,
) -> Profiled:
    """`zigzag_ring_attention_forward_flash_attn`, and the times of this call on this rank.

    `world_size`: None, or the number of the group's ranks; another is refused.
    """
    arguments.refuse({"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "deterministic": deterministic})
    circling.same_size(process_group, world_size)
    timing = _timing(q)
    out, lse = _ring(process_group, (q, k, v), "zigzag", causal, window_size, softmax_scale, timing)
    return out, lse, timing.times()


# --- cycles -----------------------------------------------------------------------------------------------------------


@reported("process_group")
def hamilton_attention_forward_full_flash_attn(
    process_group: Any,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    softmax_scale0: float | None,
    dropout_p: float = 0,
    world_size: int = 8,
    looping: Looping | None = None,
    out_mapping: Looping | None = None,
    in_mapping: Looping | None = None,
    layout: str = "BSND",
) -> Result:
    """Attention without a mask, keys and values in pieces, each on a Hamilton cycle of its own.

    q: (B, S, H, D), or (B, H, S, D) by `layout`; k, v: a list of pieces along S, one for each cycle of `looping`, whose
    rows are S together. They need not be equally long, nor the tokens of a rank be neighbours.
    `looping`: the cycles, `gen_hamilton_circle(world_size)` unless given; fewer will do, and any that share no arc.
    `out_mapping` and `in_mapping` follow from them and are refused where they differ, as is a `world_size` that is not
    the group's. Returns the output as q, and the natural log-sum-exp, (B, H, S) in float32, or in float64 where q is.
    As for rings no gradient. Raises TensorError, ArgumentError, GroupError.
    """
    arguments.refuse({"dropout_p": dropout_p})
    place = Place(process_group)
    cycles = circling.circles(place, world_size, looping, out_mapping, in_mapping)
    return _hamilton(place, q, k, v, cycles, False, softmax_scale0, layout, None)


@reported("process_group")
def hamilton_attention_forward_causal_flash_attn(
    process_group: Any,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    softmax_scale0: float | None,
    dropout_p: float = 0,
    world_size: int = 8,
    looping: Looping | None = None,
    out_mapping: Looping | None = None,
    in_mapping: Looping | None = None,
    source_rank_per_iter: Sequence[Sequence[Sequence[bool]]] | None = None,
    layout: str = "BSND",
) -> Result:
    """As `hamilton_attention_forward_full_flash_attn`, under a causal mask and zigzag placement (`shard_sequence`).

    Of q the front half of a rank's rows comes first, then the back half; a piece of k and v is as many rows of the
    front half, and then as many of the back half. `source_rank_per_iter` follows from the cycles, and is refused where
    it differs.
    """
    arguments.refuse({"dropout_p": dropout_p})
    place = Place(process_group)
    cycles = circling.circles(place, world_size, looping, out_mapping, in_mapping, source_rank_per_iter)
    return _hamilton(place, q, k, v, cycles, True, softmax_scale0, layout, None)


@reported("process_group")
def hamilton_attention_forward_full_flash_attn_two_nodes(
    process_group: Any,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    softmax_scale0: float | None,
    dropout_p: float = 0,
    inter_in_mapping: Pairs | None = None,
    inter_out_mapping: Pairs | None = None,
    out_mapping: Looping | None = None,
    in_mapping: Looping | None = None,
    layout: str = "BSND",
) -> Result:
    """As `hamilton_attention_forward_full_flash_attn`, on the cycles that pass through all ranks of a node before they
    go on to the next: m pieces for nodes of m ranks, any even m, and from 2 nodes on.

    The mappings say which cycles: `out_mapping` where a piece goes in its node, and so the m that there is, and
    `inter_out_mapping` where it leaves it; unless given they are those of `gen_hamilton_circle_two_nodes` for m = 8.
    The incoming ones follow from them and are refused where they differ.
    """
    arguments.refuse({"dropout_p": dropout_p})
    place = Place(process_group)
    cycles = circling.nodes(place, inter_in_mapping, inter_out_mapping, out_mapping, in_mapping)
    return _hamilton(place, q, k, v, cycles, False, softmax_scale0, layout, None)


@reported("process_group")
def hamilton_attention_forward_full_flash_attn_profile(
    process_group: Any,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    softmax_scale0: float | None,
    dropout_p: float = 0,
    world_size: int = 8,
    looping: Looping | None = None,
    out_mapping: Looping | None = None,
    in_mapping: Looping | None = None,
    layout: str = "BSND",
) -> Profiled:
    """`hamilton_attention_forward_full_flash_attn`, and the times of this call on this rank."""
    arguments.refuse({"dropout_p": dropout_p})
    place = Place(process_group)
    cycles = circling.circles(place, world_size, looping, out_mapping, in_mapping)
    timing = _timing(q)
    out, lse = _hamilton(place, q, k, v, cycles, False, softmax_scale0, layout, timing)
    return out, lse, timing.times()


@reported("process_group")
def hamilton_attention_forward_causal_flash_attn_profile(
    process_group: Any,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    softmax_scale0: float | None,
    dropout_p: float = 0,
    world_size: int = 8,
    looping: Looping | None = None,
    out_mapping: Looping | None = None,
    in_mapping: Looping | None = None,
    source_rank_per_iter: Sequence[Sequence[Sequence[bool]]] | None = None,
    layout: str = "BSND",
) -> Profiled:
    """`hamilton_attention_forward_causal_flash_attn`, and the times of this call on this rank."""
    arguments.refuse({"dropout_p": dropout_p})
    place = Place(process_group)
    cycles = circling.circles(place, world_size, looping, out_mapping, in_mapping, source_rank_per_iter)
    timing = _timing(q)
    out, lse = _hamilton(place, q, k, v, cycles, True, softmax_scale0, layout, timing)
    return out, lse, timing.times()


@reported("process_group")
def hamilton_attention_forward_full_flash_attn_two_nodes_profile(
    process_group: Any,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    softmax_scale0: float | None,
    dropout_p: float = 0,
    inter_in_mapping: Pairs | None = None,
    inter_out_mapping: Pairs | None = None,
    out_mapping: Looping | None = None,
    in_mapping: Looping | None = None,
    layout: str = "BSND",
) -> Profiled:
    """`hamilton_attention_forward_full_flash_attn_two_nodes`, and the times of this call on this rank."""
    arguments.refuse({"dropout_p": dropout_p})
    place = Place(process_group)
    cycles = circling.nodes(place, inter_in_mapping, inter_out_mapping, out_mapping, in_mapping)
    timing = _timing(q)
    out, lse = _hamilton(place, q, k, v, cycles, False, softmax_scale0, layout, timing)
    return out, lse, timing.times()


# --- what they share --------------------------------------------------------------------------------------------------


def _ring(
    process_group: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    placement: str,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    timing: Timing | None,
) -> Result:
    place, mask = Place(process_group), circling.mask(causal, window_size)
    arguments.check(*tensors, "BSND")
    q, k, v = (arguments.rows_first(one, "BSND") for one in tensors)
    op = circling.ring_op(place.world_size, placement, mask)
    return circling.forward(place, op, (q, k, v), placement, mask, scale, "BSND", timing)


def _hamilton(
    place: Place,
    q: Tensor,
    k: Chunks,
    v: Chunks,
    cycles: circling.Cycles,
    is_causal: bool,
    scale: float | None,
    layout: str,
    timing: Timing | None,
) -> Result:
    arguments.one_of("layout", layout, tuple(arguments.LAYOUTS))
    keys, values = (circling.joined(name, one, len(cycles), layout, is_causal) for name, one in (("k", k), ("v", v)))
    queries = circling.viewed("q", q, layout)
    arguments.check(queries, keys, values, "SBND")
    op, placement = circling.cycles_op(cycles), "zigzag" if is_causal else "contiguous"
    mask = circling.mask(is_causal, NO_WINDOW)
    return circling.forward(place, op, (queries, keys, values), placement, mask, scale, layout, timing)


def _timing(q: Tensor) -> Timing:
    given.tensor("q", q)
    return Timing(q.device)
