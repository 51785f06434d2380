"""Turns the rows that a rank received into its part of the attention, by an operator of torch, `commdsl.attend_spans`:
the kernels of `commdsl.attention` over spans of queries and keys.

Assumes rows first. Does not move rows; `Dispatcher.attend` does, before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commdsl.attention.kernel import shape_of
from commdsl.attention.merge import Merging, Partial, Summing, wide
from commdsl.dispatch.spans import known
from commdsl.runtime import given
from commdsl.runtime.errors import GradientError, TensorError
from commdsl.runtime.operators import define
from commdsl.runtime.registry import registry

Part: TypeAlias = tuple[slice, torch.Tensor]
"""Rows, and what a call found about them."""

TAIL = "Tensor spans, float scale, str kernel"
FORWARD = f"attend_spans(Tensor q, Tensor k, Tensor v, {TAIL}) -> (Tensor, Tensor)"
BACKWARD = (
    "attend_spans_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{TAIL}) -> (Tensor, Tensor, Tensor)"
)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises TensorError (C951) for shapes and dtypes that no attention has."""
    for name, one in (("q", q), ("k", k), ("v", v)):
        given.tensor("attend", one)
        if one.dim() != 3 or one.dtype != q.dtype:
            got = f"{tuple(one.shape)} of {one.dtype}"
            raise TensorError(f"expected {name} as (rows, heads, dim) of {q.dtype}, got {got}")
    heads, shared = q.shape[1], k.shape[1]
    if k.shape != v.shape or k.shape[2] != q.shape[2] or not shared or heads % shared:
        raise TensorError(
            f"expected k and v of one shape, of heads as long as q's, whose number divides q's, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def register() -> None:
    """Tells torch of the operators, once in a process."""
    table = registry()
    with table.lock:
        if hasattr(torch.ops.commdsl, "attend_spans"):
            return
        define(table.library, BACKWARD, _backward, _fake_backward)
        define(table.library, FORWARD, _forward, _fake_forward)
        name = "commdsl::attend_spans"
        torch.library.register_autograd(name, _gradients, setup_context=_setup, lib=table.library)
        torch.library.register_autograd(f"{name}_backward", _refuse, setup_context=_nothing, lib=table.library)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in the shape and dtype of q, and the natural log-sum-exp (heads, rows)."""
    work = known(spans).work(kernel, shape_of(q, k), backward=False)
    merging = Merging(len(q), q.dtype)
    for call in work.calls:
        made = work.kernel.forward(q[call.queries], k[call.keys], v[call.keys], call, scale)
        merging.add(Partial(call.queries, *made))
    out, lse = merging.result(q, wide(q.dtype))
    return out.contiguous(), lse.contiguous()


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v; what several calls find about a row is summed in their order, in float32."""
    work = known(spans).work(kernel, shape_of(q, k), backward=True)
    dout = dout.contiguous()
    parts: tuple[list[Part], ...] = ([], [], [])
    for call in work.calls:
        mine, keys = call.queries, call.keys
        tensors = dout[mine], q[mine], k[keys], v[keys], out[mine], lse[:, mine].contiguous()
        made = work.kernel.backward(*tensors, call, scale)
        for kept, rows, part in zip(parts, (mine, keys, keys), made, strict=True):
            kept.append((rows, part))
    dq, dk, dv = (_summed(found, one) for found, one in zip(parts, (q, k, v), strict=True))
    return dq, dk, dv


def _summed(parts: Sequence[Part], like: torch.Tensor) -> torch.Tensor:
    """What is found about rows, summed in the order given; what one call found about all of them is the sum."""
    if len(parts) == 1 and (parts[0][1].shape, parts[0][1].dtype) == (like.shape, like.dtype):
        return parts[0][1].contiguous()
    sums = Summing(len(like), like.dtype)
    for rows, part in parts:
        sums.add(rows, part)
    return sums.result(like).contiguous()


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=wide(q.dtype))


def _fake_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, spans, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, spans)


def _gradients(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
    made = torch.ops.commdsl.attend_spans_backward(dout, *ctx.saved_tensors, *ctx.rest)
    return (*made, None, None, None)


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _refuse(ctx: Any, *gradients: torch.Tensor) -> None:
    raise GradientError("`attend` has no gradient of its gradient: do without create_graph=True")
