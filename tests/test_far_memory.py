"""Stretches of NVSHMEM's one allocation: first fit, and joined again when they are given back."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from commdsl.machine.config import from_environment  # noqa: E402 - after the check for torch
from commdsl.machine.errors import ConfigError  # noqa: E402
from commdsl.runtime.bootstrap import Board, ThreadBootstrap, World  # noqa: E402
from commdsl.runtime.communicator import Communicator  # noqa: E402
from commdsl.runtime.desk import ordinary_notice  # noqa: E402
from commdsl.runtime.error_page import ordinary_page  # noqa: E402
from commdsl.runtime.errors import GroupError  # noqa: E402
from commdsl.runtime.far import ALIGNMENT, Room  # noqa: E402
from commdsl.runtime.host import HostCommunicator  # noqa: E402


def test_first_fit() -> None:
    """The first stretch that is long enough is taken, whole pages of it."""
    room = Room(10 * ALIGNMENT)
    assert [room.take(size) for size in (1, ALIGNMENT, 2 * ALIGNMENT + 1)] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert room.size_at(2 * ALIGNMENT) == 3 * ALIGNMENT
    room.give_back(ALIGNMENT)
    assert room.take(2 * ALIGNMENT) == 5 * ALIGNMENT
    assert room.take(1) == ALIGNMENT
    assert room.take(4 * ALIGNMENT) is None
    assert room.free_bytes == 3 * ALIGNMENT


def test_stretches_are_joined() -> None:
    """Whatever the order in which 200 stretches come and go, none overlap, and in the end all is one again."""
    dice, size = random.Random(3), 1000 * ALIGNMENT
    room, held = Room(size), dict[int, int]()
    for _ in range(2000):
        if held and dice.random() < 0.5:
            first = dice.choice(list(held))
            room.give_back(first)
            del held[first]
        else:
            wanted = dice.randrange(1, 40 * ALIGNMENT)
            first = room.take(wanted)
            if first is not None:
                assert all(first + wanted <= other or other + held[other] <= first for other in held)
                assert first + wanted <= size
                held[first] = room.size_at(first)
        assert room.free_bytes == size - sum(held.values())
    for first in held:
        room.give_back(first)
    assert room.take(size) == 0


def test_nodes_of_a_subgroup() -> None:
    """COMMDSL_NODES speaks of ranks of the world; a group on one node has no far peer, unless NVSHMEM is asked for."""

    def nodes(ranks: tuple[int, ...], **said: str) -> tuple[tuple[int, ...], str]:
        config = from_environment({f"COMMDSL_{name}": value for name, value in said.items()})
        own = ThreadBootstrap(0, len(ranks), Board())
        world = World(ThreadBootstrap(0, 4, Board()), ranks)
        made = HostCommunicator.__new__(HostCommunicator)
        Communicator.__init__(made, "x", own, config, ordinary_page(), ordinary_notice(4), "cpu", world)
        return tuple(made.nodes), made.transport.value

    assert nodes((0, 1, 2, 3), NODES="0,0,1,1") == ((0, 0, 1, 1), "nvshmem")
    assert nodes((0, 1), NODES="0,0,1,1") == ((0, 0), "peer")
    assert nodes((3, 2), NODES="0,0,1,1") == ((1, 1), "peer")
    assert nodes((1, 3), NODES="0,0,1,1") == ((0, 1), "nvshmem")
    assert nodes((2, 3), NODES="0,0,1,1", TRANSPORT="nvshmem") == ((1, 1), "nvshmem")
    assert nodes((1, 3), TRANSPORT="nvshmem") == ((1, 3), "nvshmem")
    assert nodes((1, 3)) == ((0, 0), "peer")
    with pytest.raises(GroupError, match="says where 2 ranks are; there are 4 in all"):
        nodes((0, 1), NODES="0,1")


def test_size_of_the_arena() -> None:
    """NVSHMEM's own variable says how much there is, as NVSHMEM reads it."""
    texts = {"": 1 << 30, "512M": 512 << 20, "8G": 8 << 30, "1.5g": 3 << 29, "4096": 4096}
    for text, size in texts.items():
        assert from_environment({"NVSHMEM_SYMMETRIC_SIZE": text}).arena_bytes == size
    for text in ("G", "x", "-1", "0", "nan"):
        with pytest.raises(ConfigError, match="NVSHMEM_SYMMETRIC_SIZE is a size"):
            from_environment({"NVSHMEM_SYMMETRIC_SIZE": text})
