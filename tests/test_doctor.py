"""What `commdsl doctor` says of a machine: ok is what was tried and works, all else says what to do.

Assumes a checkout. Breaks one thing at a time, by fakes where this machine has it whole. Does not run on GPUs.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import commdsl.runtime
from commdsl.build import nvrtc
from commdsl.commands import doctor
from commdsl.commands.cli import run_command
from commdsl.commands.doctor import Finding, State
from commdsl.language.diagnostics import InternalError
from commdsl.machine.config import Config, from_environment

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return from_environment({"COMMDSL_CACHE_DIR": str(tmp_path / "cache")})


def of(found: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


def test_what_works_was_tried(config: Config) -> None:
    """The cache was written, memory shared, a library loaded, a kernel built and linked: nothing is ticked unseen."""
    found = of((*doctor.probe_cache(config), *doctor.probe_shared_memory(config), *doctor.probe_compiler(config)))

    assert "written and read" in found["cache folder"].seen
    assert "two mappings" in found["shared memory"].seen
    assert "built and loaded" in found["C++ compiler"].seen
    assert {one.state for one in found.values()} == {State.OK}
    built = of(doctor.probe_cuda_build(config))
    assert "a kernel for sm_90 was built" in built["NVRTC"].seen
    assert "linked with libnvshmem_device" in built["nvJitLink"].seen


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [("COMMDSL_TIMEOUT", "abc", "settings"), ("CXX", "nosuch", "C++ compiler"), ("CXX", "'unclosed", "C++ compiler")],
)
def test_broken(variable: str, value: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """What is broken says so, with what to do, and the exit code is 1; all else is tried nevertheless."""
    monkeypatch.setenv(variable, value)
    assert run_command(["doctor", "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}

    assert (found[name]["state"], bool(found[name]["todo"])) == ("broken", True)
    assert value in found[name]["seen"]
    assert found["cache folder"]["state"] == "ok"
    assert [one["name"] for one in found.values() if one["state"] == "broken"] == [name]


def test_broken_in_words(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Printed, a line says what is broken, and another below what to do."""
    monkeypatch.setattr(doctor, "PROBES", ())
    monkeypatch.setenv("COMMDSL_DEBUG", "yes")
    assert run_command(["doctor"]) == 1
    said = capsys.readouterr().out

    assert "✗ settings  broken: error[C971]: COMMDSL_DEBUG is 0 or 1, not `yes`" in said
    assert "To mend what is broken:\n  settings" in said


def test_ignored(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A variable that is no setting is listed, with what is meant, and is no fault."""
    monkeypatch.setattr(doctor, "PROBES", ())
    monkeypatch.setenv("COMMDSL_DEBIG", "1")
    assert run_command(["doctor"]) == 0
    said = capsys.readouterr().out

    assert "! COMMDSL_DEBIG  ignored: COMMDSL_DEBIG is not a setting and changes nothing; did you mean" in said
    assert "To mend what is ignored:\n  COMMDSL_DEBIG, to set what README.md lists: unset it" in said


def test_packages_of_every_extra(config: Config) -> None:
    """What an extra installs is listed with its purpose, or tried; `test` is for the tests alone."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [(one, extra) for extra, packages in extras.items() if extra != "test" for one in packages]
    names = {(re.split(r"[<>=;,! ]", one)[0], extra) for one, extra in wanted}
    tried = {("nvidia-cuda-nvrtc", "cuda"), ("nvidia-nvjitlink", "cuda"), ("torch", "cuda")}
    found = list(doctor.probe_packages(config))

    assert {(package, extra) for _, package, _, extra in doctor.PACKAGES} == names - tried
    assert [finding.name for finding in found] == [name for name, *_ in doctor.PACKAGES]
    assert all(finding.purpose for finding in found)
    assert all("pip install" in finding.todo for finding in found if finding.state is State.MISSING)


def test_compiler_without_a_linker(tmp_path: Path, config: Config) -> None:
    """A compiler that answers and cannot build a library is broken."""
    fake = tmp_path / "c++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "c++ 1.0"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    found = of(doctor.probe_compiler(from_environment({"CXX": str(fake)})))

    assert found["C++ compiler"].state is State.BROKEN
    assert "c++ 1.0" in found["C++ compiler"].seen


def test_cache_of_others(tmp_path: Path) -> None:
    """A cache that others may write is broken, and says whose it has to be."""
    tmp_path.chmod(0o777)
    finding = of(doctor.probe_cache(from_environment({"COMMDSL_CACHE_DIR": str(tmp_path)})))["cache folder"]

    assert finding.state is State.BROKEN
    assert "others may write" in finding.seen


def test_old_linker(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """An nvJitLink of CUDA 12, which cannot link what NVRTC 13 builds, is broken; so is one that refuses."""
    real = nvrtc.load

    class Old:
        """It has a version, and the functions of its own only."""

        def nvJitLinkVersion(self, major: Any, minor: Any) -> int:  # noqa: N802 - its name there
            major._obj.value, minor._obj.value = 12, 4
            return 0

    monkeypatch.setattr(nvrtc, "load", lambda library: Old() if library is nvrtc.NVJITLINK else real(library))
    nvrtc.linker_version.cache_clear()
    finding = of(doctor.probe_cuda_build(config))["nvJitLink"]
    nvrtc.linker_version.cache_clear()
    assert finding.state is State.BROKEN
    assert "nvJitLink 12.4 is too old" in finding.seen
    assert finding.todo == "pip install 'commdsl[cuda]'"
    monkeypatch.undo()

    def refuse(*_: object) -> bytes:
        raise InternalError("nvJitLink 13.0 refused libnvshmem_device.a: error 4")

    monkeypatch.setattr(nvrtc, "link", refuse)
    finding = of(doctor.probe_cuda_build(config))["nvJitLink"]
    assert (finding.state, "new enough" in finding.todo) == (State.BROKEN, True)


def test_nothing_to_build_with(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """What is not installed is missing, with the words that install it, and no fault."""

    def absent(library: nvrtc.Library) -> object:
        raise nvrtc.MissingToolError(f"{library.stem} is not here: pip install {library.wheel}")

    monkeypatch.setattr(nvrtc, "load", absent)
    found = of(doctor.probe_cuda_build(config))
    assert {finding.state for finding in found.values()} == {State.MISSING}
    assert found["NVRTC"].seen.startswith("libnvrtc.so is not here")


def test_what_nobody_thought_of(config: Config) -> None:
    """A probe that fails in its own way is a finding, not a traceback."""

    def probe(_: Config) -> Any:
        raise RuntimeError("the sky\nfell")

    (finding,) = doctor.guarded("sky", probe, config)
    assert (finding.name, finding.state, finding.seen) == ("sky", State.BROKEN, "the sky fell")


# --- GPUs -------------------------------------------------------------------------------------------------------------


class Driver(ModuleType):
    """The driver's bindings, of two GPUs."""

    def __init__(self, sees: bool, shares: bool) -> None:
        super().__init__("driver")
        self.sees, self.shares, self.made = sees, shares, 0
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self.CUmemAllocationProp = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802 - their names there, as below
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, 2

    def cuDeviceCanAccessPeer(self, one: int, other: int) -> tuple[int, int]:  # noqa: N802
        return 0, int(self.sees or one > other)

    def cuMemGetAllocationGranularity(self, wanted: Any, flag: int) -> tuple[int, int]:  # noqa: N802
        return 0, 2 << 20

    def cuMemCreate(self, size: int, wanted: Any, flags: int) -> tuple[int, str]:  # noqa: N802
        self.made += 1
        return 0, f"memory of {wanted.location.id}"

    def cuMemExportToShareableHandle(self, memory: str, kind: int, flags: int) -> tuple[int, ...]:  # noqa: N802
        return (0, os.open(os.devnull, os.O_RDONLY)) if self.shares else (801, 0)

    def cuMemRelease(self, memory: str) -> tuple[int]:  # noqa: N802
        self.made -= 1
        return (0,)


def forget_gpus() -> None:
    """The next import of the module looks for the driver's bindings again."""
    sys.modules.pop("commdsl.runtime.gpus", None)
    if hasattr(commdsl.runtime, "gpus"):
        del commdsl.runtime.gpus


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def installed(*, sees: bool = True, shares: bool = True) -> Driver:
        made = Driver(sees, shares)
        bindings = ModuleType("cuda.bindings")
        bindings.driver = made  # type: ignore[attr-defined]  # as an import of it would do
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
        forget_gpus()
        return made

    yield installed
    forget_gpus()


def test_gpus_together(two_gpus: Any) -> None:
    """GPUs that see each other and pass memory on are ticked, and keep nothing of what was made for it."""
    driver, before = two_gpus(), len(os.listdir("/proc/self/fd"))
    found = of(doctor.shared_gpus())

    assert found["peer access"].seen == "all 2 GPUs see each other"
    assert found["shared GPU memory"].seen == "memory of 2 GPUs was made and passed on"
    assert {finding.state for finding in found.values()} == {State.OK}
    assert (driver.made, len(os.listdir("/proc/self/fd"))) == (0, before)


def test_gpus_apart(two_gpus: Any) -> None:
    """A pair that does not see each other is named, and so is the call of the driver that fails."""
    two_gpus(sees=False)
    assert of(doctor.shared_gpus())["peer access"].seen == "not 0 -> 1"
    driver = two_gpus(shares=False)
    finding = of(doctor.shared_gpus())["shared GPU memory"]
    assert (finding.state, finding.seen) == (State.BROKEN, "cuMemExportToShareableHandle failed: 801")
    assert driver.made == 0


def test_gpus_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver's bindings it is missing, with what installs them."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    forget_gpus()
    (finding,) = doctor.shared_gpus()
    assert (finding.state, finding.todo) == (State.MISSING, "pip install 'commdsl[cuda]'")
