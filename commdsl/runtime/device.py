"""Turns a group into a communicator for one GPU: memory that ranks share, CuPy's modules, kernels on torch's stream.

Assumes one process per GPU, but where a setting lets them share one. Does not synchronize the host, but to set up,
reset and free.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from commdsl.build import nvrtc
from commdsl.build.emit import Emitted, defines
from commdsl.machine.carriers import BULK_COPY_MAJORS
from commdsl.machine.config import Config
from commdsl.program.desk import desk_bytes, notice_bytes
from commdsl.program.memory import Transport
from commdsl.program.moves import Moves
from commdsl.program.sizes import Blocks, Launch, device_launch
from commdsl.runtime.binding import Gpu, capture_id
from commdsl.runtime.bootstrap import Bootstrap, Exchange, World
from commdsl.runtime.breaking import NOTHING
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.desk import Notice
from commdsl.runtime.device_heap import DeviceHeap, FarHeap
from commdsl.runtime.driver import Asked, Driver, play
from commdsl.runtime.engine import EngineKernel
from commdsl.runtime.error_page import PAGE_BYTES, ErrorPage
from commdsl.runtime.errors import CaptureError, DeviceError, GroupError
from commdsl.runtime.far import Arena, arena_of
from commdsl.runtime.gate import Filled, Gate
from commdsl.runtime.heap import Extent, Heap
from commdsl.runtime.kernel import DeviceKernel, Kernel, Prepared, Residence, residence_of
from commdsl.runtime.program import Program
from commdsl.runtime.said import Words
from commdsl.runtime.stream_order import StreamOrder
from commdsl.runtime.streams import OwnStream, TwoStreams
from commdsl.runtime.workspace import ALONE, Meanwhile, Workspace, nothing


class DeviceCommunicator(Communicator):
    def __init__(self, name: str, bootstrap: Bootstrap, config: Config, device: torch.device, world: World) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"group `{name}` has to be set up before a capture: call the op once outside it")
        pinned = torch.zeros(PAGE_BYTES, dtype=torch.uint8).pin_memory()
        noted = torch.zeros(notice_bytes(bootstrap.size), dtype=torch.uint8).pin_memory()
        errors, notice = ErrorPage(pinned.numpy(), pinned), Notice(noted.numpy(), noted)
        super().__init__(name, bootstrap, config, errors, notice, "cuda", world)
        self.index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(self.index)
        self._arch = f"sm_{properties.major}{properties.minor}"
        self._major = properties.major
        self._modules: dict[str, DeviceKernel] = {}
        self.side_stream = torch.cuda.Stream(self.index)  # calls with async_op=True
        # What travels while the caller computes: its few blocks are not to wait for those of the caller's kernels.
        self._beside = OwnStream(self.index, priority=-1)
        self._copies = OwnStream(self.index)  # of launches that are under way at once, one behind another
        self._gpu = Gpu(self.index)
        self._uuid = str(properties.uuid)
        # One for all ops: two kernels at once that both wait for peers could fill the SMs of two ranks crosswise.
        filling = Filled.order_of(self._uuid)
        self.gate = Gate(self._gpu, StreamOrder(torch, capture_id), filling, self.end_half_way)

    def _enter(self) -> None:
        self._check_members(self._uuid)
        self.open_desk()

    def calls(self) -> int:
        return self.gate.calls

    def last_call(self) -> Words:
        return NOTHING if self.gate.last is None else self.gate.last.words

    def begin(self) -> None:
        self.gate.calls += 1

    def resume(self) -> None:
        self.gate.calls -= 1

    def forget_calls(self) -> None:
        self.gate.calls, self.gate.last = 0, None

    def _check_members(self, uuid: str) -> None:
        members = self.members("device", uuid)
        if len({device for _, device in members}) < self.size and not self.config.share_gpus:
            raise GroupError(
                f"two ranks of group `{self.name}` are on one GPU: call torch.cuda.set_device(local_rank) first, or, "
                "for a test, set COMMDSL_SHARE_GPUS=1, with which they take turns"
            )

    def make_heap(self, extent: Extent, tell: Exchange) -> Heap:
        with self._gpu.bound():
            if self.transport is Transport.PEER:
                return DeviceHeap(extent, self.rank, self.index, tell, self.finish)
            return FarHeap(extent, self.rank, self.nodes, self.world.ranks, self._arena(), tell, self.finish)

    def _arena(self) -> Arena:
        return arena_of(self.world.bootstrap, self.index, self.config, self.timeout)

    def launch(self, moves: Moves, blocks: Blocks, row_bytes: int) -> Launch:
        return device_launch(moves, blocks, row_bytes)

    def kernel(self, program: Program, workspace: Workspace, dtype: str, op: str) -> Kernel:
        macros = defines(program.plan, dtype, op, self.rank)
        found = workspace.kernels.get(macros)
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"`{program.plan.name}` for {dtype} and {op} is not loaded: call it once with these before the capture"
            )
        plan, carrier = program.plan, program.plan.moves.carrier
        if not carrier.runs_on(self._major):
            raise DeviceError(f"`{plan.name}` is tuned to `protocol {carrier.name}`, which {self._arch} does not have")
        if not carrier.runs_on_sms:
            path = self._build(program.emitted, macros)
            made: Kernel = EngineKernel(
                path, program.emitted.name, program.plan, self.rank, self.index, self._copies.handle
            )
        else:
            made = self.load_kernel(program.emitted, macros, residence_of(program.plan, program.emitted.name))
        workspace.kernels[macros] = made
        return made

    def _build(self, emitted: Emitted, macros: tuple[str, ...]) -> Path:
        return nvrtc.build(emitted, macros, self.config, self._arch)

    def load_kernel(self, emitted: Emitted, macros: tuple[str, ...], residence: Residence) -> Kernel:
        path = self._build(emitted, macros)
        made = self._modules.get(str(path))
        if made is None:
            if self._major not in BULK_COPY_MAJORS:  # rows then move by registers alone
                residence = replace(residence, shared_bytes=0)
            nvshmem = self._arena().nvshmem if emitted.transport is Transport.NVSHMEM else None
            made = self._modules[str(path)] = DeviceKernel(path, residence, self.index, nvshmem)
        return made

    def starter(self, workspace: Workspace, kernel: Kernel, prepared: Prepared) -> DeviceStart:
        return DeviceStart(self.gate, workspace, kernel, prepared)

    def refuse_setup(self, what: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"`{what}` has no workspace yet: call it once on every rank before the capture")

    def streams(self) -> TwoStreams:
        beside = self._beside.of_torch
        made = TwoStreams(self._gpu, beside)
        # In order with other calls now: a mark made late would be behind a product that waits for what goes beside.
        with torch.cuda.stream(beside):
            self.gate.start(beside, nothing)
        return made

    @property
    def beside(self) -> int:
        """The stream for what travels while the caller computes."""
        return self._beside.handle

    @property
    def is_capturing(self) -> bool:
        """Whether torch's current stream is."""
        return self._gpu.capturing()

    @property
    def current_stream(self) -> int:
        """torch's."""
        found: int = self._gpu.stream_handle(self.index)
        return found

    def play(self, calls: Sequence[Asked]) -> None:
        """A call from its beginning to its end, of which what other calls come behind is what goes beside the caller's
        stream: as that of `DeviceStart.begin`. The caller's is not to be waited for, where a product waits for others.
        """
        self.gate.calls += 1
        self.gate.start(self._beside.of_torch, partial(play, calls))

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """In it the thread has this GPU."""
        return self._gpu.bound()

    def read_desk(self) -> bytes:
        import cupy  # where there is a GPU

        runtime, found = cupy.cuda.runtime, ctypes.create_string_buffer(desk_bytes(self.size))
        with self._gpu.bound():
            runtime.memcpy(ctypes.addressof(found), self.desk.address, len(found), runtime.memcpyDeviceToHost)
        return found.raw

    def finish(self) -> None:
        torch.cuda.synchronize(self.index)


class DeviceStart:
    """Starts calls on torch's current stream of one GPU, whichever device and thread it is called from."""

    __slots__ = ("_gate", "_kernel", "_launch", "_prepared", "workspace")

    def __init__(self, gate: Gate, workspace: Workspace, kernel: Kernel, prepared: Prepared) -> None:
        self.workspace = workspace
        self._gate = gate
        self._kernel = kernel
        self._prepared = prepared
        fills = isinstance(kernel, DeviceKernel) and 2 * prepared.blocks > kernel.room
        self._launch = gate.launch_alone if fills else gate.launch

    @property
    def launch(self) -> Launch:
        assert self._prepared.launch is not None
        return self._prepared.launch

    def __call__(self, changing: Sequence[int]) -> None:
        gate = self._gate
        gate.calls += 1
        gate.last = self._prepared
        try:
            self._launch(self._kernel, self._prepared, changing)
        except BaseException:
            gate.calls -= 1  # it broke the group, or was not started
            raise

    def begin(self, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        kernel = self._kernel
        if not isinstance(kernel, EngineKernel):
            assert not meanwhile.has_words, "no word of a kernel's"
            meanwhile.between()
            self._gate.last = self._prepared
            self._launch(kernel, self._prepared, changing)
            return nothing
        stream = torch.cuda.current_stream(self._gate.gpu.index)

        def begun() -> Callable[[], None]:
            self._prepared.point(*changing)
            return kernel.begin(self._prepared, stream.cuda_stream, meanwhile)

        rest = self._gate.start(stream, begun)

        def end() -> None:
            with torch.cuda.stream(stream):
                self._gate.start(stream, rest)

        return end

    def ask(self, driver: Driver, changing: Sequence[int], stream: int, meanwhile: Meanwhile) -> Callable[[], None]:
        """As `begin`, of another driver and in no order with other calls: nothing is started."""
        assert isinstance(self._kernel, EngineKernel)
        with self._gate.lock:
            self._prepared.point(*changing)
            return self._kernel.ask(driver, self._prepared, stream, meanwhile)
