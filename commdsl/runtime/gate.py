"""Turns what calls of one group start on a GPU into one sequence: the thread has that GPU, one call begins behind the
other on whichever streams they are, and one that the driver refuses half way is not taken for a call.

Assumes one communicator. Does not order what is captured with what is not, nor with replays (`stream_order`).

**Calls that fill the GPU** follow one another over all groups of a process. The kernel of products waits for others
that want an SM of the few that it leaves, and blocks of one launch may wait for each other: were another such call to
take those SMs, neither would go on before a time-out. So ranks begin them in one order, as if on one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from commdsl.runtime.binding import Gpu, capture_id
from commdsl.runtime.kernel import Kernel, Prepared
from commdsl.runtime.stream_order import StreamOrder

Made = TypeVar("Made")


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

    __slots__ = ("_end_half_way", "_filling", "_order", "calls", "gpu", "last", "lock")

    def __init__(
        self, gpu: Gpu, order: StreamOrder, filling: StreamOrder, end_half_way: Callable[[BaseException], None]
    ) -> None:
        """`filling`: of calls that fill the GPU, of all groups. `end_half_way`: what an error of the driver's does."""
        self.gpu = gpu
        self._filling = filling
        self.lock = order.lock  # also of the arguments that launches are given
        self._order = order
        self._end_half_way = end_half_way
        self.calls = 0  # that were started, since the last reset: as many on every rank
        self.last: Prepared | None = None  # what was started last

    def launch(self, kernel: Kernel, prepared: Prepared, changing: Sequence[int]) -> None:
        """Starts a call of one kernel on torch's current stream."""
        gpu, order = self.gpu, self._order
        with self.lock:
            prepared.point(*changing)
            stream = gpu.stream_handle(gpu.index)
            if stream != order.quiet or gpu.current_context() != gpu.context or gpu.capturing():
                self._start(torch.cuda.current_stream(gpu.index), partial(kernel.launch, prepared, stream))
                return
            try:
                kernel.launch(prepared, stream)
            except Exception as error:
                self._end_half_way(error)
                raise

    def launch_alone(self, kernel: Kernel, prepared: Prepared, changing: Sequence[int]) -> None:
        """As `launch`, of one that fills the GPU."""
        self.alone(partial(self.launch, kernel, prepared, changing))

    def alone(self, call: Callable[[], Made]) -> Made:
        """Makes a call that fills the GPU, and begins and ends on torch's current stream, behind the last one that
        does. Nothing in it meets other ranks: they may have begun with another group.
        """
        gpu, order = self.gpu, self._filling
        with order.lock:
            quiet = gpu.stream_handle(gpu.index) == order.quiet
            if quiet and gpu.current_context() == gpu.context and not gpu.capturing():
                return call()
            with gpu.bound():
                stream, is_captured = torch.cuda.current_stream(gpu.index), gpu.capturing()
                order.enter(stream, is_captured=is_captured)
                try:
                    return call()
                finally:
                    order.leave(stream, is_captured=is_captured)

    def start(self, stream: Any, what: Callable[[], Made]) -> Made:
        """Starts something on that stream. Ctrl-C ends nothing half way where all of it is one list."""
        with self.lock:
            return self._start(stream, what)

    def _start(self, stream: Any, what: Callable[[], Made]) -> Made:
        """As `start`, with the lock."""
        with self.gpu.bound():
            is_captured = self.gpu.capturing()
            self._order.enter(stream, is_captured=is_captured)  # or refuses, and nothing has begun
            try:
                try:
                    return what()
                finally:
                    self._order.leave(stream, is_captured=is_captured)
            except Exception as error:
                if not is_captured:
                    self._end_half_way(error)
                raise
