"""Turns the lengths that a call is given into the blocks of its tensors; refuses what does not fit.

Assumes a Signature whose ports say by what their lengths are looked up. Lengths are rows of the first dimension, those
that the rank knows, as `ir.lengths` places them: one for each rank; or for each what is sent to it, then for each what
comes from it. They may be symbolic. Does not compare them with those of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from commdsl.ir.lengths import num_places
from commdsl.program.sizes import Blocks
from commdsl.runtime import tensors
from commdsl.runtime.errors import TensorError
from commdsl.runtime.given import Asked, reduction
from commdsl.runtime.program import Port, Program, Signature
from commdsl.runtime.tensors import element_name
from commdsl.runtime.workspace import listed

Given: TypeAlias = "Sequence[Any] | None"
"""Lengths of a call; None: all its blocks are as long."""


def check(name: str, known: Program, inputs: Sequence[torch.Tensor], rank: int | None, lengths: Given) -> None:
    """Refuses other lengths than there are to be, and tensors that are not as many rows as their blocks."""
    signature, rows = known.signature, tuple(() if lengths is None else lengths)
    axes = None if signature.lengths is None else signature.lengths.axes
    wanted = 0 if axes is None else num_places(known.plan.num_ranks, len(axes))
    if len(rows) != wanted:
        what = f"{wanted} lengths, `{signature.lengths}`" if wanted else "no lengths: all blocks are as long"
        raise TensorError(f"`{name}` takes {what}, got {len(rows)}")
    if any(isinstance(one, bool) or not hasattr(one, "__index__") or one < 0 for one in rows):
        raise TensorError(f"`{name}`: a length is a number of rows, not negative; got {[*rows]}")
    ranks, own = known.plan.num_ranks, rank or 0
    if wanted == 2 * ranks and rows[own] != rows[ranks + own]:
        what = f"sends itself {rows[own]} rows, and expects {rows[ranks + own]} of itself"
        raise TensorError(f"`{name}`: rank {own} {what}")
    for port, tensor in zip(signature.inputs, inputs, strict=True) if wanted else ():
        count = sum(_blocks_of(port, known, rank, rows))
        if tensor.dim() == 0 or tensor.shape[0] != count:
            what = f"{count} rows by its lengths, `{port.lengths}`, got {tuple(tensor.shape)}"
            raise TensorError(f"`{name}`: `{port.name}` is {what}")
        if tensor.shape[1:] != inputs[0].shape[1:]:
            what = f"{tuple(tensor.shape[1:])}, one of `{signature.inputs[0].name}` {tuple(inputs[0].shape[1:])}"
            raise TensorError(f"`{name}`: a row of `{port.name}` is {what}")


def output_shapes(known: Program, inputs: Sequence[torch.Tensor], rank: int | None, lengths: Given) -> list[list[Any]]:
    """As many rows as their blocks have, each as those of the first input."""
    if known.signature.lengths is None or lengths is None:
        return tensors.output_shapes(known.signature, inputs)
    row = inputs[0].shape[1:]
    return [[sum(_blocks_of(port, known, rank, lengths)), *row] for port in known.signature.outputs]


def _blocks_of(port: Port, known: Program, rank: int | None, lengths: Sequence[Any]) -> list[Any]:
    """The rows of each block of a tensor."""
    assert port.lengths is not None
    return port.lengths.of_rank(known.plan.num_ranks, port.blocks, rank or 0, lengths)


def blocks_and_row(signature: Signature, inputs: Sequence[torch.Tensor], lengths: Given) -> tuple[Blocks, int]:
    """How long blocks are in bytes, and a row where the op makes rows; else 0."""
    if lengths is None:
        return tensors.block_and_row(signature, inputs)
    row_bytes = inputs[0].element_size() * prod(inputs[0].shape[1:])
    return tuple(int(length) * row_bytes for length in lengths), 0


def described(name: str, known: Program, inputs: Sequence[torch.Tensor], asked: Asked) -> str:
    """A call in words, as ranks compare it: with the lengths that all of them know."""
    op, lengths = reduction(asked.op), known.signature.lengths
    if lengths is None or asked.lengths is None:
        return tensors.described(name, inputs, op) + listed(asked.about)
    rows = f"{[*asked.lengths]} rows" if len(lengths.axes) == 1 else "rows"
    return (
        f"`{name}` of {rows} of {element_name(inputs[0].dtype)}{list(inputs[0].shape[1:])} by {op}{listed(asked.about)}"
    )
