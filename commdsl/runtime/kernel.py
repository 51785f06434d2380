"""Turns a built kernel into something that runs one call: threads of this process, or a launch on a CUDA stream.

Assumes packed arguments (`sizes.Arguments`). Does not order calls (`stream_order` does) and does not look at error
records.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from commdsl.diagnostics import InternalError
from commdsl.plan import Plan
from commdsl.runtime.errors import DeviceError, OpError
from commdsl.sizes import Launch

_NO_DELAY = bytes(8)


def grid_of(plan: Plan, launch: Launch) -> tuple[int, int]:
    """Thread blocks of a launch, and threads of a block."""
    return launch.blocks(plan), launch.threads(plan)


class Prepared:
    """Calls of one kernel on blocks of one size: the packed arguments, in which only the tensors' addresses change.

    Whoever points it at tensors holds the workspace's lock until the launch has copied the arguments.
    """

    __slots__ = ("arguments", "blocks", "launch", "parameters", "point", "pointers", "shared", "threads")

    def __init__(self, plan: Plan, launch: Launch, pack: Callable[[Sequence[int]], bytes]) -> None:
        self.launch = launch
        self.blocks, self.threads = grid_of(plan, launch)
        self.shared = plan.shared_bytes
        addresses = struct.Struct(f"<{len(plan.tensors)}Q")
        marks = tuple(0xC0DE_0000_0000_0000 + index for index in range(len(plan.tensors)))
        packed = pack(marks)
        at = 8 * plan.num_ranks  # behind the heaps
        if addresses.unpack_from(packed, at) != marks:
            raise InternalError("the packed arguments do not have the tensors behind the heaps")
        self.arguments = ctypes.create_string_buffer(packed, len(packed))
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))  # one argument: the struct
        self.pointers = ctypes.addressof(self.parameters)
        # Takes the addresses for the next call, in the order of Plan.tensors.
        self.point: Callable[..., None] = partial(addresses.pack_into, self.arguments, at)


class Kernel(Protocol):
    def launch(self, prepared: Prepared, stream: int) -> None:
        """Starts one call; on the processor it is over on return."""
        ...


class HostKernel:
    """The host build. A call occupies this thread and one more per further lane, without the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        self._entry = ctypes.CDLL(str(path)).commdsl_launch

    def launch(self, prepared: Prepared, stream: int) -> None:
        failure = self._entry(prepared.arguments, 1, 1, _NO_DELAY)
        if failure:
            raise OpError(f"cannot start {prepared.blocks} threads: error {failure}")


class DeviceKernel:
    """A cubin on one GPU. Refused at load when not all lanes can be resident at once: lanes wait for each other."""

    def __init__(self, path: Path, entry: str, plan: Plan, device: int, nvshmem: Any | None) -> None:
        import cupy

        with cupy.cuda.Device(device):
            self._module = cupy.RawModule(path=str(path))
            found = self._module.get_function(entry)
            self._kernel = found.kernel  # kept: the handle is good as long as it is
            if plan.shared_bytes:
                _refuse_unless_shared(cupy, plan, device)
                found.max_dynamic_shared_size_bytes = plan.shared_bytes  # 48 KB otherwise
        self._function = int(self._kernel.ptr)
        if nvshmem is not None:
            # Once per module, before its first launch: fills in the library's device state.
            nvshmem.bindings.cumodule_init(int(self._module.module.ptr))
        self._launch = cupy.cuda.driver.launchKernel  # the driver's call and no more; the GIL is free meanwhile
        _refuse_unless_resident(cupy, self._function, plan, device)

    def launch(self, prepared: Prepared, stream: int) -> None:
        self._launch(
            self._function, prepared.blocks, 1, 1, prepared.threads, 1, 1, prepared.shared, stream, prepared.pointers, 0
        )


def _refuse_unless_shared(cupy: Any, plan: Plan, device: int) -> None:
    most = int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])
    if plan.shared_bytes > most:
        raise DeviceError(
            f"`{plan.name}` takes {plan.shared_bytes} bytes of shared memory a block, and this GPU has {most}; "
            "say another `protocol` in `tune`"
        )


def _refuse_unless_resident(cupy: Any, function: int, plan: Plan, device: int) -> None:
    threads = plan.threads * plan.lanes_per_block
    per_sm = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function, threads, plan.shared_bytes)
    sms = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
    if plan.sms > per_sm * sms:
        raise DeviceError(
            f"`{plan.name}` runs {plan.lanes} lanes of {plan.threads} threads that wait for each other, in {plan.sms} "
            f"blocks; this GPU holds {per_sm * sms} at once ({sms} SMs x {per_sm}); say fewer in `tune {{ lanes ... }}`"
        )
