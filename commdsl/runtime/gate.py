"""Turns what calls of one group start on a GPU into one sequence: the thread has that GPU, one call begins behind the
other on whichever streams they are, and one that the driver refuses half way is not taken for a call.

Assumes one communicator. Does not order what is captured with what is not, nor with replays (`stream_order`).

**Calls that fill the GPU** follow one another over all groups of a process. The kernel of products waits for others
that want an SM of the few that it leaves, and blocks of one launch may wait for each other: were another such call to
take those SMs, neither would go on before a time-out. So ranks begin them in one order, as if on one stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from commdsl.runtime.binding import Gpu, capture_id
from commdsl.runtime.kernel import Kernel, Prepared
from commdsl.runtime.stream_order import StreamOrder


class Filled:
    """GPUs that this process has calls on which fill them, by UUID."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    orders: ClassVar[dict[str, StreamOrder]] = {}

    @classmethod
    def order_of(cls, uuid: str) -> StreamOrder:
        """One for all groups."""
        with cls.lock:
            return cls.orders.setdefault(uuid, StreamOrder(torch, capture_id))


class Gate:
    """Nothing is started in a group but here."""

    __slots__ = ("_end_half_way", "_filling", "_order", "gpu", "lock")

    def __init__(
        self, gpu: Gpu, order: StreamOrder, filling: StreamOrder, end_half_way: Callable[[BaseException], None]
    ) -> None:
        """`filling`: of calls that fill the GPU, of all groups. `end_half_way`: what an error of the driver's does."""
        self.gpu = gpu
        self._filling = filling
        self.lock = order.lock  # also of the arguments that launches are given
        self._order = order
        self._end_half_way = end_half_way

    def launch(self, kernel: Kernel, prepared: Prepared, changing: Sequence[int]) -> None:
        """Starts a call of one kernel on torch's current stream."""
        gpu, order = self.gpu, self._order
        with self.lock:
            prepared.point(*changing)
            stream = gpu.stream_handle(gpu.index)
            if stream != order.quiet or gpu.current_context() != gpu.context or gpu.capturing():
                with self._open(torch.cuda.current_stream(gpu.index)):
                    kernel.launch(prepared, stream)
                return
            try:
                kernel.launch(prepared, stream)
            except Exception as error:
                self._end_half_way(error)
                raise

    def launch_alone(self, kernel: Kernel, prepared: Prepared, changing: Sequence[int]) -> None:
        """As `launch`, of one that fills the GPU."""
        with self.alone():
            self.launch(kernel, prepared, changing)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """For a call that fills the GPU, and begins and ends on torch's current stream: behind the last one that does.
        Nothing in it meets other ranks: they may have begun with another group.
        """
        gpu, order = self.gpu, self._filling
        with order.lock, gpu.bound():
            if gpu.stream_handle(gpu.index) == order.quiet and not gpu.capturing():
                yield
                return
            stream = torch.cuda.current_stream(gpu.index)
            order.enter(stream)
            try:
                yield
            finally:
                order.leave(stream)

    @contextlib.contextmanager
    def open(self, stream: Any) -> Iterator[None]:
        """For what is started on that stream in it. Ctrl-C ends nothing half way where all of it is one list."""
        with self.lock, self._open(stream):
            yield

    @contextlib.contextmanager
    def _open(self, stream: Any) -> Iterator[None]:
        """As `open`, with the lock."""
        with self.gpu.bound():
            is_captured = self.gpu.capturing()
            self._order.enter(stream)  # or refuses, and nothing has begun
            try:
                try:
                    yield
                finally:
                    self._order.leave(stream)
            except Exception as error:
                if not is_captured:
                    self._end_half_way(error)
                raise
