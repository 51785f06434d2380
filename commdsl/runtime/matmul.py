"""Turns a product of matrices into a launch of our kernel on torch's current stream of a GPU.

Assumes a Hopper GPU, and tensors of it whose rows begin at multiples of 16 bytes. Does not synchronize. One `Matmul`
makes one product at a time: what waits in memory between blocks is its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commdsl.build import nvrtc
from commdsl.build.matmul import ARCH, DEPTH, ROWS, THREADS, Product, Tiling, emitted, packed, slot_bytes, table
from commdsl.machine.config import DEFAULT_TIMEOUT, from_environment
from commdsl.runtime.errors import DeviceError, TensorError
from commdsl.runtime.kernel import DeviceKernel, Residence
from commdsl.runtime.tensors import element_name

_PANEL = 64  # lines that the kernel has side by side in shared memory
_LINE = 128  # bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """One call, ready to be made any number of times."""

    blocks: int
    threads: int
    shared: int
    pointers: int
    kept: tuple[object, ...]  # as long as the launch may be made


class Matmul:
    """One product, cut in one way, on up to `sms` blocks."""

    def __init__(self, product: Product, tiling: Tiling, sms: int, device: int) -> None:
        self.product, self.tiling = product, tiling
        text, high, wide = emitted(product, tiling), *product.tiles(tiling)[:2]
        workers = min(sms // tiling.cluster, high * wide * tiling.parts)
        self._blocks = workers * tiling.cluster
        dealt = table(product, tiling, workers)
        where = torch.device("cuda", device)
        self._pieces = torch.from_numpy(dealt.pieces.view("<i4")).to(where)
        self._begin = torch.from_numpy(dealt.begin).to(where)
        self._partials = torch.empty(dealt.slots * slot_bytes(tiling), dtype=torch.uint8, device=where)
        self._flags = torch.zeros(dealt.slots * tiling.cluster * 2, dtype=torch.int64, device=where)
        config = from_environment()
        self._timeout_ns = int(1e9 * (config.timeout or DEFAULT_TIMEOUT))
        path = nvrtc.build(text, product.defines(), config, ARCH)
        held = Residence("matmul", text.name, self._blocks, THREADS, tiling.shared_bytes, self._blocks)
        self._kernel = DeviceKernel(path, held, device, None)

    def prepare(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Launch:
        """The launch that writes C to `c`. Raises TensorError where a row of a matrix begins elsewhere than TMA can."""
        half = self.tiling.columns // 2
        maps = (
            tensor_map(a, ROWS if self.product.a_deep else DEPTH),
            tensor_map(b, half if self.product.b_deep else DEPTH),
            tensor_map(c, _PANEL),
        )
        own = (self._pieces, self._begin)
        addresses = [one.data_ptr() for one in own]
        addresses += [0 if one is None else one.data_ptr() for one in (bias, residual)]
        addresses += [self._partials.data_ptr(), self._flags.data_ptr()]
        argument = packed(maps, addresses, self._timeout_ns, self.product)
        held = ctypes.create_string_buffer(argument, len(argument))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        kept = (held, pointers, a, b, c, bias, residual)
        return Launch(self._blocks, THREADS, self.tiling.shared_bytes, ctypes.addressof(pointers), kept)

    def __call__(self, launch: Launch) -> None:
        self._kernel.launch(launch, torch.cuda.current_stream().cuda_stream)


def tensor_map(matrix: torch.Tensor, lines: int) -> bytes:
    """What TMA has to know of a matrix of which it moves boxes of 128 bytes by so many lines, swizzled."""
    from cuda.bindings import driver  # where there is a GPU

    step = matrix.stride(0) * matrix.element_size()
    if matrix.stride(1) != 1 or step % 16 or matrix.data_ptr() % 16:
        raise TensorError(
            f"rows of a matrix begin at multiples of 16 bytes, with elements side by side; got strides "
            f"{matrix.stride()} of {matrix.dtype} at {matrix.data_ptr():#x}"
        )
    kinds = driver.CUtensorMapDataType
    kind = {
        "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[element_name(matrix.dtype)]
    status, made = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        matrix.data_ptr(),
        _words(driver.cuuint64_t, (matrix.shape[1], matrix.shape[0])),
        _words(driver.cuuint64_t, (step,)),
        _words(driver.cuuint32_t, (_LINE // matrix.element_size(), lines)),
        _words(driver.cuuint32_t, (1, 1)),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"cuTensorMapEncodeTiled failed for {tuple(matrix.shape)} of {matrix.dtype}: {status!r}")
    return ctypes.string_at(int(made.getPtr()), 128)


def _words(kind: type, values: Sequence[int]) -> list[object]:
    return [kind(value) for value in values]
