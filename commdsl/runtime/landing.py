"""Turns sizes of calls into symmetric memory that peers put to: regions, which the calls of a group take in turn.

Assumes every rank of a group makes the same calls in the same order: so all need a larger region at the same call, and
take regions of one set-up alike. Does not say what lies in them (`visits` does).

A call has a region to itself from its beginning to its end, by the order of streams, and what is in it is lost then. So
calls of one group need one region, as large as the largest of them needs, whichever ops they are of; a call within a
visit of another has one of its own. A smaller one that is free is given back when a larger one is made, unless it is
part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from commdsl.program.arguments import heaps
from commdsl.program.memory import Kept
from commdsl.runtime.heap import Heap
from commdsl.runtime.streams import Order
from commdsl.runtime.tensors import contiguous_strides
from commdsl.runtime.workspace import Reach

ALIGNMENT = 256
"""Bytes between whose multiples a tensor begins, as torch's own do."""


class Region:
    """Memory on every rank."""

    def __init__(self, reach: Reach, nbytes: int, heap: Heap, number: str) -> None:
        self.heap = heap
        self.bases = heaps(heap.addresses, reach.nodes, reach.rank)  # by rank, as a kernel is told of them
        self.address = heap.addresses[reach.rank]  # of the rank's own
        self.number = number  # of the set-up in which all ranks made it
        self.nbytes = nbytes
        self.is_kept = False  # for a graph that was captured: it comes back to these addresses at every replay
        self.is_taken = False
        self.last: Any = None  # the end of the call that had it last, as `Streams` marks it
        self._order: Order | None = None  # of the call that has it

    def enter(self, order: Order) -> None:
        """The call that took it begins: behind the one before."""
        self._order = order
        self.is_kept |= order.follow(self.last)

    def __enter__(self) -> Region:
        """For a call, which has taken it."""
        return self

    def __exit__(self, *_: object) -> None:
        """It ends, or has not begun."""
        order, self._order = self._order, None
        try:
            end = None if order is None else order.end()
            self.last = self.last if end is None else end  # what was captured has not run
        finally:
            self.is_taken = False


class Landed:
    """The tensors of a call that lie in a region, one after another: as many bytes on every rank, in one order."""

    def __init__(self, kinds: Mapping[Kept, tuple[Sequence[int], torch.dtype]]) -> None:
        """`kinds`: shape and dtype of each."""
        self._kinds = dict(kinds)
        self._at: dict[Kept, int] = {}
        self.nbytes = 0
        for kept, (shape, dtype) in self._kinds.items():
            self._at[kept] = self.nbytes
            self.nbytes += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._in: Region | None = None
        self._tensors: dict[Kept, torch.Tensor] = {}

    def __contains__(self, kept: Kept) -> bool:
        return kept in self._kinds

    def tensors(self, region: Region | None, like: torch.Tensor) -> Mapping[Kept, torch.Tensor]:
        """On the device of another tensor; the same ones as long as calls are given the same region. None where there
        are no bytes.
        """
        if region is None:
            return {kept: like.new_empty(tuple(shape), dtype=dtype) for kept, (shape, dtype) in self._kinds.items()}
        if self._in is not region:
            self._tensors = {kept: self._tensor(region, kept, like) for kept in self._kinds}
            self._in = region
        return self._tensors

    def _tensor(self, region: Region, kept: Kept, like: torch.Tensor) -> torch.Tensor:
        shape, dtype = self._kinds[kept]
        at, nbytes = region.address + self._at[kept], prod(shape) * dtype.itemsize
        storage = torch._C._construct_storage_from_data_pointer(at, like.device, nbytes)
        return like.new_empty(0, dtype=dtype).set_(storage, 0, tuple(shape), contiguous_strides(shape))


class Regions:
    """Those of one rank's end of a group. Whoever asks for them has the communicator's lock."""

    def __init__(self) -> None:
        self._all: list[Region] = []
        self._users: set[str] = set()

    @property
    def numbers(self) -> list[str]:
        return [region.number for region in self._all]

    @property
    def sizes(self) -> list[int]:
        """As they are reserved."""
        return [region.heap.reserved_bytes for region in self._all]

    def find(self, user: str, nbytes: int) -> Region | None:
        """One that is free and large enough, for an op of that name."""
        self._users.add(user)
        for region in self._all:
            if not region.is_taken and region.nbytes >= nbytes:
                return region
        return None

    def grow(self, make: Callable[[], Region], finish: Callable[[], None]) -> Region:
        """A larger one, in place of those that are free. `finish`: waits for what may still touch them."""
        old = [region for region in self._all if not (region.is_taken or region.is_kept)]
        if old:
            finish()
            self.drop(old)
        self._all.append(make())
        return self._all[-1]

    def keep(self, numbers: set[str]) -> None:
        """Lets go of those that not all ranks have; nothing runs."""
        self.drop([region for region in self._all if region.number not in numbers])
        for region in self._all:
            region.is_taken, region.last = False, None

    def release(self, user: str | None) -> None:
        """An op, or None for all of them, lets go; nothing runs."""
        self._users = set() if user is None else self._users - {user}
        if not self._users:
            self.drop(self._all)

    def drop(self, regions: Sequence[Region]) -> None:
        for region in tuple(regions):
            self._all.remove(region)
            region.heap.free()
