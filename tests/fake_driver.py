"""CUDA's virtual memory made of memory of this machine: what it is asked for is kept, and passed between processes.

Assumes one device, number 0. Proves nothing about CUDA; tests/gpu does that on real devices.
"""
# ruff: noqa: N802 - CUDA's names

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

from commdsl.runtime.heap import Part

GRAIN = 2 << 20


class Pointer:
    """An address that has memory behind it once something is mapped there."""

    def __init__(self) -> None:
        self.part: Part | None = None

    def __int__(self) -> int:
        assert self.part is not None
        return self.part.address


class FakeDriver:
    """`cuda.bindings.driver`. A handle is a descriptor of this process."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.mapped: dict[Pointer, int] = {}  # what is mapped now, and its bytes
        self._lock = threading.Lock()
        self._memory = weakref.WeakValueDictionary[int, Part]()
        self.most_bytes = 1 << 40  # of one allocation

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemGetAllocationGranularity(self, properties: Any, flags: int) -> tuple[int, int]:
        return 0, GRAIN

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, 3, 5

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int]:
        assert size % GRAIN == 0
        assert properties.requestedHandleTypes == 1
        if size > self.most_bytes:
            return 2, 0
        made = os.memfd_create("gpu")
        os.ftruncate(made, size)
        part = Part(size, made)
        ctypes.memset(part.address, 255, size)  # not zero: the runtime has to clear it
        return 0, made

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[int, int]:
        return 0, os.dup(handle)

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> tuple[int, int]:
        return 0, os.dup(descriptor)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        os.close(handle)
        return (0,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int, Pointer]:
        return 0, Pointer()

    def cuMemMap(self, pointer: Pointer, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        # Ranks are threads: what two of them map of one memory is at one address, so that accesses to it can be told.
        number = os.fstat(handle).st_ino
        with self._lock:
            pointer.part = self._memory.get(number) or Part(size, handle)
            self._memory[number] = pointer.part
        self.mapped[pointer] = size
        return (0,)

    def cuMemSetAccess(self, pointer: Pointer, size: int, descriptions: list[Any], count: int) -> tuple[int]:
        assert [(one.flags, one.location.id) for one in descriptions] == [(3, 0)]
        assert self.mapped[pointer] == size
        return (0,)

    def cuMemUnmap(self, pointer: Pointer, size: int) -> tuple[int]:
        assert self.mapped.pop(pointer) == size
        return (0,)

    def cuMemAddressFree(self, pointer: Pointer, size: int) -> tuple[int]:
        pointer.part = None
        return (0,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        ctypes.memset(address, value, size)
        return (0,)
