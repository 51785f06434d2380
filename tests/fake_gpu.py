"""A GPU made of the host build: stands in for cupy, nvshmem4py and torch.cuda, so that the device runtime runs here.

Assumes ranks are threads of this process, and that a tensor of the processor is one of the GPU. A launch reads the real
arguments where the driver would and runs the host build of the same text. Streams and events know what they come after,
and nothing else. Proves nothing about CUDA; tests/gpu does that on real devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commdsl.build import host, nvrtc
from commdsl.config import Config, from_environment
from commdsl.emit import Emitted
from commdsl.plan import Transport
from commdsl.runtime import communicator, device

CONTEXT = 0xC0DE


class Stream:
    """What its next work comes after; in a capture, what comes before it in that graph."""

    def __init__(self, handle: int, stream_id: int) -> None:
        self.cuda_stream = handle
        self.stream_id = stream_id
        self.before: set[int] = set()
        self.capture: int | None = None
        self.is_gone = False

    def wait_event(self, event: Event) -> None:
        assert not self.is_gone
        if self.capture is None:
            assert event.capture is None, "an eager stream waits for an event of a capture"
        else:
            assert event.capture == self.capture, "a captured stream waits for an event from outside"
        self.before |= event.before

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)


class Event:
    """A moment of a stream."""

    def __init__(self, *_: object) -> None:
        self.before: set[int] = set()
        self.capture: int | None = None

    def record(self, stream: Stream) -> None:
        assert not stream.is_gone, "an event is recorded on a stream that was destroyed"
        self.before = set(stream.before)
        self.capture = stream.capture


@dataclass(frozen=True)
class Launch:
    """A kernel as it was started, and the launches it comes after."""

    rank: int
    number: int
    stream: Stream
    capture: int | None
    before: frozenset[int]


class FakeGpu:
    """What was asked of the packages, and the state of each rank's thread."""

    def __init__(self, ranks: int, blocks_per_sm: int = 2) -> None:
        self.here = threading.local()
        self.blocks_per_sm = blocks_per_sm
        self.initialised_modules: list[int] = []
        self.freed = 0
        self.built: list[tuple[Transport, str]] = []
        self.transport = "peer"
        self.context = CONTEXT
        self.launches: list[Launch] = []
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._barrier = threading.Barrier(ranks)
        self._entries: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._handles = itertools.count(0x1000, 0x10)
        self._streams: dict[int, Stream] = {}

    def stream(self, *, external: bool = False) -> Stream:
        """A new stream, torch's own or another's."""
        handle = next(self._handles)
        made = Stream(handle, handle if external else 2 * handle + 1)
        self._streams[handle] = made
        return made

    @property
    def current(self) -> Stream:
        """The stream of this thread, at first the default one of its GPU."""
        return getattr(self.here, "stream", self.default)

    @property
    def default(self) -> Stream:
        """The default stream of this thread's GPU."""
        if not hasattr(self.here, "default"):
            self.here.default = Stream(0, 0)
        return self.here.default

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outside, self.here.stream = self.current, stream
        yield
        self.here.stream = outside

    @contextlib.contextmanager
    def capturing(self, number: int = 1) -> Iterator[None]:
        """A capture that begins on this thread's stream."""
        stream = self.current
        stream.capture = number
        yield
        for other in (self.default, *self._streams.values()):
            other.capture = None if other.capture == number else other.capture

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
            "cuda.bindings": SimpleNamespace(runtime=self._runtime()),
        }
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for name, value in self._torch_cuda().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.current.cuda_stream, raising=False)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(communicator, "_make", self._communicator)
        patch.setattr(nvrtc, "build", self._build)
        patch.setattr(device._World, "members", None)

    def _communicator(self, name: str, member: Any, _: torch.device) -> device.DeviceCommunicator:
        """A tensor of the processor leads to the GPU; what waits there waits for two seconds."""
        config = replace(from_environment(), transport=self.transport, timeout=2.0)
        return device.DeviceCommunicator(name, member.bootstrap, config, torch.device("cuda", 0))

    def _build(self, emitted: Emitted, defines: Any, transport: Transport, config: Config, arch: str) -> Path:
        self.built.append((transport, arch))
        return host.build(emitted, tuple(defines), config)

    def _cupy(self) -> Any:
        def module(path: str) -> Any:
            number = next(self._numbers)
            self._entries[number] = ctypes.CDLL(path).commdsl_launch
            kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=number))
            return SimpleNamespace(get_function=lambda _: kernel, module=SimpleNamespace(ptr=7))

        return SimpleNamespace(
            RawModule=lambda path: module(path),
            cuda=SimpleNamespace(
                Device=lambda _: _Device(132),
                driver=SimpleNamespace(
                    occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: self.blocks_per_sm,
                    launchKernel=self._launch,
                    ctxGetCurrent=lambda: getattr(self.here, "context", CONTEXT),
                    ctxSetCurrent=lambda context: setattr(self.here, "context", context),
                ),
            ),
        )

    def _launch(self, function: int, *rest: int) -> None:
        *grid, shared, stream, parameters, extra = rest
        assert getattr(self.here, "context", CONTEXT) == CONTEXT, "a launch in the context of another GPU"
        assert all(size > 0 for size in grid)
        assert (shared, extra) == (0, 0)
        self.note(stream)
        self._entries[function](ctypes.c_void_p.from_address(parameters), 1, 1, bytes(8))

    def note(self, stream: int) -> Launch:
        """A launch on the stream of that handle, which is the current one."""
        here = self.current
        assert stream == here.cuda_stream
        assert not here.is_gone
        made = Launch(self.here.rank, next(self._numbers), here, here.capture, frozenset(here.before))
        self.launches.append(made)
        here.before.add(made.number)
        return made

    def _runtime(self) -> Any:
        """Of cuda.bindings, what tells of captures."""

        def info(handle: int) -> tuple[int, int, int]:
            stream = self._streams[handle] if handle else self.default
            assert not stream.is_gone
            return 0, int(stream.capture is not None), stream.capture or 0

        return SimpleNamespace(
            cudaStreamGetCaptureInfo=info,
            cudaError_t=SimpleNamespace(cudaSuccess=0),
            cudaStreamCaptureStatus=SimpleNamespace(cudaStreamCaptureStatusActive=1),
        )

    def _torch_cuda(self) -> dict[str, Any]:
        def properties(_: object) -> Any:
            return SimpleNamespace(major=9, minor=0, uuid=f"gpu {self.here.rank}")

        return {
            "is_current_stream_capturing": lambda: self.current.capture is not None,
            "get_device_properties": properties,
            "Stream": lambda *_: self.stream(),
            "Event": Event,
            "stream": self.on,
            "current_stream": lambda *_: self.current,
            "synchronize": lambda *_: None,
            "device": self._device,
        }

    @contextlib.contextmanager
    def _device(self, index: int) -> Iterator[None]:
        """torch.cuda.device: binds the context when the thread has another GPU's, not when it has none."""
        outside = getattr(self.here, "context", CONTEXT)
        self.here.context = CONTEXT if outside else outside
        yield
        if outside:
            self.here.context = outside

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
