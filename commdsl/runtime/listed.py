"""Turns the streams of a call into a list of what they ask of the driver: nothing is started.

Assumes a call whose launches are the copy engine's, and whose functions start kernels by `launch`. Does not order the
call among others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from commdsl.runtime.driver import DEVICE_TO_DEVICE, Driver, Listing
from commdsl.runtime.kernel import Launchable
from commdsl.runtime.streams import Launching
from commdsl.runtime.workspace import ALONE, Meanwhile, Start


@runtime_checkable
class Listable(Protocol):
    """What starts launches, by another driver if it is given one."""

    def ask(self, driver: Driver, changing: Sequence[int], stream: int, meanwhile: Meanwhile) -> Callable[[], None]: ...


class ListedStreams:
    """The caller's stream, and the one beside it."""

    def __init__(self, listing: Listing, callers: int, beside: int, words: Callable[[int, torch.Tensor], int]) -> None:
        """`words`: where so many words of 64 bits are, on the device of a tensor, which calls that may run at the same
        time do not have.
        """
        self._listing, self._words = listing, words
        self._callers, self._beside = callers, beside
        self._events: dict[Hashable, Any] = {}

    def beside(self) -> AbstractContextManager[Any]:
        raise AssertionError("nothing of torch's is listed")

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        assert isinstance(start, Listable)
        rest = start.ask(self._listing.driver, changing, self._beside, meanwhile)
        self._listing.kept.append(rest)
        return rest

    def launch(self, kernel: Launching, launch: Launchable, *, beside: bool) -> None:
        assert launch.cluster == 1
        self._listing.kept.append((kernel, launch))
        shape = (launch.blocks, 1, 1, launch.threads, 1, 1, kernel.shared_bytes)
        self._listing.driver.launch(kernel.function, *shape, self._stream(beside), launch.pointers, 0)

    def zeroed(self, words: int, like: torch.Tensor) -> int:
        address = self._words(words, like)
        self._listing.driver.clear(address, 0, 8 * words, self._callers)
        self.mark("zeroed", beside=False)
        self.wait("zeroed", beside=True)
        return address

    def mark(self, what: Hashable, *, beside: bool) -> None:
        event = self._events[what] = self._listing.event()
        self._listing.driver.record(event.ptr, self._stream(beside))

    def wait(self, what: Hashable, *, beside: bool) -> None:
        self._listing.driver.wait(self._stream(beside), self._events[what].ptr, 0)

    def bring(self, dest: torch.Tensor, source: torch.Tensor, behind: Hashable | None) -> None:
        assert dest.is_contiguous()
        assert source.is_contiguous()
        assert dest.nbytes == source.nbytes
        if behind is not None:
            self.wait(behind, beside=False)
        where = dest.data_ptr(), source.data_ptr()
        self._listing.driver.copy(*where, dest.nbytes, DEVICE_TO_DEVICE, self._callers)

    def join(self) -> None:
        self.mark("join", beside=True)
        self.wait("join", beside=False)

    def end(self) -> Any:
        raise AssertionError("what is asked again has an end each time")

    def follow(self, end: Any) -> bool:
        raise AssertionError("what is asked again follows each time")

    def _stream(self, beside: bool) -> int:
        return self._beside if beside else self._callers
