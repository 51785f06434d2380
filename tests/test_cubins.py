"""Every shipped schedule and dispatch becomes a cubin on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from collectives import by_keys, dispatches, main_case, shipped
from proved import HOST_PROTOCOLS

from commdsl import compiler
from commdsl.build import nvrtc
from commdsl.build.emit import defines
from commdsl.machine.carriers import TMA, Carrier
from commdsl.machine.config import Config, from_environment
from commdsl.machine.dtypes import BOOL, FLOAT64, INT8, INT16, DType
from commdsl.program.memory import Transport


@pytest.fixture(scope="module")
def config() -> Config:
    return from_environment()


@pytest.mark.sweep
@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_cubin(path: Path, transport: Transport, config: Config) -> None:
    """NVRTC takes the text of eight ranks for sm_90, with peer pointers and with NVSHMEM for every peer."""
    case = main_case(path, 8)
    assert case is not None
    compiled = compiler.compile(path, ranks=8, params=dict(case.params), transport=transport)
    macros = defines(compiled.plan, "bfloat16", "sum")
    cubin = nvrtc.build(compiled.emitted, macros, config).read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert compiled.emitted.name.encode() in cubin


@pytest.mark.parametrize("protocol", HOST_PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("name", ["allreduce_twoshot", "allreduce_ring", "alltoall_direct"])
def test_cubin_of_a_rank(name: str, protocol: Carrier, config: Config) -> None:
    """Every protocol's text is taken too as it runs: lanes that share a block, built for one rank of four alone."""
    path = next(path for path in shipped() if path.stem == name)
    compiled = compiler.compile(path, ranks=4, tune={"protocol": protocol.name, "lanes": 16, "threads": 256, "sms": 8})
    macros = defines(compiled.plan, "bfloat16", "sum", rank=1)
    assert macros[-1] == "COMMDSL_RANK=1"
    assert "#define COMMDSL_LANES_PER_BLOCK 2\n" in compiled.emitted.text
    assert nvrtc.build(compiled.emitted, macros, config).read_bytes().startswith(b"\x7fELF")


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", [*HOST_PROTOCOLS, TMA], ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("dtype", [FLOAT64, INT16, INT8, BOOL], ids=lambda dtype: dtype.name)
def test_cubin_of_a_dtype(dtype: DType, protocol: Carrier, config: Config) -> None:
    """NVRTC takes long and short element types in every protocol; an average where there is one."""
    path = next(path for path in shipped() if path.stem == "allreduce_ring")
    compiled = compiler.compile(path, ranks=3, tune={"protocol": protocol.name})
    macros = defines(compiled.plan, dtype.name, dtype.ops[-1])
    assert nvrtc.build(compiled.emitted, macros, config).read_bytes().startswith(b"\x7fELF")


@pytest.mark.sweep
@pytest.mark.parametrize("checks", [(), ("COMMDSL_CHECK=1",)], ids=["", "checked"])
@pytest.mark.parametrize("sums", [(), ("COMMDSL_DTYPE=bfloat16",)], ids=["moves", "sums"])
@pytest.mark.parametrize(("put", "transport"), [("rows", Transport.PEER), *(("packed", one) for one in Transport)])
@pytest.mark.parametrize(("path", "name"), dispatches(), ids=lambda part: getattr(part, "stem", part))
def test_cubin_of_a_dispatch(
    path: Path,
    name: str,
    put: str,
    transport: Transport,
    sums: tuple[str, ...],
    checks: tuple[str, ...],
    config: Config,
) -> None:
    """NVRTC takes the text of every dispatch for sm_90: one that moves rows, one that sums copies, with checks too.
    What reaches far ranks is linked with NVSHMEM's part; the others have none of it.
    """
    compiled = compiler.compile(path, name, 8, tune={"put": put}, transport=transport)
    cubin = nvrtc.build(compiled.emitted, (*sums, *checks), config).read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert compiled.emitted.name.encode() in cubin
    assert (b"nvshmem" in cubin) == (transport is Transport.NVSHMEM)


BY_KEYS = [
    ("experts", Transport.PEER, (), ("", "_back", "_values", "_again")),
    ("experts_once", Transport.NVSHMEM, ("COMMDSL_CHECK=1",), ("", "_back", "_values", "_again")),
    ("experts_index", Transport.PEER, (), ("", "_again")),  # home as `experts_once`
    ("experts_nodes", Transport.PEER, (), ("_back",)),  # on one node; on two below
    ("experts_float8", Transport.PEER, (), ("",)),  # home as `experts_once`
    ("tokens", Transport.PEER, (), ("",)),  # one tensor; home as `experts`
    ("tokens_summed", Transport.NVSHMEM, (), ("",)),  # home as `experts_once`
    ("tokens", Transport.NVSHMEM, (), ("_back",)),  # there as `experts_once`, home as `experts`
    ("tokens_summed", Transport.PEER, ("COMMDSL_CHECK=1",), ("", "_back")),
]


@pytest.mark.parametrize("transport", Transport)
def test_cubins_of_rows_that_go_once_per_node(transport: Transport, config: Config) -> None:
    """The same between nodes: what crosses is sent on, there, again and back."""
    path = next(path for path, one in by_keys() if one == "experts_nodes")
    compiled = compiler.compile(path, "experts_nodes", 16, "h200_2x8", transport=transport)
    for plan, emitted in compiled.ways:
        if plan.name.endswith("values"):
            continue
        sums = ("COMMDSL_DTYPE=bfloat16",) if plan is compiled.back else ()
        cubin = nvrtc.build(emitted, (*sums, "COMMDSL_CHECK=1"), config).read_bytes()
        assert emitted.name.encode() in cubin


@pytest.mark.parametrize(("name", "transport", "checks", "ways"), BY_KEYS, ids=[case[0] for case in BY_KEYS])
def test_cubins_of_a_dispatch_by_keys(
    name: str, transport: Transport, checks: tuple[str, ...], ways: tuple[str, ...], config: Config
) -> None:
    """NVRTC takes all kernels for sm_90: the one that counts and pushes, the one that is told places, and those that
    bring back rows and values.
    """
    assert {name for _, name in by_keys()} == {case[0] for case in BY_KEYS}
    (path,) = (path for path, one in by_keys() if one == name)
    compiled = compiler.compile(path, name, 8, transport=transport)
    sums = {compiled.back: ("COMMDSL_DTYPE=bfloat16",)}
    for plan, emitted in compiled.ways:
        if plan.name.removeprefix(name) not in ways:
            continue
        cubin = nvrtc.build(emitted, (*sums.get(plan, ()), *checks), config).read_bytes()
        assert cubin.startswith(b"\x7fELF")
        assert emitted.name.encode() in cubin
