"""Turns a backward call of flash attention 2, torch's or the package's, into calls that keep a GPU busy: each of some
sequences, and of some heads.

In a fixed order that kernel runs `splits` blocks for every head of every sequence, `splits` = processors / (heads *
sequences), rounded up: each walks over every `splits`th block of keys. So one block walks over all of the longest
document of many, while the others have long done, and one document of 32 heads on 132 processors is 160 blocks, two
turns of which the second is nearly empty. The rule, by what calls take:

    a block      its pairs of queries and keys, at the rate of a processor
    the blocks   where there are as many as processors, or fewer: the longest. Else at most as many turns of it as it
                 takes, and at most the work of all, shared evenly, before the longest begins
    a call       its blocks, its launches, and a pass over the sums of each split, which are float32

Sequences are sorted by their pairs, and cut where the sum is least; so are the heads of each class. A GPU is taken to
be the call's alone. Assumes calls that the kernel takes. Does not run anything but what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from commdsl.attention.kernel import Part, Ready, Shape, Tensors, ready
from commdsl.attention.masks import Call, Longs, Mask, pairs

Floats: TypeAlias = NDArray[np.float64]

PAIR = 4.3e-12
"""Seconds of a block for a pair and an element of a head: as fits nine plans of batches of documents on H200s."""

LAUNCH = 100e-6
"""Seconds of a call beside its blocks."""

MEMORY = 3e12
"""Bytes a second."""

COLUMN = 128
"""Keys of a step of a block."""

COARSER = 1.25
"""Of many sequences, classes end behind the first few, then so many times as far, each than the one before."""


@dataclass(frozen=True, slots=True)
class Class:
    """Sequences of a call, by their numbers, the longest first; and how many heads of keys each part of them has."""

    sequences: tuple[int, ...]
    key_heads: tuple[int, ...]


# --- the rule ---------------------------------------------------------------------------------------------------------


@lru_cache(256)
def classes(call: Call, shape: Shape, processors: int) -> tuple[Class, ...]:
    """Every sequence that has pairs once, in classes that together take the least time."""
    lengths = np.diff(call.queries), np.diff(call.keys)
    work = pairs(Mask(call.left, call.right), lengths[1] - lengths[0], lengths[0], 0 * lengths[1], lengths[1])
    order = np.argsort(-work, kind="stable")[: np.count_nonzero(work)]
    rows, columns = (length[order] for length in lengths)
    if not len(order):
        return ()
    ends = _ends(len(order))
    sizes = _Sizes(work[order], rows, -(-columns // COLUMN), ends)
    by_heads = _by_heads(sizes, shape, processors)
    found, least, before = [], np.zeros(len(ends)), [0] * len(ends)
    for end in range(1, len(ends)):
        costs = least[:end] + by_heads[-1].seconds[:end, end]
        before[end] = int(costs.argmin())
        least[end] = costs[before[end]]
    end = len(ends) - 1
    while end > 0:
        first = before[end]
        parts = tuple(_taken(by_heads, first, end))
        found.append(Class(tuple(order[ends[first] : ends[end]].tolist()), parts))
        end = first
    return tuple(reversed(found))


@dataclass(frozen=True, eq=False, slots=True)
class _Sizes:
    """Of sequences, the longest first: pairs, queries, blocks of keys; and where classes may begin and end."""

    pairs: Longs
    rows: Longs
    columns: Longs
    ends: list[int]

    def of_classes(self, each: Longs) -> Floats:
        """[first, end]: the sum over the sequences between."""
        sums = np.concatenate(([0.0], np.cumsum(each)))[self.ends]
        found: Floats = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return found


def _ends(count: int) -> list[int]:
    """Where classes of so many sequences may begin and end."""
    found = [0]
    while found[-1] < count:
        found.append(min(count, max(found[-1] + 1, int(found[-1] * COARSER))))
    return found


@dataclass(frozen=True, eq=False, slots=True)
class _Heads:
    """[first, end]: what a class takes where so many heads of keys are cut best, and how many the last part has."""

    seconds: Floats
    last: Longs


def _by_heads(sizes: _Sizes, shape: Shape, processors: int) -> list[_Heads]:
    """For 0, 1, ... heads of keys."""
    serves = shape.heads // shape.key_heads
    calls = [_seconds(sizes, serves * count, shape.dim, processors) for count in range(1, shape.key_heads + 1)]
    found = [_Heads(np.zeros_like(calls[0]), np.zeros(calls[0].shape, np.int64))]
    for count in range(1, shape.key_heads + 1):
        costs = np.stack([calls[last - 1] + found[count - last].seconds for last in range(count, 0, -1)])
        best = costs.argmin(axis=0)
        found.append(_Heads(costs.min(axis=0), count - best))
    return found


def _taken(by_heads: list[_Heads], first: int, end: int) -> Iterator[int]:
    count = len(by_heads) - 1
    while count:
        last = int(by_heads[count].last[first, end])
        yield last
        count -= last


def _seconds(sizes: _Sizes, heads: int, dim: int, processors: int) -> Floats:
    """[first, end]: a call of the sequences between and of so many heads."""
    count = np.maximum(np.subtract.outer(sizes.ends, sizes.ends).T, 1)
    splits = -(-processors // (heads * count))
    first = [*sizes.ends[:-1], sizes.ends[-2]]  # no class begins at the last end
    columns = sizes.columns[first][:, None]
    longest = sizes.pairs[first][:, None] * -(-columns // splits) / columns
    turns = -(-heads * count * splits // processors) * longest
    shared = (heads * sizes.of_classes(sizes.pairs) - longest) / processors + longest
    sums = 2 * 4 * dim * heads * splits * sizes.of_classes(sizes.rows)
    found: Floats = PAIR * dim * np.minimum(turns, shared) + LAUNCH + sums / MEMORY
    return found


# --- parts ------------------------------------------------------------------------------------------------------------


def parted(shape: Shape, call: Call, device: torch.device) -> tuple[Part, ...]:
    """None where the call is best as it is. Copies cuts to the device, as `ready`."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return parts_of(call, shape, classes(call, shape, processors), device)


def parts_of(call: Call, shape: Shape, found: tuple[Class, ...], device: torch.device) -> tuple[Part, ...]:
    if sum(len(one.key_heads) for one in found) <= 1:
        return ()
    serves = shape.heads // shape.key_heads
    queries, keys = _rows(call.queries), _rows(call.keys)
    made = []
    for one in found:
        rows, key_rows = (tuple(every[number] for number in one.sequences) for every in (queries, keys))
        own = ready(Call(_cuts(rows), _cuts(key_rows), call.left, call.right), device)
        for first, end in pairwise(accumulate(one.key_heads, initial=0)):
            made.append(Part(rows, key_rows, slice(serves * first, serves * end), slice(first, end), own))
    return tuple(made)


def _rows(cuts: tuple[int, ...]) -> list[slice]:
    return [slice(first - cuts[0], end - cuts[0]) for first, end in pairwise(cuts)]


def _cuts(rows: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(accumulate((one.stop - one.start for one in rows), initial=0))


def by_parts(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The same backward, of a call that has parts by them."""

    def run(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        ready: Ready,
        scale: float,
    ) -> Tensors:
        if not ready.parts:
            return backward(dout, q, k, v, out, lse, ready, scale)
        made = tuple(torch.zeros_like(one) for one in (q, k, v))
        for part in ready.parts:
            mine = [_together(one[:, part.heads], part.queries) for one in (dout, q, out, lse.T)]
            seen = [_together(one[:, part.key_heads], part.keys) for one in (k, v)]
            slopes, queries, outs, sums = mine
            found = backward(slopes, queries, *seen, outs, sums.T.contiguous(), part.ready, scale)
            for one, gradient, (rows, heads) in zip(made, found, part.places, strict=True):
                _apart(gradient, one[:, heads], rows)
        return made

    return run


def _together(one: torch.Tensor, rows: tuple[slice, ...]) -> torch.Tensor:
    return one[rows[0]] if len(rows) == 1 else torch.cat([one[some] for some in rows])


def _apart(found: torch.Tensor, into: torch.Tensor, rows: tuple[slice, ...]) -> None:
    pieces = found.split([some.stop - some.start for some in rows])
    torch._foreach_copy_([into[some] for some in rows], list(pieces))
