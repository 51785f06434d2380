"""Turns products whose rows come from all ranks, or whose sums or columns go to them, into operators of torch,
`torch.ops.commdsl_overlap`: what autograd and torch.compile see of them.

Assumes calls that every rank makes alike, with gradients of the same tensors, also those of a backward pass. Gradients
are calls of the same operators, so they have gradients, too. Does not choose what runs; `programs` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch

from commdsl.overlap.calls import NAMESPACE, call
from commdsl.overlap.programs import EXCHANGE, GATHER, REDUCE, SCATTER, program, program_with_rows
from commdsl.overlap.sequence import (
    gather_then_multiply,
    multiply_then_exchange,
    multiply_then_reduce,
    multiply_then_scatter,
)
from commdsl.runtime import collective_ops, collectives, groups, menu
from commdsl.runtime.errors import TensorError
from commdsl.runtime.operators import define
from commdsl.runtime.tensors import lies_in_lines

Tensor: TypeAlias = torch.Tensor

_LOCK = threading.Lock()


def all_gather_matmul(x: Tensor, w: Tensor, *, group: Any = None, keep_rows: bool = False) -> Tensor:
    """The rows of all ranks, in rank order along dimension 0, times this rank's weights: x (n, ..., K), w (N, K), as
    torch.nn.Linear has it -> (P * n, ..., N).

    x, w: of one dtype and device, cpu or cuda; of the same shapes on every rank. w may lie by rows or by columns, as a
    transpose does, in a wider matrix or not: where these begin at multiples of 16 bytes nothing of it is copied, nor is
    it for a gradient. x travels: it is copied where it is not contiguous. Each rank's rows are multiplied while others
    are on their way. Sums are those of a matmul of torch's, rounded once. Where no schedule multiplies (one rank, ranks
    on other machines; on GPUs other than bfloat16 and float16, K or N that is no multiple of 8), or one after the other
    is faster (`choice` says), it is `commdsl.all_gather` and torch.mm. Under autocast tensors are cast as
    torch.nn.functional.linear casts.

    The gradient of x is `matmul_reduce_scatter` of that of the result with w transposed. That of w needs the rows of
    all ranks. They are gathered again, as P times the memory of x is what sequence parallelism is to save; with
    `keep_rows` they are kept, in that much memory, until the gradient is made. Raises TensorError (C951), GroupError
    (C953).
    """
    if keep_rows and w.requires_grad and torch.is_grad_enabled():
        made: Tensor = _call("all_gather_matmul_rows", x, w, group)[0]
        return made
    return _of_call("all_gather_matmul", x, w, group)


def matmul_reduce_scatter(x: Tensor, w: Tensor, *, group: Any = None) -> Tensor:
    """This rank's rows of the sum over all ranks of x times w transposed: x (P * n, ..., K), w (N, K) -> (n, ..., N).

    x, w: as for `all_gather_matmul`, K this rank's share of what is summed up; x may lie as w may. What other ranks
    make is rounded, and travels while more is multiplied; it is added to this rank's own in float32 or wider, and the
    sum rounded. Where no schedule multiplies, or one after the other is faster (`choice` says), it is torch.mm and
    `commdsl.reduce_scatter`: this rank's own is rounded as well before it is added.

    The gradient of x is `all_gather_matmul` of that of the result with w transposed. Where w has one as well, the
    gradients of all ranks are gathered once, for both. Raises TensorError (C951), GroupError (C953).
    """
    return _of_call("matmul_reduce_scatter", x, w, group)


def matmul_all_reduce(x: Tensor, w: Tensor, *, group: Any = None) -> Tensor:
    """The sum over all ranks of x times w transposed, on every rank: x (n, ..., K), w (N, K) -> (n, ..., N).

    x, w: as for `matmul_reduce_scatter`. Each rank adds up some of the rows, as there, and sends them to all, so all
    have the same bits. Where no schedule multiplies, the ranks do not divide n, or one after the other is faster, it is
    torch.mm and `commdsl.all_reduce`.

    The loss is one, which all ranks compute alike: the gradient of the result is the same on all of them, and those of
    x and w are made of it where they are, by products alone. (`commdsl.all_reduce` reads each rank's loss as its own.)
    Raises TensorError (C951), GroupError (C953).
    """
    return _of_call("matmul_all_reduce", x, w, group)


def matmul_all_to_all(x: Tensor, w: Tensor, *, group: Any = None) -> Tensor:
    """This rank's columns of the rows of all ranks, in rank order along dimension 0, each times its rank's weights:
    x (n, ..., K), w (P * N, K) -> (P * n, ..., N). From some tokens and all heads to all tokens and some heads.

    x, w: as for `matmul_reduce_scatter`, w all weights, of which rows r * N ..< (r + 1) * N make what rank r gets. The
    columns of other ranks travel while more is multiplied, and nothing is added: results are those of a matmul of
    torch's. Where no schedule multiplies, or one after the other is faster (`choice` says), it is torch.bmm and
    `commdsl.all_to_all`. Where all ranks have the same w, `all_gather_matmul` of x and this rank's rows of it makes the
    same: a row of x travels then, K numbers in place of N.

    The gradient of the result comes back by `commdsl.all_to_all`, and those of x and w are products of it. Raises
    TensorError (C951), GroupError (C953).
    """
    return _of_call("matmul_all_to_all", x, w, group)


def replicated_matmul(x: Tensor, w: Tensor, *, group: Any = None) -> Tensor:
    """Rows that are the same on all ranks times this rank's weights: x (n, ..., K), w (N, K) -> (n, ..., N). Nothing is
    sent but on the way back: the gradient of x is `matmul_all_reduce` of that of the result with w transposed.

    x, w: as for `matmul_all_reduce`, whose gradient of x this is. Raises TensorError (C951), GroupError (C953).
    """
    return _of_call("replicated_matmul", x, w, group)


def _of_call(name: str, x: Tensor, w: Tensor, group: Any) -> Tensor:
    made: Tensor = _call(name, x, w, group)
    return made


def _call(name: str, x: Tensor, w: Tensor, group: Any) -> Any:
    return call(__name__, name, _RUNS[name], (_cast(x), _cast(w)), groups.name_of(group))


def _cast(x: Tensor) -> Tensor:
    """What autocast makes of it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


# --- runs -------------------------------------------------------------------------------------------------------------


def _all_gather_matmul(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    shape = _gathered(x, w, group_name)
    rows, factor = x.flatten(0, -2).contiguous(), _in_lines(w)
    op = program(GATHER, rows, factor, group_name)
    if op is None:
        return gather_then_multiply(rows, factor, group_name).view(shape)
    made = op(rows, factor, group=group_name)
    assert isinstance(made, Tensor)
    return made.view(shape)


def _all_gather_matmul_rows(x: Tensor, w: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """The rows that were multiplied, too: a gradient of weights is made of them."""
    shapes = _gathered(x, w, group_name), _rows_of(x, group_name)
    rows, factor = x.flatten(0, -2).contiguous(), _in_lines(w)
    op = program_with_rows(rows, factor, group_name)
    if op is None:
        there = collectives.all_gather(rows, group_name)
        return torch.mm(there, factor.t()).view(shapes[0]), there.view(shapes[1])
    results = op(rows, factor, group=group_name)
    assert isinstance(results, tuple)
    made, there = results
    return made.view(shapes[0]), there.view(shapes[1])


def _matmul_reduce_scatter(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return _sent(_scattered(x, w, group_name), SCATTER, multiply_then_scatter, x, w, group_name)


def _matmul_all_reduce(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return _sent(_multiplied("matmul_all_reduce", x, w), REDUCE, multiply_then_reduce, x, w, group_name)


def _matmul_all_to_all(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return _sent(_exchanged(x, w, group_name), EXCHANGE, multiply_then_exchange, x, w, group_name)


def _sent(
    shape: list[Any],
    operator: str,
    in_sequence: Callable[[Tensor, Tensor, str], Tensor],
    x: Tensor,
    w: Tensor,
    group_name: str,
) -> Tensor:
    """What products make and then travels, of that shape: by the program that is chosen, or one after the other."""
    rows, factor = _in_lines(x.flatten(0, -2)), _in_lines(w)
    op = program(operator, rows, factor, group_name)
    made = in_sequence(rows, factor, group_name) if op is None else op(rows, factor, group=group_name)
    assert isinstance(made, Tensor)
    return made.view(shape)


def _replicated_matmul(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    shape = _multiplied("replicated_matmul", x, w)
    return torch.mm(x.flatten(0, -2), w.t()).view(shape)


def _in_lines(matrix: Tensor) -> Tensor:
    """As products read it: by rows or by columns."""
    return matrix if lies_in_lines(matrix) else matrix.contiguous()


_RUNS: dict[str, Callable[[Tensor, Tensor, str], Any]] = {
    "all_gather_matmul": _all_gather_matmul,
    "all_gather_matmul_rows": _all_gather_matmul_rows,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_all_to_all": _matmul_all_to_all,
    "replicated_matmul": _replicated_matmul,
}


# --- shapes -----------------------------------------------------------------------------------------------------------


def _gathered(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    _check("all_gather_matmul", x, w)
    return [x.shape[0] * menu.size(group_name), *x.shape[1:-1], w.shape[0]]


def _rows_of(x: Tensor, group_name: str) -> list[Any]:
    return [x.shape[0] * menu.size(group_name), *x.shape[1:]]


def _scattered(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    _check("matmul_reduce_scatter", x, w)
    ranks = menu.size(group_name)
    if x.shape[0] % ranks:
        raise TensorError(
            f"`matmul_reduce_scatter`: {ranks} ranks share the {x.shape[0]} rows of `x`, equally many each"
        )
    return [x.shape[0] // ranks, *x.shape[1:-1], w.shape[0]]


def _exchanged(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    _check("matmul_all_to_all", x, w)
    ranks = menu.size(group_name)
    if w.shape[0] % ranks:
        raise TensorError(f"`matmul_all_to_all`: {ranks} ranks share the {w.shape[0]} rows of `w`, equally many each")
    return [x.shape[0] * ranks, *x.shape[1:-1], w.shape[0] // ranks]


def _multiplied(name: str, x: Tensor, w: Tensor) -> list[Any]:
    _check(name, x, w)
    return [*x.shape[:-1], w.shape[0]]


def _check(name: str, x: Tensor, w: Tensor) -> None:
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(w.shape)}"
        raise TensorError(f"`{name}`: `x` is (rows, ..., K) and `w` (N, K), got {shapes}")


def _fake_gather(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return x.new_empty(_gathered(x, w, group_name))


def _fake_rows(x: Tensor, w: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return _fake_gather(x, w, group_name), x.new_empty(_rows_of(x, group_name))


def _fake_scatter(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return x.new_empty(_scattered(x, w, group_name))


def _fake_reduce(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return x.new_empty(_multiplied("matmul_all_reduce", x, w))


def _fake_exchange(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return x.new_empty(_exchanged(x, w, group_name))


def _fake_replicated(x: Tensor, w: Tensor, group_name: str) -> Tensor:
    return x.new_empty(_multiplied("replicated_matmul", x, w))


# --- gradients --------------------------------------------------------------------------------------------------------


def library() -> None:
    """The operators, defined when they are first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        _library()


@cache
def _library() -> torch.library.Library:
    made = torch.library.Library(NAMESPACE, "FRAGMENT")
    collective_ops.library()  # of gradients
    for name, fake, back, keep in (
        ("all_gather_matmul", _fake_gather, _gather_back, _keep),
        ("all_gather_matmul_rows", _fake_rows, _rows_back, _keep_rows),
        ("matmul_reduce_scatter", _fake_scatter, _scatter_back, _keep),
        ("matmul_all_reduce", _fake_reduce, _reduce_back, _keep),
        ("matmul_all_to_all", _fake_exchange, _exchange_back, _keep),
        ("replicated_matmul", _fake_replicated, _replicated_back, _keep),
    ):
        results = "(Tensor, Tensor)" if fake is _fake_rows else "Tensor"
        define(made, f"{name}(Tensor x, Tensor w, str group_name) -> {results}", _RUNS[name], fake)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", back, setup_context=keep, lib=made)
    return made


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    """Each for the gradient of the other alone."""
    x, w, ctx.group_name = inputs
    of_x, of_w, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if of_w else None, w if of_x else None)


def _keep_rows(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    """As `_keep`, and of x the rows of all ranks."""
    _, w, ctx.group_name = inputs
    of_x, of_w, *_ = ctx.needs_input_grad
    ctx.save_for_backward(output[1] if of_w else None, w if of_x else None)
    ctx.set_materialize_grads(False)


def _gather_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    of_x = of_w = None
    if w is not None:
        of_x = torch.ops.commdsl_overlap.matmul_reduce_scatter(gradient, w.t(), ctx.group_name)
    if x is not None:
        of_w = _of_weights(gradient, _all_rows(x, ctx.group_name))
    return of_x, of_w, None


def _rows_back(ctx: Any, gradient: Tensor | None, of_rows: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    """None: nothing is made of that result."""
    rows, w = ctx.saved_tensors
    of_x = of_w = None
    if gradient is not None and w is not None:
        of_x = torch.ops.commdsl_overlap.matmul_reduce_scatter(gradient, w.t(), ctx.group_name)
    if gradient is not None and rows is not None:
        of_w = _of_weights(gradient, rows)
    if of_rows is not None and ctx.needs_input_grad[0]:
        back = torch.ops.commdsl_collectives.reduce_scatter(of_rows.contiguous(), ctx.group_name)
        of_x = back if of_x is None else of_x + back
    return of_x, of_w, None


def _scatter_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """The gradients of all ranks are gathered once: w has them from what x needs them for."""
    x, w = ctx.saved_tensors
    if w is None:
        return None, _of_weights(_all_rows(gradient, ctx.group_name), x), None
    if x is None:
        return torch.ops.commdsl_overlap.all_gather_matmul(gradient, w.t(), ctx.group_name), None, None
    of_x, rows = torch.ops.commdsl_overlap.all_gather_matmul_rows(gradient, w.t(), ctx.group_name)
    return of_x, _of_weights(rows, x), None


def _reduce_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    of_x = None if w is None else torch.ops.commdsl_overlap.replicated_matmul(gradient, w.t(), ctx.group_name)
    return of_x, None if x is None else _of_weights(gradient, x), None


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """The gradient of all columns comes back once, for both."""
    x, w = ctx.saved_tensors
    ranks = menu.size(ctx.group_name)
    blocks = torch.ops.commdsl_collectives.all_to_all(gradient.contiguous(), ctx.group_name)
    made = blocks.unflatten(0, (ranks, -1)).movedim(0, -2).flatten(-2)  # (n, ..., P * N)
    return None if w is None else made @ w, None if x is None else _of_weights(made, x), None


def _replicated_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    of_x = None if w is None else torch.ops.commdsl_overlap.matmul_all_reduce(gradient, w.t(), ctx.group_name)
    return of_x, None if x is None else _of_weights(gradient, x), None


def _all_rows(x: Tensor, group_name: str) -> Tensor:
    rows: Tensor = torch.ops.commdsl_collectives.all_gather(x.contiguous(), group_name)
    return rows


def _of_weights(gradient: Tensor, rows: Tensor) -> Tensor:
    return torch.mm(gradient.flatten(0, -2).t(), rows.flatten(0, -2))
