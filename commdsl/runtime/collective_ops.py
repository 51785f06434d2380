"""Turns the collectives into torch ops, `torch.ops.commdsl_collectives`: what autograd and torch.compile see of them.

Assumes the reading of torch's functional collectives: every rank has its own loss, and the gradients of all are summed
where a value went to all. An op chooses when it runs, so a traced graph serves every size, and a gradient is a chosen
collective as well. Does not serve eager calls without gradients; those have a shorter way (`menu`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from commdsl.planner.tuning.selection import Candidate
from commdsl.runtime import groups, menu
from commdsl.runtime.autograd import zeroed
from commdsl.runtime.eager import skips_dispatcher
from commdsl.runtime.errors import GradientError
from commdsl.runtime.operators import define
from commdsl.runtime.reporting import reported
from commdsl.runtime.tensors import must

NAMESPACE = "commdsl_collectives"

Tensor: TypeAlias = torch.Tensor

_LOCK = threading.Lock()


@dataclass(frozen=True)
class Traced:
    """One collective as torch knows it. `settings`: the arguments after tensor and group; `wires`: whether values may
    travel in another element type.
    """

    name: str
    settings: str
    run: Callable[..., Tensor]
    shape: Callable[..., list[Any]]  # of the result, from that of the tensor and the ranks, or lengths and the rank
    back: Callable[..., Tensor]  # from gradient, lengths where there are any, group name and settings
    wires: bool = False
    has_lengths: bool = False  # behind the tensor: of blocks that are not as long as each other

    @reported(
        lambda one, _, /, *given, **__: given[one.has_lengths], lambda one, /, *_, **__: f"the gradient of `{one.name}`"
    )
    def gradient(self, gradient: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        """Of x, from that of the result and what was given behind x."""
        return self.back(gradient.contiguous(), *arguments, **settings)


def ops(x: Tensor) -> Any:
    """What calls a collective of x: torch's dispatcher, unless it has nothing to do but to see to gradients."""
    if skips_dispatcher((x,), but_gradients=True):
        return DIRECT
    if torch.compiler.is_dynamo_compiling():
        from commdsl.runtime.traced import defined  # a second, where torch has traced nothing yet

        defined(__name__)
    else:
        library()
    return torch.ops.commdsl_collectives


class _Direct(torch.autograd.Function):
    """A call that has a gradient, which torch's dispatcher would take three times as long for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Traced, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
        ctx.given = one, arguments, settings
        with torch._C._AutoDispatchBelowAutograd():
            return one.run(x, *arguments, **settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        one, arguments, settings = ctx.given
        return one.gradient(gradient, *arguments, **settings), None, None, None


def _directly(one: Traced, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Direct.apply(x, one, arguments, settings)  # type: ignore[no-untyped-call] # torch's
    return one.run(x, *arguments, **settings)


def library() -> torch.library.Library:
    """The ops, defined when they are first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        return _library()


@cache
def _library() -> torch.library.Library:
    made = torch.library.Library(NAMESPACE, "FRAGMENT")
    for one in TRACED:
        _define(made, one)
    schema = 'all_reduce_(Tensor(a!) x, str group_name, str op="sum", float? timeout=None) -> ()'
    define(made, schema, menu.all_reduce_in_place, lambda *_: None)
    made.impl("all_reduce_", _refuse_gradient, "Autograd")
    return made


def _define(made: torch.library.Library, one: Traced) -> None:
    wire = ", str? wire=None" if one.wires else ""
    lengths = "SymInt[] lengths, " if one.has_lengths else ""
    schema = f"{one.name}(Tensor x, {lengths}str group_name{one.settings}, float? timeout=None{wire}) -> Tensor"

    def fake(x: Tensor, *arguments: Any) -> Tensor:
        if one.has_lengths:
            rows, group_name, *_ = arguments
            return x.new_empty(one.shape(list(x.shape), rows, groups.rank_of(group_name) or 0))
        return x.new_empty(one.shape(list(x.shape), menu.size(arguments[0])))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.arguments = inputs[1:]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (one.gradient(gradient, *ctx.arguments), *(None for _ in ctx.arguments))

    define(made, schema, one.run, fake)
    torch.library.register_autograd(f"{NAMESPACE}::{one.name}", backward, setup_context=setup_context, lib=made)


# --- runs -------------------------------------------------------------------------------------------------------------


def _run(collective: str, x: Tensor, nbytes: int, group_name: str, **settings: Any) -> Tensor:
    result: Tensor = menu.run(collective, x, nbytes, group_name, **settings)
    return result


def _all_reduce(
    x: Tensor, group_name: str, op: str = "sum", timeout: float | None = None, wire: str | None = None
) -> Tensor:
    return _run("all_reduce", x, x.nbytes, group_name, op=op, timeout=timeout, wire=wire)


def _all_gather(x: Tensor, group_name: str, timeout: float | None = None, wire: str | None = None) -> Tensor:
    return _run("all_gather", x, x.nbytes * menu.size(group_name), group_name, timeout=timeout, wire=wire)


def _reduce_scatter(x: Tensor, group_name: str, op: str = "sum", timeout: float | None = None) -> Tensor:
    return _run("reduce_scatter", x, x.nbytes, group_name, op=op, timeout=timeout)


def _all_to_all(x: Tensor, group_name: str, timeout: float | None = None) -> Tensor:
    return _run("all_to_all", x, x.nbytes, group_name, timeout=timeout)


def _all_gather_uneven(x: Tensor, lengths: Sequence[int], group_name: str, timeout: float | None = None) -> Tensor:
    return _run("all_gather", x, x.nbytes, group_name, timeout=timeout, lengths=lengths)


def _reduce_scatter_uneven(
    x: Tensor, lengths: Sequence[int], group_name: str, op: str = "sum", timeout: float | None = None
) -> Tensor:
    return _run("reduce_scatter", x, x.nbytes, group_name, op=op, timeout=timeout, lengths=lengths)


def _all_to_all_uneven(x: Tensor, lengths: Sequence[int], group_name: str, timeout: float | None = None) -> Tensor:
    return _run("all_to_all", x, x.nbytes, group_name, timeout=timeout, lengths=lengths)


def _broadcast(x: Tensor, group_name: str, root: int = 0, timeout: float | None = None) -> Tensor:
    return _run("broadcast", x, x.nbytes, group_name, root=root, timeout=timeout)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _same(shape: list[Any], ranks: int) -> list[Any]:
    return shape


def _gathered(shape: list[Any], ranks: int) -> list[Any]:
    return [shape[0] * ranks, *shape[1:]] if shape else [ranks]


def _scattered(shape: list[Any], ranks: int) -> list[Any]:
    must(len(shape) > 0, f"expected a block for each of {ranks} ranks along dimension 0, got a number")
    must(shape[0] % ranks == 0, f"dimension 0, {shape[0]}, is no multiple of the {ranks} ranks")
    return [shape[0] // ranks, *shape[1:]]


def _all_rows(shape: list[Any], lengths: Sequence[Any], rank: int) -> list[Any]:
    return [sum(lengths), *shape[1:]]


def _own_rows(shape: list[Any], lengths: Sequence[Any], rank: int) -> list[Any]:
    return [lengths[rank], *shape[1:]]


def _coming_rows(shape: list[Any], lengths: Sequence[Any], rank: int) -> list[Any]:
    return [sum(lengths[len(lengths) // 2 :]), *shape[1:]]


# --- gradients --------------------------------------------------------------------------------------------------------


def _linear(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise GradientError(f"`{name}` has a gradient for sum and avg, not for {op}")


def _back_all_reduce(
    gradient: Tensor, group_name: str, op: str = "sum", timeout: float | None = None, wire: str | None = None
) -> Any:
    _linear("all_reduce", op)
    return ops(gradient).all_reduce(gradient, group_name, op, timeout, wire)


def _back_all_gather(gradient: Tensor, group_name: str, timeout: float | None = None, wire: str | None = None) -> Any:
    return ops(gradient).reduce_scatter(gradient, group_name, "sum", timeout)


def _back_reduce_scatter(gradient: Tensor, group_name: str, op: str = "sum", timeout: float | None = None) -> Any:
    _linear("reduce_scatter", op)
    gathered = ops(gradient).all_gather(gradient, group_name, timeout)
    return gathered / menu.size(group_name) if op == "avg" else gathered


def _back_all_to_all(gradient: Tensor, group_name: str, timeout: float | None = None) -> Any:
    return ops(gradient).all_to_all(gradient, group_name, timeout)


def _back_all_gather_uneven(
    gradient: Tensor, lengths: Sequence[int], group_name: str, timeout: float | None = None
) -> Any:
    return ops(gradient).reduce_scatter_uneven(gradient, lengths, group_name, "sum", timeout)


def _back_reduce_scatter_uneven(
    gradient: Tensor, lengths: Sequence[int], group_name: str, op: str = "sum", timeout: float | None = None
) -> Any:
    _linear("reduce_scatter", op)
    gathered = ops(gradient).all_gather_uneven(gradient, lengths, group_name, timeout)
    return gathered / menu.size(group_name) if op == "avg" else gathered


def _back_all_to_all_uneven(
    gradient: Tensor, lengths: Sequence[int], group_name: str, timeout: float | None = None
) -> Any:
    ranks = len(lengths) // 2
    swapped = [*lengths[ranks:], *lengths[:ranks]]  # what was sent comes back
    return ops(gradient).all_to_all_uneven(gradient, swapped, group_name, timeout)


def _back_broadcast(gradient: Tensor, group_name: str, root: int = 0, timeout: float | None = None) -> Tensor:
    ranks = menu.size(group_name)
    if ranks == 1:
        return gradient
    back = menu.loaded(Candidate("reduce_tree", (("root", root),)), ranks)
    summed = back(gradient, group=group_name, timeout=timeout)
    assert isinstance(summed, Tensor)
    return summed if groups.rank_of(group_name) == root else zeroed(summed)


def _refuse_gradient(x: Tensor, group_name: str, op: str = "sum", timeout: float | None = None) -> None:
    refuse_gradient(x)
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.commdsl_collectives.all_reduce_(x, group_name, op, timeout)


def refuse_gradient(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise GradientError("`all_reduce_` works in place and has no gradient: use `all_reduce` or torch.no_grad()")


TRACED = (
    Traced("all_reduce", ', str op="sum"', _all_reduce, _same, _back_all_reduce, wires=True),
    Traced("all_gather", "", _all_gather, _gathered, _back_all_gather, wires=True),
    Traced("reduce_scatter", ', str op="sum"', _reduce_scatter, _scattered, _back_reduce_scatter),
    Traced("all_to_all", "", _all_to_all, _same, _back_all_to_all),
    Traced("all_gather_uneven", "", _all_gather_uneven, _all_rows, _back_all_gather_uneven, has_lengths=True),
    Traced(
        "reduce_scatter_uneven",
        ', str op="sum"',
        _reduce_scatter_uneven,
        _own_rows,
        _back_reduce_scatter_uneven,
        has_lengths=True,
    ),
    Traced("all_to_all_uneven", "", _all_to_all_uneven, _coming_rows, _back_all_to_all_uneven, has_lengths=True),
    Traced("broadcast", ", int root=0", _broadcast, _same, _back_broadcast),
)

DIRECT = SimpleNamespace(all_reduce_=_refuse_gradient, **{one.name: partial(_directly, one) for one in TRACED})
"""`torch.ops.commdsl_collectives` without torch's dispatcher."""
