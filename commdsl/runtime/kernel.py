"""Turns a built kernel into something that runs one call: threads of this process, or a launch on a CUDA stream.

Assumes packed arguments (`program.arguments`). Does not order calls (`stream_order` does) and does not look at error
records.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from commdsl.build import host
from commdsl.program.arguments import arguments
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch
from commdsl.program.stages import shared_bytes
from commdsl.runtime.errors import DeviceError, OpError
from commdsl.runtime.said import Words

_NO_DELAY = bytes(8)


def grid_of(plan: Plan, launch: Launch) -> tuple[int, int]:
    """Thread blocks of a launch, and threads of a block."""
    computing = 0 if plan.tiles is None else min(launch.active_lanes, plan.tiles.sms)
    threads = launch.threads(plan.moves) if plan.tiles is None else plan.tiles.threads
    return launch.blocks(plan.moves) + computing + plan.agreeing_blocks, max(threads, plan.moves.threads)


@dataclass(frozen=True, slots=True)
class Residence:
    """What of a kernel has to be on a GPU at once: its blocks wait for each other."""

    name: str  # of the schedule or dispatch
    entry: str  # of the text
    blocks: int
    threads: int
    shared_bytes: int
    lanes: int


def residence_of(plan: Plan, entry: str) -> Residence:
    role, shared = plan.comm, shared_bytes(plan)
    # Of all roles: they are one launch. The block that agrees may come when another has ended: no lane waits for it,
    # and it is the last, so it takes no lane's place.
    blocks = sum(one.sms for one in plan.roles if not one.is_caller)
    return Residence(plan.name, entry, blocks, role.threads * role.lanes_per_block, shared, role.lanes)


class Prepared:
    """Calls of one kernel: the packed arguments, in which one stretch changes from call to call.

    Whoever points it at a call holds the workspace's lock until the launch has copied the arguments.
    """

    __slots__ = ("arguments", "blocks", "cluster", "launch", "parameters", "point", "pointers", "threads", "words")

    def __init__(
        self,
        plan: Plan,
        values: Mapping[str, int | Sequence[int]],
        changing: tuple[str, str],
        launch: Launch | None,
    ) -> None:
        """`changing`: the first and the last argument of the stretch. `launch`: None where each call says its lanes."""
        layout = arguments(plan)
        packed = layout.pack(values)
        self.words = Words(f"`{plan.name}`")  # of a call
        self.launch = launch
        self.cluster = 1 if launch is None else launch.parts
        if launch is None:
            self.blocks, self.threads = plan.comm.sms + plan.agreeing_blocks, plan.comm.threads
        else:
            self.blocks, self.threads = grid_of(plan, launch)
        self.arguments = ctypes.create_string_buffer(packed, len(packed))
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))  # one argument: the struct
        self.pointers = ctypes.addressof(self.parameters)
        # Takes what the next call changes, in the order of the arguments.
        words = layout.stretch(*changing)
        pack = partial(words.pack_into, self.arguments, layout.offset(changing[0]))
        self.point: Callable[..., None] = (
            pack if launch is not None else partial(self._point, pack, plan.agreeing_blocks)
        )

    def _point(self, pack: Callable[..., None], beside: int, *changing: int) -> None:
        """As `point` does where each call says its lanes, a block each."""
        pack(*changing)
        self.blocks = changing[-1] + beside


class Launchable(Protocol):
    """What the driver is told of a launch. `pointers`: the address of the addresses of its arguments."""

    @property
    def blocks(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def cluster(self) -> int:
        """Blocks that are started together, where the launch says it, not the kernel."""
        ...

    @property
    def pointers(self) -> int: ...


class Kernel(Protocol):
    def launch(self, prepared: Prepared, stream: int) -> None:
        """Starts one call; on the processor it is over on return."""
        ...


class HostKernel:
    """The host build. A call occupies this thread and one more per further lane, without the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        self._entry = host.loaded(path).commdsl_launch

    def launch(self, prepared: Prepared, stream: int) -> None:
        failure = self._entry(prepared.arguments, 1, 1, _NO_DELAY)
        if failure:
            raise OpError(f"cannot start {prepared.blocks} threads: error {failure}")


class DeviceKernel:
    """A cubin on one GPU. Refused at load when not all lanes can be resident at once: lanes wait for each other."""

    def __init__(self, path: Path, residence: Residence, device: int, nvshmem: Any | None) -> None:
        import cupy  # where there is a GPU

        with cupy.cuda.Device(device):
            self._module = cupy.RawModule(path=str(path))
            found = self._module.get_function(residence.entry)
            self._kernel = found.kernel  # kept: the handle is good as long as it is
            if residence.shared_bytes:
                _refuse_unless_shared(cupy, residence, device)
                found.max_dynamic_shared_size_bytes = residence.shared_bytes  # 48 KB otherwise
        self.function = int(self._kernel.ptr)
        self.shared_bytes = residence.shared_bytes
        if nvshmem is not None:
            # Once per module, before its first launch: fills in the library's device state.
            nvshmem.bindings.cumodule_init(int(self._module.module.ptr))
        self._launch = cupy.cuda.driver.launchKernel  # the driver's call and no more; the GIL is free meanwhile
        self.room = _room(cupy, self.function, residence, device)  # blocks that the GPU has at once

    def launch(self, prepared: Launchable, stream: int) -> None:
        if prepared.cluster > 1:
            self._launch_clusters(prepared, stream)
            return
        self._launch(
            self.function,
            prepared.blocks,
            1,
            1,
            prepared.threads,
            1,
            1,
            self.shared_bytes,
            stream,
            prepared.pointers,
            0,
        )

    def launch_early(self, prepared: Launchable, stream: int) -> None:
        """A launch that may begin when the one before it on the stream lets it: the kernel itself waits for that."""
        from cuda.bindings import driver  # where there is a GPU

        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._launch_with(early, prepared, stream)

    def _launch_clusters(self, prepared: Launchable, stream: int) -> None:
        from cuda.bindings import driver  # where there is a GPU

        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = together.value.clusterDim
        size.x, size.y, size.z = prepared.cluster, 1, 1
        self._launch_with(together, prepared, stream)

    def _launch_with(self, attribute: Any, prepared: Launchable, stream: int) -> None:
        from cuda.bindings import driver  # where there is a GPU

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = prepared.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = prepared.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        config.attrs, config.numAttrs = [attribute], 1
        (status,) = driver.cuLaunchKernelEx(config, driver.CUfunction(self.function), prepared.pointers, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"cuLaunchKernelEx failed: {status!r}")


def _refuse_unless_shared(cupy: Any, residence: Residence, device: int) -> None:
    most = int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])
    if residence.shared_bytes > most:
        raise DeviceError(
            f"`{residence.name}` takes {residence.shared_bytes} bytes of shared memory a block, and this GPU has "
            f"{most}; say another `protocol` in `tune`"
        )


def _room(cupy: Any, function: int, residence: Residence, device: int) -> int:
    """How many of its blocks a GPU has at once: not fewer than wait for each other."""
    name, blocks, lanes = residence.name, residence.blocks, residence.lanes
    occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    per_sm = int(occupancy(function, residence.threads, residence.shared_bytes))
    sms = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
    if blocks > per_sm * sms:
        raise DeviceError(
            f"`{name}` runs {lanes} lanes that wait for each other, in {blocks} blocks of {residence.threads} threads; "
            f"this GPU holds {per_sm * sms} at once ({sms} SMs x {per_sm}); say fewer in `tune {{ lanes ... }}`"
        )
    return per_sm * sms
