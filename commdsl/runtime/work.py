"""Turns a call made with `async_op=True` into something to wait for.

Assumes the call was started. `wait` on a GPU makes the current stream wait. Does not make the host wait there.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import torch

from commdsl.runtime.communicator import Communicator

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class Work(Protocol):
    def wait(self) -> Result:
        """The op's outputs, usable from here on; raises what the call raised."""
        ...

    def is_completed(self) -> bool: ...


class HostWork:
    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    def wait(self) -> Result:
        return self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


class DeviceWork:
    def __init__(self, result: Result, event: Any, communicator: Communicator) -> None:
        self._result = result
        self._event = event
        self._communicator = communicator

    def wait(self) -> Result:
        self._communicator.check()
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in self._result if isinstance(self._result, tuple) else (self._result,):
            tensor.record_stream(stream)  # its memory belongs to the side stream
        return self._result

    def is_completed(self) -> bool:
        return bool(self._event.query())
