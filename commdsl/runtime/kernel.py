"""Turns a built kernel into something that runs one call: threads of this process, or a launch on a CUDA stream.

Assumes packed arguments (`sizes.Arguments`). Does not order calls (`workspace` does) and does not look at error
records.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from commdsl.plan import Plan
from commdsl.runtime.errors import DeviceError, OpError

_NO_DELAY = bytes(8)


class Kernel(Protocol):
    def launch(self, arguments: bytes, lanes: int, stream: int) -> None:
        """Starts one call; on the processor it is over on return."""
        ...


class HostKernel:
    """The host build. A call occupies this thread and one more per further lane, without the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        self._entry = ctypes.CDLL(str(path)).commdsl_launch

    def launch(self, arguments: bytes, lanes: int, stream: int) -> None:
        failure = self._entry(arguments, 1, 1, _NO_DELAY)
        if failure:
            raise OpError(f"cannot start {lanes} threads: error {failure}")


class DeviceKernel:
    """A cubin on one GPU. Refused at load when not all lanes can be resident at once: lanes wait for each other."""

    def __init__(self, path: Path, entry: str, plan: Plan, device: int, nvshmem: Any | None) -> None:
        import cupy

        with cupy.cuda.Device(device):
            self._module = cupy.RawModule(path=str(path))
            self._kernel = self._module.get_function(entry).kernel
        if nvshmem is not None:
            # Once per module, before its first launch: fills in the library's device state.
            nvshmem.bindings.cumodule_init(int(self._module.module.ptr))
        self._threads = plan.threads
        _refuse_unless_resident(cupy, int(self._kernel.ptr), plan, device)

    def launch(self, arguments: bytes, lanes: int, stream: int) -> None:
        packed = np.frombuffer(arguments, dtype=np.dtype((np.void, len(arguments))))
        self._kernel((lanes, 1, 1), (self._threads, 1, 1), (packed,), stream=_external_stream(stream))


def _refuse_unless_resident(cupy: Any, function: int, plan: Plan, device: int) -> None:
    per_sm = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function, plan.threads, 0)
    sms = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
    if plan.lanes > per_sm * sms:
        raise DeviceError(
            f"`{plan.name}` runs {plan.lanes} lanes of {plan.threads} threads that wait for each other; this GPU holds "
            f"{per_sm * sms} at once ({sms} SMs x {per_sm}); say fewer in `tune {{ lanes ... }}`"
        )


class _TorchStream:
    """A stream of torch's, in the words of CUDA's stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


@cache
def _external_stream(stream: int) -> Any:
    import cupy

    return cupy.cuda.Stream.from_external(_TorchStream(stream)) if stream else cupy.cuda.Stream.null
