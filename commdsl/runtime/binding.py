"""Turns a GPU's number into what a launch asks of the driver and of torch, each with one call.

Assumes torch with CUDA; refuses where CuPy or the driver's bindings are not there. Does not launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from commdsl.runtime.errors import DeviceError


class Gpu:
    """One GPU, whichever device and context the thread has."""

    def __init__(self, index: int) -> None:
        try:
            import cuda.bindings  # noqa: F401 - missed here, before anything collective
            import cupy  # where there is a GPU
        except ImportError as error:
            raise DeviceError(f"GPUs need `pip install 'commdsl[cuda]'`: {error}") from error

        self.index = index
        self.capturing = torch.cuda.is_current_stream_capturing
        self.current_context = cupy.cuda.driver.ctxGetCurrent
        # Under torch.cuda.current_stream, which makes an object of the handle.
        self.stream_handle = torch._C._cuda_getCurrentRawStream
        self._set_context = cupy.cuda.driver.ctxSetCurrent
        with torch.cuda.device(index):
            torch.cuda.synchronize(index)  # the first call of a thread to the runtime binds the device's context
            self.context = self.current_context()

    @property
    def is_bound(self) -> bool:
        """Whether the thread has this GPU's context."""
        return bool(self.current_context() == self.context)

    def bound(self) -> AbstractContextManager[None]:
        """In it the thread has this GPU, and its context, also a thread that is new to CUDA."""
        return nullcontext() if self.is_bound else self._bound()

    @contextmanager
    def _bound(self) -> Iterator[None]:
        with torch.cuda.device(self.index):  # where that is the thread's device already, it binds no context
            if not self.is_bound:
                self._set_context(self.context)
            yield


def capture_id(stream: int) -> int | None:
    """Which capture a stream is in."""
    from cuda.bindings import runtime  # where there is a GPU

    error, status, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise DeviceError(f"cudaStreamGetCaptureInfo: {error!r}")
    return int(number) if status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive else None
