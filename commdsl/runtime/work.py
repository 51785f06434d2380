"""Turns a call made with `async_op=True` into something to wait for, which torch takes for one of its own.

Assumes the call was started. `wait` on a GPU makes the current stream wait. Does not make the host wait there, unless
it is given a time. Where torch's `Work` returns True, `wait` returns the op's outputs.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.distributed import Work as TorchWork

from commdsl.runtime.communicator import Communicator

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]

POLL_SECONDS = 0.0002


class Work(TorchWork):
    """One call. `exception` and a failed `wait` ask for its error; one that nobody asked for is logged, when nobody can
    any more.
    """

    @abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """The op's outputs, usable from here on; raises what the call raised. TimeoutError when it is not over after so
        long: it goes on then, and can be waited for again. None, and no time at all: as long as the call takes.
        """

    @abstractmethod
    def is_completed(self) -> bool: ...

    @abstractmethod
    def exception(self) -> BaseException | None:
        """What went wrong, so far as that is known now."""

    @abstractmethod
    def get_future(self) -> Any:
        """A torch.futures.Future of the list of outputs, as a DDP communication hook returns it. On a GPU it is done at
        once, and who uses its value waits on the stream.
        """

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        return tensors_of(self.wait())

    def synchronize(self) -> None:
        self.wait()


class HostWork(Work):
    """Of a call that runs on a thread."""

    def __init__(self, future: Future[Result]) -> None:
        super().__init__()
        self._future = future
        self._is_asked = False

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        seconds = seconds_of(timeout)
        try:
            found = self._future.result(seconds)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise _late(seconds) from error
        finally:
            self._is_asked = self._future.done()
        return found

    def is_completed(self) -> bool:
        return self._future.done()

    def exception(self) -> BaseException | None:
        self._is_asked = self._future.done()
        return self._future.exception() if self._is_asked else None

    def get_future(self) -> Any:
        made: torch.futures.Future[Any] = torch.futures.Future()
        self._is_asked = True  # by whoever waits for it

        def tell(done: Future[Result]) -> None:
            error = done.exception()
            if error is None:
                made.set_result(tensors_of(done.result()))
            else:
                made.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self._future.add_done_callback(tell)
        return made

    def __del__(self) -> None:
        if not self._is_asked:
            self._future.add_done_callback(_log)


def _log(done: Future[Result]) -> None:
    error = done.exception()
    if error is not None:
        logging.getLogger("commdsl").error("nobody waited for a call that failed: %s", error)


class DeviceWork(Work):
    """Of a call on the stream `side` of a GPU."""

    def __init__(self, result: Result, event: Any, side: Any, communicator: Communicator) -> None:
        super().__init__()
        self._result = result
        self._event = event
        self._side = side
        self._communicator = communicator

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        seconds = seconds_of(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise _late(seconds)
            time.sleep(POLL_SECONDS)
        self._communicator.check()
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in tensors_of(self._result):
            tensor.record_stream(stream)  # its memory belongs to the side stream
        return self._result

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def exception(self) -> BaseException | None:
        try:
            self._communicator.check()
        except BaseException as error:
            return error
        return None

    def get_future(self) -> Any:
        found = tensors_of(self._result)
        made: torch.futures.Future[Any] = torch.futures.Future(devices=[found[0].device])
        with torch.cuda.stream(self._side):  # its value is there when this stream has come so far
            made.set_result(found)
        return made


class CopyBack(Work):
    """Of an in-place call: the tensor has its result once it was waited for."""

    def __init__(self, x: torch.Tensor, work: Work) -> None:
        super().__init__()
        self._x = x
        self._work = work
        self._is_copied = False

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        result = self._work.wait(timeout)
        return self._copied(result)

    def _copied(self, result: torch.Tensor) -> torch.Tensor:
        if not self._is_copied:
            self._x.copy_(result)
            self._is_copied = True
        return self._x

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def get_future(self) -> Any:
        def copy(done: Any) -> list[torch.Tensor]:
            return [self._copied(done.value()[0])]

        return self._work.get_future().then(copy)


def tensors_of(result: Result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """A time in seconds; None where there is none, as torch says by 0."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return seconds or None


def _late(seconds: float | None) -> TimeoutError:
    return TimeoutError(f"the call is not over after {seconds:g} s; it goes on")
