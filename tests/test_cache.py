"""The build cache: keys, races, failures, and where it may be."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import commdsl
from commdsl.build import cache
from commdsl.language.diagnostics import InternalError
from commdsl.machine.config import from_environment


def test_key_separates_its_parts() -> None:
    """Moving a character from one part to the next is another key; the same parts are the same key."""
    assert cache.key(["ab", "c"]) == cache.key(["ab", "c"])
    assert len({cache.key(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], [])}) == 5


def test_builds_once(tmp_path: Path) -> None:
    """The second caller finds the folder of the first."""
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "result").write_text("x")

    first = cache.entry(tmp_path, cache.key(["a"]), build)
    assert cache.entry(tmp_path, cache.key(["a"]), build) == first
    assert (first / "result").read_text() == "x"
    assert len(builds) == 1


def test_one_builds_for_all(tmp_path: Path) -> None:
    """Callers that ask at the same time get one folder, whole, from one build; nothing half built is left."""
    together = threading.Barrier(4)
    builds: list[Path] = []
    found: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "first").write_text("1")
        time.sleep(0.05)
        (folder / "second").write_text("2")

    def ask() -> None:
        together.wait(timeout=10)
        found.append(cache.entry(tmp_path, cache.key(["a"]), build))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert {path.name for path in found[0].iterdir()} == {"first", "second"}
    assert [path for path in found[0].parent.iterdir() if path.is_dir()] == [found[0]]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """What did not finish is not found later: not its folder, nor what it wrote; and the next caller builds anew."""

    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise InternalError("no")

    with pytest.raises(InternalError):
        cache.entry(tmp_path, cache.key(["a"]), build)
    assert list(tmp_path.rglob("half")) == []
    assert list(cache.entry(tmp_path, cache.key(["a"]), lambda folder: None).iterdir()) == []


def test_never_under_the_package() -> None:
    """A cache inside the package would be shipped with it."""
    inside = Path(commdsl.__file__).parent / "cache"
    with pytest.raises(InternalError):
        cache.entry(inside, cache.key(["a"]), lambda folder: None)
    assert not inside.exists()


def test_config_reads_the_environment(tmp_path: Path) -> None:
    """Every variable has its effect, and a value that means nothing is refused."""
    config = from_environment(
        {"COMMDSL_CACHE_DIR": str(tmp_path), "COMMDSL_TIMEOUT": "2.5", "COMMDSL_DEBUG": "1", "CXX": " clang++ -m64 "}
    )
    assert (config.cache_dir, config.timeout, config.debug, config.cxx) == (tmp_path, 2.5, True, "clang++ -m64")
    plain = from_environment({})
    assert (plain.cache_dir, plain.timeout, plain.debug) == (Path.home() / ".cache" / "commdsl", None, False)
    for name, value in (("COMMDSL_TIMEOUT", "soon"), ("COMMDSL_TIMEOUT", "-1"), ("COMMDSL_DEBUG", "yes")):
        with pytest.raises(ValueError, match=name):
            from_environment({name: value})
