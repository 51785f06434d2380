"""Turns this machine into a list of what commdsl can do on it, each thing tried, and what to do about the rest.

Assumes nothing is installed but the core. Does not fail: what breaks while it is tried is reported as broken, what is
not there as missing. Leaves nothing behind, and asks torch nothing: its import alone takes seconds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

from commdsl.build import host, nvrtc
from commdsl.commands import output
from commdsl.commands.output import Exit
from commdsl.language.diagnostics import InternalError
from commdsl.machine import cache, resources
from commdsl.machine.config import Config, from_environment, unread
from commdsl.machine.errors import ConfigError, Error, MissingToolError
from commdsl.machine.printable import printable
from commdsl.machine.private import work_folder

PROBE_SECONDS = 60
HOST_PROBE = 'extern "C" int probe() { return 7; }\n'
RACE_PROBE = "#include <thread>\nint main() { std::thread t([] {}); t.join(); return 0; }\n"
GPU_PROBE = 'extern "C" __global__ void probe(int* x) { *x = 7; }\n'
CUDA = "pip install 'commdsl[cuda]'"
UNSEEN = "PEER TO PEER is off, or the GPUs hang on different roots: see `nvidia-smi topo -p2p r`"


class State(StrEnum):
    OK = "ok"
    MISSING = "missing"
    IGNORED = "ignored"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing, how it is, what was seen, what it is for, and what to do where it is not ok."""

    name: str
    state: State
    seen: str
    purpose: str
    todo: str = ""


def doctor(*, as_json: bool) -> Exit:
    """Prints every finding. What is missing is no fault, as GPUs may be; what is broken is exit code 1."""
    found: list[Finding] = []
    config, settings = settings_of_process()
    found += settings
    with output.progress("looking around", len(PROBES)) as advance:
        for name, probe in PROBES:
            found += guarded(name, probe, config)
            advance("looking around")
    broken = any(finding.state is State.BROKEN for finding in found)
    if as_json:
        output.say_json([asdict(finding) for finding in found])
    else:
        show(found)
    return Exit.DIAGNOSTICS if broken else Exit.FINE


def show(found: list[Finding]) -> None:
    """A line each, then what to do."""
    marks = {State.OK: output.style("✓", "good"), State.MISSING: output.style("·", "faint")}
    marks |= {State.BROKEN: output.style("✗", "bad"), State.IGNORED: output.style("!", "bad")}
    width = max(len(finding.name) for finding in found)
    for finding in found:
        state = "" if finding.state is State.OK else f"{finding.state}: "
        output.say(f"{marks[finding.state]} {finding.name:<{width}}  {state}{printable(finding.seen)}", styled=True)
    titles = {State.BROKEN: "To mend what is broken:", State.IGNORED: "To mend what is ignored:"}
    for state, title in (titles | {State.MISSING: "To get what is missing:"}).items():
        rows = [finding for finding in found if finding.state is state]
        if rows:
            output.say(f"\n{title}")
        for finding in rows:
            output.say(f"  {finding.name}, to {finding.purpose}: {finding.todo}")


def settings_of_process() -> tuple[Config, list[Finding]]:
    """Return the settings, and what is wrong with them: with one that cannot be read the rest is tried without any."""
    purpose = "set what README.md lists"
    ignored = [Finding(name, State.IGNORED, seen, purpose, "unset it") for name, seen in unread().items()]
    try:
        return from_environment(), [Finding("settings", State.OK, "every variable can be read", purpose), *ignored]
    except ConfigError as error:
        found = Finding("settings", State.BROKEN, str(error), purpose, "set it anew, or unset it")
        return from_environment({}), [found, *ignored]


def guarded(name: str, probe: Callable[[Config], Iterator[Finding]], config: Config) -> Iterator[Finding]:
    """What a probe finds; what it did not expect, as a finding."""
    try:
        yield from probe(config)
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        yield Finding(name, State.BROKEN, said[:200], "be tried", "see what it says")


def probe_python(config: Config) -> Iterator[Finding]:
    seen = (
        f"commdsl {resources.version()}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    yield Finding("commdsl", State.OK, seen, "be here")


def probe_cache(config: Config) -> Iterator[Finding]:
    purpose = "keep built kernels"
    wrong = cache.trouble(config.cache_dir)
    if wrong:
        todo = "mend that, or set COMMDSL_CACHE_DIR to a folder of your own"
        yield Finding("cache folder", State.BROKEN, f"{config.cache_dir}: {wrong}", purpose, todo)
        return
    yield Finding("cache folder", State.OK, f"{config.cache_dir}, an entry was written and read", purpose)


def probe_shared_memory(config: Config) -> Iterator[Finding]:
    """As host ranks share it: memory without a name, reserved, passed on and written through both ends."""
    purpose, name = "run host ranks as processes", "shared memory"
    handle = os.memfd_create("commdsl-doctor")
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        try:
            os.posix_fallocate(handle, 0, mmap.PAGESIZE)
            socket.send_fds(here, [b"x"], [handle])
            _, (passed,), _, _ = socket.recv_fds(there, 1, 1)
        except OSError as error:
            yield Finding(name, State.BROKEN, str(error.strerror), purpose, "allow more memory (ulimit, cgroup)")
            return
        finally:
            os.close(handle)
    try:
        with mmap.mmap(passed, mmap.PAGESIZE) as one, mmap.mmap(passed, mmap.PAGESIZE) as other:
            one[0] = 7
            same = other[0] == 7
    finally:
        os.close(passed)
    seen = "written and read through two mappings of a memfd that was passed on"
    yield Finding(name, State.OK if same else State.BROKEN, seen, purpose, "" if same else "use another kernel")


def probe_compiler(config: Config) -> Iterator[Finding]:
    name, purpose, sanitizer = "C++ compiler", "run emitted kernels on host ranks", "run --sanitize (ThreadSanitizer)"
    try:
        compiler = host.find_compiler(config)
    except ConfigError as error:
        yield Finding(name, State.BROKEN, str(error), purpose, "set CXX to a C++ compiler, or unset it")
        yield Finding("ThreadSanitizer", State.MISSING, "needs a C++ compiler", sanitizer, "apt install g++")
        return
    except host.NoHostCompilerError:
        install = "apt install g++, or pip install 'commdsl[cxx]' (ziglang)"
        yield Finding(name, State.MISSING, "g++, clang++ and ziglang are not here", purpose, install)
        yield Finding("ThreadSanitizer", State.MISSING, "needs a C++ compiler", sanitizer, "apt install g++")
        return
    seen, wrong = f"{' '.join(compiler.command)}: {compiler.version}", library_trouble(compiler.command)
    if wrong:
        yield Finding(name, State.BROKEN, f"{seen}: {wrong}", purpose, "install it whole (apt install g++), or set CXX")
    else:
        yield Finding(name, State.OK, f"{seen}; a library was built and loaded", purpose)
    if has_thread_sanitizer(compiler.command):
        yield Finding("ThreadSanitizer", State.OK, "a program built with -fsanitize=thread runs", sanitizer)
    else:
        todo = "apt install g++ (it brings libtsan)"
        yield Finding("ThreadSanitizer", State.MISSING, "the compiler cannot build or run it", sanitizer, todo)


def library_trouble(command: tuple[str, ...]) -> str:
    """What is wrong where a library is built and loaded as kernels are, nothing where it works."""
    with work_folder() as folder:
        source, library = folder / "probe.cpp", folder / "probe.so"
        source.write_text(HOST_PROBE)
        if not runs([*command, *host.FLAGS, "-shared", "-o", str(library), str(source)]):
            return "it cannot build a library"
        try:
            return "" if ctypes.CDLL(str(library)).probe() == 7 else "a library that it built is wrong"
        except OSError as error:
            return f"what it built cannot be loaded: {error}"


def has_thread_sanitizer(command: tuple[str, ...]) -> bool:
    """Builds and runs a program of two threads."""
    with work_folder() as folder:
        source, program = folder / "probe.cpp", folder / "probe"
        source.write_text(RACE_PROBE)
        build = [*command, "-fsanitize=thread", "-pthread", "-o", str(program), str(source)]
        return runs(build) and runs([str(program)])


def runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def probe_cuda_build(config: Config) -> Iterator[Finding]:
    """NVRTC makes a cubin, nvJitLink links it with NVSHMEM's library for devices."""
    purpose, linking = "build kernels for the GPU (needs none)", "link kernels that reach other machines"
    try:
        cubin = nvrtc.compile_cubin("probe.cu", GPU_PROBE, [f"-arch={nvrtc.ARCH}", "-rdc=true"])
    except MissingToolError as error:
        yield Finding("NVRTC", State.MISSING, said(error), purpose, CUDA)
        yield Finding("nvJitLink", State.MISSING, "needs NVRTC", linking, CUDA)
        return
    except InternalError as error:
        yield Finding("NVRTC", State.BROKEN, f"{nvrtc.version()}: {said(error)}", purpose, CUDA)
        return
    yield Finding("NVRTC", State.OK, f"{nvrtc.version()}, a kernel for {nvrtc.ARCH} was built", purpose)
    linker = ""
    try:
        library, linker = nvrtc.device_library(), nvrtc.linker_version()
        nvrtc.link(nvrtc.ARCH, [("probe", cubin)], [library])
    except MissingToolError as error:
        yield Finding("nvJitLink", State.BROKEN if linker else State.MISSING, said(error), linking, CUDA)
    except InternalError as error:
        yield Finding("nvJitLink", State.BROKEN, said(error), linking, f"{CUDA}, which brings one that is new enough")
    else:
        seen = f"{linker}, a kernel was linked with libnvshmem_device"
        yield Finding("nvJitLink", State.OK, seen, linking)


def said(error: Exception) -> str:
    """The first line, without the code."""
    return str(error).split("\n")[0].partition("]: ")[2] or str(error).split("\n")[0]


PACKAGES = (
    ("torch", "torch", "call schedules as torch ops", "torch"),
    ("CuPy", "cupy-cuda13x", "load kernels on the GPU", "cuda"),
    ("nvshmem4py", "nvshmem4py-cu13", "reach GPUs of other machines", "cuda"),
    ("NVSHMEM", "nvidia-nvshmem-cu13", "reach GPUs of other machines", "cuda"),
    ("cuda-bindings", "cuda-bindings", "share memory between GPUs", "cuda"),
    ("CUDA headers", "nvidia-cuda-runtime", "build kernels for the GPU (needs none)", "cuda"),
    ("CCCL headers", "nvidia-cuda-cccl", "build kernels for the GPU (needs none)", "cuda"),
    ("ziglang", "ziglang", "run emitted kernels on host ranks where no other C++ compiler is installed", "cxx"),
    ("scipy", "scipy", "prove lower bounds of time on any machine, and synthesise schedules (commdsl synth)", "bounds"),
    ("pygls", "pygls", "answer editors (commdsl lsp)", "lsp"),
)
"""Name, package, purpose and extra of every package that an extra installs. NVRTC and nvJitLink are tried instead, and
those of the extra `test` serve the tests alone.
"""


def probe_packages(config: Config) -> Iterator[Finding]:
    """Look for the packages of the extras; each finding says what the package is for."""
    for name, package, purpose, extra in PACKAGES:
        install = f"pip install 'commdsl[{extra}]'"
        try:
            yield Finding(name, State.OK, f"{importlib.metadata.version(package)} is installed", purpose)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, State.MISSING, "not installed", purpose, install)


def probe_gpus(config: Config) -> Iterator[Finding]:
    """GPUs by the driver's own tool: asking torch would cost its import, and create contexts."""
    purpose, install = "run schedules on GPUs", "a machine with NVIDIA GPUs and their driver"
    names = query_nvidia("--query-gpu=name,memory.total", "--format=csv,noheader")
    if not names:
        yield Finding("GPUs", State.MISSING, "none that nvidia-smi sees", purpose, install)
        return
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    yield Finding("GPUs", State.OK, kinds, purpose)
    yield from shared_gpus()
    links = [line.strip() for line in query_nvidia("nvlink", "--status") if "GB/s" in line]
    seen = f"{len(links) // len(names)} links per GPU at {links[0].split(':')[-1].strip()}" if links else "none active"
    state, todo = (State.OK, "") if links else (State.MISSING, "GPUs joined by NVLink")
    yield Finding("NVLink", state, seen, "reach peers at full speed", todo)


def shared_gpus() -> Iterator[Finding]:
    """Whether they reach each other's memory, and whether it can be passed to other processes."""
    reach, share = "reach peers by plain loads and stores", "share memory between processes"
    try:
        from commdsl.runtime import gpus  # the driver's bindings, which are not everywhere
    except ImportError:
        yield Finding("shared GPU memory", State.MISSING, "needs cuda-bindings", share, CUDA)
        return
    try:
        count, blind = gpus.blind_pairs()
        wrong = ", ".join(f"{one} -> {other}" for one, other in blind)
        seen = f"not {wrong}" if blind else "the one there is" if count == 1 else f"all {count} GPUs see each other"
        yield Finding("peer access", State.BROKEN if blind else State.OK, seen, reach, UNSEEN if blind else "")
        for device in range(count):
            gpus.export(device)
        yield Finding("shared GPU memory", State.OK, f"memory of {count} GPUs was made and passed on", share)
    except Error as error:
        todo = "a driver of CUDA 12 or later, and in a container the capability `compute`"
        yield Finding("shared GPU memory", State.BROKEN, said(error), share, todo)


def query_nvidia(*arguments: str) -> list[str]:
    """The lines nvidia-smi prints, none where it is not there or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().split("\n") if done.returncode == 0 and done.stdout.strip() else []


PROBES: tuple[tuple[str, Callable[[Config], Iterator[Finding]]], ...] = (
    ("commdsl", probe_python),
    ("cache folder", probe_cache),
    ("shared memory", probe_shared_memory),
    ("C++ compiler", probe_compiler),
    ("NVRTC", probe_cuda_build),
    ("packages", probe_packages),
    ("GPUs", probe_gpus),
)
