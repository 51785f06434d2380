"""Turns CUDA C++ into a cubin with NVRTC and nvJitLink; needs neither a GPU nor nvcc.

Assumes the wheels nvidia-cuda-nvrtc and, where code is linked, nvidia-nvjitlink, or a CUDA toolkit in their place.
Does not load what it builds (`runtime.kernel` does).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as memoize
from pathlib import Path

from commdsl.build import built
from commdsl.build.emit import Emitted
from commdsl.build.headers import headers_digest, include_dir
from commdsl.language.diagnostics import InternalError
from commdsl.machine import cache
from commdsl.machine.config import Config
from commdsl.machine.errors import MissingToolError
from commdsl.machine.shortage import explain, explained, number_of
from commdsl.program.memory import Transport

ARCH = "sm_90"
TOOLKIT = Path("/usr/local/cuda")
SHIM = "nvshmem_shim.cubin"
_SUCCESS = 0
_CUBIN = 1  # nvJitLinkInputType
_LIBRARY = 6


@dataclass(frozen=True, slots=True)
class Library:
    """One of the two compilers' libraries: its name, which wheel brings it, and what it needs from beside it."""

    stem: str
    wheel: str
    parts: tuple[str, ...] = ()


NVRTC = Library("libnvrtc.so", "nvidia-cuda-nvrtc", ("libnvrtc-builtins.so.*",))
NVJITLINK = Library("libnvJitLink.so", "nvidia-nvjitlink")


@memoize
def wheel_folders() -> tuple[Path, ...]:
    """The folders that NVIDIA's wheels share, newest CUDA first: `nvidia/cu13`, `nvidia/cuda_nvrtc`, ..."""
    spec = importlib.util.find_spec("nvidia")
    roots = sorted(Path(place) for place in (spec.submodule_search_locations or ())) if spec else []
    return tuple(folder for root in roots for folder in sorted(root.iterdir(), reverse=True) if folder.is_dir())


def locate(pattern: str) -> Path | None:
    """The first file or folder that matches `pattern` in NVIDIA's wheels, then in the installed toolkit."""
    for folder in (*wheel_folders(), TOOLKIT):
        for match in sorted(folder.glob(pattern)):
            return match
    return None


def _library_path(library: Library) -> Path | None:
    return locate(f"lib/{library.stem}.*") or locate(f"lib64/{library.stem}.*")


@memoize
def load(library: Library) -> ctypes.CDLL:
    """Return the library, loaded. Raises MissingToolError, or ResourceError where a limit of the process is reached."""
    try:
        path = _library_path(library)
        for part in library.parts:
            # NVRTC opens its second half by name alone, which the loader finds only if it is loaded already.
            for file in sorted(path.parent.glob(part)) if path else ():
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path) if path else f"{library.stem}.13")
    except OSError as error:
        if number_of(error):
            raise explain(error, f"load {library.stem}") from error
        raise MissingToolError(f"{library.stem} is not here: pip install {library.wheel} ({error})") from error


@memoize
def version() -> str:
    """NVRTC's version, part of every cache key."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    load(NVRTC).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@memoize
def linker_version() -> str:
    major, minor = ctypes.c_uint(), ctypes.c_uint()
    load(NVJITLINK).nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_cubin(name: str, text: str, options: Sequence[str]) -> bytes:
    """One translation unit to a cubin. A refusal is our fault: InternalError with the log."""
    nvrtc = load(NVRTC)
    program = ctypes.c_void_p()
    _nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), "create")
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        if status != _SUCCESS:
            log = _nvrtc_bytes(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise InternalError(f"NVRTC {version()} refused {name} ({' '.join(options)}):\n{log}")
        return _nvrtc_bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"size of {what}")
    buffer = ctypes.create_string_buffer(size.value)
    _nvrtc(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _nvrtc(status: int, what: str) -> None:
    if status != _SUCCESS:
        raise InternalError(f"NVRTC failed ({what}): error {status}")


def link(arch: str, cubins: Sequence[tuple[str, bytes]], libraries: Sequence[Path]) -> bytes:
    """Device link: relocatable cubins (name, bytes) and static libraries to one cubin."""
    linker = load(NVJITLINK)
    handle = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(f"-arch={arch}".encode())
    status = _symbol(linker, "Create")(ctypes.byref(handle), 1, options)
    if status != _SUCCESS:
        raise InternalError(f"nvJitLink did not start for {arch}: error {status}")
    try:
        for name, data in cubins:
            size = ctypes.c_size_t(len(data))
            _linked(linker, handle, _symbol(linker, "AddData")(handle, _CUBIN, data, size, name.encode()), name)
        for path in libraries:
            _linked(linker, handle, _symbol(linker, "AddFile")(handle, _LIBRARY, str(path).encode()), path.name)
        _linked(linker, handle, _symbol(linker, "Complete")(handle), "the whole")
        size = ctypes.c_size_t()
        _linked(linker, handle, _symbol(linker, "GetLinkedCubinSize")(handle, ctypes.byref(size)), "the cubin's size")
        buffer = ctypes.create_string_buffer(size.value)
        _linked(linker, handle, _symbol(linker, "GetLinkedCubin")(handle, buffer), "the cubin")
        return buffer.raw
    finally:
        _symbol(linker, "Destroy")(ctypes.byref(handle))


def _symbol(linker: ctypes.CDLL, name: str) -> Callable[..., int]:
    """nvJitLink exports each function once per minor version of CUDA; all of them have the first one's."""
    try:
        function: Callable[..., int] = getattr(linker, f"__nvJitLink{name}_13_0")
    except AttributeError as error:
        raise MissingToolError(
            f"nvJitLink {linker_version()} is too old for what NVRTC {version()} builds: "
            "pip install 'nvidia-nvjitlink>=13'"
        ) from error
    return function


def _linked(linker: ctypes.CDLL, handle: ctypes.c_void_p, status: int, what: str) -> None:
    if status == _SUCCESS:
        return
    size = ctypes.c_size_t()
    _symbol(linker, "GetErrorLogSize")(handle, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    _symbol(linker, "GetErrorLog")(handle, log)
    text = log.value.decode(errors="replace")
    raise InternalError(f"nvJitLink {linker_version()} refused {what}: error {status}\n{text}")


@memoize
def architectures() -> tuple[str, ...]:
    """What NVRTC builds for, `sm_75` and so on."""
    nvrtc, count = load(NVRTC), ctypes.c_int()
    _nvrtc(nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "number of architectures")
    found = (ctypes.c_int * count.value)()
    _nvrtc(nvrtc.nvrtcGetSupportedArchs(found), "architectures")
    return tuple(f"sm_{number}" for number in found)


def key_ahead(emitted: Emitted, defines: Sequence[str], config: Config, arch: str) -> str:
    """What a cubin that is built ahead of time goes by: all but the compiler, which need not be there when it runs."""
    return cache.key(["ahead", emitted.text, headers_digest(), *_flags(arch, config), *defines])


@explained("build for a GPU")
def build(emitted: Emitted, defines: Sequence[str], config: Config, arch: str = ARCH) -> Path:
    """The cubin of one text, element type and reduction, NVSHMEM's part linked: built ahead of time, kept, or new."""
    ahead = built.find(emitted.kernels, key_ahead(emitted, defines, config, arch)) if emitted.kernels else None
    if ahead is not None:
        digest = cache.key(["kernel.cubin, built ahead", hashlib.sha256(ahead).hexdigest()])
        return cache.entry(config.cache_dir, digest, lambda: {"kernel.cubin": ahead}) / "kernel.cubin"
    links = emitted.transport is Transport.NVSHMEM
    flags = [*_flags(arch, config), *(f"-D{define}" for define in defines)]
    if links:
        flags += ["-rdc=true"]
    parts = (
        emitted.text,
        headers_digest(),
        _identity(NVRTC),
        "kernel.cubin",
        *flags,
        *(_link_identity() if links else ()),
    )

    def made() -> dict[str, bytes]:
        cubin = compile_cubin(emitted.name + ".cu", emitted.text, [*flags, f"-I{include_dir()}"])
        if links:
            archive = device_library()
            units = [("kernel", cubin), ("nvshmem_shim", shim(config, arch).read_bytes())]
            cubin = link(arch, units, [archive])
        return {"kernel.cu": emitted.text.encode(), "kernel.cubin": cubin}

    return cache.entry(config.cache_dir, cache.key(parts), made) / "kernel.cubin"


@explained("build for a GPU")
def shim(config: Config, arch: str = ARCH) -> Path:
    """NVSHMEM's device calls with C linkage, compiled once for all kernels: the headers take seconds."""
    source = include_dir() / "commdsl" / "nvshmem_shim.cu"
    flags = [*_flags(arch, config), "-rdc=true"]
    parts = (
        source.read_text(encoding="utf-8"),
        headers_digest(),
        _identity(NVRTC),
        "nvshmem_shim",
        *_link_identity(),
        *flags,
    )

    def made() -> dict[str, bytes]:
        includes = (
            include_dir() / "nvshmem_repair",
            _need("include/nvshmem.h", "nvidia-nvshmem-cu13").parent,
            _need("include/cuda_runtime.h", "nvidia-cuda-runtime").parent,
            _need("include/cccl", "nvidia-cuda-cccl"),
        )
        text = source.read_text(encoding="utf-8")
        return {SHIM: compile_cubin(source.name, text, [*flags, *(f"-I{include}" for include in includes)])}

    return cache.entry(config.cache_dir, cache.key(parts), made) / SHIM


def _flags(arch: str, config: Config) -> list[str]:
    # No fused multiply-add: it rounds once where the host build and the oracle round twice.
    # NVRTC 13.0 takes a generic lambda for a function of the host, unless all functions are the device's.
    # A seed, or else names in the cubin have the process's number in them: the same input, the same bytes.
    return [
        f"-arch={arch}",
        "-std=c++17",
        "-default-device",
        "-fmad=false",
        "-frandom-seed=commdsl",
        *(["-lineinfo"] if config.debug else []),
    ]


def _identity(library: Library) -> str:
    """Stands for a compiler's version in cache keys; asking the library itself would cost a warm start its loading."""
    path = _library_path(library)
    return f"{path.name} {path.stat().st_size}" if path else "none"


def _link_identity() -> tuple[str, str]:
    archive = device_library()
    return _identity(NVJITLINK), f"{archive.name} {archive.stat().st_size}"


def device_library() -> Path:
    """NVSHMEM's functions for kernels."""
    return _need("lib/libnvshmem_device.a", "nvidia-nvshmem-cu13")


def _need(pattern: str, wheel: str) -> Path:
    found = locate(pattern)
    if found is None:
        raise MissingToolError(f"{pattern} is not here: pip install {wheel}")
    return found
