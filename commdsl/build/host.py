"""Turns a kernel's text into a shared library for this machine's processor, with the first C++ compiler there is.

Assumes POSIX: pthreads and `dlopen`. Does not run what it built (`host_run` does).
"""

from __future__ import annotations

import importlib.util
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from commdsl.build import cache
from commdsl.config import Config
from commdsl.diagnostics import InternalError
from commdsl.emit import Emitted, headers_digest, include_dir
from commdsl.resources import data_dir

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


class NoHostCompilerError(RuntimeError):
    """No C++ compiler on this machine; the interpreter still runs schedules."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; install g++ or clang++, or `pip install ziglang`")


@dataclass(frozen=True, slots=True)
class HostCompiler:
    command: tuple[str, ...]
    version: str


def find_compiler(config: Config) -> HostCompiler:
    """$CXX when set, else g++, clang++, or the ziglang wheel. A $CXX that does not run is a mistake, not a hint."""
    if config.cxx:
        command = tuple(shlex.split(config.cxx))
        version = _version(command)
        if version is None:
            raise NoHostCompilerError(f"CXX is `{config.cxx}`, which does not run")
        return HostCompiler(command, version)
    candidates: list[tuple[str, ...]] = [(path,) for name in ("g++", "clang++") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    for command in candidates:
        version = _version(command)
        if version is not None:
            return HostCompiler(command, version)
    raise NoHostCompilerError("this machine has no C++ compiler")


def _version(command: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0] if done.returncode == 0 else None


def build(emitted: Emitted, defines: tuple[str, ...], config: Config, *, sanitize: bool = False) -> Path:
    """The library of one text, element type and reduction; `sanitize` instruments it for ThreadSanitizer."""
    flags = (*FLAGS, *_mode(config, sanitize), "-shared", *(f"-D{define}" for define in defines))
    return _compile(emitted.text, "kernel.cpp", "kernel.so", flags, config)


def build_runner(config: Config, *, sanitize: bool = False) -> Path:
    """The program that runs any library of `build` in a process of its own; built alike, as one runtime serves both."""
    text = (data_dir("templates") / "runner.cpp").read_text(encoding="utf-8")
    return _compile(text, "runner.cpp", "runner", (*FLAGS, *_mode(config, sanitize), "-ldl"), config)


SANITIZE = (
    "-fsanitize=thread",
    "-g",  # without it a report names only addresses
    "-fno-omit-frame-pointer",
    # ThreadSanitizer intercepts these calls; g++ would put copies of bounded length in line, out of its sight.
    "-fno-builtin-memcpy",
    "-fno-builtin-memmove",
)


def _mode(config: Config, sanitize: bool) -> tuple[str, ...]:
    optimize = ("-O0", "-g") if config.debug else ("-O2",)
    return (*optimize, *(SANITIZE if sanitize else ()))


def _compile(text: str, source_name: str, target_name: str, flags: tuple[str, ...], config: Config) -> Path:
    compiler = find_compiler(config)
    parts = (text, headers_digest(), *compiler.command, compiler.version, platform.machine(), target_name, *flags)

    def fill(folder: Path) -> None:
        (folder / source_name).write_text(text, encoding="utf-8")
        command = [*compiler.command, *flags, "-I", str(include_dir()), "-o", target_name, source_name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            kept = config.cache_dir / f"failed-{source_name}"
            kept.write_text(text, encoding="utf-8")
            raise InternalError(f"the host compiler refused {kept}\n{shlex.join(command)}\n{done.stderr}")

    return cache.entry(config.cache_dir, cache.key(parts), fill) / target_name
