"""Turns this machine into a list of what commdsl can do on it, and what to install for the rest.

Assumes nothing is installed but the core. Does not fail: what breaks while it is looked at is reported as missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from commdsl.build import host, nvrtc
from commdsl.commands import output
from commdsl.commands.output import Exit
from commdsl.machine import cache
from commdsl.machine.config import from_environment
from commdsl.machine.errors import MissingToolError

PROBE_SECONDS = 60
RACE_PROBE = "#include <thread>\nint main() { std::thread t([] {}); t.join(); return 0; }\n"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing, whether it is there, what was seen, what it is for, and how to get it."""

    name: str
    present: bool
    seen: str
    purpose: str
    install: str


def doctor(*, as_json: bool) -> Exit:
    """Prints every finding. Exit code 0 also where things are missing: a machine without a GPU is not at fault."""
    found: list[Finding] = []
    with output.progress("looking around", len(PROBES)) as advance:
        for probe in PROBES:
            found += probe()
            advance("looking around")
    if as_json:
        output.say_json([asdict(finding) for finding in found])
        return Exit.FINE
    width = max(len(finding.name) for finding in found)
    for finding in found:
        mark = output.style("✓", "good") if finding.present else output.style("·", "faint")
        output.say(f"{mark} {finding.name:<{width}}  {finding.seen}")
    missing = [finding for finding in found if not finding.present]
    if missing:
        output.say("\nTo get the rest:")
        for finding in missing:
            output.say(f"  {finding.purpose}: {finding.install}")
    return Exit.FINE


def probe_python() -> Iterator[Finding]:
    version = importlib.metadata.version("commdsl") if installed("commdsl") else "a checkout"
    seen = f"commdsl {version}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("commdsl", True, seen, "", "")


def probe_cache() -> Iterator[Finding]:
    folder = from_environment().cache_dir
    wrong = cache.trouble(folder)
    seen = f"{folder}: {wrong}" if wrong else str(folder)
    yield Finding("cache folder", not wrong, seen, "keep built kernels", "set COMMDSL_CACHE_DIR" if wrong else "")


def probe_compiler() -> Iterator[Finding]:
    purpose = "run emitted kernels on host ranks"
    install = "apt install g++, or pip install 'commdsl[cxx]' (ziglang)"
    sanitizer = "run --sanitize (ThreadSanitizer)"
    try:
        compiler = host.find_compiler(from_environment())
    except host.NoHostCompilerError as error:
        yield Finding("C++ compiler", False, str(error).split(";")[0], purpose, install)
        yield Finding("ThreadSanitizer", False, "needs a C++ compiler", sanitizer, "apt install g++")
        return
    yield Finding("C++ compiler", True, f"{' '.join(compiler.command)}: {compiler.version}", purpose, "")
    works = has_thread_sanitizer(compiler.command)
    seen = "a program built with -fsanitize=thread runs" if works else "the compiler cannot build or run it"
    yield Finding("ThreadSanitizer", works, seen, sanitizer, "apt install g++ (it brings libtsan)")


def has_thread_sanitizer(command: tuple[str, ...]) -> bool:
    """Builds and runs a program of two threads."""
    with tempfile.TemporaryDirectory(prefix="commdsl-") as folder:
        source, program = Path(folder) / "probe.cpp", Path(folder) / "probe"
        source.write_text(RACE_PROBE)
        build = [*command, "-fsanitize=thread", "-pthread", "-o", str(program), str(source)]
        return runs(build) and runs([str(program)])


def runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def probe_cuda_build() -> Iterator[Finding]:
    install = "pip install 'commdsl[cuda]'"
    for name, look in (("NVRTC", nvrtc.version), ("nvJitLink", nvrtc.linker_version)):
        purpose = "build kernels for the GPU (needs none)" if name == "NVRTC" else "link the NVSHMEM transport"
        try:
            yield Finding(name, True, look(), purpose, "")
        except MissingToolError as error:
            yield Finding(name, False, str(error).split(":")[0], purpose, install)


def probe_packages() -> Iterator[Finding]:
    rows = (
        ("torch", "torch", "call schedules as torch ops", "pip install 'commdsl[torch]'"),
        ("CuPy", "cupy-cuda13x", "load kernels on the GPU", "pip install 'commdsl[cuda]'"),
        ("nvshmem4py", "nvshmem4py-cu13", "symmetric memory between GPUs", "pip install 'commdsl[cuda]'"),
        ("NVSHMEM", "nvidia-nvshmem-cu13", "symmetric memory between GPUs", "pip install 'commdsl[cuda]'"),
        ("cuda-bindings", "cuda-bindings", "talk to the driver", "pip install 'commdsl[cuda]'"),
    )
    for name, package, purpose, install in rows:
        there = installed(package)
        seen = importlib.metadata.version(package) if there else "not installed"
        yield Finding(name, there, seen, purpose, install)


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def probe_gpus() -> Iterator[Finding]:
    """GPUs by the driver's own tool: asking torch would cost its import, and create contexts."""
    purpose, install = "run schedules on GPUs", "a machine with NVIDIA GPUs and their driver"
    names = query_nvidia("--query-gpu=name,memory.total", "--format=csv,noheader")
    if not names:
        yield Finding("GPUs", False, "none that nvidia-smi sees", purpose, install)
        return
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    yield Finding("GPUs", True, kinds, purpose, "")
    links = [line.strip() for line in query_nvidia("nvlink", "--status") if "GB/s" in line]
    seen = f"{len(links) // len(names)} links per GPU at {links[0].split(':')[-1].strip()}" if links else "none active"
    yield Finding("NVLink", bool(links), seen, "reach peers at full speed", "GPUs joined by NVLink")


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


PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    probe_python,
    probe_cache,
    probe_compiler,
    probe_cuda_build,
    probe_packages,
    probe_gpus,
)
