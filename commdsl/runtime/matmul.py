"""Turns tasks, products of matrices, into a launch of our kernel on torch's current stream of a GPU.

Assumes a Hopper GPU, and tensors of it whose rows begin at multiples of 16 bytes. Does not synchronize. One `Matmul`
makes one product at a time: what waits in memory between blocks is its own.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

import numpy as np
import torch

from commdsl.build import nvrtc
from commdsl.build.matmul import ARCH, FLOAT8, THREADS, Product, Tiling, emitted, form_of, packed, slot_bytes, stores
from commdsl.build.matmul import table as table_of
from commdsl.build.task_table import Sizes, TaskRow, biases_of, maps_of, packed_tasks
from commdsl.machine.config import DEFAULT_TIMEOUT, from_environment
from commdsl.runtime.errors import DeviceError, TensorError
from commdsl.runtime.kept import keep
from commdsl.runtime.kernel import DeviceKernel, Residence
from commdsl.runtime.lasting import lasting, room
from commdsl.runtime.tensors import element_name, is_deep

_PANEL = 64  # lines that the kernel has side by side in shared memory
_LINE = 128  # bytes

PATIENCE = 3
"""Time-outs that a block waits before its launch fails: by then the launches beside have found and reported who is
missing.
"""


MAX_AWAITS = 1024
"""Waits for words that are kept: calls whose words lie at the same addresses share them."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one shape in memory: `step` bytes apart, the elements of a row side by side."""

    address: int
    dtype: torch.dtype
    count: int
    rows: int
    columns: int
    row_bytes: int  # from one row to the next
    step: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Matrices:
        """Return the description of a tensor (rows, columns) or (matrices, rows, columns), transposed where its columns
        lie side by side. Raises TensorError where neither rows nor columns do.
        """
        whole = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
        if not is_deep(tensor):
            whole = whole.transpose(1, 2)
        count, rows, columns = whole.shape
        step, row, one = (stride * tensor.element_size() for stride in whole.stride())
        if one != tensor.element_size():
            raise TensorError(f"elements of a row lie side by side; got strides {tensor.stride()}")
        return Matrices(tensor.data_ptr(), tensor.dtype, count, rows, columns, row, step if count > 1 else rows * row)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call, ready to be launched any number of times while its tensors live."""

    blocks: int
    threads: int
    pointers: int
    kept: tuple[object, ...]
    cluster: int = 1  # the kernels say it themselves


def launch_of(argument: bytes, sizes: Sequence[int], blocks: int, threads: int) -> Launch:
    """Return a launch of packed arguments, of these sizes in bytes, one behind another."""
    held = ctypes.create_string_buffer(argument, len(argument))
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    pointers = (ctypes.c_void_p * len(sizes))(*(ctypes.addressof(held) + offset for offset in offsets))
    return Launch(blocks, threads, ctypes.addressof(pointers), (held, pointers))


class Side(Enum):
    """The use of a tensor in tasks, which decides the boxes that TMA moves of it."""

    ROWS = "rows"
    FACTOR = "factor"
    RESULT = "result"  # or what is added to one, or a copy of it on a peer
    COPY = "copy of rows"


Mapped: TypeAlias = tuple[Matrices, Side]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Further addresses of a launch, 0 where it has none: biases, the words of its call, time stamps, and for float8
    the scales of A and of B.
    """

    biases: tuple[int, ...] = ()
    words: int = 0
    stamps: int = 0
    scales: tuple[int, ...] = (0, 0)


NO_ADDRESSES = Addresses()


class Matmul:
    """The tasks of one launch, each of a product, cut in one way, on up to `sms` blocks."""

    def __init__(
        self,
        products: Sequence[Product],
        tiling: Tiling,
        sms: int,
        device: int,
        rows: Sequence[TaskRow],
        *,
        is_alone: bool = False,
        is_stamped: bool = False,
    ) -> None:
        """Build the tables and load the kernel. `is_alone`: no launch beside it needs SMs before it begins."""
        self.products, self.tiling, self._is_alone = products, tiling, is_alone
        self.maps, self._biases = maps_of(rows), biases_of(rows)
        form = form_of(products, rows)
        self._room = form.maps - self.maps
        self._factor_lines = form.factor_lines(tiling)
        text = emitted(form, tiling, is_stamped=is_stamped)
        sizes = [one.tiles(tiling) for one in products]
        most = sum(high * wide for high, wide, _ in sizes)
        if tiling.parts > 1:
            most = max(high * wide * tiling.parts for high, wide, _ in sizes)
        workers = min(tiling.workers(sms), most)
        self._blocks = workers * tiling.blocks
        dealt = table_of(products, tiling, workers)
        self.intervals = np.repeat(dealt.pieces["turn"][:-1].ravel().astype(np.int32), 2 * tiling.blocks)
        """The task of each interval that a stamped kernel writes: two of every piece and block."""
        where = torch.device("cuda", device)
        self._pieces = lasting(torch.from_numpy(dealt.pieces.view("<i4")), where)
        of = [Sizes(one.columns, one.source_stages, stores(one, tiling)) for one in products]
        self._tables = [
            lasting(torch.frombuffer(bytearray(one or bytes(16)), dtype=torch.uint8), where)
            for one in packed_tasks(rows, of)
        ]
        self._partials = room(dealt.slots * slot_bytes(tiling), where)
        words = (torch.zeros(count, dtype=torch.int64, device="cpu") for count in (dealt.slots * tiling.cluster * 2, 1))
        self._flags, self._claims = (lasting(zeros, where) for zeros in words)
        self._entries = len(dealt.pieces) - 1
        self._awaits: dict[tuple[int, int], Launch] = {}
        config = from_environment()
        self._timeout_ns = PATIENCE * int(1e9 * (config.timeout or DEFAULT_TIMEOUT))
        path = nvrtc.build(text, products[0].defines(), config, ARCH)
        held = Residence("matmul", text.name, self._blocks, THREADS, tiling.shared_bytes, self._blocks)
        self.kernel = DeviceKernel(path, held, device, None)
        beside = {name: Residence("matmul", f"{text.name}_{name}", 1, 1, 0, 1) for name in ("await", "mark")}
        self.awaiting = DeviceKernel(path, beside["await"], device, None)
        self._mark = DeviceKernel(path, beside["mark"], device, None) if is_stamped else None

    def prepare(self, maps: Sequence[Mapped], at: Addresses = NO_ADDRESSES) -> Launch:
        """Return the launch on these tensors, which the rows of its tasks name by number. Raises TensorError where a
        row of a matrix begins elsewhere than TMA can read.
        """
        assert (len(maps), len(at.biases or (0,))) == (self.maps, self._biases)
        made = [self._map(*one) for one in maps]
        made += made[:1] * self._room
        addresses = (
            *(one.data_ptr() for one in (self._pieces, self._claims, *self._tables)),
            at.words,
            *(one.data_ptr() for one in (self._partials, self._flags)),
            *at.scales,
        )
        argument = packed(made, addresses, self._timeout_ns, self._entries, at.stamps, at.biases or (0,))
        return launch_of(argument, [len(argument)], self._blocks, THREADS)

    def _map(self, one: Matrices, side: Side) -> bytes:
        match side:
            case Side.ROWS:
                return tensor_map(one, self.tiling.rows if self.products[0].a_deep else _PANEL)
            case Side.FACTOR:
                return tensor_map(one, self._factor_lines)
            case Side.RESULT:
                return tensor_map(one, _PANEL, self.tiling.line(self.products[0]))
            case Side.COPY:
                return tensor_map(one, _PANEL)
            case _:
                assert_never(side)

    def __call__(self, launch: Launch) -> None:
        start = self.kernel.launch_early if self._is_alone else self.kernel.launch
        start(launch, torch.cuda.current_stream().cuda_stream)

    def waiting(self, word: int, least: int) -> Launch:
        """Return the launch of `awaiting` that ends when a word has come to a level."""
        launch = self._awaits.get((word, least))
        if launch is None:
            launch = launch_of(struct.pack("<3Q", word, least, self._timeout_ns), [8, 8, 8], 1, 1)
            keep(self._awaits, (word, least), launch, MAX_AWAITS)
        return launch

    def stores(self, task: int) -> int:
        """Return the level of the stored tiles of a task."""
        return stores(self.products[task], self.tiling)

    def mark(self, address: int) -> None:
        """Write the time to an address when the current stream is here, by the clock of a stamped kernel."""
        assert self._mark is not None
        launch = launch_of(struct.pack("<Q", address), [8], 1, 1)  # the driver has copied it when this returns
        self._mark.launch(launch, torch.cuda.current_stream().cuda_stream)


def tensor_map(one: Matrices, lines: int, line: int = _LINE) -> bytes:
    """Return the map by which TMA moves boxes of so many lines of 128, 64 or 32 bytes, swizzled."""
    from cuda.bindings import driver  # where there is a GPU

    steps = (one.row_bytes, one.step)
    if any(step % 16 for step in (*steps, one.address)):
        raise TensorError(
            f"rows of a matrix begin at multiples of 16 bytes; got rows {one.row_bytes} bytes apart, matrices "
            f"{one.step}, at {one.address:#x}"
        )
    kinds = driver.CUtensorMapDataType
    kind = {
        "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        FLOAT8: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[element_name(one.dtype)]
    status, made = driver.cuTensorMapEncodeTiled(
        kind,
        3,
        one.address,
        _words(driver.cuuint64_t, (one.columns, one.rows, one.count)),
        _words(driver.cuuint64_t, steps),
        _words(driver.cuuint32_t, (line // one.dtype.itemsize, lines, 1)),
        _words(driver.cuuint32_t, (1, 1, 1)),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{line}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"cuTensorMapEncodeTiled failed for {one}: {status!r}")
    return ctypes.string_at(int(made.getPtr()), 128)


def _words(kind: type, values: Sequence[int]) -> list[object]:
    return [kind(value) for value in values]
