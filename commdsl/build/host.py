"""Turns a kernel's text into a shared library for this machine's processor, with the first C++ compiler there is.

Assumes POSIX: pthreads and `dlopen`. Does not run what it built (`host_run` does). What a full disk or a limit of the
process keeps from being built is a CacheError or a ResourceError, as `machine.shortage` says.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from commdsl.build.emit import Emitted
from commdsl.build.headers import headers_digest, include_dir
from commdsl.language.diagnostics import InternalError
from commdsl.machine import cache
from commdsl.machine.config import Config
from commdsl.machine.errors import CacheError, ConfigError, MissingToolError
from commdsl.machine.private import work_folder
from commdsl.machine.resources import data_dir
from commdsl.machine.shortage import explained

Sources: TypeAlias = tuple[tuple[str, str], ...]
"""Texts by the names of files."""

ROOM = 4 << 20
"""Bytes; no library is larger."""

FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",  # a fused multiply-add rounds once where the GPU, the oracle and x86 round twice
    "-Wall",
    "-Wextra",
    "-Werror=return-type",
)

OPTIMIZED = "-O1"
"""Builds in three quarters of the time of -O2, and runs as fast: kernels copy and sum, and wait for memory."""

AT_ONCE = "-O0"
"""Builds in two thirds of the time of -O1: what runs a few times, to be compared, takes longer to build than to run."""

SANITIZE = (
    "-fsanitize=thread",
    "-g1",  # functions and lines: without it a report names only addresses
    "-fno-omit-frame-pointer",
    # ThreadSanitizer intercepts these calls; g++ would put copies of bounded length in line, out of its sight.
    "-fno-builtin-memcpy",
    "-fno-builtin-memmove",
)


class NoHostCompilerError(MissingToolError):
    """No C++ compiler on this machine; the interpreter still runs schedules."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; install g++ or clang++, or `pip install ziglang`")


@dataclass(frozen=True, slots=True)
class HostCompiler:
    command: tuple[str, ...]
    version: str


@explained("look for a C++ compiler")
def find_compiler(config: Config) -> HostCompiler:
    """$CXX when set, else g++, clang++, or the ziglang wheel; NoHostCompilerError where there is none.

    A $CXX that does not run is a mistake, not a hint: ConfigError.
    """
    if config.cxx:
        command = _words(config.cxx)
        version = _version(command)
        if version is None:
            raise ConfigError(f"CXX is `{config.cxx}`, which does not run: name a C++ compiler, or unset it")
        return HostCompiler(command, version)
    candidates: list[tuple[str, ...]] = [(path,) for name in ("g++", "clang++") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang") is not None:
        # Without -P, a folder `ziglang` where the user stands would run in place of the wheel.
        candidates.append((sys.executable, "-P", "-m", "ziglang", "c++"))
    for command in candidates:
        version = _version(command)
        if version is not None:
            return HostCompiler(command, version)
    raise NoHostCompilerError("this machine has no C++ compiler")


def _words(text: str) -> tuple[str, ...]:
    """As a shell would read it."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"CXX is `{text}`, and a shell could not read it ({error}): name a C++ compiler") from error


def _version(command: tuple[str, ...]) -> str | None:
    """The first line of what it says of itself; None where it does not run."""
    path = shutil.which(command[0])
    if path is None:
        return None
    written = os.stat(path)
    return _asked(command, path, (written.st_ino, written.st_mtime_ns, written.st_size))


@lru_cache(maxsize=16)
def _asked(command: tuple[str, ...], path: str, file: tuple[int, int, int]) -> str | None:
    """Asked once for as long as the file is the same: every set-up looks for the compiler, on every rank.

    Raises OSError where a limit of this process is reached: the file is not to blame, and may run the next time.
    """
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return done.stdout.split("\n")[0] if done.returncode == 0 else None


def build(emitted: Emitted, defines: tuple[str, ...], config: Config, level: str = OPTIMIZED) -> Path:
    """The shared library of one text, element type and reduction."""
    return _compile((("kernel.cpp", emitted.text),), "kernel.so", ("-shared", *_macros(defines)), config, level)


def build_runner(config: Config) -> Path:
    """The program that runs any library of `build` in a process of its own."""
    return _compile((("runner.cpp", _runner()),), "runner", (), config)


def build_sanitized(emitted: Emitted, defines: tuple[str, ...], config: Config) -> Path:
    """Kernel and runner as one program under ThreadSanitizer, whose runtime does not bear being loaded later."""
    flags = ("-DCOMMDSL_LINKED", *SANITIZE)
    runner = _compile((("runner.cpp", _runner()),), "runner.o", ("-c", *flags), config)
    return _compile((("kernel.cpp", emitted.text),), "sanitized", (*flags, *_macros(defines), str(runner)), config)


@explained("read the text of the runner")
def _runner() -> str:
    return (data_dir("templates") / "runner.cpp").read_text(encoding="utf-8")


def _macros(defines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"-D{define}" for define in defines)


@explained("build for this processor")
def _compile(sources: Sources, target: str, more: tuple[str, ...], config: Config, level: str = OPTIMIZED) -> Path:
    """One run of the compiler over named texts, or what an earlier one left in the cache."""
    compiler = find_compiler(config)
    flags = (*FLAGS, *((AT_ONCE, "-g") if config.debug else (level,)), *more)
    texts = tuple(part for source in sources for part in source)
    parts = (*texts, headers_digest(), *compiler.command, compiler.version, platform.machine(), target, *flags)

    return cache.entry(config.cache_dir, cache.key(parts), lambda: _made(compiler, flags, sources, target)) / target


def _made(compiler: HostCompiler, flags: tuple[str, ...], sources: Sources, target: str) -> dict[str, bytes]:
    """The texts, and what the compiler makes of them."""
    with work_folder() as folder:
        for name, text in sources:
            (folder / name).write_text(text, encoding="utf-8")
        names = [name for name, _ in sources]
        command = [*compiler.command, *flags, "-I", str(include_dir()), "-o", target, *names, "-ldl"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            _refuse_unless_room(folder, done.stderr)
            raise InternalError(f"the host compiler refused {_copy(*sources[0])}\n{shlex.join(command)}\n{done.stderr}")
        return {name: (folder / name).read_bytes() for name in (*names, target)}


NO_ROOM = ("No space left on device", "Cannot create temporary file")
NO_FILES = ("Too many open files", "out of file descriptors")


def _refuse_unless_room(folder: Path, said: str) -> None:
    """Raise CacheError or MissingToolError where the machine, and not the text, made a compiler fail.

    A compiler that has no room to write says so in its own words, if at all, and may have removed what filled the disk.
    """
    if any(words in said for words in NO_FILES):
        raise MissingToolError("the host compiler had too few file descriptors: raise the limit (`ulimit -n 1024`)")
    if any(words in said for words in NO_ROOM):
        raise CacheError(f"the host compiler had no room to write in {folder.parent}: set TMPDIR to a folder with more")
    try:
        (folder / "probe").write_bytes(bytes(ROOM))
    except OSError as error:
        raise CacheError(f"the host compiler cannot write to {folder.parent} ({error.strerror}): set TMPDIR") from error


def _copy(name: str, text: str) -> str:
    """A copy of a text that stays, to look at."""
    with suppress(OSError):  # what the compiler said is worth more
        handle, path = tempfile.mkstemp(prefix="commdsl-refused-", suffix=f"-{name}")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return path
    return name


@explained("load a library that was built")
def loaded(path: Path) -> ctypes.CDLL:
    """Return a library of `build`, loaded. Raises ResourceError where a limit of the process is reached."""
    return ctypes.CDLL(str(path))
