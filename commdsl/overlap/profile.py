"""Turns a product and what travels for it into what it returns, and when each part of that began and ended.

Assumes every rank asks for the same. Does not choose what runs; `programs` does, as for a call.
"""

from __future__ import annotations

from typing import Any

import torch

from commdsl.cost.profile import Profile
from commdsl.machine.errors import ArgumentError
from commdsl.overlap.auto import OPERATORS
from commdsl.overlap.programs import operands, program
from commdsl.runtime import groups, menu
from commdsl.runtime.errors import OpError, TensorError


def profiled(operator: str, x: torch.Tensor, w: torch.Tensor, *, group: Any = None) -> tuple[torch.Tensor, Profile]:
    """What `all_gather_matmul` or another operator returns, without a gradient, and what its time stamps say.

    x (rows, K), w (N, K): as for that operator. Collective as it is, and over with this. Raises ArgumentError for
    another name, TensorError (C951), GroupError (C953), and OpError (C950) where a collective and a product run one
    after the other, or torch multiplies on a GPU: those have no time stamps.
    """
    if operator not in OPERATORS:
        raise ArgumentError(f"expected one of {', '.join(OPERATORS)}, got `{operator}`")
    name = groups.name_of(group)
    times = menu.size(name) if OPERATORS[operator].all_depths else 1
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] * times != w.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(w.shape)}"
        raise TensorError(f"`{operator}`: `x` and `w` are matrices to be profiled, as deep as for it, got {shapes}")
    x, w = operands(operator, x.detach(), w.detach(), name)
    op = program(operator, x, w, name)
    if op is None:
        raise OpError(f"`{operator}` is a collective and a product here, one after the other: they have no time stamps")
    made, profile = op.profiled(x, w, group=name)
    assert isinstance(made, torch.Tensor)
    return made, profile
