"""Turns a call of several launches into two streams of a GPU: the caller's, and one beside it for what travels.

Assumes the caller's device is current. Does not decide what waits for what: the Plan says it. On the processor a launch
is over when it returns, so there one stream is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from commdsl.runtime.workspace import Start, nothing


class Streams(Protocol):
    """The streams of one call."""

    def beside(self) -> AbstractContextManager[Any]:
        """In it, launches go on the stream beside the caller's."""
        ...

    def start(
        self, start: Start, changing: Sequence[int], told: int = 0, between: Callable[[], None] = nothing
    ) -> Callable[[], None]:
        """Starts a launch on the stream beside, and returns what starts its rest: others may begin before that. `told`,
        `between`: as `Start.begin` takes them.
        """
        ...

    def mark(self, what: Hashable, *, beside: bool) -> None:
        """Remembers under a name what a stream has been given so far."""
        ...

    def wait(self, what: Hashable, *, beside: bool) -> None:
        """The other stream goes on when what was marked is over."""
        ...

    def bring(self, dest: torch.Tensor, source: torch.Tensor, behind: Hashable | None) -> None:
        """Copies on the caller's stream, behind what was marked beside it under that name, if under any."""
        ...

    def join(self) -> None:
        """The caller's stream waits for all that went beside it."""
        ...

    def end(self) -> Any:
        """Marks what the caller's stream has been given, for a call on another one; None where nothing has to wait."""
        ...

    def follow(self, end: Any) -> bool:
        """Both streams go on behind that mark. Whether they are being captured: then its order is that of replays."""
        ...


class Around:
    """The streams of a call, of which a subclass does some things in another way."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def beside(self) -> AbstractContextManager[Any]:
        return self._streams.beside()

    def start(
        self, start: Start, changing: Sequence[int], told: int = 0, between: Callable[[], None] = nothing
    ) -> Callable[[], None]:
        return self._streams.start(start, changing, told, between)

    def mark(self, what: Hashable, *, beside: bool) -> None:
        self._streams.mark(what, beside=beside)

    def wait(self, what: Hashable, *, beside: bool) -> None:
        self._streams.wait(what, beside=beside)

    def bring(self, dest: torch.Tensor, source: torch.Tensor, behind: Hashable | None) -> None:
        self._streams.bring(dest, source, behind)

    def join(self) -> None:
        self._streams.join()

    def end(self) -> Any:
        return self._streams.end()

    def follow(self, end: Any) -> bool:
        return self._streams.follow(end)


class OneStream:
    """Of the processor: everything is over when it returns."""

    def beside(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def start(
        self, start: Start, changing: Sequence[int], told: int = 0, between: Callable[[], None] = nothing
    ) -> Callable[[], None]:
        assert not told, "no word of a GPU's"
        between()
        start(changing)
        return nothing

    def mark(self, what: Hashable, *, beside: bool) -> None:
        """Whoever comes later comes after it."""

    def wait(self, what: Hashable, *, beside: bool) -> None:
        """It is over."""

    def bring(self, dest: torch.Tensor, source: torch.Tensor, behind: Hashable | None) -> None:
        if behind is not None:
            self.wait(behind, beside=False)
        dest.copy_(source)

    def join(self) -> None:
        """Nothing is left to wait for."""

    def end(self) -> None:
        """It is over."""

    def follow(self, end: Any) -> bool:
        """Nothing is captured."""
        return False


class TwoStreams:
    """Of a GPU. In a capture both belong to it; no event is seen by the host."""

    def __init__(self, index: int, side: torch.cuda.Stream) -> None:
        self._side = side
        self._main = torch.cuda.current_stream(index)
        self._events: dict[Hashable, Any] = {}
        self._side.wait_stream(self._main)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def start(
        self, start: Start, changing: Sequence[int], told: int = 0, between: Callable[[], None] = nothing
    ) -> Callable[[], None]:
        with self.beside():
            return start.begin(changing, told, between)

    def mark(self, what: Hashable, *, beside: bool) -> None:
        event = self._events[what] = torch.cuda.Event()
        event.record(self._side if beside else self._main)

    def wait(self, what: Hashable, *, beside: bool) -> None:
        (self._side if beside else self._main).wait_event(self._events[what])

    def bring(self, dest: torch.Tensor, source: torch.Tensor, behind: Hashable | None) -> None:
        if behind is not None:
            self.wait(behind, beside=False)
        dest.copy_(source)

    def join(self) -> None:
        self._main.wait_stream(self._side)

    def end(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record(self._main)
        return self._main.cuda_stream, event

    def follow(self, end: Any) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return True
        if end is not None and end[0] != self._main.cuda_stream:
            self._main.wait_event(end[1])
            self._side.wait_event(end[1])
        return False


class OwnStream:
    """A stream that nobody else has. torch has a few dozen, and hands them out again: to a caller, whose kernel then
    waits for what stands behind it on the same stream.
    """

    def __init__(self, device: int, priority: int = 0) -> None:
        import cupy  # where there is a GPU

        with cupy.cuda.Device(device):
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=priority)  # kept: it ends with this
        self.handle = int(self._stream.ptr)
        self.of_torch = torch.cuda.ExternalStream(self.handle, device)
