"""Turns a group into a communicator for CPU tensors: the host build over memory that its ranks share.

Assumes all ranks run on one machine. Does not need the ranks to be processes: threads of one process serve as well.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from commdsl.build.emit import Emitted, defines
from commdsl.build.host import build
from commdsl.machine.config import Config
from commdsl.program.desk import calls_on, desk_bytes
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan
from commdsl.program.sizes import HOST_MAX_LANES, Blocks, Launch, host_launch, touched
from commdsl.runtime.bootstrap import Board, Bootstrap, Exchange, World
from commdsl.runtime.breaking import NOTHING
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.compared import user_line
from commdsl.runtime.desk import ordinary_notice
from commdsl.runtime.error_page import ordinary_page
from commdsl.runtime.errors import GroupError, OpError
from commdsl.runtime.failures import UNKNOWN
from commdsl.runtime.heap import Extent, Heap, SharedHeap, ThreadHeap
from commdsl.runtime.kernel import HostKernel, Kernel, Prepared, Residence, residence_of
from commdsl.runtime.program import Program
from commdsl.runtime.said import Words
from commdsl.runtime.streams import OneStream
from commdsl.runtime.workspace import ALONE, Meanwhile, Workspace, nothing

T = TypeVar("T")


class HostCommunicator(Communicator):
    def __init__(self, name: str, bootstrap: Bootstrap, config: Config, board: Board | None, world: World) -> None:
        super().__init__(name, bootstrap, config, ordinary_page(), ordinary_notice(bootstrap.size), "cpu", world)
        self._board = board
        # Calls with async_op=True run here, one after another.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="commdsl", initializer=self._name_worker)
        self._worker = 0
        self._line = ""  # the user's, of the call that the worker makes
        self._last: Future[Any] | None = None

    def _enter(self) -> None:
        hosts = {host for (host,) in self.members("host")}
        if len(hosts) > 1:
            raise GroupError(
                f"CPU ranks share memory, so they run on one machine; group `{self.name}` has {len(hosts)}"
            )
        self.open_desk()

    def calls(self) -> int:
        return 0 if not self.is_open else calls_on(self.desk.address)[0]

    def last_call(self) -> Words:
        if not self.is_open:
            return NOTHING
        _, digest = calls_on(self.desk.address)
        return (self.said.known(digest) if digest else NOTHING) or UNKNOWN

    def refuse_setup(self, what: str) -> None:
        """Memory of the processor can be had at any time."""

    def extent(self, plan: Plan, room: int) -> Extent:
        """Few lanes run here, whatever the Plan has room for."""
        if not plan.is_static:
            return super().extent(plan, room)
        return Extent(plan.name, plan.symmetric_bytes, touched(plan.moves, HOST_MAX_LANES))

    def make_heap(self, extent: Extent, tell: Exchange) -> Heap:
        if self._board is None:
            return SharedHeap(extent, self.rank, tell)
        return ThreadHeap(extent, self.rank, tell, self._board)

    def kernel(self, program: Program, workspace: Workspace, dtype: str, op: str) -> Kernel:
        macros = defines(program.plan, dtype, op)
        found = workspace.kernels.get(macros)
        if found is None:
            residence = residence_of(program.plan, program.emitted.name)
            found = workspace.kernels[macros] = self.load_kernel(program.emitted, macros, residence)
        return found

    def launch(self, moves: Moves, blocks: Blocks, row_bytes: int) -> Launch:
        return host_launch(moves, blocks, row_bytes)

    def load_kernel(self, emitted: Emitted, macros: tuple[str, ...], residence: Residence) -> Kernel:
        return HostKernel(build(emitted, macros, self.config))

    def starter(self, workspace: Workspace, kernel: Kernel, prepared: Prepared) -> HostStart:
        return HostStart(self, workspace, kernel, prepared)

    def _name_worker(self) -> None:
        self._worker = threading.get_ident()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Starts a call behind those submitted before. A callback of a future, which the worker runs, may submit a call
        and wait for it: the worker makes that at once.
        """
        if threading.get_ident() == self._worker:
            return _run(call)
        future = self._executor.submit(self._called, call, user_line() if self.compares else "")
        self._last = future
        return future

    def _called(self, call: Callable[[], T], line: str) -> T:
        """A call that was submitted before the group broke ends as the one that broke it."""
        if self.broken is not None:
            raise self.broken
        self._line = line
        return call()

    def compare(self, call: str, line: str = "") -> None:
        if self.compares:
            self.drain()
            super().compare(call, line or (self._line if threading.get_ident() == self._worker else ""))

    def close(self) -> None:
        super().close()
        self._executor.shutdown(wait=False)

    def report(self, error: BaseException, what: str) -> None:
        """In call order: behind calls that were submitted before."""
        last = self._last
        if last is None or last.done() or threading.get_ident() == self._worker:
            super().report(error, what)
        else:
            self._last = self._executor.submit(super().report, error, what)

    def drain(self) -> None:
        """Keeps call order: a call waits for those submitted before it."""
        if self._last is not None and threading.get_ident() != self._worker:
            wait([self._last])

    def streams(self) -> OneStream:
        return OneStream()

    def read_desk(self) -> bytes:
        return ctypes.string_at(self.desk.address, desk_bytes(self.size))

    def finish(self) -> None:
        self.drain()


def _run(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    return future


class HostStart:
    """Runs calls, one at a time, in the thread that asks."""

    __slots__ = ("_communicator", "_kernel", "_prepared", "workspace")

    def __init__(
        self, communicator: HostCommunicator, workspace: Workspace, kernel: Kernel, prepared: Prepared
    ) -> None:
        self.workspace = workspace
        self._communicator = communicator
        self._kernel = kernel
        self._prepared = prepared

    @property
    def launch(self) -> Launch:
        assert self._prepared.launch is not None
        return self._prepared.launch

    def begin(self, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        assert not meanwhile.has_words, "no word of a GPU's"
        meanwhile.between()
        self(changing)
        return nothing

    def __call__(self, changing: Sequence[int]) -> None:
        self._communicator.drain()
        with self.workspace.lock:
            self._prepared.point(*changing)
            try:
                self._kernel.launch(self._prepared, 0)
            except OpError as error:  # some of its threads began
                self._communicator.end_half_way(error)
                raise
            finally:  # Ctrl-C, too, comes when the kernel has given up
                self._communicator.check()
