"""NVRTC and nvJitLink without a GPU: what they refuse says why, what they build is built once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commdsl import compiler
from commdsl.build import nvrtc
from commdsl.build.emit import Emitted, defines
from commdsl.language.diagnostics import InternalError
from commdsl.machine.config import from_environment

RING = Path(__file__).parents[1] / "schedules" / "collectives" / "allreduce_ring.comm"


def test_a_refusal_carries_the_log() -> None:
    """Text that NVRTC does not take is our fault: the error has its log."""
    with pytest.raises(InternalError, match='identifier "nothing" is undefined'):
        nvrtc.compile_cubin("broken.cu", "__device__ int x = nothing;", [f"-arch={nvrtc.ARCH}"])


def test_an_undefined_symbol_is_named() -> None:
    """A link that misses a function says which."""
    text = 'extern "C" __device__ void absent(); extern "C" __global__ void kernel() { absent(); }'
    cubin = nvrtc.compile_cubin("kernel.cu", text, [f"-arch={nvrtc.ARCH}", "-rdc=true"])
    with pytest.raises(InternalError, match="absent"):
        nvrtc.link(nvrtc.ARCH, [("kernel", cubin)], [])


def test_cold_and_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks' kernel is compiled once; the second build finds it and calls no compiler."""
    config = replace(from_environment(), cache_dir=tmp_path)
    compiled = compiler.compile(RING, ranks=8)
    macros = defines(compiled.plan, "bfloat16", "sum")
    real, names = nvrtc.compile_cubin, list[str]()

    def counted(name: str, *rest: Any) -> bytes:
        names.append(name)
        return real(name, *rest)

    monkeypatch.setattr(nvrtc, "compile_cubin", counted)
    first = nvrtc.build(compiled.emitted, macros, config)
    assert len(names) == 1
    assert nvrtc.build(compiled.emitted, macros, config) == first
    assert len(names) == 1


def test_options_are_part_of_the_key(tmp_path: Path) -> None:
    """Another architecture or a debug build is another file."""
    config = replace(from_environment(), cache_dir=tmp_path)
    emitted = Emitted("kernel", 'extern "C" __global__ void kernel(int* p) { *p = 1; }', "", "")
    found = {
        nvrtc.build(emitted, (), config),
        nvrtc.build(emitted, (), config, "sm_80"),
        nvrtc.build(emitted, (), replace(config, debug=True)),
        nvrtc.build(emitted, ("COMMDSL_DTYPE=float32",), config),
    }
    assert len(found) == 4
