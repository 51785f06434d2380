"""Turns of ranks: how far one is from another where ranks stand in a ring, or in rings of rings.

Assumes ranks numbered row by row. Does not know what ranks do: that all do the same is for whoever asks to see.

Rings over nodes and rings over rails are the same on every node, and on every GPU of a node: turned along an axis, they
are themselves. There are as many turns as ranks, and each leads from rank 0 to another rank. So one rank stands for
all: what it knows of the rank to which a turn leads, every other knows of the rank to which the turn leads from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np

from commdsl.ir.schedules import Ints
from commdsl.language.records import dataclass

Found = TypeVar("Found")


@dataclass(frozen=True)
class Torus:
    """Ranks along axes of these sizes, the last one fastest. A turn is named by the rank to which it turns rank 0."""

    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The turn by one along each axis; together they lead everywhere."""
        return tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    @property
    def neighbours(self) -> Ints:
        """Rank 0 and those next to it along each axis, on either side: they tell most of what is not alike."""
        last = ((size - 1) * step for size, step in zip(self.sizes, self.steps, strict=True))
        return np.array([0, *self.steps, *last], np.int32) % np.int32(self.num_ranks)

    def distance(self, rank: Ints, of: Ints | int) -> Ints:
        """The turn that leads from each `of` to each `rank`."""
        return self._joined(rank, of, np.subtract)

    def turned(self, rank: Ints, by: Ints | int) -> Ints:
        """Where each turn leads from each rank."""
        return self._joined(rank, by, np.add)

    def _joined(self, one: Ints, other: Ints | int, how: np.ufunc) -> Ints:
        """Place by place along each axis."""
        found = np.zeros(np.broadcast_shapes(np.shape(one), np.shape(other)), np.int32)
        for size, step in zip(self.sizes, self.steps, strict=True):
            place = how(one, other) if step == 1 else how(one // step, other // step)
            found += (place % size * step).astype(np.int32, copy=False)
        return found

    def seen_from(self, rank: int) -> Ints:
        """(num_ranks,): the turn that leads from there to every rank: where what it knows of each stands."""
        return self.distance(np.arange(self.num_ranks, dtype=np.int32), rank)


def alike_along(num_ranks: int, seen: Callable[[Torus, Ints], Found | None]) -> Iterator[Found]:
    """Along each torus on which all ranks are alike, what is seen of them. `seen` is given some ranks, rank 0 first;
    None: they differ. Neighbours are looked at before all are: at most tori that is enough.
    """
    every = np.arange(num_ranks, dtype=np.int32)
    for torus in tori(num_ranks):
        if seen(torus, torus.neighbours) is not None and (found := seen(torus, every)) is not None:
            yield found


def tori(num_ranks: int) -> Iterator[Torus]:
    """Every way to number so many ranks along axes: the ring first, then those of ever more axes."""
    for axes in range(1, max(num_ranks.bit_length(), 2)):
        for sizes in _factors(num_ranks, axes):
            yield Torus(sizes)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """So many factors of a number, each 2 or more, in every order; of the number alone, itself."""
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, count - 1))
