"""Turns products whose rows come from all ranks, or whose sums or columns go to them, into operators of torch,
`torch.ops.commdsl_overlap`: what autograd and torch.compile see of them.

Assumes calls that every rank makes alike, with gradients of the same tensors, also those of a backward pass. Gradients
are calls of the same operators, so they have gradients, too. Does not choose what runs; `programs` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from commdsl.overlap import gradients
from commdsl.overlap.calls import NAMESPACE, through_torch
from commdsl.overlap.runs import RUNS
from commdsl.overlap.shapes import check_activation
from commdsl.runtime import collective_ops, groups
from commdsl.runtime.eager import skips_dispatcher
from commdsl.runtime.errors import GradientError
from commdsl.runtime.given import tensor as check_tensor
from commdsl.runtime.operators import define
from commdsl.runtime.products import activated
from commdsl.runtime.reporting import reported
from commdsl.runtime.tensors import FLOAT8

Tensor: TypeAlias = torch.Tensor

_LOCK = threading.Lock()


@reported()
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    group: Any = None,
    keep_rows: bool = False,
) -> Tensor:
    """The rows of all ranks, in rank order along dimension 0, times this rank's weights: x (n, ..., K), w (N, K), as
    torch.nn.Linear has it -> (P * n, ..., N). Each row has `bias` (N,) added to it, this rank's own, of the type of
    results; then `activation` is applied: "gelu", by the error function, or "swiglu", of weights whose first N / 2 rows
    make a gate: silu(gate) times what the others make -> (P * n, ..., N / 2).

    x, w: of one dtype and device, cpu or cuda; of the same shapes on every rank. w may lie by rows or by columns, as a
    transpose does, in a wider matrix or not: where these begin at multiples of 16 bytes nothing of it is copied, nor is
    it for a gradient. x travels: it is copied where it is not contiguous. Each rank's rows are multiplied while others
    are on their way. Sums are those of a matmul of torch's; bias and activation are of these, and the result is rounded
    once. Where no schedule multiplies (one rank, ranks on other machines; on GPUs other than bfloat16 and float16, K or
    columns of the result that are no multiple of 8), or one after the other is faster (`choice` says), it is
    `commdsl.all_gather` and torch.mm. Under autocast tensors are cast as torch.nn.functional.linear casts.

    x, w of float8 (e4m3fn) have a scale each, float32 tensors of one number on their device, that of x the same on all
    ranks: the result is that of x * scale_x and w * scale_w, as torch._scaled_mm has it, in bfloat16, and has no
    gradient. Both lie by rows. Where K is no multiple of 16 or N of 8, they are cast to float32 first: slow, and right.
    The tensor cores of compute capability 9.0 keep a sum of float8 in fewer bits than float32 has; our kernel adds up
    such sums of 128 products in float32.

    The gradient of x is `matmul_reduce_scatter` of that of the result with w transposed. That of w needs the rows of
    all ranks. They are gathered again, as P times the memory of x is what sequence parallelism is to save; with
    `keep_rows` they are kept, in that much memory, until the gradient is made. That of `bias` is the sum of all rows of
    that of the result. What an activation is applied to is needed for its gradient: where there is to be one, torch
    applies it to the rounded product. Raises TensorError (C951), GroupError (C953), ArgumentError for an activation
    that there is not.
    """
    keeps = keep_rows and w.requires_grad and torch.is_grad_enabled()
    name = "all_gather_matmul_rows" if keeps else "all_gather_matmul"
    return _first_of(name, x, w, group, bias, None, (scale_x, scale_w), activation)


@reported()
def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """This rank's rows of the sum over all ranks of x times w transposed: x (P * n, ..., K), w (N, K) -> (n, ..., N).
    `bias` (N,) is in each row once: every rank adds its own to the rows that it gets, and so it does `residual`, of the
    shape and type of the result.

    x, w: as for `all_gather_matmul`, K this rank's share of what is summed up; x may lie as w may. What other ranks
    make is rounded, and travels while more is multiplied; it is added to this rank's own in float32 or wider, with the
    bias and the residual, and the sum rounded. Where no schedule multiplies, or one after the other is faster (`choice`
    says), it is torch.mm and `commdsl.reduce_scatter`: this rank's own is rounded as well before it is added, and the
    sum before the bias is, and before the residual is. Of float8 each rank has scales of its own, and what travels is
    bfloat16.

    The gradient of x is `all_gather_matmul` of that of the result with w transposed. Where w has one as well, the
    gradients of all ranks are gathered once, for both. Raises TensorError (C951), GroupError (C953).
    """
    return _first_of("matmul_reduce_scatter", x, w, group, bias, residual, (scale_x, scale_w))


@reported()
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """The sum over all ranks of x times w transposed, on every rank: x (n, ..., K), w (N, K) -> (n, ..., N).
    `bias` (N,) and `residual`, of the shape and type of the result, are in each row once, added by the rank that adds
    that up: they are to be the same on all ranks.

    x, w: as for `matmul_reduce_scatter`. Each rank adds up some of the rows, as there, and sends them to all, so all
    have the same bits. Where no schedule multiplies, the ranks do not divide n, or one after the other is faster, it is
    torch.mm and `commdsl.all_reduce`.

    The loss is one, which all ranks compute alike: the gradient of the result is the same on all of them, and those of
    x, w, bias and residual are made of it where they are, by products and a sum alone. (`commdsl.all_reduce` reads each
    rank's loss as its own.) Raises TensorError (C951), GroupError (C953).
    """
    return _first_of("matmul_all_reduce", x, w, group, bias, residual, (scale_x, scale_w))


@reported()
def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """This rank's columns of the rows of all ranks, in rank order along dimension 0, each times its rank's weights:
    x (n, ..., K), w (P * N, K) -> (P * n, ..., N). From some tokens and all heads to all tokens and some heads. `bias`
    (P * N,) has a number for each row of w: this rank's is in what it multiplies, before that is sent.

    x, w: as for `matmul_reduce_scatter`, w all weights, of which rows r * N ..< (r + 1) * N make what rank r gets. The
    columns of other ranks travel while more is multiplied, and nothing is added: results are those of a matmul of
    torch's. Where no schedule multiplies, or one after the other is faster (`choice` says), it is torch.bmm and
    `commdsl.all_to_all`. Where all ranks have the same w, `all_gather_matmul` of x and this rank's rows of it makes the
    same: a row of x travels then, K numbers in place of N.

    The gradient of x is `all_to_all_matmul` of that of the result with w transposed; what came for it, that of w is a
    product of. Raises TensorError (C951), GroupError (C953).
    """
    return _first_of("matmul_all_to_all", x, w, group, bias, None, (scale_x, scale_w))


@reported()
def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """This rank's rows of all columns, which each rank has some of, times all weights: x (P * n, ..., K),
    w (N, P * K) -> (n, ..., N). From all tokens and some heads to some tokens, by the projection of all heads. `bias`
    (N,), this rank's own, is added to each of its rows, and `residual`, of the shape and type of the result.

    x, w: as for `all_gather_matmul`; rank r has columns r * K ..< (r + 1) * K of what w multiplies. They travel, n rows
    of them to each rank, while its own are multiplied. Sums are float32 or wider, rounded once. Where no schedule
    multiplies, or one after the other is faster (`choice` says), it is `commdsl.all_to_all`, a copy and torch.mm.

    The gradient of x is `matmul_all_to_all` of that of the result with w transposed. That of w needs what came: it is
    kept in place of x, whose size it has. Raises TensorError (C951), GroupError (C953).
    """
    keeps = w.requires_grad and torch.is_grad_enabled()
    name = "all_to_all_matmul_rows" if keeps else "all_to_all_matmul"
    return _first_of(name, x, w, group, bias, residual, (scale_x, scale_w))


@reported()
def replicated_matmul(x: Tensor, w: Tensor, *, bias: Tensor | None = None, group: Any = None) -> Tensor:
    """Rows that are the same on all ranks times this rank's weights: x (n, ..., K), w (N, K) -> (n, ..., N). `bias`
    (N,), this rank's own, is added to each row. Nothing is sent but on the way back: the gradient of x is
    `matmul_all_reduce` of that of the result with w transposed.

    x, w: as for `matmul_all_reduce`, whose gradient of x this is, but for float8. Raises TensorError (C951), GroupError
    (C953).
    """
    return _first_of("replicated_matmul", x, w, group, bias)


def _first_of(
    name: str,
    x: Tensor,
    w: Tensor,
    group: Any,
    bias: Tensor | None,
    residual: Tensor | None = None,
    scales: Sequence[Tensor | None] = (),
    activation: str | None = None,
) -> Tensor:
    """What an operator gives, without rows that are for its gradients."""
    given = [one for one in (*scales, bias, residual) if one is not None]
    has_scales = len(given) > (bias is not None) + (residual is not None)
    for one in (x, w, *given):
        if not isinstance(one, Tensor) or one.layout is not torch.strided:
            check_tensor(name, one)
    has_end = has_scales or activation is not None
    if has_end and torch.is_grad_enabled() and any(one.requires_grad for one in (x, w, *given)):
        if has_scales:
            raise GradientError(f"`{name}` of {FLOAT8} has no gradient: call it under torch.no_grad()")
        check_activation(name, x, w, activation)
        return activated(_first_of(name, x, w, group, bias), activation)
    if torch._C._is_any_autocast_enabled():
        x, w, bias = cast(x), cast(w), None if bias is None else cast(bias)
    beside: dict[str, Any] = {}
    if has_scales:
        beside |= zip(("scale_x", "scale_w"), scales, strict=True)
    if bias is not None:
        beside["bias"] = bias
    if residual is not None:
        beside["residual"] = residual
    if activation is not None:
        beside["activation"] = activation
    made = _operator(name, x, w, groups.name_of(group), **beside)
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found


def _operator(name: str, x: Tensor, w: Tensor, group_name: str, **beside: Any) -> Any:
    """`beside`: scales, a bias, a residual and an activation, where there are such."""
    ends = beside.get("bias"), beside.get("residual")
    added = [one for one in ends if one is not None] if beside else []
    if not skips_dispatcher((x, w, *added), but_gradients=True):
        return through_torch(__name__, name)(x, w, group_name, **beside)
    has_gradient = x.requires_grad or w.requires_grad or (added and any(one.requires_grad for one in added))
    if has_gradient and torch.is_grad_enabled():
        ways = _OPERATORS[name]
        return gradients.Direct.apply(x, w, group_name, *ends, RUNS[name], ways, _operator)  # type: ignore[no-untyped-call] # torch's
    return RUNS[name](x, w, group_name, **beside)


def cast(x: Tensor) -> Tensor:
    """What autocast makes of it."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device) or not x.is_floating_point():
        return x
    if x.dtype in (torch.float64, FLOAT8):
        return x
    return x.to(torch.get_autocast_dtype(device))


# --- operators --------------------------------------------------------------------------------------------------------

_OPERATORS: dict[str, tuple[Callable[..., gradients.Gradients], Callable[..., None]]] = {
    "all_gather_matmul": (gradients.gather_back, gradients.keep),
    "all_gather_matmul_rows": (gradients.rows_back, gradients.keep_rows),
    "matmul_reduce_scatter": (gradients.scatter_back, gradients.keep),
    "matmul_all_reduce": (gradients.reduce_back, gradients.keep),
    "matmul_all_to_all": (gradients.exchange_back, gradients.keep),
    "all_to_all_matmul": (gradients.return_back, gradients.keep),
    "all_to_all_matmul_rows": (gradients.return_rows_back, gradients.keep_rows),
    "replicated_matmul": (gradients.replicated_back, gradients.keep),
}
"""How the gradients of each are made, and what keeps what they need."""


def library() -> None:
    """The operators, defined when they are first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        _library()


@cache
def _library() -> torch.library.Library:
    made = torch.library.Library(NAMESPACE, "FRAGMENT")
    collective_ops.library()  # of gradients
    for name, (back, keep) in _OPERATORS.items():
        results = "(Tensor, Tensor)" if name.endswith("_rows") else "Tensor"
        beside = ", Tensor? residual=None, Tensor? scale_x=None, Tensor? scale_w=None, str? activation=None"
        more = "" if name == "replicated_matmul" else beside
        schema = f"{name}(Tensor x, Tensor w, str group_name, Tensor? bias=None{more}) -> {results}"
        define(made, schema, RUNS[name], RUNS[name].fake)
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", partial(gradients.padded, back), setup_context=keep, lib=made
        )
    return made
