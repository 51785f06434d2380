"""Dispatches as torch ops: four processes of a gloo group, threads of one process, and the end-to-end example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import dispatch_cases  # noqa: E402 - after the check for torch
import gloo_ranks  # noqa: E402 - after the check for torch
from dispatch_checks import Player, Rows  # noqa: E402 - after the check for torch
from dispatch_plans import cases, routed, simulated  # noqa: E402 - after the check for torch
from forked import launched  # noqa: E402 - as above
from thread_ranks import in_group  # noqa: E402 - after the check for torch

from commdsl import dispatch  # noqa: E402 - after the check for torch
from commdsl.planner.chance import random_plan, varied  # noqa: E402 - after the check for torch

Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
EXAMPLE = ROOT / "commdsl" / "dispatch" / "README.md"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    yield from gloo_ranks.started("dispatch_cases", tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", [case.__name__ for case in dispatch_cases.CASES])
def test_processes(ranks: list[Connection], name: str) -> None:
    """What the case states holds on every rank."""
    gloo_ranks.holds(ranks, name)


def test_two_opinions() -> None:
    """The simulation on Metadata and the plan's routes say the same of every row, in both directions."""
    for case in cases(varied(5, 60, 27), seed=500):
        one, other = simulated(case.metadata, case.rows), routed(case.plan)

        assert one.rows == other.rows
        for name in ("queries", "queries_back", "keys"):
            assert all(map(torch.equal, getattr(one, name), getattr(other, name))), name
        for mine, theirs in zip(one.keys_back, other.keys_back, strict=True):
            assert torch.equal(mine[: len(theirs)], theirs)
            assert (mine[len(theirs) :] == -1).all()


def test_plans_are_of_every_kind() -> None:
    """The random plans have what is hard: no rows, shards of none, ranks that get nothing, documents over ranks."""
    found = [random_plan(draw, 900 + at) for at, draw in enumerate(varied(4, 60, 50))]
    received = [set(plan.dest.flatten().tolist()) - {-1} for plan in found]

    assert any((plan.shards.rows == 0).any() for plan in found)
    assert any(len(ranks) < 4 for ranks in received)
    assert any((plan.shards.length == 0).any() for plan in found)
    assert any((plan.dest < 0).any() for plan in found)
    assert any(len(set(plan.shards.rank[plan.document == of])) > 1 for plan in found for of in set(plan.document))
    assert max(int(plan.position.max(initial=0)) for plan in found) >= 8
    assert (found[0].dest == random_plan(varied(4, 60, 1)[0], 900).dest).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_sums(dtype: torch.dtype) -> None:
    """What the checks expect back of keys is the simulation's sum, bit for bit; in float32 its order shows."""
    order_shows = False
    for case in cases(varied(4, 40, 8)[:6], seed=40):
        rows, cpu = Rows(dtype, (8, 8, 8)), torch.device("cpu")
        held = Player(0, case.traced, rows, cpu).everyone(1, case.received(1), 3, bits=False)
        tensor = torch.zeros(4, max(case.received(1)), *held[0].shape[1:], dtype=dtype)
        for rank, values in enumerate(held):
            tensor[rank, : len(values)] = values
        output = torch.zeros(4, max(case.rows), *held[0].shape[1:], dtype=dtype)
        dispatch.simulate_reduce(tensor, output, case.metadata[2])
        other_order = replace(case.traced, keys_back=tuple(ids.flip(0) for ids in case.traced.keys_back))
        for rank, length in enumerate(case.rows):
            found = Player(rank, case.traced, rows, cpu).back(1, held)
            order_shows |= not torch.equal(found, Player(rank, other_order, rows, cpu).back(1, held))
            assert torch.equal(found, output[rank, :length])

    assert order_shows or dtype is not torch.float32


class Moved(torch.autograd.Function):
    """What an op does, and its gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, move: Move, back: Move) -> torch.Tensor:
        context.back = back
        return move(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return context.back(gradient), None, None


@dataclass(frozen=True)
class Alone:
    """A dispatcher for a group of one, by the oracle itself; `flips`: of the part whose results have a wrong bit."""

    player: Player
    flips: int | None

    def _moves(self, part: int) -> tuple[Move, Move]:
        def ended(x: torch.Tensor) -> torch.Tensor:
            found = x.contiguous().clone()
            if part == self.flips:
                found.view(torch.int32).view(-1)[-1] ^= 1
            return found

        return (
            lambda x: ended(self.player.there(part, [x.detach()])),
            lambda x: ended(self.player.back(part, [x.detach()])),
        )

    def dispatch_qkv(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, route: None) -> tuple[torch.Tensor, ...]:
        return tuple(Moved.apply(x, *self._moves(part)) for part, x in enumerate((q, k, v)))

    def collect_qkv(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, route: None) -> tuple[torch.Tensor, ...]:
        return tuple(Moved.apply(x, *self._moves(part)[::-1]) for part, x in enumerate((q, k, v)))

    def dispatch(self, x: torch.Tensor, route: None) -> torch.Tensor:
        return Moved.apply(x, *self._moves(0))

    def collect(self, x: torch.Tensor, route: None) -> torch.Tensor:
        return Moved.apply(x, *self._moves(0)[::-1])


def test_a_wrong_bit_counts() -> None:
    """The checks see one bit of one row, in every op and in every tensor."""
    (case,) = cases([varied(1, 30, 8)[7]], seed=2)
    for part in range(3):
        for check in dispatch_cases.CHECKS:
            for flips in (False, True):
                player = Player(0, case.traced, Rows(torch.float32, (8, 4, 12)), torch.device("cpu"))
                check(player, Alone(player, part if flips else None), None, 5)
                concerned = flips and (part == 0 or check is not Player.one_tensor)

                assert int(player.wrong) == int(concerned), (part, check, flips)


@pytest.mark.parametrize(("num_ranks", "nodes"), [(1, ""), (3, ""), (3, "0,1,2"), (3, "0,1,1")])
@pytest.mark.parametrize("put", dispatch_cases.PUTS)
def test_threads_of_one_process(put: str, num_ranks: int, nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may be threads, one alone among them, and some or all of them far from each other."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    found = cases(varied(num_ranks, 30, 4), seed=7)
    rows = [Rows(torch.bfloat16, (24, 6, 2)), Rows(torch.float16, (24, 6, 2), 3)]
    in_group(num_ranks, lambda rank, group: dispatch_cases.exact(put, found, rows, rank, group, torch.device("cpu")))


@pytest.fixture
def example(tmp_path: Path) -> str:
    """The document's program: attention elsewhere equals attention at home, and so do gradients."""
    programs = re.findall(r"^```python\n(.*?)^```$", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(programs[0])
    return str(script)


def test_example(example: str) -> None:
    """It runs on four processes."""
    done = launched(4, example)

    assert done.returncode == 0, done.stderr


def test_example_under_torchrun(example: str) -> None:
    """It runs as torchrun itself starts it; what other tests launch has the same environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", example]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stderr


def test_command_line() -> None:
    """The script for GPUs says what it does on a machine without one, and refuses to run without torchrun."""
    script = str(ROOT / "tests" / "gpu" / "run_dispatch.py")
    bare = {name: value for name, value in os.environ.items() if name != "RANK"}
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True, env=bare)
    refused = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=bare)

    assert "--only" in shown.stdout
    assert "torchrun" in refused.stderr
    assert refused.returncode == 1
