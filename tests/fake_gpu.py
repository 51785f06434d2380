"""A GPU made of the host build: stands in for cupy, nvshmem4py and torch.cuda, so that the device runtime runs here.

Assumes ranks are threads of this process, and that a tensor of the processor is one of the GPU. A launch reads the real
arguments where the driver would and runs the host build of the same text. Streams and events know what they come after,
and nothing else. Copies, and kernels for the flags between them, are kept besides: in a capture they are not run, as
they are not by CUDA. Proves nothing about CUDA; tests/gpu does that on real devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_order import Command
from fake_driver import FakeDriver

from commdsl.build import host, nvrtc
from commdsl.build.emit import Emitted
from commdsl.machine.config import Config, from_environment
from commdsl.program.arguments import FAR
from commdsl.program.memory import Transport
from commdsl.program.moves import BLOCK_SHARED_BYTES
from commdsl.runtime import device, far, gate, groups, said

CONTEXT = 0xC0DE
ARENA_BYTES = 128 << 20  # NVSHMEM_SYMMETRIC_SIZE
SHARED_BYTES = 48 * 1024  # of a launch, where a function was not allowed more


class Stream:
    """What its next work comes after; in a capture, what comes before it in that graph."""

    def __init__(self, handle: int, stream_id: int) -> None:
        self.cuda_stream = handle
        self.stream_id = stream_id
        self.before: set[int] = set()
        self.capture: int | None = None
        self.is_gone = False
        self.outside: set[int] | None = None  # while a capture that it joined goes on: what it came after before

    @property
    def ptr(self) -> int:
        return self.cuda_stream

    def join_capture_of(self, event: Event) -> None:
        """As CUDA does it: a stream that waits for an event of a capture is captured, too."""
        if event.capture is not None and self.capture is None:
            self.outside, self.before, self.capture = self.before, set(), event.capture

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
        self.join_capture_of(event)
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

    def __init__(
        self,
        ranks: int,
        blocks_per_sm: int = 2,
        shared_bytes: int = BLOCK_SHARED_BYTES,
        major: int = 9,
        sms: int = 132,
    ) -> None:
        self.here = threading.local()
        self.blocks_per_sm = blocks_per_sm
        self.sms = sms
        self.shared_bytes = shared_bytes
        self.major = major
        self.launched_with: set[int] = set()  # bytes of shared memory
        self.initialised_modules: list[int] = []
        self.freed = 0  # arenas of NVSHMEM
        self.built: list[tuple[Transport, str]] = []
        self.transport = "peer"
        self.share_gpus = False
        self.driver = FakeDriver()
        self.nodes: tuple[int, ...] = ()
        self.nodes_of: dict[int, tuple[int, ...]] = {}  # by rank, in place of those of all
        self.context = CONTEXT
        self.launches: list[Launch] = []
        self.commands: list[Command] = []
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._barrier = threading.Barrier(ranks)
        self._entries: dict[int, Any] = {}
        self._kernels: dict[int, SimpleNamespace] = {}
        self._numbers = itertools.count(1)
        self._handles = itertools.count(0x1000, 0x10)
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._arguments: dict[str, Struct] = {}  # by library

    def stream(self, *, external: bool = False) -> Stream:
        """A new stream, torch's own or another's."""
        handle = next(self._handles)
        made = Stream(handle, handle if external else 2 * handle + 1)
        self._streams[handle] = made
        return made

    @property
    def of_torch(self) -> list[Stream]:
        """Streams that torch has handed out, and will again."""
        return [one for one in self._streams.values() if one.stream_id % 2]

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
        """As torch.cuda.stream: the device is the stream's, too."""
        outside, self.here.stream = self.current, stream
        with self._device(0):
            yield
        self.here.stream = outside

    @contextlib.contextmanager
    def capturing(self, number: int = 1) -> Iterator[None]:
        """A capture that begins on this thread's stream."""
        stream = self.current
        stream.capture = number
        yield
        for other in (self.default, *self._streams.values()):
            if other.capture == number:
                other.capture = None
                if other.outside is not None:
                    assert other.before <= stream.before, "a stream that forked in a capture was not joined"
                    other.before, other.outside = other.outside, None

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
            "cuda.bindings": SimpleNamespace(runtime=self._runtime(), driver=self.driver),
        }
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for name, value in self._torch_cuda().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.current.cuda_stream, raising=False)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(groups, "_make", self._communicator)
        patch.setattr(nvrtc, "build", self._build)
        patch.setattr(said, "ANSWER_SECONDS", 0.2)  # a rank that stays away says nothing
        patch.setattr(far._Started, "arenas", {})
        patch.setattr(gate.Filled, "orders", {})

    def _communicator(self, name: str, member: Any, _: torch.device) -> device.DeviceCommunicator:
        """A tensor of the processor leads to the GPU; what waits there waits for two seconds."""
        nodes = self.nodes_of.get(member.bootstrap.rank, self.nodes)
        config = replace(
            from_environment(), transport=self.transport, nodes=nodes, timeout=6.0, arena_bytes=ARENA_BYTES
        )
        config = replace(config, share_gpus=self.share_gpus)
        return device.DeviceCommunicator(name, member.bootstrap, config, torch.device("cuda", 0), member.world)

    def _build(self, emitted: Emitted, defines: Any, config: Config, arch: str) -> Path:
        self.built.append((emitted.transport, arch))
        path = host.build(emitted, tuple(defines), config)
        # What comes of no Plan has no addresses of peers in its argument, which is passed on as it is.
        self._arguments[str(path)] = Struct(emitted.text) if "struct Args {" in emitted.text else None
        return path

    def _cupy(self) -> Any:
        def module(path: str) -> Any:
            number = next(self._numbers)
            kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=number), max_dynamic_shared_size_bytes=SHARED_BYTES)
            self._kernels[number] = kernel

            def get_function(name: str) -> Any:
                library = ctypes.CDLL(path)
                if name.endswith("_flags"):
                    self._entries[number] = (library[name], self._arguments[path].size)
                else:
                    self._entries[number] = partial(self._enter, library.commdsl_launch, self._arguments[path])
                return kernel

            return SimpleNamespace(get_function=get_function, module=SimpleNamespace(ptr=7))

        return SimpleNamespace(
            RawModule=lambda path: module(path),
            cuda=SimpleNamespace(
                Device=lambda _: _Device(self.sms, self.shared_bytes, self.here),
                Stream=lambda non_blocking, priority=0: self.stream(external=True),
                Event=lambda disable_timing: self._event(),
                runtime=SimpleNamespace(
                    memcpyAsync=self._copy,
                    memsetAsync=lambda address, value, size, stream: self._command(
                        stream, lambda: ctypes.memset(address, value, size)
                    ),
                    memcpy=lambda dest, source, num_bytes, kind: ctypes.memmove(dest, source, num_bytes),
                    memcpyDeviceToHost=2,
                    eventRecord=self._record,
                    streamWaitEvent=self._wait,
                ),
                driver=SimpleNamespace(
                    occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: self.blocks_per_sm,
                    launchKernel=self._launch,
                    ctxGetCurrent=lambda: getattr(self.here, "context", CONTEXT),
                    ctxSetCurrent=lambda context: setattr(self.here, "context", context),
                ),
            ),
        )

    def _launch(self, function: int, *rest: int) -> None:
        self._ask()
        *grid, shared, stream, parameters, extra = rest
        assert getattr(self.here, "context", CONTEXT) == CONTEXT, "a launch in the context of another GPU"
        assert all(size > 0 for size in grid)
        assert extra == 0
        if isinstance(self._entries[function], tuple):
            assert (grid[:3], shared) == ([1, 1, 1], 0)
            self._flags(function, stream, parameters)
            return
        assert shared <= self._kernels[function].max_dynamic_shared_size_bytes <= self.shared_bytes
        self.launched_with.add(shared)
        self.note(stream)
        self._entries[function](ctypes.c_void_p.from_address(parameters))

    def _enter(self, entry: Any, layout: Struct | None, arguments: ctypes.c_void_p) -> None:
        """Runs a kernel, after what NVSHMEM does on a GPU: its symmetric address of ours is the peer's own."""
        if layout is None:
            entry(arguments, 1, 1, bytes(8))
            return
        words = layout.read(arguments)
        for word, peer in layout.of_peers:
            if words[word] & FAR:
                words[word] = FAR | self._at_peer(words[word] & ~FAR, words[layout.first("pe") + peer])
        entry(bytes(words), 1, 1, bytes(8))

    def _at_peer(self, address: int, pe: int) -> int:
        for (number, rank), tensor in self._memory.items():
            if rank == self.here.rank and 0 <= address - tensor.data_ptr() < tensor.nbytes:
                return address - tensor.data_ptr() + self._memory[number, pe].data_ptr()
        raise AssertionError("not an address of this rank's symmetric memory")

    def note(self, stream: int) -> Launch:
        """A launch on the stream of that handle, which is the current one."""
        here = self.current
        assert stream == here.cuda_stream
        assert not here.is_gone
        made = Launch(self.here.rank, next(self._numbers), here, here.capture, frozenset(here.before))
        self.launches.append(made)
        here.before.add(made.number)
        return made

    def _at(self, handle: int) -> Stream:
        found = self._streams[handle] if handle else self.default
        assert not found.is_gone
        return found

    def _event(self) -> Event:
        """Of the GPU whose context the thread has, and no other."""
        made = Event()
        made.context = getattr(self.here, "context", CONTEXT) or CONTEXT  # type: ignore[attr-defined] # for `_record`
        made.ptr = next(self._handles)  # type: ignore[attr-defined] # cupy's have it
        self._events[made.ptr] = made  # type: ignore[attr-defined] # as above
        return made

    def _ask(self) -> None:
        """Before every launch and copy, what `here.refuse` of the rank does: raise, as the driver may."""
        getattr(self.here, "refuse", lambda: None)()

    def _record(self, event: int, stream: int) -> None:
        made = self._events[event]
        assert made.context == CONTEXT, "an event of another GPU"  # type: ignore[attr-defined] # as `_event` has it
        made.record(self._at(stream))

    def _wait(self, stream: int, event: int, flags: int) -> None:
        assert flags == 0
        self._at(stream).join_capture_of(self._events[event])
        self._at(stream).wait_event(self._events[event])

    def _command(self, handle: int, run: Callable[[], object], **what: Any) -> None:
        """Keeps a command, and runs it unless it is captured: what comes after it was started later."""
        stream = self._at(handle)
        made = Command(self.here.rank, next(self._numbers), stream.capture, frozenset(stream.before), run, **what)
        self.commands.append(made)
        stream.before.add(made.number)
        if stream.capture is None:
            run()

    def _copy(self, dest: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        self._ask()
        assert kind == 3
        assert num_bytes > 0
        what = (dest, source, num_bytes)
        self._command(stream, lambda: ctypes.memmove(dest, source, num_bytes), copy=what)

    def _flags(self, function: int, stream: int, parameters: int) -> None:
        entry, size = self._entries[function]
        arguments, turn = (ctypes.c_void_p * 2).from_address(parameters)
        copied = ctypes.string_at(arguments, size), ctypes.string_at(turn, 40)
        self._command(stream, lambda: entry(*copied), turn=struct.unpack("<7i", copied[1][:28]))

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
            return SimpleNamespace(major=self.major, minor=0, uuid=f"gpu {self.here.rank}")

        return {
            "is_current_stream_capturing": lambda: self.current.capture is not None,
            "get_device_properties": properties,
            "Stream": lambda *_, priority=0: self.stream(),
            "ExternalStream": lambda handle, _: self._streams[handle],
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


class Struct:
    """The arguments of a kernel, as its text has them."""

    def __init__(self, text: str) -> None:
        body = text[text.index("struct Args {") :]
        fields = re.findall(r"(u64|i32) (\w+)(?:\[(\d+)\])?;", body[: body.index("};")])
        self._places: dict[str, tuple[int, int]] = {}  # first word, and how many
        self.size = 0
        for kind, name, count in fields:
            self._places[name] = (self.size // 8, int(count or 1))
            self.size += int(count or 1) * (8 if kind == "u64" else 4)
        self.size += -self.size % 8  # as a struct with 64-bit words ends

    def first(self, name: str) -> int:
        return self._places[name][0]

    @property
    def of_peers(self) -> list[tuple[int, int]]:
        """Words that may say where a far peer has something, and the peer."""
        names = [name for name in ("heap", "desk", "landing") if name in self._places]
        return [(self.first(name) + peer, peer) for name in names for peer in range(self._places[name][1])]

    def read(self, arguments: ctypes.c_void_p) -> ctypes.Array[ctypes.c_uint64]:
        found = (ctypes.c_uint64 * (self.size // 8))()
        ctypes.memmove(found, arguments, self.size)
        return found


class _Device:
    def __init__(self, sms: int, shared_bytes: int, here: threading.local) -> None:
        self._here = here
        self.attributes = {"MultiProcessorCount": sms, "MaxSharedMemoryPerBlockOptin": shared_bytes}

    def __enter__(self) -> _Device:
        self._outside = getattr(self._here, "context", CONTEXT)
        self._here.context = CONTEXT
        return self

    def __exit__(self, *_: object) -> None:
        self._here.context = self._outside


class _UniqueId:
    def __init__(self) -> None:
        self._data = np.zeros(128, np.uint8)

    @property
    def ptr(self) -> int:
        return int(self._data.ctypes.data)
