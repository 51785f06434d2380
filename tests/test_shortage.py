"""What a full disk, or a limit on open files, keeps from being built, kept or run: an error with a code and advice.

Assumes a C++ compiler. The limit on open files is real, raised by one descriptor at a time, so that each place fails
once; full disks are played at the calls of the system, or by a limit on the size of files.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import plans
import pytest
from plans import changed

import commdsl
from commdsl.build import headers, host, host_run, nvrtc
from commdsl.build.emit import Emitted, emit
from commdsl.machine import cache, private
from commdsl.machine.config import Config, from_environment
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.errors import CacheError, ResourceError

ROOT = Path(__file__).parents[1]
ANSWER = Emitted("answer", 'extern "C" int answer() { return 42; }\n', "", "")
EMPTY = Emitted("empty", 'extern "C" __global__ void empty() {}', "", "")


@contextmanager
def most_files(more: int) -> Iterator[None]:
    """As many descriptors as are open now, and some more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def found_compiler(config: Config) -> object:
    host._asked.cache_clear()
    return host.find_compiler(config)


def run(config: Config, mode: str = "processes") -> object:
    plan = changed(plans.build(*plans.ring_allgather(2, 2, True)[:3], rotation=2), has_reduction=False)
    given = [np.zeros(100, np.uint8)] * 2
    return host_run.run(plan, emit(plan), {"x": given}, BY_NAME["uint8"], mode=mode, config=config)


WORK: dict[str, Callable[[Config], object]] = {
    "a compiler is found": found_compiler,
    "a library is built": lambda config: host.build(ANSWER, (), config),
    "a program is built": host.build_runner,
    "a library is loaded": lambda config: host.loaded(host.build(ANSWER, (), config)),
    "a cubin is built": lambda config: nvrtc.build(EMPTY, (), config),
    "headers are read": lambda config: (headers._digest.cache_clear(), headers.headers_digest()),
    "an entry is kept": lambda config: cache.entry(config.cache_dir, cache.key(["a"]), lambda: {"result": b"x"}),
    "an object is kept": lambda config: cache.kept(config.cache_dir, cache.key(["a"]), int, lambda: 7),
    "entries are listed": lambda config: cache.num_bytes(config.cache_dir or Path()),
    "the cache is cleared": lambda config: cache.clear(config.cache_dir or Path()),
    "ranks are processes": run,
    "ranks are threads": lambda config: run(config, "threads"),
}


@pytest.mark.parametrize("work", WORK)
def test_no_descriptors(work: str, tmp_path: Path) -> None:
    """With few descriptors left, whatever their number, work is done or refused with C975 or C970, and done later."""
    said = []
    for more in range(12):
        config = replace(from_environment(), cache_dir=tmp_path / str(more))
        cache.entry(config.cache_dir, cache.key(["before"]), lambda: {"result": b"x"})
        cache._told().clear()
        with most_files(more):
            try:
                WORK[work](config)
            except commdsl.Error as error:
                said.append(str(error))
        WORK[work](config)

    assert all("error[C97" in one for one in said)
    assert work == "an object is kept" or any("Too many open files" in one for one in said)


def test_a_limit_is_no_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that cannot be started for want of processes is not taken for one that is not there, now or later."""
    real = subprocess.run

    def none(*said: object, **more: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    host._asked.cache_clear()
    monkeypatch.setattr(subprocess, "run", none)
    with pytest.raises(ResourceError, match=r"C975.*Resource temporarily unavailable.*ulimit -v -u"):
        host.find_compiler(from_environment({}))
    monkeypatch.setattr(subprocess, "run", real)
    assert host.find_compiler(from_environment({})).version


def test_no_descriptors_for_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that cannot be loaded for want of descriptors is not taken for one that is not installed."""
    nvrtc.load.cache_clear()
    with most_files(0), pytest.raises(ResourceError, match=r"cannot load libnvJitLink.*ulimit -n"):
        nvrtc.load(nvrtc.NVJITLINK)
    assert nvrtc.load(nvrtc.NVJITLINK) is not None


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@pytest.mark.parametrize("reason", FULL, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["mkdtemp", "gettempdir"])
def test_no_temporary_folder(reason: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be made, the error says why and which variable names another place."""

    def none(*said: object, **more: object) -> None:
        raise OSError(reason, os.strerror(reason), "/somewhere")

    config = replace(from_environment(), cache_dir=tmp_path)
    host.find_compiler(config)
    private._folder_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, call, none)
        for build in (lambda: host.build(ANSWER, (), config), private.process_folder):
            with pytest.raises(CacheError, match=f"C970.*{os.strerror(reason)}.*/somewhere.*TMPDIR"):
                build()


def test_a_full_temporary_folder(tmp_path: Path) -> None:
    """With a limit on the size of files, as on a full disk, a build is refused with C970, whoever meets the limit."""
    code = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import commdsl
from commdsl.build import host
from commdsl.build.emit import Emitted
from commdsl.machine.config import from_environment
config = replace(from_environment(), cache_dir=Path(sys.argv[1]))
text = 'extern "C" int answer() { return 42; }' + " " * int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    print(host.build(Emitted("answer", text, "", ""), (), config))
except commdsl.CacheError as error:
    print(error)
"""
    for spaces in ("0", "9000"):
        words = [sys.executable, "-c", code, str(tmp_path), spaces]
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert said.startswith("error[C970]"), said
        assert "TMPDIR" in said


def test_an_arena_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ranks share is refused where its folder has no room, before a rank would be killed by a signal."""
    run(from_environment())
    real = os.statvfs

    def full(path: str) -> os.statvfs_result:
        fields = list(real(path))
        fields[4] = 0  # of free blocks those for anybody
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(CacheError, match=r"cannot run host ranks: No space left on device.*TMPDIR"):
        run(from_environment())
    run(from_environment(), "threads")


def test_a_temporary_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others may rename what compilers write, nothing is built."""
    with tempfile.TemporaryDirectory(prefix="commdsl-test-") as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(CacheError, match=r"others may write .*sticky bit.*TMPDIR"):
            host.build(ANSWER, (), replace(from_environment(), cache_dir=tmp_path))
        Path(folder).chmod(0o1777)
        assert host.build(ANSWER, (), replace(from_environment(), cache_dir=tmp_path)).is_file()
