"""Turns a stretch of symmetric memory into results: tensors that give their memory back when nobody holds them.

Assumes calls of one stream, or of streams that torch orders: memory that is given back is used by the next call that is
enqueued, as in torch's own allocator. Does not grow. Ranks need not take the same offsets: they tell each other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from commdsl.dispatch.errors import DispatchError

ALIGNMENT = 256


class Pool:
    """Memory [address, address + size) of this rank's heap, first fit."""

    def __init__(self, name: str, address: int, size: int, device: torch.device) -> None:
        self._name = name
        self._address = address
        self._device = device
        self._size = size
        self._free = [(0, size)] if size else []  # (offset, bytes), by offset; no two adjoin
        self._returned: deque[tuple[int, int]] = deque()  # by whatever thread lets a tensor go
        self._taken = 0

    def empty(self, rows: Sequence[int], like: Sequence[torch.Tensor], *, keep: bool) -> list[torch.Tensor]:
        """New tensors for the results of one call, with `rows` rows like those of others, which are
        contiguous; their memory comes back when
        none of them is held. With `keep` never: a graph that is being captured will write there at every replay.

        Raises DispatchError (C961) when there is no room.
        """
        offsets, size = [], 0
        for count, tensor in zip(rows, like, strict=True):
            offsets.append(size)
            size += aligned(count * row_bytes(tensor))
        at = self._take(size)
        memory = _Memory(self._address + at, size)
        if not keep:
            weakref.finalize(memory, self._returned.append, (at, size)).atexit = False
        storage = memory.tensor(self._device).untyped_storage()
        return [
            tensor.new_empty(0).set_(
                storage, offset // tensor.element_size(), (count, *tensor.shape[1:]), tensor.stride()
            )
            for offset, count, tensor in zip(offsets, rows, like, strict=True)
        ]

    def _take(self, size: int) -> int:
        self._merge()
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self._taken += 1
                return offset
        raise DispatchError(
            f"`{self._name}` has no {size} bytes left of {self._size}: the results of {self._taken} calls are in use. "
            "Let some go, make the Dispatcher with more `results`, or with put='packed': its results are ordinary"
        )

    def _merge(self) -> None:
        """Takes back what was let go since."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
            self._taken -= 1
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for offset, room in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((offset, room))
        self._free = merged


def aligned(size: int) -> int:
    """Bytes that a result of `size` takes."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row: of what lies along all dimensions but the first."""
    elements = 1
    for extent in tensor.shape[1:]:
        elements *= extent
    return elements * tensor.element_size()


class _Memory:
    """Bytes at an address, as torch takes memory of others: a tensor of it holds this object."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = {**self.__array_interface__, "strides": None}

    def tensor(self, device: torch.device) -> torch.Tensor:
        """uint8, (size,)"""
        if device.type == "cuda":
            return torch.as_tensor(self, device=device)
        return torch.from_numpy(np.asarray(self))
