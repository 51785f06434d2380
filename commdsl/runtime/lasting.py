"""Turns what is kept from call to call into tensors on a GPU that are not of torch's allocator.

That one may be giving from the pool of a graph: in a capture, and while `torch.compile(mode="reduce-overhead")` makes
for the first time the calls that it is about to capture. What stays then is refused as a leak, or given away again.

Assumes CuPy where there is a GPU. Does not serve the tensors of a single call, which are to come of the caller's pool,
nor work in a capture.
"""

from __future__ import annotations

from typing import Any

import torch


class _Bytes:
    """Of CuPy's own pool, as long as a tensor has them: to give memory back to the driver would end a capture."""

    def __init__(self, pointer: Any, nbytes: int) -> None:
        self._pointer = pointer  # kept: the memory is there as long as it is
        where = {"data": (int(pointer.ptr), False), "shape": (nbytes,), "strides": None}
        self.__cuda_array_interface__ = {**where, "typestr": "|u1", "version": 3}


def lasting(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`made`, which is the processor's, on that device."""
    if device.type == "cpu":
        return made
    found = room(made.nbytes, device).view(made.dtype).view(made.shape)
    found.copy_(made)
    return found


def room(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes there."""
    if device.type == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    import cupy  # where there is a GPU

    with cupy.cuda.Device(torch.cuda.current_device() if device.index is None else device.index):
        pool = cupy.get_default_memory_pool()
        try:
            pointer = pool.malloc(max(nbytes, 1))
        except cupy.cuda.memory.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch has it, and gives it away to nobody else
            pointer = pool.malloc(max(nbytes, 1))
    return torch.as_tensor(_Bytes(pointer, max(nbytes, 1)), device=device)[:nbytes]
