"""Turns the shapes of rows and weights into those of what an operator gives, also of tensors without data; refuses what
is no product.

Assumes nothing of what is given but that it is tensors. Does not look at strides, nor at scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commdsl.ir.functions import ACTIVATIONS, GATED
from commdsl.machine.errors import ArgumentError
from commdsl.overlap.epilogue import WITH_ACTIVATION, WITH_RESIDUAL, Epilogue
from commdsl.runtime import menu
from commdsl.runtime.errors import TensorError
from commdsl.runtime.tensors import made_of

Tensor: TypeAlias = torch.Tensor


def gathered(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    check("all_gather_matmul", x, w)
    return [x.shape[0] * menu.size(group_name), *x.shape[1:-1], w.shape[0]]


def rows_of(x: Tensor, group_name: str) -> list[Any]:
    return [x.shape[0] * menu.size(group_name), *x.shape[1:]]


def columns_of(x: Tensor, group_name: str) -> list[Any]:
    return list(x.shape)


def scattered(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    check("matmul_reduce_scatter", x, w)
    ranks = menu.size(group_name)
    if x.shape[0] % ranks:
        raise TensorError(
            f"`matmul_reduce_scatter`: {ranks} ranks share the {x.shape[0]} rows of `x`, equally many each"
        )
    return [x.shape[0] // ranks, *x.shape[1:-1], w.shape[0]]


def exchanged(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    check("matmul_all_to_all", x, w)
    ranks = menu.size(group_name)
    if w.shape[0] % ranks:
        raise TensorError(f"`matmul_all_to_all`: {ranks} ranks share the {w.shape[0]} rows of `w`, equally many each")
    return [x.shape[0] * ranks, *x.shape[1:-1], w.shape[0] // ranks]


def returned(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    ranks = menu.size(group_name)
    check("all_to_all_matmul", x, w, ranks)
    if x.shape[0] % ranks:
        raise TensorError(f"`all_to_all_matmul`: {ranks} ranks share the {x.shape[0]} rows of `x`, equally many each")
    return [x.shape[0] // ranks, *x.shape[1:-1], w.shape[0]]


def reduced(x: Tensor, w: Tensor, group_name: str) -> list[Any]:
    return multiplied("matmul_all_reduce", x, w)


def multiplied(name: str, x: Tensor, w: Tensor) -> list[Any]:
    check(name, x, w)
    return [*x.shape[:-1], w.shape[0]]


def replicated(x: Tensor, w: Tensor) -> list[Any]:
    if x.is_floating_point() and x.element_size() == 1:
        raise TensorError(f"`replicated_matmul` takes no scales, so it multiplies no {x.dtype}")
    return multiplied("replicated_matmul", x, w)


def check(name: str, x: Tensor, w: Tensor, ranks: int = 1) -> None:
    """`ranks`: as many times as deep as rows are weights."""
    if x.dtype != w.dtype or x.device != w.device:
        kinds = f"{x.dtype} on {x.device} and {w.dtype} on {w.device}"
        raise TensorError(f"`{name}`: `x` and `w` are of one dtype and device, got {kinds}")
    if x.is_complex():
        raise TensorError(f"`{name}`: there are no products of complex numbers here, got {x.dtype}")
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] * ranks != w.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(w.shape)}"
        depth = f"{ranks} * K" if ranks > 1 else "K"
        raise TensorError(f"`{name}`: `x` is (rows, ..., K) and `w` (N, {depth}), got {shapes}")


def check_epilogue(name: str, x: Tensor, w: Tensor, made: list[Any], epilogue: Epilogue) -> None:
    """`name` multiplies for results of the shape `made`, before an activation halves it."""
    if epilogue.bias is not None:
        _check_bias(name, x, w, epilogue.bias)
    if epilogue.residual is not None:
        _check_residual(name, x, made, epilogue.residual)
    if epilogue.activation is not None and name not in WITH_ACTIVATION:
        raise ArgumentError(f"`{name}` takes no activation; {', '.join(WITH_ACTIVATION)} does")
    check_activation(name, x, w, epilogue.activation)


def _check_bias(name: str, x: Tensor, w: Tensor, bias: Tensor) -> None:
    """It has a number for each row of `w`, of the type of results."""
    if wrong := _unlike(x, w.shape[:1], bias):
        raise TensorError(f"`{name}`: `bias` is a number for each row of `w`, {wrong}")


def _check_residual(name: str, x: Tensor, made: list[Any], residual: Tensor) -> None:
    """It is what results are, of an operator that makes sums where they stay."""
    if name not in WITH_RESIDUAL:
        raise ArgumentError(f"`{name}` takes no residual; {', '.join(WITH_RESIDUAL)} do")
    if wrong := _unlike(x, made, residual):
        raise TensorError(f"`{name}`: `residual` is as the result, {wrong}")


def _unlike(x: Tensor, shape: Sequence[Any], found: Tensor) -> str:
    """What is wanted and what is there, where these are not the same; of the type of results on the device of `x`."""
    wanted, of = tuple(shape), made_of(x.dtype)
    if tuple(found.shape) == wanted and found.dtype == of and found.device == x.device:
        return ""
    return f"{wanted} of {of} on {x.device}, got {tuple(found.shape)} of {found.dtype} on {found.device}"


def check_activation(name: str, x: Tensor, w: Tensor, activation: str | None) -> None:
    """It is one of ours, or none, and of floats."""
    if activation is None:
        return
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"`{name}`: no activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
    if not x.is_floating_point():
        raise TensorError(f"`{name}`: `{activation}` is of floats, got {x.dtype}")
    if activation == GATED and w.shape[0] % 2:
        what = f"a gate and as many columns that it is multiplied with, not {w.shape[0]} in all"
        raise TensorError(f"`{name}`: `w` makes {what}")
