"""Turns attention over a group into torch's operators, `torch.ops.commdsl.sequence_attention` and its way back: what
autograd and torch.compile see of it.

Assumes arguments that `arguments` wrote. Shapes of results follow from those of the tensors alone, so what is traced
asks no group. Does not compute; `run` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch

from commdsl.attention import run
from commdsl.attention.arguments import NUM_ASKED, SCHEMA, check, laid_out, rows_first
from commdsl.runtime.errors import GradientError
from commdsl.runtime.op import registry

Tensor: TypeAlias = torch.Tensor

FORWARD, BACKWARD = "sequence_attention", "sequence_attention_backward"

_LOCK = threading.Lock()


def library() -> None:
    """The operators, defined when they are first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        _define()


@cache
def _define() -> None:
    made = registry().library
    tail = f"Tensor? cu_seqlens, {SCHEMA}"
    _operator(made, f"{FORWARD}(Tensor q, Tensor k, Tensor v, {tail}) -> (Tensor, Tensor)", run.forward, _fake)
    given = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    results = "(Tensor, Tensor, Tensor)"
    _operator(made, f"{BACKWARD}({given}, {tail}) -> {results}", run.backward, _fake_back)
    torch.library.register_autograd(f"commdsl::{FORWARD}", _backward, setup_context=_setup, lib=made)
    torch.library.register_autograd(f"commdsl::{BACKWARD}", _refuse, setup_context=_nothing, lib=made)


def _operator(made: torch.library.Library, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    made.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        made.impl(name, run, key)
    torch.library.register_fake(f"commdsl::{name}", fake, lib=made)


def _fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *asked: Any) -> tuple[Tensor, Tensor]:
    layout = asked[NUM_ASKED - 2]
    check(q, k, v, layout)
    rows, batch, heads, _ = rows_first(q, layout).shape
    sums = q.new_empty((batch, heads, rows), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _like(q, layout), sums


def _fake_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None, *asked: Any
) -> tuple[Tensor, Tensor, Tensor]:
    layout = asked[NUM_ASKED - 2]
    return _like(q, layout), _like(k, layout), _like(v, layout)


def _like(x: Tensor, layout: str) -> Tensor:
    """Of the shape of x, with rows outermost in memory."""
    return laid_out(x.new_empty(rows_first(x, layout).shape), layout)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.asked = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)


def _backward(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    made = torch.ops.commdsl.sequence_attention_backward(dout, q, k, v, out, lse, cu_seqlens, *ctx.asked)
    return (*made, *(None for _ in range(1 + NUM_ASKED)))


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise GradientError("`attention` has no gradient of its gradient: do without create_graph=True")
