"""Turns a call of attention into what a kernel is given: the form that every plug of an attention kernel has.

Assumes rows first: q (m, heads, dim), k and v (n, heads of keys, dim), of which each serves heads / heads of keys heads
of q in order; a batch is more heads. Does not choose a kernel (`kernels`), nor run one (`torch_kernels`,
`flash_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch

from commdsl.attention.masks import Call
from commdsl.runtime.lasting import lasting

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What kernels differ in: the dtype, how long a head is, and how many heads there are."""

    dtype: torch.dtype
    dim: int
    heads: int = 1
    key_heads: int = 1


def shape_of(q: torch.Tensor, k: torch.Tensor) -> Shape:
    """Of a batch as of more heads."""
    return Shape(q.dtype, q.shape[-1], q.shape[1:-1].numel(), k.shape[1:-1].numel())


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A call with all that needs no data, made once: of a packed one the cuts, counted from its first row."""

    call: Call
    queries: slice  # the rows of q
    keys: slice
    cuts: tuple[torch.Tensor, torch.Tensor] | None  # int32 on the device
    longest: tuple[int, int]  # sequence of queries, of keys
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Some sequences of a call, in their own order, and some of its heads: a call of their own."""

    queries: tuple[slice, ...]  # each sequence's rows, of those of the whole call
    keys: tuple[slice, ...]
    heads: slice
    key_heads: slice
    ready: Ready

    @property
    def places(self) -> tuple[tuple[tuple[slice, ...], slice], ...]:
        """Rows and heads of the gradients of q, k and v."""
        return (self.queries, self.heads), (self.keys, self.key_heads), (self.keys, self.key_heads)


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """An attention kernel.

    `refuses(shape, call)`: in words why it cannot run such a call, "" where it can. `forward(q, k, v, ready, scale)`
    returns the output (m, heads, dim) and the natural log-sum-exp (heads, m) in float32, or float64 where q is;
    `backward(dout, q, k, v, out, lse, ready, scale)` the gradients of q, k and v in their shapes, in their dtype or a
    wider one: of these keys' part in the whole that `out` and `lse` are of. `lse` is contiguous there. All tensors are
    the rows of the call alone. `is_exact` says that two runs of backward have the same bits. `parts(shape, call,
    device)` are the parts in which backward runs the call, none where it does not take it apart.
    """

    name: str
    refuses: Callable[[Shape, Call], str]
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    is_exact: bool = True
    parts: Callable[[Shape, Call, torch.device], tuple[Part, ...]] = lambda *_: ()


def ready(call: Call, device: torch.device, parts: tuple[Part, ...] = ()) -> Ready:
    """Copies the cuts of a packed call to the device, so not while a CUDA graph is captured."""
    cuts = None
    if call.is_packed:
        first, second = (
            lasting(torch.tensor([row - rows[0] for row in rows], dtype=torch.int32, device="cpu"), device)
            for rows in (call.queries, call.keys)
        )
        cuts = first, second
    longest = [max(end - first for first, end in pairwise(rows)) for rows in (call.queries, call.keys)]
    return Ready(
        call,
        slice(call.queries[0], call.queries[-1]),
        slice(call.keys[0], call.keys[-1]),
        cuts,
        (longest[0], longest[1]),
        parts,
    )
