"""Turns gradients, some of them of this rank's blocks, into gradients whose norm over all blocks is bounded.

Assumes that all ranks pass the same parameters in the same order. Does not sum gradients; `replicated` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from commdsl.machine.errors import ArgumentError
from commdsl.overlap.splits import is_dtensor, split_of
from commdsl.runtime import groups
from commdsl.runtime.collectives import all_reduce
from commdsl.runtime.errors import TensorError
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor


def _groups_of(parameters: Any, *_: Any, group: Any = None, **__: Any) -> list[Any]:
    """The groups over which gradients are brought together."""
    if group is not None:
        return [group]
    each = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return sorted({split.group_name for one in each if (split := split_of(one)) is not None})


@reported(_groups_of)
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: Any = None,
) -> Tensor:
    """Collective: scale gradients in place so that their norm, as one rank would have it, is at most `max_norm`.

    Does what torch.nn.utils.clip_grad_norm_ does of one rank: that function takes each rank's own norm where ranks have
    blocks, so it scales the gradients of one parameter differently on each rank. Here the norm of a parameter that is
    declared sharded is that of all its blocks, brought together by one all-reduce for each group; a parameter that all
    ranks have whole counts once. Its gradient is the same on all ranks: call this after gradients are summed.

    parameters: parameters, or one. A parameter without a gradient counts as zero, also where other ranks have one.
    max_norm: the largest norm afterwards.
    norm_type: p of the p-norm, positive; math.inf or "inf": the largest absolute value. Default: 2.0.
    error_if_nonfinite: raise RuntimeError, on all ranks, where the norm is infinite or not a number. Default: False.
    foreach: as torch has it. Default: None, where torch has it for the device.
    group: the one group over which parameters may be sharded. Default: each parameter's own.

    Returns the norm before scaling, a tensor of one number, the same on all ranks of a group. Raises ArgumentError
    (C973) for another `norm_type` and for a parameter sharded over another group, TensorError (C951) for a DTensor.
    """
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _clip(every, max_norm, norm_type, error_if_nonfinite, foreach, group=group)


@reported(_groups_of, lambda *_, **__: "`clip_grad_norm_`")
def _clip(
    every: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    *,
    group: Any,
) -> Tensor:
    power = float(norm_type)
    if not power > 0:
        raise ArgumentError(f"`norm_type` is a positive number or inf, not {norm_type!r}")
    by_group: dict[str | None, list[Tensor]] = {}  # in the order of the parameters, the same on all ranks
    for parameter in every:
        split = split_of(parameter)
        if is_dtensor(parameter):
            raise TensorError("a parameter is a DTensor: torch.nn.utils.clip_grad_norm_ is right for DTensors")
        if split is not None and group is not None and split.group_name != groups.name_of(group):
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded over group `{split.group_name}`, and "
                f"`group` is `{groups.name_of(group)}`: without it each parameter's own is taken"
            )
        gradients = by_group.setdefault(None if split is None else split.group_name, [])
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    if not every:
        return torch.tensor(0.0)
    norms = [_norm(gradients, power, foreach, every[0], name) for name, gradients in by_group.items()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), power)
    total = total.to(torch.promote_types(every[0].dtype, torch.float32))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {power} of the gradients is {total.item()}: nothing was clipped; "
            "error_if_nonfinite=False scales by it all the same"
        )
    torch.nn.utils.clip_grads_with_norm_(every, max_norm, total, foreach)
    return total


def _norm(
    gradients: Sequence[Tensor], power: float, foreach: bool | None, like: Tensor, group_name: str | None
) -> Tensor:
    """Return the norm of gradients of whole parameters, or, with a group, of all its ranks' blocks, in float64."""
    own: Tensor = torch.nn.utils.get_total_norm(gradients, power, foreach=foreach).to(like.device, torch.float64)
    if group_name is None or groups.size_of(group_name) == 1:
        return own
    if math.isinf(power):
        largest: Tensor = all_reduce(own, "max", group_name)
        return largest
    total: Tensor = all_reduce(own**power, group=group_name)
    root: Tensor = total ** (1 / power)
    return root
