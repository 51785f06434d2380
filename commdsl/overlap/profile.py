"""Turns a product and what travels for it into what it returns, and when each part of that began and ended.

Assumes every rank asks for the same. Does not choose what runs; `programs` does, as for a call.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from commdsl.cost.profile import Profile
from commdsl.machine.errors import ArgumentError
from commdsl.overlap import shapes
from commdsl.overlap.programs import operands, program
from commdsl.runtime import given, groups
from commdsl.runtime.errors import OpError, TensorError
from commdsl.runtime.reporting import reported
from commdsl.runtime.tensors import check_scales

Tensor: TypeAlias = torch.Tensor

_REFUSING = {
    "all_gather_matmul": shapes.gathered,
    "matmul_reduce_scatter": shapes.scattered,
    "matmul_all_reduce": shapes.reduced,
    "matmul_all_to_all": shapes.exchanged,
    "all_to_all_matmul": shapes.returned,
}
"""What refuses other shapes than an operator takes."""


@reported()
def profiled(
    operator: str,
    x: Tensor,
    w: Tensor,
    *,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Profile]:
    """What `all_gather_matmul` or another operator returns, without a gradient, and what its time stamps say.

    x (rows, K), w (N, K), scales of float8: as for that operator. Collective as it is, and over with this. Raises
    ArgumentError for another name, TensorError (C951), GroupError (C953), and OpError (C950) where a collective and a
    product run one after the other, or torch multiplies on a GPU: those have no time stamps.
    """
    if operator not in _REFUSING:
        raise ArgumentError(f"expected one of {', '.join(_REFUSING)}, got `{operator}`")
    name, scales = groups.name_of(group), [one for one in (scale_x, scale_w) if one is not None]
    for one in (x, w, *scales):
        given.tensor(operator, one)
    _REFUSING[operator](x, w, name)
    if x.dim() != 2:
        raise TensorError(f"`{operator}`: `x` is a matrix to be profiled, got {tuple(x.shape)}")
    check_scales(operator, x, w, scales)
    x, w = operands(operator, x.detach(), w.detach(), name)
    op = program(operator, x, w, name)
    if op is None:
        raise OpError(f"`{operator}` is a collective and a product here, one after the other: they have no time stamps")
    made, profile = op.profiled(x, w, *scales, group=name)
    assert isinstance(made, Tensor)
    return made, profile
