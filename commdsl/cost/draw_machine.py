"""Turns a machine into a picture: its GPUs, its links as hairs, and bows between those that have to do with each other.

Assumes sizes in pixels. GPUs stand on a circle; those whose topology names two axes or three stand on a grid along
them, so that a torus, or a grid, looks like one. A wire is a hair between two GPUs; a switch is a square that hairs
lead to, so that a mesh of wires looks like another thing. Past `MAX_VERTICES` ranks, neighbours share a dot. Does not
know what bows stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, cos, hypot, pi, sin, sqrt

import numpy as np

from commdsl.cost.canvas import FAINT, GRID, INK, MARGIN, NODES, PAPER, Canvas, Point, number
from commdsl.language.kinds import LinkScope
from commdsl.machine.topology import NO_LINK, Axis, Topology, link_of

MAX_VERTICES = 32
RING = 400  # width and height of a machine beside a table
LOADS = ("#b9cdf0", "#7fa8ea", "#4d86e0", "#e8a13c", "#d8412f")
SLANT = Point(0.38, -0.3)  # where the next GPU on a third axis stands, if that on the last stands at (1, 0)


@dataclass(frozen=True, slots=True)
class Groups:
    """Ranks by dot: one each, or neighbours together when there are many."""

    num_ranks: int
    size: int

    @staticmethod
    def of(num_ranks: int) -> Groups:
        return Groups(num_ranks, ceil(num_ranks / MAX_VERTICES))

    @property
    def count(self) -> int:
        return ceil(self.num_ranks / self.size)

    def label(self, group: int) -> str:
        last = min((group + 1) * self.size, self.num_ranks) - 1
        return str(group) if self.size == 1 else f"{group * self.size}–{last}"


@dataclass(frozen=True, slots=True)
class Frame:
    """A machine drawn in a rectangle: the places of its ranks, and its boxes."""

    places: tuple[Point, ...]
    boxes: tuple[tuple[Point, float], ...]  # the upper left corner of each node and its side
    centres: tuple[Point, ...]  # of each rank's node
    radius: float  # of a rank's dot

    @property
    def shows_numbers(self) -> bool:
        return self.radius >= 6


@dataclass(frozen=True)
class Machine:
    """The nodes of a topology that the ranks of a schedule take."""

    topology: Topology
    num_ranks: int

    @property
    def num_nodes(self) -> int:
        return ceil(self.num_ranks / self.topology.gpus_per_node)

    @property
    def grid(self) -> tuple[int, int]:
        """Columns and rows of nodes: one, a pair side by side, nearly a square of more."""
        columns = ceil(sqrt(self.num_nodes))
        return columns, ceil(self.num_nodes / columns)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those that GPUs of a node are drawn along; none where they stand on a circle."""
        found = tuple(axis for axis in self.topology.axes if axis.length > 1)
        return found if len(found) in (2, 3) else ()

    def frame(self, corner: Point, width: float) -> Frame:
        """Where everything is if the machine is so wide."""
        columns, _ = self.grid
        pitch = width / columns
        gap = 0.0 if columns == 1 else 0.06 * pitch
        side, gpus = pitch - gap, min(self.topology.gpus_per_node, self.num_ranks)
        room = 0.12 * side / max(axis.length for axis in self.axes) if self.axes else 0.055 * side * min(1.0, 8 / gpus)
        radius = min(15.0, room + 2.2)
        places: list[Point] = []
        centres: list[Point] = []
        boxes: list[tuple[Point, float]] = []
        for node in range(self.num_nodes):
            box = Point(corner.x + node % columns * pitch + gap / 2, corner.y + node // columns * pitch + gap / 2)
            centre = Point(box.x + side / 2, box.y + side / 2)
            places += self._gpus(centre, side / 2 - radius - 0.045 * side, radius)
            centres += [centre] * gpus
            boxes.append((box, side))
        return Frame(tuple(places[: self.num_ranks]), tuple(boxes), tuple(centres), radius)

    def _gpus(self, centre: Point, half: float, radius: float) -> tuple[Point, ...]:
        """Those of a node."""
        count = min(self.topology.gpus_per_node, self.num_ranks)
        if not self.axes:
            return circle(centre, half, count) if count > 1 else (centre,)
        gpu = np.arange(self.topology.gpus_per_node, dtype=np.int32)
        across, down, *back = (axis.place(gpu).astype(float) for axis in reversed(self.axes))
        for depth in back:
            across, down = across + SLANT.x * depth, down + SLANT.y * depth
        room = half - 3 * radius  # bows around the grid stay in the box
        pitch = 2 * room / max(np.ptp(across), np.ptp(down))
        x, y = (centre_of + pitch * (at - (at.min() + at.max()) / 2)
                for centre_of, at in ((centre.x, across), (centre.y, down)))  # fmt: skip
        return tuple(Point(*place) for place in zip(x.tolist(), y.tolist(), strict=True))[:count]

    @cached_property
    def _links(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        ranks = np.arange(self.num_ranks)
        return link_of(self.topology, ranks[:, None], ranks[None, :])

    def wires(self) -> Iterator[tuple[int, int]]:
        """Every pair of ranks that a link joins, but for those that a switch does, or a network of all nodes."""
        linked = self._links != NO_LINK
        for index in (*self._classes(LinkScope.IN_NODE), *self._classes(LinkScope.ACROSS_NODES)):
            linked &= self._links != index
        for source, dest in zip(*np.nonzero(np.triu(linked | linked.T)), strict=True):
            yield int(source), int(dest)

    def switched(self) -> Iterator[list[int]]:
        """The ranks behind each switch."""
        node = np.arange(self.num_ranks) // self.topology.gpus_per_node
        for index in self._classes(LinkScope.IN_NODE):
            for number_of in range(self.num_nodes):
                behind = (node == number_of) & (self._links == index).any(axis=1)
                if behind.any():
                    yield np.flatnonzero(behind).tolist()

    def _classes(self, scope: LinkScope) -> list[int]:
        """Those of a scope that are capped by what each GPU has to them: behind its port all are alike."""
        return [index for index, link in enumerate(self.topology.links) if link.scope is scope and link.has_ports]


def circle(centre: Point, radius: float, count: int) -> tuple[Point, ...]:
    """Evenly spaced from the top, clockwise."""
    turns = [2 * pi * index / count - pi / 2 for index in range(count)]
    return tuple(Point(centre.x + radius * cos(turn), centre.y + radius * sin(turn)) for turn in turns)


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bow:
    """A bent line, and where it ends: before the dot that it leads to."""

    start: Point
    middle: Point
    tip: Point

    @property
    def path(self) -> str:
        points = (f"{number(point.x)} {number(point.y)}" for point in (self.start, self.middle, self.tip))
        return "M{} Q{} {}".format(*points)


def bow(places: Sequence[Point], source: int, dest: int, share: float, radius: float) -> Bow:
    """A line that leaves room for the opposite one: bent by a share of its length, and around the dots on its way."""
    start, end = places[source], places[dest]
    dx, dy = end.x - start.x, end.y - start.y
    length = hypot(dx, dy)
    bend = share * length
    if any(_is_between(place, start, end, radius) for place in places):
        bend = max(bend, 4 * radius)  # the line itself goes half as far
    middle = Point((start.x + end.x) / 2 - dy / length * bend, (start.y + end.y) / 2 + dx / length * bend)
    left = hypot(end.x - middle.x, end.y - middle.y)
    gap = (radius + 2) / left
    return Bow(start, middle, Point(end.x - (end.x - middle.x) * gap, end.y - (end.y - middle.y) * gap))


def _is_between(place: Point, start: Point, end: Point, radius: float) -> bool:
    """Whether a dot lies on the straight line between two others."""
    dx, dy = end.x - start.x, end.y - start.y
    length = hypot(dx, dy)
    along = ((place.x - start.x) * dx + (place.y - start.y) * dy) / length
    off = abs((place.x - start.x) * dy - (place.y - start.y) * dx) / length
    return off < radius / 2 and radius < along < length - radius


def draw_hairs(canvas: Canvas, machine: Machine, places: Sequence[Point], radius: float) -> None:
    """Wires, and switches with what leads to them."""
    for ranks in machine.switched():
        behind = [places[rank] for rank in ranks]
        hub = Point(sum(place.x for place in behind) / len(behind), sum(place.y for place in behind) / len(behind))
        for place in behind:
            canvas.line(hub, place, GRID, 1)
        canvas.add("rect", x=hub.x - radius / 2, y=hub.y - radius / 2, width=radius, height=radius, rx=2, fill=GRID)
    for source, dest in machine.wires():
        canvas.add("path", d=bow(places, source, dest, 0, radius).path, fill="none", stroke=GRID, stroke_width=1)


def draw_bows(canvas: Canvas, places: Sequence[Point], arcs: Mapping[tuple[int, int], float], radius: float) -> None:
    """Every arc as thick, and as hot, as its share of the greatest."""
    most = max(arcs.values(), default=1.0)
    stroke = 2.2 if len(arcs) <= 60 else 1.0
    for (source, dest), load in sorted(arcs.items(), key=lambda item: (item[1], item[0])):
        share = load / most
        line = bow(places, source, dest, 0.09, radius)
        colour = LOADS[min(int(share * len(LOADS)), len(LOADS) - 1)]
        width = (0.45 + share) * stroke
        canvas.add("path", d=line.path, fill="none", stroke=colour, stroke_width=width, opacity=0.85)
        canvas.head(line.tip, line.middle, colour, 5 + 1.8 * stroke * share)


def draw_dots(canvas: Canvas, places: Sequence[Point], groups: Groups, radius: float, colours: Sequence[str]) -> None:
    """The ranks, each with its number where there is room."""
    for index, (place, colour) in enumerate(zip(places, colours, strict=True)):
        canvas.add("circle", cx=place.x, cy=place.y, r=radius, fill=PAPER, stroke=colour, stroke_width=2.5)
        if groups.size == 1 and radius >= 7:
            size = min(12.0, 0.9 * radius)
            canvas.text(Point(place.x, place.y + 0.375 * size), groups.label(index), size=size, anchor="middle",
                        fill=INK, weight=600)  # fmt: skip


def node_colours(machine: Machine, groups: Groups) -> list[str]:
    """Of every dot, its node's."""
    per_node = machine.topology.gpus_per_node
    return [NODES[index * groups.size // per_node % len(NODES)] for index in range(groups.count)]


# --- the machine beside a table ---------------------------------------------------------------------------------------


def draw_machine(
    canvas: Canvas, machine: Machine, arcs: Mapping[tuple[int, int], float], colours: Sequence[str], middle: float
) -> None:
    """The ranks with their links, every arc between two dots, and the names of nodes and axes."""
    groups, centre = Groups.of(machine.num_ranks), Point(MARGIN + RING / 2, middle)
    if machine.axes and groups.size == 1:
        columns, rows = machine.grid
        frame = machine.frame(Point(MARGIN, middle - RING / columns * rows / 2), RING)
        places, radius = frame.places, frame.radius
    else:
        places, radius = circle(centre, RING / 2 - 34, groups.count), 15.0 if groups.count <= 16 else 9.0
    if len(places) <= 16 or (machine.axes and groups.size == 1):
        draw_hairs(canvas, machine, places, radius)
    draw_bows(canvas, places, arcs, radius)
    draw_dots(canvas, places, groups, radius, colours)
    if machine.axes and groups.size == 1:
        names = zip(machine.axes[::-1], ("→", "↓", "↗"), strict=False)
        words = "   ".join(f"{axis.name} {arrow}" for axis, arrow in names)
        below = max(place.y for place in places) + 4 * radius
        canvas.text(Point(centre.x, below), words, size=12, fill=FAINT, anchor="middle")
    if machine.num_nodes > 1:
        draw_node_names(canvas, machine, places, centre, groups)


def draw_node_names(canvas: Canvas, machine: Machine, places: Sequence[Point], centre: Point, groups: Groups) -> None:
    """Beside the dots of each node: outside of the circle, or above the grid."""
    per_node = machine.topology.gpus_per_node
    for node in range(machine.num_nodes):
        first, last = node * per_node, min((node + 1) * per_node, machine.num_ranks) - 1
        if machine.axes and groups.size == 1:
            own = places[first : last + 1]
            place = Point(sum(one.x for one in own) / len(own), min(one.y for one in own) - 40)
        else:
            turn = 2 * pi * ((first + last) / 2) / groups.size / groups.count - pi / 2
            place = Point(centre.x + (RING / 2 + 4) * cos(turn), centre.y + (RING / 2 + 4) * sin(turn) + 4)
        canvas.text(place, f"node {node}", size=11, fill=NODES[node % len(NODES)], anchor="middle", weight=600)
