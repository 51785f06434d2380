"""The routes of a rotation, their picture and the table of its visits: all is what the schedule moves, and readable."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import ir_builder as build
import numpy as np
import pytest

from commdsl import compiler
from commdsl.commands.cli import run_command
from commdsl.cost.draw_routes import COLOURS, MOST_ROUTES, picture, stroke, words
from commdsl.cost.routes import NOBODY, Route, routes
from commdsl.cost.visitors import visitors
from commdsl.ir.schedules import Schedule, Step
from commdsl.language.kinds import MoveKind
from commdsl.machine import cycles

ATTENTION = Path(__file__).parent.parent / "schedules" / "attention"

PATHS = """
schedule around_nodes for P ranks {
  cycles C = paths(gpus)
  inout kv[len(C)]
  ensure rotation(kv)

  yield kv
  for s in 1 ..< P {
    each r, c in C {
      let home = r - r % gpus
      if c.position(r % gpus) < gpus - 1 { put kv[c] -> kv[c] @ (home + c.next(r % gpus)) }
      else { put kv[c] -> kv[c] @ (home + gpus + c) % P }
    }
    yield kv
  }
}
topology boxes {
  nodes 2
  gpus 4 per node
  sms 132
  link nvlink in node   450 GB/s per gpu   0.7 us
  link nic across nodes   50 GB/s per gpu   4 us
}
"""


def rotation(name: str, ranks: int) -> Schedule:
    return compiler.check(ATTENTION / f"{name}.comm", ranks=ranks).schedule


def arcs(schedule: Schedule) -> set[tuple[int, int]]:
    """Every ordered pair of ranks between which anything moves, straight from the moves."""
    return {
        (int(source), int(dest))
        for step in schedule.steps
        if isinstance(step, Step)
        for moves in step.moves
        for source, dest in zip(moves.source_rank[:, 0], moves.dest_rank, strict=True)
        if source != dest
    }


def drawn(found: tuple[Route, ...]) -> list[tuple[int, int]]:
    return [pair for route in found for chain in route.chains for pair in pairwise(chain)]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_hamilton(ranks: int) -> None:
    """The routes of a Hamilton rotation are its cycles, each in the order in which it visits the ranks."""
    found = routes(rotation("rotation_hamilton", ranks))
    made = [np.roll(cycle, -int(np.flatnonzero(cycle == 0)[0])) for cycle in cycles.hamilton(ranks)]

    assert [route.chains for route in found] == [((*cycle.tolist(), 0),) for cycle in made]
    assert all(route.is_cycle for route in found)


@pytest.mark.parametrize(("name", "ranks"), [("rotation_ring", 6), ("rotation_direct", 6), ("rotation_hamilton", 7)])
def test_everything_that_moves_is_on_one_route(name: str, ranks: int) -> None:
    """Routes together have every pair of ranks that the schedule uses, each once."""
    schedule = rotation(name, ranks)
    pairs = drawn(routes(schedule))

    assert set(pairs) == arcs(schedule)
    assert len(pairs) == len(set(pairs))


def test_shifts() -> None:
    """What a rank sends straight to each other is a route for each distance; 6 and 2 have a factor in common."""
    found = routes(rotation("rotation_direct", 6))

    assert [words(route) for route in found] == [f"r → (r + {distance}) % 6" for distance in range(1, 6)]
    assert found[1].chains == ((0, 2, 4, 0), (1, 3, 5, 1))
    assert [route.is_cycle for route in found] == [True, False, False, False, True]


def test_an_exchange_has_a_route_for_each_distance() -> None:
    """Where every rank sends each chunk to another rank, and hears the same chunk of all, routes are shifts."""
    exchange = compiler.check(ATTENTION / "attention_ulysses.comm", ranks=5).schedule

    assert [words(route) for route in routes(exchange)] == [f"r → (r + {distance}) % 5" for distance in range(1, 5)]


def test_a_broadcast_has_a_route_for_each_distance() -> None:
    """Where one rank sends to several at once, or several to one, what goes equally far is a route."""
    x, y = build.buffer(build.BufferKind.INPUT, "x"), build.buffer(build.BufferKind.OUTPUT, "y")
    move = build.move(MoveKind.PUT, (0, [0, 0, 0], 0), (1, [1, 2, 3], 0), np.array([0, 0, 0]))
    spread = build.schedule(4, (x, y), (build.allgather_contract(4),), (build.step(move),))

    assert [route.after.tolist() for route in routes(spread)] == [[1, -1, -1, -1], [2, -1, -1, -1], [3, -1, -1, -1]]


def test_parts_of_a_route_are_none() -> None:
    """A step that moves less, along ways that another has taken, adds no route."""
    x = build.buffer(build.BufferKind.INOUT, "x")
    whole = build.move(MoveKind.PUT, (0, [0, 1, 2, 3], 0), (0, [1, 2, 3, 0], 0), np.arange(4))
    part = build.move(MoveKind.PUT, (0, [1, 2], 0), (0, [2, 3], 0), np.array([1, 2]))
    for steps in ([whole, part], [part, whole]):
        made = build.schedule(4, (x,), (build.allgather_contract(4),), tuple(map(build.step, steps)))
        assert [route.after.tolist() for route in routes(made)] == [[1, 2, 3, 0]]


def test_words() -> None:
    """Chains that close are in brackets, those that do not have arrows."""
    open_ = Route(np.array([1, NOBODY, 3, 2], np.int32))

    assert open_.chains == ((0, 1), (2, 3, 2))
    assert words(open_) == "0 → 1, (2 3)"
    assert not open_.is_cycle


def text_of(svg: str) -> list[str]:
    return [element.text.strip() for element in ElementTree.fromstring(svg).iter() if element.text]


def test_paths_through_nodes(tmp_path: Path) -> None:
    """What goes through a node and on to the next is one cycle, also where two statements say so; nodes are boxes."""
    path = tmp_path / "paths.comm"
    path.write_text(PATHS)
    checked = compiler.check(path, on=str(path), ranks=8)
    found = routes(checked.schedule)
    shown = text_of(picture(checked.schedule, checked.report))

    assert len(found) == 4
    assert all(route.is_cycle for route in found)
    assert {"node 0", "node 1", "cycle 3", "0 1 3 2 4 5 7 6"} <= set(shown)
    assert any("4 Hamiltonian cycles, no link in two of them" in line for line in shown)


@pytest.mark.parametrize("ranks", [8, 16])
def test_picture(ranks: int) -> None:
    """The picture of a rotation has every cycle twice, on the machine and by itself, in a colour of its own."""
    checked = compiler.check(ATTENTION / "rotation_hamilton.comm", ranks=ranks)
    svg = picture(checked.schedule, checked.report)
    bows = re.findall(r'<path [^>]*stroke="(#\w+)"', svg)

    assert svg == picture(checked.schedule, checked.report)
    assert len(bows) == 2 * ranks * (ranks - 1)
    assert {f"cycle {cycle}" for cycle in range(ranks - 1)} <= set(text_of(svg))
    assert len(set(bows)) == min(ranks - 1, len(COLOURS))


def test_what_is_drawn_otherwise() -> None:
    """A schedule that is no rotation, and one of more ranks than can be told apart, have the picture of their steps."""
    exchange = ATTENTION.parent / "collectives" / "alltoall_direct.comm"
    for path, ranks, word in ((exchange, 4, "rank 3"), (ATTENTION / "rotation_ring.comm", 34, "ranks 32–33")):
        checked = compiler.check(path, ranks=ranks)
        assert word in text_of(picture(checked.schedule, checked.report))


def luminance(colour: str) -> float:
    """Relative luminance as WCAG has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_strokes_can_be_told_apart() -> None:
    """Every stroke stands out from the paper by 3 : 1 at least, and no two are drawn alike."""
    assert all(1.05 / (luminance(colour) + 0.05) >= 3 for colour in COLOURS)
    assert len({stroke(index) for index in range(MOST_ROUTES)}) == MOST_ROUTES


# --- the table of visits ----------------------------------------------------------------------------------------------


def table(schedule: Schedule, width: int = 1000) -> list[list[str]]:
    """The cells of each row but the head, apart by two spaces or more."""
    lines = visitors(schedule, width).split("\n")
    return [re.split(r"  +", line.strip())[2:] for line in lines[1:]]


def test_visits_of_a_ring() -> None:
    """After s hops rank r has what is rank r - s's."""
    expected = [[str((rank - hop) % 5) for rank in range(5)] for hop in range(5)]

    assert table(rotation("rotation_ring", 5)) == expected


@pytest.mark.parametrize("ranks", [5, 8])
def test_visits_of_cycles(ranks: int) -> None:
    """Each piece came along its own cycle: s hops before rank r on it is whose it is."""
    orders = cycles.hamilton(ranks).tolist()
    expected = [
        [
            " ".join(str(order[(order.index(rank) - hop) % ranks]) for order in orders) if hop else str(rank)
            for rank in range(ranks)
        ]
        for hop in range(ranks)
    ]

    assert table(rotation("rotation_hamilton", ranks)) == expected


HALVES = """
schedule later_half for P ranks where P >= 2 {
  inout k[2 blocks, 3 blocks]
  inout v[2 blocks, 3 blocks]
  ensure rotation(k, v) each r, q, h in 0 ..< 2 where h == 0 or q >= r

  yield attend(k, v)
  for s in 1 ..< P {
    each r, h in 0 ..< 2 where h == 0 or (r + s - 1) % P >= (r - 1) % P {
      put k[h] -> k[h] @ (r - 1) % P
      put v[h] -> v[h] @ (r - 1) % P
    }
    yield attend(k, v)
  }
}
"""


def test_visits_of_halves(tmp_path: Path) -> None:
    """Keys and values that come together are one row; a block that brings nothing is a dot, apart from the others."""
    path = tmp_path / "halves.comm"
    path.write_text(HALVES)
    schedule = compiler.check(path, ranks=3).schedule

    assert visitors(schedule).split("\n")[1].split()[:3] == ["0", "k,", "v"]
    assert table(schedule) == [["0", "1", "2"], ["1", "2", "0 | ·"], ["2", "0 | ·", "1 | ·"]]


@pytest.mark.parametrize(("ranks", "width"), [(4, 60), (8, 80), (24, 80), (34, 120)])
def test_the_table_fits(ranks: int, width: int) -> None:
    """It is no wider than asked, has the first and the last visit, and says how many rows and ranks it leaves out."""
    lines = visitors(rotation("rotation_ring", ranks), width).split("\n")
    shown = lines[0].count("rank")

    assert max(map(len, lines)) <= width
    assert any(line.startswith(f"{ranks - 1:>3} s={ranks - 1}") for line in lines)
    assert (shown == ranks) != any(f"and {ranks - shown} more rank" in line for line in lines)
    assert (ranks > 20) == any(line.strip() == f"… {ranks - 20} more rows" for line in lines)


def test_run_shows_the_visits(capsys: pytest.CaptureFixture[str]) -> None:
    """`commdsl run` prints the table, and has it in its JSON; a schedule without yields has none."""
    assert run_command(["run", "rotation_ring", "--ranks", "3", "--bytes", "1000"]) == 0
    assert "visits: whose chunks each rank is handed" in capsys.readouterr().out
    assert run_command(["run", "rotation_ring", "--ranks", "3", "--bytes", "1000", "--json"]) == 0
    (ran,) = json.loads(capsys.readouterr().out)["runs"]
    assert [visit["handed"]["kv"] for visit in ran["visits"]] == [
        [[[(rank - hop) % 3, 0]] for rank in range(3)] for hop in range(3)
    ]
    assert run_command(["run", "allgather_ring", "--ranks", "3", "--bytes", "1000"]) == 0
    assert "visits" not in capsys.readouterr().out
