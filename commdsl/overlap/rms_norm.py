"""Turns rows that ranks add up, and a residual, into the residual of the next layer and its norm: an operator of torch,
`torch.ops.commdsl_overlap.all_reduce_rms_norm`, in one launch where rows are few.

Assumes calls that every rank makes alike, with gradients of the same tensors, also those of a backward pass. Does not
choose what runs; `programs` does.
"""

from __future__ import annotations

import threading
from functools import cache
from numbers import Real
from typing import Any, TypeAlias

import torch

from commdsl.machine.errors import ArgumentError
from commdsl.overlap.calls import NAMESPACE, call
from commdsl.overlap.programs import row_program
from commdsl.runtime import collectives, groups
from commdsl.runtime.eager import skips_dispatcher
from commdsl.runtime.errors import CaptureError, TensorError
from commdsl.runtime.given import Asked
from commdsl.runtime.given import tensor as check_tensor
from commdsl.runtime.lasting import lasting
from commdsl.runtime.operators import define
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor

_LOCK = threading.Lock()


@reported()
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, group: Any = None
) -> tuple[Tensor, Tensor]:
    """What follows a layer whose sums lie on all ranks: (z, y), y the residual plus the sum of x over the ranks, and
    z = y / sqrt(mean(y * y) + eps) * weight, each row by itself.

    x, residual: (..., K), weight: (K,), of one floating dtype and device, cpu or cuda, of the same shapes on every
    rank; residual, weight and eps are the same on every rank, and so are z and y then, to the bit. The sum is rounded,
    and y; the rest, eps with it, is in float32 or wider, and z rounded once. Autocast casts nothing of it. Few rows, as
    a decoding step has, are one launch: who adds up a row norms it. Of more rows, of one rank, and of ranks on other
    machines it is `commdsl.all_reduce`, an addition and torch.nn.functional.rms_norm.

    The loss is one, which all ranks compute alike: gradients of z and y are the same on all of them, and so are those
    of x, residual and weight, which nothing travels for. (`commdsl.all_reduce` reads each rank's loss as its own.)
    Raises TensorError (C951), GroupError (C953), AgreementError (C964) where ranks of one launch have another eps, and
    CaptureError (C955) in a capture that no call with this eps went before.
    """
    for one in (x, residual, weight):
        if not isinstance(one, Tensor) or one.layout is not torch.strided:
            check_tensor("all_reduce_rms_norm", one)
    given, others = (x, residual, weight), (eps, groups.name_of(group))
    is_differentiated = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    found: tuple[Tensor, Tensor]
    if is_differentiated and skips_dispatcher(given, but_gradients=True):
        found = _Direct.apply(*given, *others)  # type: ignore[no-untyped-call] # torch's
    else:
        found = call(__name__, "all_reduce_rms_norm", _run, given, *others)
    return found


def _run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight)
    if not isinstance(eps, Real):
        raise ArgumentError(f"`all_reduce_rms_norm`: `eps` is a number, not {eps!r}")
    eps = float(eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    op = row_program(x, group_name)
    if op is None:
        y = collectives.all_reduce(x, group=group_name) + residual
        return torch.nn.functional.rms_norm(y, weight.shape, weight, eps), y
    given = x, residual, weight, _number(eps, x.device)
    y, z = op.bound(given, group_name, Asked("sum", None, about=f"eps {eps}"))(given)
    return z, y


@cache
def _number(eps: float, device: torch.device) -> Tensor:
    """Where a kernel finds it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"`all_reduce_rms_norm` with eps = {eps}: call it once on every rank before the capture")
    return lasting(torch.full((1,), eps, dtype=torch.float32, device="cpu"), device)


def _check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if not x.device == residual.device == weight.device:
        devices = f"{x.device}, {residual.device} and {weight.device}"
        raise TensorError(f"`all_reduce_rms_norm`: `x`, `residual` and `weight` are on one device, got {devices}")
    if x.dim() < 1 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        shapes = f"{tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}"
        raise TensorError(f"`all_reduce_rms_norm`: `x` and `residual` are (..., K) and `weight` is (K,), got {shapes}")
    if not x.is_floating_point() or not x.dtype == residual.dtype == weight.dtype:
        dtypes = f"{x.dtype}, {residual.dtype} and {weight.dtype}"
        raise TensorError(
            f"`all_reduce_rms_norm`: `x`, `residual` and `weight` are of one floating dtype, got {dtypes}"
        )


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape)


# --- gradients --------------------------------------------------------------------------------------------------------


def library() -> None:
    """The operator, defined when it is first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        _library()


@cache
def _library() -> torch.library.Library:
    made = torch.library.Library(NAMESPACE, "FRAGMENT")
    schema = "Tensor x, Tensor residual, Tensor weight, float eps, str group_name"
    define(made, f"all_reduce_rms_norm({schema}) -> (Tensor, Tensor)", _run, _fake)
    torch.library.register_autograd(f"{NAMESPACE}::all_reduce_rms_norm", _back, setup_context=_keep, lib=made)
    return made


class _Direct(torch.autograd.Function):
    """A call that has gradients, where torch's dispatcher has nothing else to do."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            made = _run(*given)
        _keep(ctx, given, made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _back(ctx, *gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(weight, output[1])


def _back(ctx: Any, of_z: Tensor, of_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    """Written in operators that have gradients themselves."""
    weight, y = ctx.saved_tensors
    of_x, of_residual, of_weight, *_ = ctx.needs_input_grad
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normed = wide * scale
    through = of_z * weight.to(wide.dtype)
    back = scale * (through - normed * (through * normed).mean(-1, keepdim=True)) + of_y
    back = back.to(y.dtype)
    own = (of_z * normed).sum_to_size(weight.shape).to(weight.dtype) if of_weight else None
    return back if of_x else None, back.clone() if of_residual else None, own, None, None
