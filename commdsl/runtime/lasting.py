"""Turns what is kept from call to call into tensors on a GPU that are not of torch's allocator.

That one may be giving from the pool of a graph: in a capture, and while `torch.compile(mode="reduce-overhead")` makes
for the first time the calls that it is about to capture. What stays then is refused as a leak, or given away again.
What is let go of is given away behind the kernels that had it, as torch's is: on the stream that it was made on.

Assumes CuPy where there is a GPU. Does not serve the tensors of a single call, which are to come of the caller's pool,
nor work in a capture.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch


class _Pools:
    """CuPy's memory, by torch's stream: CuPy would take all of it for that of its own current stream."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    of: ClassVar[dict[int, Any]] = {}

    @classmethod
    def here(cls, cupy: Any, device: torch.device) -> Any:
        stream = int(torch.cuda.current_stream(device).cuda_stream)
        with cls.lock:
            if stream not in cls.of:
                cls.of[stream] = cupy.cuda.MemoryPool()
            return cls.of[stream]


class _Bytes:
    """Of a pool of CuPy's, as long as a tensor has them: to give memory back to the driver would end a capture."""

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
        pool = _Pools.here(cupy, device)
        try:
            pointer = pool.malloc(max(nbytes, 1))
        except cupy.cuda.memory.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch has it, and gives it away to nobody else
            pointer = pool.malloc(max(nbytes, 1))
    return torch.as_tensor(_Bytes(pointer, max(nbytes, 1)), device=device)[:nbytes]


def words(count: int, device: torch.device) -> torch.Tensor:
    """So many of int32 there, which calls are given: whatever mode the first is in, others compute gradients."""
    with torch.inference_mode(mode=False):
        made = torch.empty(0, dtype=torch.int32, device=device)
        return made.set_(room(4 * count, device).untyped_storage(), 0, (count,), (1,))
