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

from commdsl.runtime.binding import Gpu
from commdsl.runtime.kernel import Launchable
from commdsl.runtime.stream_order import is_of_torch
from commdsl.runtime.workspace import ALONE, Meanwhile, Start, nothing


class Launching(Protocol):
    """A kernel on a GPU."""

    function: int
    shared_bytes: int

    def launch(self, prepared: Launchable, stream: int) -> None: ...


class Order(Protocol):
    """Of a call that has what another one had before it."""

    def end(self) -> Any:
        """Marks what the caller's stream has been given, for a call on another one; None where nothing has to wait."""
        ...

    def follow(self, end: Any) -> bool:
        """All streams go on behind that mark. Whether they are being captured: then its order is that of replays."""
        ...


class Streams(Order, Protocol):
    """The streams of one call."""

    def beside(self) -> AbstractContextManager[Any]:
        """In it, launches go on the stream beside the caller's."""
        ...

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Starts a launch on the stream beside, and returns what starts its rest: others may begin before that."""
        ...

    def launch(self, kernel: Launching, launch: Launchable, *, beside: bool) -> None:
        """Starts a kernel that the caller has."""
        ...

    def zeroed(self, words: int, like: torch.Tensor) -> int:
        """Where so many words of 64 bits are that this call alone has: zero for what follows, on both streams. On the
        device of another tensor.
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


class Around:
    """The streams of a call, of which a subclass does some things in another way."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def beside(self) -> AbstractContextManager[Any]:
        return self._streams.beside()

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        return self._streams.start(start, changing, meanwhile)

    def launch(self, kernel: Launching, launch: Launchable, *, beside: bool) -> None:
        self._streams.launch(kernel, launch, beside=beside)

    def zeroed(self, words: int, like: torch.Tensor) -> int:
        return self._streams.zeroed(words, like)

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

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        assert not meanwhile.has_words, "no word of a GPU's"
        meanwhile.between()
        start(changing)
        return nothing

    def launch(self, kernel: Launching, launch: Launchable, *, beside: bool) -> None:
        raise AssertionError("no kernel of a GPU's")

    def zeroed(self, words: int, like: torch.Tensor) -> int:
        raise AssertionError("no kernel of a GPU's")

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


class CallersStream:
    """Of a GPU, where nothing goes beside it."""

    def __init__(self, index: int, last: Any = None) -> None:
        """`last`: an end that nobody will ask for again, whose event may mark the next."""
        self._main, self._last = torch.cuda.current_stream(index), last
        self._is_captured = torch.cuda.is_current_stream_capturing()

    def end(self) -> Any:
        if self._is_captured:
            return None
        event = self._last[1] if self._last is not None and self._is_behind(self._last) else torch.cuda.Event()
        event.record(self._main)
        return self._main, event

    def follow(self, end: Any) -> bool:
        if self._is_captured:
            return True
        if end is not None and not self._is_behind(end):
            self._main.wait_event(end[1])
        return False

    def _is_behind(self, end: Any) -> bool:
        """Whether the caller's stream is the one that was marked: torch's exist to the end, any other may be gone, and
        its number be that of a new one.
        """
        stream, _ = end
        return bool(stream.cuda_stream == self._main.cuda_stream) and is_of_torch(stream)


class TwoStreams(CallersStream):
    """Of a GPU. In a capture both belong to it; no event is seen by the host."""

    def __init__(self, gpu: Gpu, side: torch.cuda.Stream) -> None:
        super().__init__(gpu.index)
        self._gpu, self._side = gpu, side
        self._events: dict[Hashable, Any] = {}
        self._zeroed: list[torch.Tensor] = []
        self._side.wait_stream(self._main)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        with self.beside():
            return start.begin(changing, meanwhile)

    def launch(self, kernel: Launching, launch: Launchable, *, beside: bool) -> None:
        with self._gpu.bound():
            kernel.launch(launch, (self._side if beside else self._main).cuda_stream)

    def zeroed(self, words: int, like: torch.Tensor) -> int:
        made = torch.zeros(words, dtype=torch.int64, device=like.device)
        self._zeroed.append(made)  # as long as the call goes on
        self._side.wait_stream(self._main)
        return made.data_ptr()

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

    def follow(self, end: Any) -> bool:
        is_captured = super().follow(end)
        if not is_captured and end is not None and not self._is_behind(end):
            self._side.wait_event(end[1])
        return is_captured


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
