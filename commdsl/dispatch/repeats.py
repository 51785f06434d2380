"""Turns a call that was made into one that is made again: what it asked, and what was worked out for it.

Assumes that what was right once is right again, of the same Route with as many rows, on tensors of the same shapes.
Does not look at torch's modes or at gradients (`eager` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from commdsl.runtime.pool import Results
from commdsl.runtime.workspace import Start

Asked: TypeAlias = tuple[tuple[int, int], tuple[int, int], bool, str]
"""Rows of the results and of the inputs, of queries and of keys each; whether there may be more of them; and the words
of `Call.about`.
"""

Shapes: TypeAlias = tuple[list[int], list[tuple[torch.Size, torch.dtype]]]
"""Rows of the results, and what the inputs are."""


@dataclass(frozen=True, slots=True)
class Call:
    """What calls one way on tensors of the same shapes have in common."""

    goes: bool
    shapes: Shapes
    results: Results
    start: Start
    pad: tuple[int, ...]  # for tensors that a call does not have
    words: tuple[int, ...]  # arguments behind the addresses
    about: str  # further settings that all ranks must agree on, in words


@dataclass(frozen=True, slots=True)
class Repeat:
    """What calls with the same Route have in common besides."""

    asked: Asked
    device: torch.device
    there: torch.Tensor
    """The table of the call."""
    back: torch.Tensor
    """And of its way back."""
    call: Call

    def serves(self, asked: Asked, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether the call is this one again; the tensors are plain."""
        shapes = self.call.shapes[1]
        if self.asked != asked or len(tensors) != len(shapes):
            return False
        for tensor, (shape, dtype) in zip(tensors, shapes, strict=True):
            if (
                tensor.layout is not torch.strided
                or tensor.is_nested  # it has no shape
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.device != self.device
                or not tensor.is_contiguous()
            ):
                return False
        return True
