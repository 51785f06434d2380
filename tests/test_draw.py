"""Pictures of machines and steps: a torus is drawn as one, a switch as one, and a step says which chunks leave."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from commdsl import compiler
from commdsl.compiler import CheckedSchedule
from commdsl.cost.canvas import Canvas, Point
from commdsl.cost.draw import draw
from commdsl.cost.draw_machine import Machine, bow, draw_hairs
from commdsl.machine.topology import Axis, Link, Topology, switch

BOXES = """topology boxes {
  nodes 2   gpus x = 2, y = 2 per node   sms 100
  link wire pairs along x, y   50 GB/s per pair   1 us
  link rail across nodes same gpu   25 GB/s per gpu   4 us
}
schedule shift for P ranks where P == 8 {
  group line = ranks along y
  input x[P blocks]
  output z
  ensure each r { z == x[r] @ line.next(r) }
  each r { put x[line.prev(r)] -> z @ line.prev(r) }
}
"""


def torus(*lengths: int) -> Machine:
    """Wires are of no concern."""
    strides = [1]
    for length in reversed(lengths):
        strides.append(strides[-1] * length)
    axes = [Axis(name, length, stride) for name, length, stride in zip("zyx", lengths, strides[-2::-1], strict=False)]
    return Machine(Topology("torus", 1, strides[-1], 100, (), axes=tuple(axes)), strides[-1])


def test_gpus_stand_along_their_axes() -> None:
    """The last axis goes to the right, the one before it down, each in equal steps; a third one askew."""
    places = torus(3, 4).frame(Point(0, 0), 400).places
    rows = [places[4 * row : 4 * row + 4] for row in range(3)]
    pitch = rows[0][1].x - rows[0][0].x

    for number, row in enumerate(rows):
        assert [place.x - row[0].x for place in row] == pytest.approx([0, pitch, 2 * pitch, 3 * pitch])
        assert [place.y - rows[0][0].y for place in row] == pytest.approx([number * pitch] * 4)
    cube = torus(2, 2, 3).frame(Point(0, 0), 400).places
    assert len({(round(place.x), round(place.y)) for place in cube}) == 12
    assert all(0 < place.x < 400 and 0 < place.y < 400 for place in (*places, *cube))


def test_the_way_round_leads_around_the_dots() -> None:
    """The link from the last to the first of a row is bent by more than a dot; that to a neighbour hardly."""
    frame = torus(4, 4).frame(Point(0, 0), 400)
    near, round_ = bow(frame.places, 0, 1, 0.0, frame.radius), bow(frame.places, 3, 0, 0.0, frame.radius)

    assert near.middle.y == frame.places[0].y
    assert abs(round_.middle.y - frame.places[0].y) / 2 > 1.5 * frame.radius


def drawn(machine: Machine) -> dict[str, int]:
    """How many elements of each kind its links are."""
    canvas, frame = Canvas(400, 400), machine.frame(Point(0, 0), 400)
    draw_hairs(canvas, machine, frame.places, frame.radius)
    tags = [element.tag for element in canvas.root]
    return {tag: tags.count(tag) for tag in ("path", "line", "rect")}


def test_a_mesh_is_drawn_as_wires_and_a_switch_as_one() -> None:
    """A torus has two wires for each GPU, a mesh one for each pair; behind a switch each GPU has one to it."""
    (port,) = switch(8).links
    mesh = Link(port.name, port.scope, port.pair_bandwidth, port.port_bandwidth, port.latency)

    assert drawn(Machine(compiler.find_topology((), "torus_4x4", 16), 16)) == {"path": 32, "line": 0, "rect": 1}
    assert drawn(Machine(Topology("mesh", 1, 8, 100, (mesh,)), 8)) == {"path": 28, "line": 0, "rect": 1}
    assert drawn(Machine(switch(8), 8)) == {"path": 0, "line": 8, "rect": 2}


def test_a_step_shows_the_chunks_that_leave() -> None:
    """Beside each rank what it sends, where that is short; the axes and the nodes of the machine have their names."""
    checked = compiler.check(compiler.read_text(BOXES, "boxes.comm", Path()), ranks=8, on="boxes")
    assert isinstance(checked, CheckedSchedule)
    svg = draw(checked.schedule, checked.report)
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]

    assert [text for text in texts if "x[" in text] == [f"x[{rank ^ 1}]" for rank in range(8)]
    assert {"y →   x ↓", "node 0", "node 1"} <= set(texts)
