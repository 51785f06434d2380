"""Groups on host ranks: meshes, groups that come and go, what is given back, and who is no rank."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gloo_ranks import holds, started

from commdsl.machine.config import from_environment
from commdsl.planner.tuning import selection
from commdsl.program.memory import Transport
from commdsl.runtime.load import definition
from commdsl.runtime.program import program

GRAIN = 2 << 20
"""What CUDA's memory comes in."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    yield from started("group_cases", Path(tmp_path_factory.mktemp("groups")))


@pytest.mark.parametrize("case", ["mesh", "wrong_groups", "released", "forked"])
def test_groups(ranks: list[Connection], case: str) -> None:
    """See the cases: each is a sentence."""
    holds(ranks, case)


def test_groups_that_come_and_go(ranks: list[Connection], request: pytest.FixtureRequest) -> None:
    """Made and destroyed with calls between: memory, descriptors and threads stay as after the tenth. 200 of them in a
    run of all sweeps.
    """
    whole = request.config.getoption("--sweep") == "all"
    holds(ranks, "two_hundred_groups" if whole else "thirty_groups", 280.0)


@pytest.mark.parametrize("transport", Transport, ids=lambda transport: transport.value)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_symmetric_memory_of_an_all_reduce(size: int, transport: Transport) -> None:
    """After all-reduces of every size from 1 KB to 1 GB a rank of H200s has less than 256 MB of symmetric memory."""
    plain = transport is Transport.NVSHMEM
    rows = selection.rows_for(selection.known_tables(()), "all_reduce", size, "NVIDIA H200", plain=plain)
    chosen = {rows.rows[rows.index(1 << exponent)].candidate for exponent in range(10, 31)}
    total = 0
    for candidate in chosen:
        asked = definition(candidate.schedule, None, dict(candidate.params), None, dict(candidate.tune))
        nbytes = program(asked, size, transport, from_environment()).plan.symmetric_bytes
        total += -(-nbytes // GRAIN) * GRAIN
    assert len(chosen) >= 3
    assert 16 << 20 < total < 256 << 20
