"""Turns tensors that travel in float8 into what arrives of them: rows in float8, and their scales in float32.

Assumes tensors of rows. Does not compute a scale: the kernel does, and `simulate.quantised` says which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from commdsl.runtime.errors import TensorError
from commdsl.runtime.pool import aligned, row_bytes

Tensors: TypeAlias = tuple[torch.Tensor, ...]

ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What may travel so, and how a kernel is told."""

SCALE_BYTES = 4


class Quantised(NamedTuple):
    """Rows that came in float8. A value is `rows` times the scale of its stretch."""

    rows: torch.Tensor  # (R, ...) float8_e4m3fn
    scales: torch.Tensor  # (R, ceil(H / stretch)) float32, H the elements of a row


def stretches_of(width: int, stretch: int) -> int:
    """How many scales a row of so many elements has."""
    return -(-width // stretch)


def travels_in(tensor: torch.Tensor, stretch: int) -> int:
    """Bytes of a row as it crosses, its scales apart."""
    return row_bytes(tensor) // tensor.element_size() if stretch else row_bytes(tensor)


def judge(tensor: torch.Tensor) -> None:
    """Raises TensorError (C951) for rows that do not travel in float8."""
    if tensor.dtype not in ELEMENTS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENTS)
        raise TensorError(f"rows that travel as float8 are given as {known}, not as {tensor.dtype}")


def arriving(tensors: Tensors, stretches: Sequence[int]) -> Tensors:
    """Tensors of no rows, like those that arrive: one for each of `tensors`, then the scales of those in float8."""
    rows, scales = list[torch.Tensor](), list[torch.Tensor]()
    for tensor, stretch in zip(tensors, stretches, strict=True):
        if stretch:
            rows.append(tensor.new_empty((0, *tensor.shape[1:]), dtype=torch.float8_e4m3fn))
            many = stretches_of(travels_in(tensor, stretch), stretch)
            scales.append(tensor.new_empty((0, many), dtype=torch.float32))
        else:
            rows.append(tensor)
    return (*rows, *scales)


def staged_bytes(widths: Sequence[int], stretches: Sequence[int]) -> int:
    """For a row of any of the tensors in float8, with its scales behind it."""
    return max(
        (
            aligned(16 + width + SCALE_BYTES * stretches_of(width, by))
            for width, by in zip(widths, stretches, strict=True)
            if by
        ),
        default=0,
    )


def flat(rows: Sequence[torch.Tensor | Quantised]) -> Tensors:
    """The way back of `paired`."""
    scales = [one.scales for one in rows if isinstance(one, Quantised)]
    return (*(one.rows if isinstance(one, Quantised) else one for one in rows), *scales)


def dequantised(rows: torch.Tensor, scales: torch.Tensor, stretch: int, dtype: torch.dtype) -> torch.Tensor:
    """Each value times the scale of its stretch, in float32, rounded once."""
    wide = rows.flatten(1).float()
    by = scales.repeat_interleave(stretch, 1)[:, : wide.shape[1]]
    return (wide * by).to(dtype).view(rows.shape)


def paired(came: Tensors, stretches: Sequence[int]) -> tuple[torch.Tensor | Quantised, ...]:
    """What arrived as callers have it: by tensor, with its scales if it has some."""
    scales = iter(came[len(stretches) :])
    rows = zip(came, stretches, strict=False)
    return tuple(Quantised(one, next(scales)) if stretch else one for one, stretch in rows)
