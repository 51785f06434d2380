"""Turns the ways of an Exchange into operators of torch, `torch.ops.commdsl.ep_*`: what autograd and torch.compile see.

Assumes calls that every rank makes alike, also those of a backward pass. Shapes follow from those of the tensors and
from limits, never from where tokens go. Does not move anything; `exchange` does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from commdsl.ep.exchange import ENTRY, PADDING, Exchange, known
from commdsl.ep.float8 import Quantised, arriving, dequantised, flat, paired
from commdsl.ep.handles import Handle
from commdsl.ep.way_back import SUMMED
from commdsl.runtime import given
from commdsl.runtime.errors import GradientError
from commdsl.runtime.operators import define
from commdsl.runtime.registry import registry
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor

THERE = "ep_dispatch(Tensor[] rows, Tensor keys, Tensor? values, str exchange, str about) -> Tensor[]"
AGAIN = "ep_dispatch_again(Tensor rows, Tensor keys, Tensor[] handle, str exchange) -> Tensor"
BACK = "ep_combine(Tensor rows, Tensor keys, Tensor[] handle, Tensor? weights, str exchange) -> Tensor"
WIDE = "ep_dequantise(Tensor x, Tensor rows, Tensor scales, Tensor keys, Tensor[] handle, str exchange) -> Tensor"
VALUES = "ep_combine_values(Tensor values, Tensor keys, Tensor[] handle, str exchange) -> Tensor"

HANDLE = COUNTS, ORIGINS, OFFSETS, PLACES, MATES, BESIDE = range(6)
"""Where what a handle has stands in a list of its tensors; its keys are the caller's, and none of it."""


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What a rank holds after `dispatch`: tensors of `limits.received` rows, of which the first offsets[-1] count.
    Those behind them are not written, and what is computed of them does not count either. Where an Exchange aligns,
    rows of zeros, and weights of zero, stand behind those of an expert.
    """

    rows: Any  # a tensor, or a tuple of them, as was given; what travels in float8 is Quantised: rows and their scales
    weights: Tensor | None  # (received,) float32: of each row, where weights were given
    counts: Tensor  # (E / P, P) int32: rows by this rank's experts, in their order, and by source rank
    offsets: Tensor  # (E / P,) int32: where the rows of each expert end, with zeros: the `offs` of a grouped matmul
    handle: Handle


@reported("exchange")
def dispatch(
    exchange: Exchange,
    x: Tensor | tuple[Tensor, ...],
    expert: Tensor,
    weight: Tensor | None = None,
    *,
    about: str = "",
) -> Dispatched:
    """Tokens to the ranks of their experts, a row for each choice, sorted by (expert, source rank, token).

    x: (T, ...), contiguous, any dtype, T up to `limits.rows`; or a tuple of such, of which the first has a gradient.
    expert: (T, K) int32, 0 ..< E; E drops. weight: (T, K) float32, which arrive beside their rows; all ranks give
    weights, or none does. about: further settings that ranks must agree on, in words (C964). The gradient of x is
    `combine` of that of the rows, and the gradient of weight that of the weights, each back at its choice. In float8
    tokens have none here, but in what `dequantise` makes of rows. Raises TensorError (C951), DispatchError (C961),
    GradientError (C958).
    """
    tensors = x if isinstance(x, tuple) else (x,)
    given.instance("exchange", exchange, Exchange)
    for name, one in (("x", tensors), ("expert", (expert,)), ("weight", () if weight is None else (weight,))):
        for tensor in one:
            given.argument(name, tensor)
    library()
    for number, tensor in enumerate(tensors):
        if exchange.float8 and tensor.requires_grad and torch.is_grad_enabled():
            raise GradientError("rows in float8 have no gradient: detach the tokens, and pass them to `ep.dequantise`")
        if tensor.requires_grad and torch.is_grad_enabled() and (number or tensor.dtype not in SUMMED):
            raise GradientError(
                f"tokens of {tensor.dtype} have no gradient, nor has more than the first tensor: detach them"
            )
    made = torch.ops.commdsl.ep_dispatch(list(tensors), expert, weight, exchange.name, about)
    rows, handle = paired(tuple(made[: -len(HANDLE)]), exchange.stretches), _handle(expert, made[-len(HANDLE) :])
    found = rows if isinstance(x, tuple) else rows[0]
    return Dispatched(found, None if weight is None else handle.values, handle.counts, handle.offsets, handle)


def dequantise(exchange: Exchange, x: Tensor, there: Dispatched) -> Tensor:
    """What came in float8 times its scales, in float32, rounded to the dtype of x: (received, ...). x: the tokens that
    went there. The gradient of x is `combine` of that of the result: it goes straight through the rounding to float8,
    as if that were none. Raises GradientError (C958) for an Exchange without float8.
    """
    given.instance("exchange", exchange, Exchange)
    given.argument("x", x)
    given.instance("there", there, Dispatched)
    first = there.rows[0] if isinstance(there.rows, tuple) and not isinstance(there.rows, Quantised) else there.rows
    if not isinstance(first, Quantised):
        raise GradientError("these rows did not travel in float8: they have a gradient as they are")
    tensors = _tensors(there.handle)
    made: Tensor = torch.ops.commdsl.ep_dequantise(x, *first, there.handle.keys, tensors, exchange.name)
    return made


@reported("exchange")
def combine(exchange: Exchange, rows: Tensor, handle: Handle, weight: Tensor | None = None) -> Tensor:
    """What experts made of received rows back to their tokens: (T, ...), for each token the sum over its choices of
    (weight times) its row; zero for a token of none. In the order of the choices, in float32, rounded once; of an
    Exchange with `local_combine` so on each rank of experts, and the sums of ranks likewise, in their order.

    rows: as many as were received, and any behind them up to `limits.received`; float32, float16 or bfloat16.
    weight: float32, unless the experts weighed: (T, K), or with `local_combine` one for each of `rows`, such as those
    that came beside them. The gradient of rows is `dispatch` of that of the result, times the weight; that of weight
    the product of that and the row. Raises as `dispatch`.
    """
    given.instance("exchange", exchange, Exchange)
    given.argument("rows", rows)
    given.instance("handle", handle, Handle)
    if weight is not None:
        given.argument("weight", weight)
    library()
    needs = rows.requires_grad or (weight is not None and weight.requires_grad)
    if needs and torch.is_grad_enabled() and not exchange.limits.width_again:
        raise GradientError("there is no memory for the gradient of `combine`: the Exchange has gradients=False")
    made: Tensor = torch.ops.commdsl.ep_combine(rows, handle.keys, _tensors(handle), weight, exchange.name)
    return made


# --- the operators ----------------------------------------------------------------------------------------------------

_LOCK = threading.Lock()


def library() -> None:
    """The operators, defined when they are first needed."""
    if hasattr(torch.ops.commdsl, "ep_dequantise"):
        return
    with _LOCK:  # ranks that are threads come here at once
        _define()


@cache
def _define() -> None:
    made = registry().library
    for schema, run, fake in (
        (THERE, _there, _fake_there),
        (AGAIN, _again, _fake_again),
        (BACK, _back, _fake_back),
        (VALUES, _values, _fake_values),
        (WIDE, _wide, _fake_wide),
    ):
        define(made, schema, run, fake)
    torch.library.register_autograd("commdsl::ep_dispatch", _there_back, setup_context=_keep_there, lib=made)
    torch.library.register_autograd("commdsl::ep_combine", _back_back, setup_context=_keep_back, lib=made)
    torch.library.register_autograd("commdsl::ep_dequantise", _wide_back, setup_context=_keep_wide, lib=made)
    for name in ("ep_dispatch_again", "ep_combine_values"):
        torch.library.register_autograd(f"commdsl::{name}", _refuse, setup_context=_nothing, lib=made)


def _tensors(handle: Handle) -> list[Tensor]:
    empty = handle.counts.new_empty(0)
    beside = [empty if one is None else one for one in (handle.mates, handle.values)]
    return [handle.counts, handle.origins, handle.offsets, handle.places, *beside]


def _handle(keys: Tensor, tensors: Sequence[Tensor]) -> Handle:
    return Handle(keys, *tensors)


def _plain(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in tensors)


def _there(rows: Sequence[Tensor], keys: Tensor, values: Tensor | None, exchange: str, about: str) -> list[Tensor]:
    sent = None if values is None else values.detach()
    found = known(exchange).dispatch(_plain(rows), keys, sent, about=about)
    return [*flat(found.rows), *_tensors(found.handle)]


def _again(rows: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str) -> Tensor:
    return known(exchange).dispatch_again(rows.detach(), _handle(keys, handle))


def _back(rows: Tensor, keys: Tensor, handle: Sequence[Tensor], weights: Tensor | None, exchange: str) -> Tensor:
    sent = None if weights is None else weights.detach()
    return known(exchange).combine(rows.detach(), _handle(keys, handle), sent)


def _values(values: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str) -> Tensor:
    return known(exchange).combine_values(values.detach(), _handle(keys, handle))


def _wide(x: Tensor, rows: Tensor, scales: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str) -> Tensor:
    return dequantised(rows, scales, known(exchange).float8, x.dtype)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _fake_there(rows: Sequence[Tensor], keys: Tensor, values: Tensor | None, exchange: str, about: str) -> list[Tensor]:
    found = known(exchange)
    received = found.limits.received
    return [
        *(_fake_again(row, keys, (), exchange) for row in arriving(tuple(rows), found.stretches)),
        keys.new_empty((found.keys_a_rank, found.ranks)),
        keys.new_empty((received,), dtype=torch.int64),
        keys.new_empty((found.keys_a_rank,)),
        keys.new_empty(keys.shape),
        keys.new_empty((found.ranks, found.limits.rows, keys.shape[1])),
        keys.new_empty((received,), dtype=torch.float32),
    ]


def _fake_again(rows: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str) -> Tensor:
    return rows.new_empty((known(exchange).limits.received, *rows.shape[1:]))


def _fake_back(rows: Tensor, keys: Tensor, handle: Sequence[Tensor], weights: Tensor | None, exchange: str) -> Tensor:
    return rows.new_empty((keys.shape[0], *rows.shape[1:]))


def _fake_values(values: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str) -> Tensor:
    return values.new_empty(keys.shape)


def _fake_wide(
    x: Tensor, rows: Tensor, scales: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str
) -> Tensor:
    return x.new_empty(rows.shape)


# --- gradients --------------------------------------------------------------------------------------------------------


def _keep_there(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, keys, values, ctx.exchange, _ = inputs
    ctx.num_rows, ctx.has_values = len(rows), values is not None
    ctx.like = (output[0].shape, output[0].dtype, rows[0].requires_grad)
    ctx.save_for_backward(keys, *output[-len(HANDLE) :])
    first = 1 if output[0].dtype in SUMMED else 0
    ctx.mark_non_differentiable(*output[first : -1 if ctx.has_values else None])


@reported(lambda ctx, *_: known(ctx.exchange), lambda *_: "the gradient of experts")
def _there_back(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Every rank makes these calls, whatever it has a gradient of."""
    keys, *handle = ctx.saved_tensors
    first, values = gradients[0], gradients[-1]
    shape, dtype, needs_rows = ctx.like
    of_rows, of_values = None, None
    if needs_rows:
        slopes = keys.new_zeros(shape, dtype=dtype) if first is None else first.contiguous()
        of_rows = torch.ops.commdsl.ep_combine(slopes, keys, handle, None, ctx.exchange)
    if ctx.has_values and ctx.needs_input_grad[2]:
        slopes = keys.new_zeros(shape[:1], dtype=torch.float32) if values is None else values.contiguous()
        of_values = torch.ops.commdsl.ep_combine_values(slopes, keys, handle, ctx.exchange)
    return [of_rows, *(None for _ in range(1, ctx.num_rows))], None, of_values, None, None


def _keep_wide(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, keys, handle, ctx.exchange = inputs
    ctx.num_handle = len(handle)
    ctx.save_for_backward(keys, *handle)


@reported(lambda ctx, *_: known(ctx.exchange), lambda *_: "the gradient of experts")
def _wide_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    keys, *handle = ctx.saved_tensors
    of_x = torch.ops.commdsl.ep_combine(gradient.contiguous(), keys, handle, None, ctx.exchange)
    return of_x, None, None, None, [None] * ctx.num_handle, None


def _keep_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, keys, handle, weights, ctx.exchange = inputs
    ctx.num_handle, ctx.length = len(handle), rows.shape[0]
    more = () if weights is None else (weights, rows)
    ctx.save_for_backward(keys, *handle, *more)


@reported(lambda ctx, *_: known(ctx.exchange), lambda *_: "the gradient of experts")
def _back_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    keys, *rest = ctx.saved_tensors
    handle, more = rest[: ctx.num_handle], rest[ctx.num_handle :]
    came = torch.ops.commdsl.ep_dispatch_again(gradient.contiguous(), keys, handle, ctx.exchange)[: ctx.length]
    along = (slice(None), *(None for _ in gradient.shape[1:]))
    # What lies behind the rows that came is not written, and may be no number, nor is what lies between.
    place = torch.arange(ctx.length, device=came.device)
    counts = (place < handle[OFFSETS][-1]) & (handle[ORIGINS][: ctx.length] != PADDING)
    nothing = [None] * ctx.num_handle
    if not more:
        return torch.where(counts[along], came, 0), None, nothing, None, None
    weights, rows = more
    is_home = weights.dim() == 2
    beside = _beside(weights, keys, handle, ctx.exchange)[: ctx.length] if is_home else weights
    wide = torch.where(counts[along], came.float(), 0)
    of_rows = (wide * torch.where(counts, beside, 0)[along]).to(came.dtype)
    of_weights = None
    if ctx.needs_input_grad[3]:
        of_weights = (wide * torch.where(counts[along], rows.float(), 0)).flatten(1).sum(1)
        if is_home:
            of_weights = torch.ops.commdsl.ep_combine_values(of_weights, keys, handle, ctx.exchange)
    return of_rows, None, nothing, of_weights, None


def _beside(weights: Tensor, keys: Tensor, handle: Sequence[Tensor], exchange: str) -> Tensor:
    """Weights, (T, K), where the rows are: each has all of its token, and takes its own."""
    came: Tensor = torch.ops.commdsl.ep_dispatch_again(weights.contiguous(), keys, handle, exchange)
    which = (handle[ORIGINS] & ENTRY) % keys.shape[1]
    return came.gather(1, which[:, None])[:, 0]


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise GradientError("dispatch and combine have no gradient of their gradient: do without create_graph=True")
