"""Turns the GPUs of this process into what they can do for each other: reach memory, pass it to other processes.

Assumes the driver's bindings. Does not create contexts, and does not keep what it makes.
"""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver

from commdsl.runtime.errors import DeviceError


def blind_pairs() -> tuple[int, tuple[tuple[int, int], ...]]:
    """How many GPUs there are, and the pairs of which the first does not reach the second's memory. DeviceError."""
    _done("cuInit", driver.cuInit(0))
    (count,) = _done("cuDeviceGetCount", driver.cuDeviceGetCount())
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    blind = [pair for pair in pairs if not _done("cuDeviceCanAccessPeer", driver.cuDeviceCanAccessPeer(*pair))[0]]
    return count, tuple(blind)


def export(device: int) -> None:
    """Makes the least memory that there is, passes it on as a file descriptor, and lets it go. DeviceError."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted.requestedHandleTypes = kind
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    (size,) = _done("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(wanted, least))
    (memory,) = _done("cuMemCreate", driver.cuMemCreate(size, wanted, 0))
    try:
        (handle,) = _done("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle(memory, kind, 0))
        os.close(int(handle))
    finally:
        driver.cuMemRelease(memory)


def _done(what: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the driver returns behind its status."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what} failed: {getattr(status, 'name', status)}")
    return tuple(values)
