"""Turns attention over a group into torch's operators, `torch.ops.commdsl.sequence_attention` and its way back: what
autograd and torch.compile see of it.

Assumes arguments that `arguments` wrote. Shapes of results follow from those of the tensors alone, so what is traced
asks no group. Does not compute; `run` does.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, TypeAlias

import torch

from commdsl.attention import run, ways
from commdsl.attention.arguments import AUTOS, NUM_ASKED, SCHEMA, Asked, check, laid_out, rows_first
from commdsl.attention.merge import wide
from commdsl.attention.placement import PLACEMENTS
from commdsl.runtime import groups
from commdsl.runtime.errors import GradientError
from commdsl.runtime.operators import define
from commdsl.runtime.registry import registry
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor

FORWARD, BACKWARD = "sequence_attention", "sequence_attention_backward"
SHOWN, SHOWN_BACK = "`attention`", "the gradient of `attention`"

_LOCK = threading.Lock()


def library() -> None:
    """The operators, defined when they are first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        _define()


@cache
def _define() -> None:
    made = registry().library
    tail = f"Tensor? cu_seqlens, {SCHEMA}"
    given, results = "Tensor q, Tensor k, Tensor v", "(Tensor, Tensor, Tensor[])"
    define(made, f"{FORWARD}({given}, {tail}) -> {results}", run.forward, _fake, SHOWN)
    given, results = f"Tensor dout, {given}, Tensor out, Tensor lse, Tensor[] kept", "(Tensor, Tensor, Tensor)"
    define(made, f"{BACKWARD}({given}, {tail}) -> {results}", run.backward, _fake_back, SHOWN_BACK)
    torch.library.register_autograd(f"commdsl::{FORWARD}", _backward, setup_context=_setup, lib=made)
    torch.library.register_autograd(f"commdsl::{BACKWARD}", _refuse, setup_context=_nothing, lib=made)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *said: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    asked = Asked(*said)
    check(q, k, v, asked.layout)
    rows, batch, heads, _ = rows_first(q, asked.layout).shape
    ranks = groups.size_of(asked.group) or 1
    blocks = 0 if asked.schedule in AUTOS else ways.blocks_of_heads(asked.schedule, ranks)
    if blocks:
        kept = _kept(q, k, (blocks, ranks), asked, is_packed=cu_seqlens is not None)
        return _like(q, asked.layout), _sums(q, (0,)), kept
    return _like(q, asked.layout), _sums(q, (batch, heads, rows)), []


def _kept(q: Tensor, k: Tensor, sizes: tuple[int, int], asked: Asked, *, is_packed: bool) -> list[Tensor]:
    """What a way that exchanges heads, in so many blocks on so many ranks, keeps for the way back: q, k and v of the
    heads that are its own, the result and its log-sum-exp.
    """
    blocks, ranks = sizes
    if is_packed or asked.placement not in PLACEMENTS:
        rows = 2 * torch.library.get_ctx().new_dynamic_size()
    else:
        own = rows_first(q, asked.layout).shape[0]
        rows = 2 * _halved(own * ranks if asked.length is None else asked.length, ranks)
    _, batch, heads, dim = rows_first(q, asked.layout).shape
    shared = rows_first(k, asked.layout).shape[2] // blocks
    shapes = [(blocks, rows, batch, count, dim) for count in (heads // blocks, shared, shared, heads // blocks)]
    return [*(q.new_empty(shape) for shape in shapes), _sums(q, (batch * (heads // blocks), blocks * rows))]


def _halved(length: Any, ranks: Any) -> Any:
    """The rows of the longest half."""
    return -(-length // (2 * ranks))


def _sums(q: Tensor, shape: tuple[Any, ...]) -> Tensor:
    return q.new_empty(shape, dtype=wide(q.dtype))


def _fake_back(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: list[Tensor],
    cu_seqlens: Tensor | None,
    *said: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Asked(*said).layout
    return _like(q, layout), _like(k, layout), _like(v, layout)


def _like(x: Tensor, layout: str) -> Tensor:
    """Of the shape of x, with rows outermost in memory."""
    return laid_out(x.new_empty(rows_first(x, layout).shape), layout)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, cu_seqlens, *ctx.asked = inputs
    out, lse, kept = output
    ctx.mark_non_differentiable(lse, *kept)
    ctx.save_for_backward(q, k, v, cu_seqlens, out, lse, *kept)


@reported(lambda ctx, *_: ctx.asked[0], lambda *_: SHOWN_BACK)
def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, out, lse, *kept = ctx.saved_tensors
    made = torch.ops.commdsl.sequence_attention_backward(dout, q, k, v, out, lse, kept, cu_seqlens, *ctx.asked)
    return (*made, *(None for _ in range(1 + NUM_ASKED)))


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise GradientError("`attention` has no gradient of its gradient: do without create_graph=True")
