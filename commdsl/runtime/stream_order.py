"""Turns calls on several CUDA streams into one order, with as few events as that takes.

Assumes that the caller holds `lock` from before `enter` to after `leave`. Does not order a graph's replays: inside a
capture calls are joined by events of that capture alone, so a replay and other calls of the same group have to be
ordered by the caller's streams, like any two users of one buffer.

**Calls that stay on one stream need no event.** After many calls in a row on a stream that torch owns, that stream is
*quiet*: a call on it neither waits nor leaves a mark. When a call then comes on another stream, the mark is made late,
on the quiet stream as it is now. That waits for all that was put there since: for more than the last call, never for
less. Such an edge points from what this process started earlier to what it starts later, so it closes no cycle while
ranks start what waits for each other in the same order. It needs the quiet stream to exist still, as torch's streams do
to the end of the process; any other stream may be gone, so it never becomes quiet and a call on it leaves its mark at
once. After a change of stream calls leave marks again for a while, so that two streams that take turns wait for each
other's calls and for nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from commdsl.runtime.errors import CaptureError

MARKED_CALLS = 32
"""So many calls after a change of stream leave an event each."""

NO_STREAM = -1


class StreamOrder:
    """Puts calls into one order across CUDA streams: those of one communicator, or all that fill a GPU."""

    def __init__(self, torch: Any, capture_id: Callable[[int], int | None]) -> None:
        self.lock = threading.Lock()
        self.quiet = NO_STREAM  # the handle of the stream on which a call outside a capture needs nothing
        self._torch = torch
        self._capture_id = capture_id
        self._last: Any = None  # the stream of the last call outside a capture
        self._in_a_row = 0
        self._is_marked = False
        self._event: Any = None
        self._captured: tuple[int | None, int, Any] | None = None  # capture, stream, event

    def enter(self, stream: Any, *, is_captured: bool) -> None:
        """Makes the stream wait for the last call, if that ran on another one."""
        handle = stream.cuda_stream
        if is_captured:
            last = self._captured
            if last is not None and last[0] == self._capture_id(handle) and last[1] != handle:
                stream.wait_event(last[2])
        elif self._last is not None and (handle != self._last.cuda_stream or not is_of_torch(self._last)):
            if not self._is_marked:
                self._mark_late()
            stream.wait_event(self._event)

    def leave(self, stream: Any, *, is_captured: bool) -> None:
        """Marks the end of the call just launched."""
        if is_captured:
            event = self._torch.cuda.Event()
            event.record(stream)
            self._captured = (self._capture_id(stream.cuda_stream), stream.cuda_stream, event)
            return
        if self._last is None:
            self._in_a_row = MARKED_CALLS  # the first stream is quiet until there is another
        elif stream.cuda_stream != self._last.cuda_stream:
            self._in_a_row = 0
        self._last = stream
        self._in_a_row += 1
        self._is_marked = self._in_a_row <= MARKED_CALLS or not is_of_torch(stream)
        self.quiet = NO_STREAM if self._is_marked else stream.cuda_stream
        if self._is_marked:
            self._record(stream)

    def _mark_late(self) -> None:
        if self._capture_id(self._last.cuda_stream) is not None:
            raise CaptureError(
                "the last call ran on a stream that is being captured now: make this call before the capture, "
                "or on that stream"
            )
        self._record(self._last)

    def _record(self, stream: Any) -> None:
        if self._event is None:
            self._event = self._torch.cuda.Event()
        self._event.record(stream)


def is_of_torch(stream: Any) -> bool:
    """Whether torch made the stream, and so never destroys it: its id is 0 or odd, anyone else's is an address."""
    number = int(stream.stream_id)
    return number == 0 or number % 2 == 1
