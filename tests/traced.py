"""Turns a model that torch traced into whether it makes what the model makes, with the same gradients.

Assumes that every rank of a group comes here, traced or not. Does not trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def assert_as_eager(
    traced: Callable[..., Any], model: Callable[..., Any], tensors: Sequence[torch.Tensor], *others: Any
) -> None:
    """Of leaves that are equal to these tensors, and of what has no gradient."""
    mine, eager = ([one.detach().clone().requires_grad_() for one in tensors] for _ in range(2))
    got, wanted = traced(*mine, *others), model(*eager, *others)
    torch.testing.assert_close(got, wanted)
    got.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
