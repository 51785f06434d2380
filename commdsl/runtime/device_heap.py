"""Turns a size into memory of every rank's GPU, mapped by all: CUDA's virtual memory, or a stretch of NVSHMEM's arena.

Assumes a CUDA context, and that a rank's kernels are over when it lets go. Does not start NVSHMEM (`far` does).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from commdsl.runtime.bootstrap import Exchange
from commdsl.runtime.descriptors import pass_round
from commdsl.runtime.errors import HeapError
from commdsl.runtime.far import Arena
from commdsl.runtime.heap import Extent, together


class _DevicePart:
    """Memory of a GPU, mapped for this process's own; it is there as long as one process has it mapped."""

    def __init__(self, driver: Any, handle: Any, size: int, device: int) -> None:
        """Takes the handle."""
        self._driver, self._size = driver, size
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._at = _done(driver, "cuMemAddressReserve", size, 0, 0, 0)
            _done(driver, "cuMemMap", self._at, size, 0, handle, 0)
            _done(driver, "cuMemSetAccess", self._at, size, [access], 1)
        finally:
            _done(driver, "cuMemRelease", handle)
        self.address = int(self._at)

    def free(self) -> None:
        _done(self._driver, "cuMemUnmap", self._at, self._size)
        _done(self._driver, "cuMemAddressFree", self._at, self._size)


class DeviceHeap:
    """Ranks whose GPUs reach each other: each allocates its own part and passes a descriptor of it to the others."""

    def __init__(self, extent: Extent, rank: int, device: int, exchange: Exchange, finish: Callable[[], None]) -> None:
        from cuda.bindings import driver  # where there is a GPU

        self._driver, self._rank, self._finish = driver, rank, finish
        properties = _properties(driver, device)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = int(_done(driver, "cuMemGetAllocationGranularity", properties, least))
        size = self.reserved_bytes = -(-extent.size // grain) * grain
        handle = together(exchange, lambda: _created(driver, extent, size, properties))
        kind = properties.requestedHandleTypes
        self._parts: list[_DevicePart] = []
        try:
            descriptor = int(_done(driver, "cuMemExportToShareableHandle", handle, kind, 0))
            try:
                passed = pass_round(descriptor, rank, exchange)
            finally:
                os.close(descriptor)
        except BaseException:
            _done(driver, "cuMemRelease", handle)
            raise
        try:
            for peer, one in enumerate(passed):
                theirs = handle if peer == rank else _done(driver, "cuMemImportFromShareableHandle", one, kind)
                self._parts.append(_DevicePart(driver, theirs, size, device))
        except BaseException:
            self.free()
            raise
        finally:
            for one in passed:
                os.close(one)
        self.addresses = tuple(part.address for part in self._parts)
        self.zero()

    def zero(self) -> None:
        _done(self._driver, "cuMemsetD8", self.addresses[self._rank], 0, self.reserved_bytes)
        self._finish()

    def free(self) -> None:
        self.addresses = ()
        while self._parts:
            self._parts.pop().free()


class FarHeap:
    """Ranks of which some are far: a stretch of each one's arena, where it has room; they tell each other where.

    A near peer's is a pointer. A far one's is named as NVSHMEM does: where it would lie in the arena of this rank.
    """

    def __init__(
        self,
        extent: Extent,
        rank: int,
        nodes: Sequence[int],
        pe: Sequence[int],
        arena: Arena,
        exchange: Exchange,
        finish: Callable[[], None],
    ) -> None:
        from cuda.bindings import driver  # where there is a GPU

        self._driver, self._rank, self._arena, self._finish = driver, rank, arena, finish
        self._at = together(exchange, lambda: arena.take(extent.name, extent.size))
        self.reserved_bytes = arena.size_at(self._at)
        told = [value.decode().split() for value in exchange("places", f"{self._at} {uuid.uuid4().hex}".encode())]
        self._name = told[0][1]
        self._pe = tuple(pe)
        bases = (
            arena.own if node != nodes[rank] else arena.base(number) for node, number in zip(nodes, pe, strict=True)
        )
        self.addresses = tuple(base + int(at) for base, (at, _) in zip(bases, told, strict=True))
        self.zero()

    def zero(self) -> None:
        _done(self._driver, "cuMemsetD8", self._arena.own + self._at, 0, self.reserved_bytes)
        self._finish()

    def free(self) -> None:
        self.addresses = ()
        self._arena.let_go(self._at, self._name, self._pe)


def _properties(driver: Any, device: int) -> Any:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return made


def _created(driver: Any, extent: Extent, size: int, properties: Any) -> Any:
    code, handle = driver.cuMemCreate(size, properties, 0)
    if code == driver.CUresult.CUDA_SUCCESS:
        return handle
    free, total = _done(driver, "cuMemGetInfo")
    raise HeapError(
        f"`{extent.name}` takes {size} bytes of this rank's GPU, of whose {total} bytes {free} are free ({code!r})"
    )


def _done(driver: Any, name: str, *arguments: Any) -> Any:
    """What a call of the driver gives; HeapError where it fails."""
    code, *found = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise HeapError(f"{name}: {code!r}; ranks of one node have GPUs that reach each other's memory")
    return found[0] if len(found) == 1 else tuple(found)
