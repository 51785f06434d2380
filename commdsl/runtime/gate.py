"""Turns what calls of one group start on a GPU into one sequence: the thread has that GPU, one call begins behind the
other on whichever streams they are, and one that the driver refuses half way is not taken for a call.

Assumes one communicator. Does not order what is captured with what is not, nor with replays (`stream_order`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commdsl.runtime.binding import Gpu
from commdsl.runtime.kernel import Kernel, Prepared
from commdsl.runtime.stream_order import StreamOrder


class Gate:
    """Nothing is started in a group but here."""

    __slots__ = ("_end_half_way", "_order", "gpu", "lock")

    def __init__(self, gpu: Gpu, order: StreamOrder, end_half_way: Callable[[BaseException], None]) -> None:
        """`end_half_way`: what an error of the driver's does to the group."""
        self.gpu = gpu
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
