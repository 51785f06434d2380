"""Turns a schedule's contract into its backward: the shipped schedule of the inverse contract.

Assumes the reading of torch's functional collectives: every rank has its own loss, and the gradients of all are summed
where a value went to all. Does not derive a schedule: a contract without a shipped inverse has no gradient, and says
so. Nor load one: the op says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from commdsl.ir.backward import Backward
from commdsl.runtime import groups
from commdsl.runtime.errors import GradientError
from commdsl.runtime.given import Asked, Patience, Reduction
from commdsl.runtime.program import Program
from commdsl.runtime.reporting import reported
from commdsl.runtime.work import Result

Call: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""What makes calls on tensors of some shapes."""


class Op(Protocol):
    """What a gradient needs of an op."""

    name: str
    shown: str  # in errors
    overwritten: tuple[int, ...]

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], str, Asked]: ...

    def traced(self, group_name: str) -> Program: ...

    def bound(self, inputs: tuple[torch.Tensor, ...], group: Any, asked: Asked) -> Call: ...

    def inverse(self, way: Backward, group_name: str) -> Op:
        """The op of a way back."""
        ...

    def __call__(
        self,
        *inputs: torch.Tensor,
        group: Any = None,
        op: Reduction = "sum",
        timeout: Patience = None,
        lengths: Sequence[int] | None = None,
    ) -> Any: ...


def called(op: Op, group_name: str, asked: Asked, inputs: tuple[torch.Tensor, ...]) -> Result:
    """A call that has a gradient, where torch's dispatcher has nothing else to do."""
    result: Result = _Direct.apply(op, group_name, asked, *inputs)  # type: ignore[no-untyped-call] # torch's
    return result


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, group_name: str, asked: Asked, *inputs: torch.Tensor) -> Any:
        ctx.given = op, group_name, asked
        ctx.others = len(inputs) - 1
        with torch._C._AutoDispatchBelowAutograd():
            outputs = op.bound(inputs, group_name, asked)(inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, group_name, asked = ctx.given
        return None, None, None, _back(op, gradients, group_name, asked), *ctx.others * (None,)


def register(library: torch.library.Library, op: Op) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        known, ctx.group_name, ctx.asked = op.split(inputs)
        ctx.num_strings = len(inputs) - len(known)

    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = _back(op, gradients, ctx.group_name, ctx.asked)
        return (gradient, *(None for _ in range(ctx.num_strings)))

    torch.library.register_autograd(f"commdsl::{op.name}", backward, setup_context=setup_context, lib=library)


@reported("group_name", lambda op, /, *_, **__: f"the gradient of `{op.shown}`")
def _back(op: Op, gradients: tuple[torch.Tensor, ...], group_name: str, asked: Asked) -> torch.Tensor:
    known = op.traced(group_name)
    way = known.backward
    if way is None:
        raise GradientError(
            f"`{op.shown}` has no gradient: its contract `{known.plan.contract}` has no shipped inverse; "
            "call it under torch.no_grad() or write the backward yourself"
        )
    if known.signature.has_reduction and asked.op not in ("sum", "avg"):
        raise GradientError(f"`{op.shown}` has a gradient for sum and avg, not for {asked.op}")
    (gradient,) = gradients
    result = _call(op, way, gradient.contiguous(), group_name, asked)
    if way.averages and asked.op == "avg":
        result = result / known.plan.num_ranks
    if way.only_root is not None and groups.rank_of(group_name) not in (None, way.only_root):
        result = zeroed(result)
    return result


def zeroed(partial: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an input that was not read: zeros in place of the partial result that a reduction to a
    root leaves on the other ranks. For autograd they depend on `partial`, so that all ranks record the same calls, and
    none waits in a second backward pass for a rank that records none.
    """
    return torch.where(torch.zeros((), dtype=torch.bool, device=partial.device), partial, 0)


def _call(op: Op, way: Backward, gradient: torch.Tensor, group_name: str, asked: Asked) -> torch.Tensor:
    inverse, passed = (op, asked.op) if way.schedule == "" else (op.inverse(way, group_name), "sum")
    ranks = inverse.traced(group_name).plan.num_ranks
    lengths = None if asked.lengths is None else _way_back(asked.lengths, ranks)
    result: torch.Tensor = inverse(gradient, group=group_name, op=passed, timeout=asked.seconds, lengths=lengths)
    return result


def _way_back(lengths: Sequence[int], ranks: int) -> list[int]:
    """What is sent comes, and what comes is sent; what each rank has it has."""
    return [*lengths[ranks:], *lengths[:ranks]]


def refuse_in_place(library: torch.library.Library, op: Op) -> None:
    """The in-place variant has no gradient; without this torch would compute one that ignores it."""

    def call(*arguments: Any) -> None:
        known, *_ = op.split(arguments)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in known):
            raise GradientError(
                f"`{op.shown}_` works in place and has no gradient: use `{op.shown}` or torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            getattr(torch.ops.commdsl, f"{op.name}_")(*arguments)
        count_write(op, known)

    library.impl(f"{op.name}_", call, "Autograd")


def count_write(op: Op, inputs: Sequence[torch.Tensor]) -> None:
    """Tells autograd that tensors were overwritten: a backward pass that saved one refuses it then."""
    counted = [inputs[index] for index in op.overwritten if not inputs[index].is_inference()]
    torch.autograd.graph.increment_version(counted)
