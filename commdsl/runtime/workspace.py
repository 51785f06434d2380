"""Turns a Program and a communicator into the place where its calls run, one after another in call order.

Assumes every rank makes the same calls of one Program in the same order. Does not check tensors (`op` does). Calls from
different CUDA streams are joined by events; inside a graph capture by events of that capture alone, so a replay and
other calls of the same op have to be ordered by the caller's streams, like any two users of one buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from commdsl.plan import Plan
from commdsl.runtime.heap import ErrorWord, Heap
from commdsl.runtime.kernel import Kernel
from commdsl.sizes import Arguments, Launch
from commdsl.timeouts import CommTimeout, timeout_of, unpack


class Workspace:
    """Symmetric memory, error word and kernels of one Program on one rank of one communicator."""

    def __init__(self, plan: Plan, rank: int, heap: Heap, error: ErrorWord, timeout: float) -> None:
        self.plan = plan
        self.heap = heap
        self.kernels: dict[tuple[str, ...], Kernel] = {}
        self.launches: dict[int, Launch] = {}
        self.order: StreamOrder | None = None
        self.lock = threading.Lock()
        self._rank = rank
        self._error = error
        self._timeout = timeout

    def call(self, kernel: Kernel, tensors: Sequence[int], launch: Launch, average: bool, stream: int = 0) -> None:
        """Starts one call; the caller holds `lock` from before it joined the streams."""
        arguments = Arguments(
            heaps=self.heap.addresses,
            tensors=tensors,
            launch=launch,
            timeout_ns=int(self._timeout * 1e9),
            error=self._error.address,
            rank=self._rank,
            average=average,
        )
        kernel.launch(arguments.pack(), launch.active_lanes, stream)

    def failure(self) -> CommTimeout | None:
        """What a kernel of this rank reported, if one did."""
        if not self._error.is_set:
            return None
        return timeout_of(self.plan, [unpack(self._error.data.tobytes())], self._timeout)

    def reset(self) -> None:
        """Back to the state before the first call; no rank's kernel may be running."""
        self.heap.zero()
        self._error.clear()


class StreamOrder:
    """Puts the calls of one workspace into one order across CUDA streams."""

    def __init__(self, torch: Any, capture_id: Callable[[int], int]) -> None:
        self._torch = torch
        self._capture_id = capture_id
        self._event: Any = None
        self._stream = 0
        self._captured: tuple[int, int, Any] | None = None  # capture, stream, event

    def enter(self, stream: Any) -> None:
        """Makes the stream wait for the last call, if that ran on another one."""
        if self._torch.cuda.is_current_stream_capturing():
            last = self._captured
            if last is not None and last[0] == self._capture_id(stream.cuda_stream) and last[1] != stream.cuda_stream:
                stream.wait_event(last[2])
        elif self._event is not None and self._stream != stream.cuda_stream:
            stream.wait_event(self._event)

    def leave(self, stream: Any) -> None:
        """Marks the end of the call just launched."""
        if self._torch.cuda.is_current_stream_capturing():
            event = self._torch.cuda.Event()
            event.record(stream)
            self._captured = (self._capture_id(stream.cuda_stream), stream.cuda_stream, event)
            return
        if self._event is None:
            self._event = self._torch.cuda.Event()
        self._event.record(stream)
        self._stream = stream.cuda_stream
