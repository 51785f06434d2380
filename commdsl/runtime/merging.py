"""Turns results of attention over parts of the keys into one, by one kernel on torch's current stream of a GPU.

Assumes tensors of one GPU. Does not synchronize, and does not allocate on the GPU: a capture takes it in once the
kernel is loaded, which a call outside of one does. What is summed in which order stands in `merge.cuh`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import torch

from commdsl.build import nvrtc
from commdsl.build.merge import DTYPES, MOST, NOTHING, THREADS, Merge, Rows, emitted
from commdsl.machine.config import from_environment
from commdsl.runtime.binding import Gpu
from commdsl.runtime.errors import CaptureError, TensorError
from commdsl.runtime.tensors import element_name


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of the whole from `first` on: `out` (rows, batch, heads, head_dim), `lse` (batch, heads, rows) in float32.
    Any strides, but one in the last dimension of `out`.
    """

    first: int
    out: torch.Tensor
    lse: torch.Tensor | None = None  # of gradients there is none


def merge(parts: Sequence[Part], running: Part | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Writes the whole to `out` (rows, batch, heads, head_dim) and `lse` (batch, heads, rows; float32): zeros and -inf
    in rows that no part has.

    Up to 8 parts of one dtype: bfloat16, float16 or float32; `running` is float32 and comes first in every sum. `out`
    may be `running.out`; nothing else that is written may be what is read. Without any `lse` the parts are summed as
    they are, in the same order. TensorError: what the kernel does not take. CaptureError: the first of its kind, in a
    capture.
    """
    made = described(parts, running, out, lse)
    if made.items:
        _launcher(out.get_device(), made.defines())(made)


def described(parts: Sequence[Part], running: Part | None, out: torch.Tensor, lse: torch.Tensor | None) -> Merge:
    """The launch of `merge`, which refuses here what it does not take."""
    dtypes = {part.out.dtype for part in parts} or {torch.float32}
    names = [element_name(dtype) for dtype in (*dtypes, out.dtype)]
    if len(parts) > MOST or len(dtypes) > 1 or not set(names) <= set(DTYPES):
        found = ", ".join(dict.fromkeys(names))
        raise TensorError(f"up to {MOST} parts of one of {', '.join(DTYPES)} are merged; got {len(parts)} of {found}")
    if running is not None and running.out.dtype != torch.float32:
        raise TensorError(f"the running part is float32, not {running.out.dtype}")
    rows, batch, heads, head_dim = out.shape
    given = [Part(0, out, lse), *parts, *([] if running is None else [running])]
    for one in given:
        _refuse_unless_part(one, rows, (batch, heads, head_dim), lse is not None)
    made = Merge(
        tuple(_rows(part) for part in parts),
        NOTHING if running is None else _rows(running),
        _rows(given[0]),
        batch,
        heads,
        head_dim,
        names[0],
        names[-1],
        lse is not None,
    )
    if made.items >= 1 << 31:
        raise TensorError(f"a result of {tuple(out.shape)} is more than one launch merges: merge it in pieces of rows")
    return made


def _refuse_unless_part(part: Part, rows: int, whole: tuple[int, int, int], weighs: bool) -> None:
    count, *rest = part.out.shape
    lse = None if part.lse is None else tuple(part.lse.shape)
    shapes = tuple(rest) == whole and lse == ((*whole[:2], count) if weighs else None)
    if not shapes or not 0 <= part.first <= part.first + count <= rows:
        raise TensorError(
            f"a part is rows of the whole, {rows} x {whole}, with lse (batch, heads, rows) where any has it; "
            f"got {tuple(part.out.shape)} and {lse} from row {part.first} on"
        )
    if part.out.stride(-1) != 1 or (part.lse is not None and part.lse.dtype != torch.float32):
        raise TensorError(
            f"a part's lse is float32, and its output has elements side by side; "
            f"got {part.lse.dtype if part.lse is not None else None} and strides {part.out.stride()}"
        )


def _rows(part: Part) -> Rows:
    row, batch, head, _ = _steps(part.out)
    address, (lse_batch, lse_head, lse_row) = 0, (0, 0, 0)
    if part.lse is not None:
        address, (lse_batch, lse_head, lse_row) = part.lse.data_ptr(), _steps(part.lse)
    last = part.first + part.out.shape[0]
    return Rows(part.out.data_ptr(), address, part.first, last, row, batch, head, lse_row, lse_batch, lse_head)


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides; where there is one alone, torch may say anything."""
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


class _Launcher:
    """A kernel on one GPU."""

    def __init__(self, index: int, defines: tuple[str, ...]) -> None:
        import cupy  # where there is a GPU

        self._gpu = Gpu(index)
        properties = torch.cuda.get_device_properties(index)
        path = nvrtc.build(emitted(), defines, from_environment(), f"sm_{properties.major}{properties.minor}")
        with cupy.cuda.Device(index):
            self._module = cupy.RawModule(path=str(path))
            self._kernel: Any = self._module.get_function(
                emitted().name
            ).kernel  # kept: the handle is good as long as it is
        self._function = int(self._kernel.ptr)
        self._launch = cupy.cuda.driver.launchKernel

    def __call__(self, merge: Merge) -> None:
        packed = merge.packed()
        argument = ctypes.create_string_buffer(packed, len(packed))  # the driver has copied it when the launch returns
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        blocks = -(-merge.items // THREADS)
        stream = self._gpu.stream_handle(self._gpu.index)
        with self._gpu.bound():
            self._launch(self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)


@memoize
def _launcher(index: int, defines: tuple[str, ...]) -> _Launcher:
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"what merges ({', '.join(defines)}) is not loaded: attend once outside of the capture")
    return _Launcher(index, defines)
