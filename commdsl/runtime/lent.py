"""Keeps symmetric memory that its owner gave back for as long as somebody holds a result that lies there.

Assumes that no call writes to a heap any more that comes here. What is let go is freed when the communicator sets up or
gives back memory the next time, as torch says nothing when a tensor goes; what is held beyond the communicator stays
until the process ends. Does not know calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commdsl.runtime.heap import Heap
from commdsl.runtime.pool import Pool

_BEYOND: list[Heap] = []


class Lent:
    """The heaps of one communicator that results keep."""

    def __init__(self, finish: Callable[[], None]) -> None:
        """`finish` waits for this rank's kernels: of those that read a result the last may still run."""
        self._finish = finish
        self._heaps: list[tuple[Heap, Sequence[Pool]]] = []

    def give_back(self, heap: Heap, pools: Sequence[Pool]) -> None:
        """Frees a heap in which these pools lie, or keeps it while a result of theirs is held."""
        self._heaps.append((heap, pools))
        self.sweep()

    def sweep(self) -> None:
        """Frees what nobody holds any more."""
        held = [any(pool.is_held for pool in pools) for _, pools in self._heaps]
        if all(held):
            return
        self._finish()
        kept, self._heaps = self._heaps, [one for one, is_held in zip(self._heaps, held, strict=True) if is_held]
        for (heap, _), is_held in zip(kept, held, strict=True):
            if not is_held:
                heap.free()

    def close(self) -> None:
        """The end of the communicator."""
        self.sweep()
        _BEYOND.extend(heap for heap, _ in self._heaps)
        self._heaps.clear()
