"""A Hopper GPU that is made up: stands in for NVRTC, the driver and torch.cuda, so that products run here by warps.

The kernel is the one that the GPU has, but for the headers in `hopper`, which stand for its instructions: what a launch
is given, its table and its argument are the runtime's own. Proves nothing about time, nor about weak orders of memory.
"""
# ruff: noqa: N802 - CUDA's names

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commdsl.build import host, nvrtc
from commdsl.build.emit import Emitted
from commdsl.machine.config import Config
from commdsl.runtime import matmul
from commdsl.runtime.kernel import Residence

HEADERS = Path(__file__).parent / "hopper"
FLAGS = (*host.FLAGS, "-O1", "-Wno-unknown-pragmas", "-Wno-psabi", f"-I{HEADERS}")

MULTIPLY = re.compile(r"(void multiply\(commdsl::(\w+), [^{]*\{)\s*asm volatile\(.*?\"r\"\(adds\)\);", re.DOTALL)
ENTRY = """
extern "C" void hopper_kernel(const void* args) { commdsl_matmul(*static_cast<const commdsl::MatmulArgs*>(args)); }
extern "C" unsigned hopper_arguments() { return sizeof(commdsl::MatmulArgs); }
"""


@dataclass(frozen=True)
class Move:
    """What happens beside a launch: when a word is `least`, one tensor becomes another, and then a word is 1."""

    source: torch.Tensor
    dest: torch.Tensor
    word: int = 0
    least: int = 0
    raised: int = 0

    def packed(self) -> bytes:
        assert self.source.nbytes == self.dest.nbytes
        return struct.pack(
            "<6Q",
            self.word,
            self.least,
            self.source.data_ptr(),
            self.dest.data_ptr(),
            self.source.nbytes,
            self.raised,
        )


class FakeHopper:
    """Kernels built in a folder, of the headers in another; `seed` draws the order of all that a launch leaves open."""

    def __init__(self, folder: Path, headers: Path) -> None:
        self.seed = 0
        self.resident = 1 << 30  # clusters that are there at once
        self.stores_again = False  # whether tasks store where others have stored
        self.beside: Sequence[Move] = ()
        self._folder, self._headers = folder, headers
        self._clusters: dict[Path, int] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(nvrtc, "build", self._build)
        patch.setattr(matmul, "DeviceKernel", self._kernel)
        patch.setattr(matmul, "torch", SimpleNamespace(**{**vars(torch), "device": lambda *_: torch.device("cpu")}))
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        patch.setitem(sys.modules, "cuda", SimpleNamespace())
        patch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=Driver()))

    @contextlib.contextmanager
    def of(self, headers: Path) -> Iterator[None]:
        """Kernels are built of other headers."""
        usual, self._headers = self._headers, headers
        yield
        self._headers = usual

    def _build(self, emitted: Emitted, defines: Sequence[str], config: Config, arch: str) -> Path:
        text, count = MULTIPLY.subn(r"\1 commdsl::multiply<Matmul, commdsl::\2>(sum, a, b, adds);", emitted.text)
        assert count >= 2
        assert "asm" not in text
        compile_ = (*host.find_compiler(config).command, *FLAGS, f"-I{self._headers}")
        machine = self._folder / "machine.o"
        if not machine.exists():
            subprocess.run([*compile_, "-O3", "-c", HEADERS / "machine.cpp", "-o", machine], check=True)
        name = hashlib.sha256(f"{text} {defines} {self._headers}".encode()).hexdigest()[:16]
        source, made = self._folder / f"{name}.cpp", self._folder / f"{name}.so"
        if not made.exists():
            source.write_text(text + ENTRY, "utf-8")
            macros = [f"-D{define}" for define in defines]
            subprocess.run([*compile_, *macros, "-shared", source, machine, "-o", made], check=True)
        found = re.search(r"__cluster_dims__\((\d+), 1, 1\)", text)
        self._clusters[made] = int(found[1]) if found else 1
        return made

    def _kernel(self, path: Path, residence: Residence, device: int, nvshmem: None) -> Any:
        library = ctypes.CDLL(str(path))
        library.hopper_run.restype = ctypes.c_char_p

        def launch(given: matmul.Launch, stream: int) -> None:
            argument, moves = given.kept[0], b"".join(one.packed() for one in self.beside)
            assert isinstance(argument, ctypes.Array)
            assert len(argument) == library.hopper_arguments()
            held = ctypes.create_string_buffer(len(argument) + 64)
            aligned = ctypes.addressof(held) + -ctypes.addressof(held) % 64
            ctypes.memmove(aligned, argument, len(argument))
            ctypes.c_uint.in_dll(library, "hopper_stores_again").value = self.stores_again
            launched = (given.blocks, given.threads, self._clusters[path], residence.shared_bytes, self.resident)
            beside = (ctypes.c_uint64(self.seed), moves, len(self.beside))
            failure = library.hopper_run(ctypes.c_void_p(aligned), *launched, *beside)
            assert not failure, failure.decode()

        return SimpleNamespace(launch=launch, launch_early=launch)


class Driver:
    """Of cuda.bindings.driver, what describes tensors: a map is what it was told."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUtensorMapDataType = SimpleNamespace(
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16=2,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT16=2,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT32=4,
        CU_TENSOR_MAP_DATA_TYPE_UINT8=1,
    )
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=None)
    CUtensorMapSwizzle = SimpleNamespace(**{f"CU_TENSOR_MAP_SWIZZLE_{line}B": line for line in (32, 64, 128)})
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=None)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=None)
    cuuint64_t = cuuint32_t = int

    def cuTensorMapEncodeTiled(
        self,
        element: int,
        dimensions: int,
        address: int,
        sizes: list[int],
        steps: list[int],
        box: list[int],
        strides: list[int],
        interleave: None,
        swizzle: int,
        *_: None,
    ) -> tuple[int, Any]:
        """As CUDA takes it: three dimensions, and a box of whole swizzled lines."""
        assert (dimensions, strides, box[2]) == (3, [1, 1, 1], 1)
        assert not any(step % 16 for step in (address, *steps))
        assert max(box) <= 256
        assert box[0] * element == swizzle
        held = ctypes.create_string_buffer(struct.pack("<11Q40x", address, *sizes, *steps, *box, element, swizzle), 128)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(held), held=held)
