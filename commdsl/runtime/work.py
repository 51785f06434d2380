"""Turns a call made with `async_op=True` into a Work, a subclass of torch's.

Assumes the call was started. `wait` on a GPU makes the current stream wait. Does not make the host wait there, unless
it is given a time. Where torch's `Work` returns True, `wait` returns the op's outputs.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.distributed import Work as TorchWork

from commdsl.runtime.errors import WorkTimeoutError

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]

POLL_SECONDS = 0.0002


class Work(TorchWork):
    """One call. `exception` and a failed `wait` ask for its error; one that nobody asked for is logged, when nobody can
    any more.
    """

    @abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Return the op's outputs, usable from here on; raise what the call raised.

        Raises WorkTimeoutError (C967) where the call is not over after `timeout` seconds: it goes on, and can be waited
        for again. None or 0: no limit.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the call is over: its tensors, also those of a call in place, have their results."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """What went wrong, so far as that is known now."""

    @abstractmethod
    def get_future(self) -> Any:
        """Return a torch.futures.Future of the list of outputs, as a DDP communication hook returns it. On a GPU it is
        done at once, and the stream that uses its value waits.
        """

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        return tensors_of(self.wait())

    def synchronize(self) -> None:
        self.wait()


class HostWork(Work):
    """The Work of a call that runs on a thread."""

    _is_asked = True  # where `__init__` did not come to its end, nobody can ask

    def __init__(self, future: Future[Result]) -> None:
        super().__init__()
        self._future = future
        self._promise: torch.futures.Future[Any] | None = None  # that torch's users have
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
        if self._promise is not None:
            self._promise.wait()  # the thread sets it behind the other one
        return found

    def is_completed(self) -> bool:
        return self._future.done() and (self._promise is None or self._promise.done())

    def exception(self) -> BaseException | None:
        self._is_asked = self._future.done()
        return self._future.exception() if self._is_asked else None

    def get_future(self) -> Any:
        self._is_asked = True  # by the one that waits for it
        if self._promise is None:
            made: torch.futures.Future[Any] = torch.futures.Future()
            self._promise = made
            self._future.add_done_callback(lambda done: _pass_on(done, made))
        return self._promise

    def __del__(self) -> None:
        if not self._is_asked:
            self._future.add_done_callback(_log)


def _pass_on(done: Future[Result], promise: torch.futures.Future[Any]) -> None:
    error = done.exception()
    if error is None:
        promise.set_result(tensors_of(done.result()))
    else:
        promise.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def _log(done: Future[Result]) -> None:
    error = done.exception()
    if error is not None:
        logging.getLogger("commdsl").error("nobody waited for a call that failed: %s", error)


class DeviceWork(Work):
    """The Work of a call on a stream of a GPU."""

    def __init__(self, result: Result, stream: Any, check: Callable[[], None]) -> None:
        """`stream`: the call was the last thing put on it; `check` raises what kernels have reported."""
        super().__init__()
        self._result = result
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._stream = stream
        self._check = check

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        seconds = seconds_of(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise _late(seconds)
            time.sleep(POLL_SECONDS)
        self._check()
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in tensors_of(self._result):
            tensor.record_stream(stream)  # its memory belongs to the side stream
        return self._result

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def exception(self) -> BaseException | None:
        try:
            self._check()
        except BaseException as error:
            return error
        return None

    def get_future(self) -> Any:
        found = tensors_of(self._result)
        made: torch.futures.Future[Any] = torch.futures.Future(devices=[found[0].device])
        with torch.cuda.stream(self._stream):  # its value is there when this stream has come so far
            made.set_result(found)
        return made


def on_stream(
    call: Callable[[], Result], inputs: Sequence[torch.Tensor], stream: Any, check: Callable[[], None]
) -> Work:
    """Return the Work of a call that is put on a stream behind the current one."""
    stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
    with torch.cuda.stream(stream):
        result = call()
    for tensor in inputs:
        tensor.record_stream(stream)  # its memory is not used again before the call is over
    return DeviceWork(result, stream, check)


def on_thread(call: Callable[[], Result], submit: Callable[[Callable[[], Result]], Future[Result]]) -> Work:
    """Return the Work of a call that another thread makes, in the modes of this one."""
    has_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run() -> Result:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
            return call()

    return HostWork(submit(run))


def completed(result: Result) -> Work:
    """Return the Work of a call that waits for nothing but the current stream."""
    first, *_ = tensors_of(result)
    if first.is_cuda:
        return DeviceWork(result, torch.cuda.current_stream(first.device), lambda: None)
    done: Future[Result] = Future()
    done.set_result(result)
    return HostWork(done)


def tensors_of(result: Result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """A time in seconds; None where there is none, as torch says by 0."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return seconds or None


def _late(seconds: float | None) -> WorkTimeoutError:
    return WorkTimeoutError(f"the call is not over after {seconds:g} s; it goes on, and can be waited for again")
