"""Every shipped schedule becomes a cubin on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from collectives import main_case, shipped

from commdsl import compiler
from commdsl.build import nvrtc
from commdsl.config import Config, from_environment
from commdsl.emit import defines
from commdsl.plan import Transport


@pytest.fixture(scope="module")
def config() -> Config:
    return from_environment()


@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_cubin(path: Path, transport: Transport, config: Config) -> None:
    """NVRTC takes the text of eight ranks for sm_90, with peer pointers and with NVSHMEM for every peer."""
    case = main_case(path, 8)
    assert case is not None
    compiled = compiler.compile(path, ranks=8, params=dict(case.params), transport=transport)
    macros = defines(compiled.plan, "bfloat16", "sum")
    cubin = nvrtc.build(compiled.emitted, macros, transport, config).read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert compiled.emitted.name.encode() in cubin
