"""A GPU made of the host build: stands in for cupy, nvshmem4py and torch.cuda, so that the device runtime runs here.

Assumes ranks are threads of this process. A launch packs the real arguments and runs the host build of the same text.
Proves nothing about CUDA; tests/gpu does that on real devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commdsl.build import host, nvrtc
from commdsl.config import Config
from commdsl.emit import Emitted
from commdsl.plan import Transport
from commdsl.runtime import device


class FakeGpu:
    """What was asked of the packages, and the state of each rank's thread."""

    def __init__(self, ranks: int, blocks_per_sm: int = 2) -> None:
        self.here = threading.local()
        self.blocks_per_sm = blocks_per_sm
        self.initialised_modules: list[int] = []
        self.freed = 0
        self.built: list[tuple[Transport, str]] = []
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._barrier = threading.Barrier(ranks)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        core = SimpleNamespace(
            get_unique_id=lambda empty: _UniqueId(),
            init=lambda **_: None,
            bytetensor=self._allocate,
            tensor_get_buffer=lambda tensor: (tensor, tensor.nbytes, "uint8"),
            get_peer_buffer=lambda tensor, peer: SimpleNamespace(handle=self._memory[tensor.number, peer].data_ptr()),
            free_tensor=self._free,
            finalize=lambda: None,
        )
        bindings = SimpleNamespace(cumodule_init=self.initialised_modules.append)
        modules = {
            "cupy": self._cupy(),
            "nvshmem": SimpleNamespace(core=core, bindings=bindings),
            "nvshmem.core": core,
            "nvshmem.bindings": bindings,
            "cuda": SimpleNamespace(),
            "cuda.core": SimpleNamespace(Device=lambda _: SimpleNamespace(set_current=lambda: None)),
        }
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for name, value in self._torch_cuda().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(nvrtc, "build", self._build)
        patch.setattr(device._World, "members", None)

    def _build(self, emitted: Emitted, defines: Any, transport: Transport, config: Config, arch: str) -> Path:
        self.built.append((transport, arch))
        return host.build(emitted, tuple(defines), config)

    def _cupy(self) -> Any:
        def module(path: str) -> Any:
            entry = ctypes.CDLL(path).commdsl_launch

            def launch(grid: Any, block: Any, args: Any, stream: Any) -> None:
                assert args[0].size == 1
                entry(args[0].tobytes(), 1, 1, bytes(8))

            launch.ptr = 1  # type: ignore[attr-defined] # as the function object of CuPy has
            kernel = SimpleNamespace(kernel=launch)
            return SimpleNamespace(get_function=lambda _: kernel, module=SimpleNamespace(ptr=7))

        return SimpleNamespace(
            RawModule=lambda path: module(path),
            cuda=SimpleNamespace(
                Device=lambda _: _Device(132),
                Stream=SimpleNamespace(null=None, from_external=lambda stream: stream),
                driver=SimpleNamespace(
                    occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: self.blocks_per_sm
                ),
            ),
        )

    def _torch_cuda(self) -> dict[str, Any]:
        def properties(_: object) -> Any:
            return SimpleNamespace(major=9, minor=0, uuid=f"gpu {self.here.rank}")

        return {
            "is_current_stream_capturing": lambda: getattr(self.here, "capturing", False),
            "get_device_properties": properties,
            "Stream": lambda *_: SimpleNamespace(cuda_stream=0),
            "Event": lambda *_: SimpleNamespace(record=lambda _: None),
            "current_stream": lambda *_: SimpleNamespace(cuda_stream=0, wait_event=lambda _: None),
            "synchronize": lambda *_: None,
            "device": lambda _: contextlib.nullcontext(),
        }

    def _allocate(self, shape: tuple[int, ...], except_on_del: bool) -> torch.Tensor:
        number = getattr(self.here, "allocations", 0)
        self.here.allocations = number + 1
        tensor = torch.full(shape, 255, dtype=torch.uint8)  # not zero: the runtime has to clear it
        tensor.number = number  # type: ignore[attr-defined] # stands for the symmetric address
        self._memory[number, self.here.rank] = tensor
        self._barrier.wait(60)
        return tensor

    def _free(self, tensor: torch.Tensor) -> None:
        self.freed += 1


class _Device:
    def __init__(self, sms: int) -> None:
        self.attributes = {"MultiProcessorCount": sms}

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _UniqueId:
    def __init__(self) -> None:
        self._data = np.zeros(128, np.uint8)

    @property
    def ptr(self) -> int:
        return int(self._data.ctypes.data)
