"""Turns a stretch of symmetric memory into results: tensors that give their memory back when nobody holds them.

Assumes calls of one stream, or of streams that torch orders: memory that is given back is used by the next call that is
enqueued, as in torch's own allocator. Does not grow. Ranks need not take the same places: they tell each other.
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
    """Room for the results of so many calls there, and of so many back, each in a place that holds the largest: so
    whether a call has room does not depend on the sizes of those before it, which differ from rank to rank.
    """

    def __init__(self, name: str, address: int, sizes: tuple[int, int], calls: int, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._sizes = sizes  # of a call's results: there, back
        self._calls = calls
        there, back = sizes
        middle = address + calls * there
        # Returned by whatever thread lets a tensor go.
        self._free = (
            deque(address + call * there for call in range(calls)),
            deque(middle + call * back for call in range(calls)),
        )

    def empty(self, rows: Sequence[int], like: Sequence[torch.Tensor], *, goes: bool, keep: bool) -> list[torch.Tensor]:
        """New tensors for the results of one call, `goes` there or back, with `rows` rows like those of others; their
        memory comes back when none of them is held. With `keep` never: a graph that is being captured will write there
        at every replay.

        Raises DispatchError (C961) when there is no room.
        """
        offsets, size = [], 0
        for count, tensor in zip(rows, like, strict=True):
            offsets.append(size)
            size += aligned(count * row_bytes(tensor))
        places, most = self._free[not goes], self._sizes[not goes]
        if size > most:
            raise DispatchError(
                f"the results of a call of `{self._name}` take {size} bytes, and the Limits give {most}"
            )
        try:
            at = places.pop()
        except IndexError:
            raise DispatchError(
                f"`{self._name}` has no memory left: the results of {self._calls} calls {'there' if goes else 'back'} "
                "are held. Let some go, make the Dispatcher with more `results`, or with put='packed': its results are "
                "ordinary"
            ) from None
        memory = _Memory(at, size)
        if not keep:
            weakref.finalize(memory, places.append, at).atexit = False
        storage = memory.tensor(self._device).untyped_storage()
        return [
            tensor.new_empty(0).set_(storage, offset // tensor.element_size(), *_contiguous(count, tensor))
            for offset, count, tensor in zip(offsets, rows, like, strict=True)
        ]


def aligned(size: int) -> int:
    """Bytes that a result of `size` takes."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row: of what lies along all dimensions but the first."""
    elements = 1
    for extent in tensor.shape[1:]:
        elements *= extent
    return elements * tensor.element_size()


def _contiguous(rows: int, like: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides. Those of `like` may be any where it has no row, or one."""
    shape = (rows, *like.shape[1:])
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return shape, tuple(reversed(strides))


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
