"""What the builders keep heals: Programs, libraries, cubins and NVSHMEM's shim, cut at any length, are made anew.

Assumes a cache of the module's own, filled once; NVRTC's output is kept aside, so that healing costs no build. Does not
damage entries in other ways; test_cache.py does.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from commdsl.build import host, nvrtc
from commdsl.build.emit import Emitted
from commdsl.machine import cache
from commdsl.machine.config import Config, from_environment
from commdsl.program.memory import Transport
from commdsl.runtime.program import Definition, digest_of, program

ROOT = Path(__file__).parents[1]
ONESHOT = ROOT / "schedules" / "collectives" / "allreduce_oneshot.comm"
LENGTHS = 20
ANSWER = Emitted("answer", 'extern "C" int answer() { return 42; }\n', "", "")


@dataclass(frozen=True)
class Kind:
    """A file of the cache, and what asks for it: a number that is the same whenever the file is right."""

    file: str
    use: Callable[[Config], object]


def answer(config: Config) -> object:
    path = host.build(ANSWER, (), config)
    return ctypes.CDLL(str(path)).answer(), path.read_bytes()


def cubin(config: Config) -> object:
    return nvrtc.build(Emitted("empty", 'extern "C" __global__ void empty() {}', "", ""), (), config).read_bytes()


def proved(config: Config) -> object:
    made = program(Definition(ONESHOT, None, (), None), 2, Transport.PEER, config)
    return made.emitted, made.plan.symmetric_bytes, made.signature


KINDS = {
    "library": Kind("kernel.so", answer),
    "Program": Kind(cache.OBJECT, proved),
    "cubin": Kind("kernel.cubin", cubin),
    "shim": Kind(nvrtc.SHIM, lambda config: nvrtc.shim(config).read_bytes()),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return replace(from_environment(), cache_dir=tmp_path_factory.mktemp("torn") / "cache")


@pytest.fixture(scope="module")
def right(config: Config) -> Callable[[str], object]:
    """What each kind gives when nothing is amiss."""
    found: dict[str, object] = {}

    def first(kind: str) -> object:
        if kind not in found:
            with pytest.MonkeyPatch.context() as patch:
                if kind == "shim":  # its headers take seconds: what other tests have, too
                    shim = nvrtc.shim(from_environment()).read_bytes()
                    patch.setattr(nvrtc, "compile_cubin", lambda *_: shim)
                found[kind] = KINDS[kind].use(config)
        return found[kind]

    return first


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(LENGTHS))
@pytest.mark.parametrize("kind", KINDS)
def test_torn(
    kind: str, number: int, config: Config, right: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends too soon, wherever, is made anew, and what comes of it is right."""
    expected, place = right(kind), config.cache_dir
    assert place is not None
    compiled = nvrtc.compile_cubin
    monkeypatch.setattr(
        nvrtc, "compile_cubin", lambda *given: expected if kind in ("cubin", "shim") else compiled(*given)
    )
    files = sorted(place.glob(f"??/*/{KINDS[kind].file}"))
    assert files
    draw = random.Random(f"{kind} {number}")
    for path in files:
        whole = path.read_bytes()
        left = draw.randrange(len(whole)) if number else 0
        path.unlink()  # a library that is loaded is not written over, here or in life
        path.write_bytes(whole[:left])
        path.chmod(0o700)

    assert KINDS[kind].use(config) == expected
    assert KINDS[kind].use(config) == expected


def test_a_whole_cache_torn(tmp_path: Path) -> None:
    """A cache whose every file was cut in half gives the right sum, says nothing, and is whole again."""
    place = tmp_path / "cache"
    words = [sys.executable, "-m", "commdsl", "run", str(ONESHOT), "--ranks", "2", "--bytes", "1000"]

    def run() -> None:
        environment = {**os.environ, "COMMDSL_CACHE_DIR": str(place)}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

        assert (done.returncode, done.stderr) == (0, "")
        assert "equal to the oracle, bit for bit" in done.stdout

    run()
    sizes = {path: path.stat().st_size for path in place.glob("??/*/*")}
    assert {"kernel.so", cache.OBJECT, cache.MANIFEST} <= {path.name for path in sizes}
    for path, size in sizes.items():
        os.truncate(path, size // 2)
    run()
    assert all(path.stat().st_size > size // 2 for path, size in sizes.items())


def test_a_name_is_shown_as_it_was_given(tmp_path: Path) -> None:
    """The same text under two names is one schedule; each Program shows the name that it was asked by."""
    for name in ("a.comm", "b.comm"):
        (tmp_path / name).write_text(ONESHOT.read_text())
    config = replace(from_environment(), cache_dir=tmp_path / "cache")
    asked = [Definition(tmp_path / name, None, (), None) for name in ("a.comm", "b.comm")]
    for _ in range(2):
        first, second = (program(one, 2, Transport.PEER, config) for one in asked)

        assert first.emitted.identity == second.emitted.identity
        assert [one.plan.span.source.name for one in (first, second)] == [str(one.path) for one in asked]
    assert digest_of(asked[0]) == digest_of(asked[1])
    (tmp_path / "b.comm").write_text(ONESHOT.read_text() + "# another\n")
    assert digest_of(asked[0]) != digest_of(asked[1])
