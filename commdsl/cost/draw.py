"""Turns a schedule and its report into a picture: the machine with its busiest links, and beside it the steps.

Assumes a checked schedule. Writes plain SVG, the same bytes every time. Past `MAX_VERTICES` ranks, neighbours share a
dot; past `MAX_STEPS` steps, the middle is left out, and the picture says so. Does not know times within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, cos, hypot, pi, sin
from xml.etree import ElementTree

import numpy as np

from commdsl.cost.report import Report
from commdsl.ir.schedules import AnyStep, Schedule, Step
from commdsl.language.kinds import MoveKind
from commdsl.machine.topology import NO_LINK, link_of, wire_bandwidth

MAX_VERTICES = 32
MAX_STEPS = 16
BUSIEST = 5
WIDTH, TOP, MARGIN = 1180, 96, 36
RING = 400  # width and height of the left picture
STEPS_LEFT = MARGIN + RING + 90

INK, FAINT, PAPER, GRID = "#1d2733", "#6b7785", "#ffffff", "#e6eaef"
KINDS = {MoveKind.PUT: "#2f6fde", MoveKind.GET: "#13907a", MoveKind.REDUCE: "#d9622b", MoveKind.COPY: "#8a94a3"}
VERBS = {MoveKind.PUT: "put", MoveKind.GET: "get", MoveKind.REDUCE: "reduce", MoveKind.COPY: "copy"}
NODES = ("#2f6fde", "#7b4fc9", "#13907a", "#b8781a", "#c2417c", "#4b7d2a", "#356d8c", "#8c4a35")
LOADS = ("#b9cdf0", "#7fa8ea", "#4d86e0", "#e8a13c", "#d8412f")
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float


class Canvas:
    """An SVG under construction."""

    def __init__(self, width: float, height: float) -> None:
        size = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "font-family": FONT})
        self.add("rect", width=width, height=height, fill=PAPER)

    def add(self, tag: str, **attributes: str | float) -> ElementTree.Element:
        named = {key.rstrip("_").replace("_", "-"): number(value) for key, value in attributes.items()}
        return ElementTree.SubElement(self.root, tag, named)

    def text(
        self, at: Point, words: str, *, size: float = 13, fill: str = INK, anchor: str = "start", weight: int = 400
    ) -> None:
        element = self.add("text", x=at.x, y=at.y, font_size=size, fill=fill, text_anchor=anchor, font_weight=weight)
        element.text = words

    def line(
        self, start: Point, end: Point, colour: str, width: float, *, opacity: float = 1.0, dash: str = ""
    ) -> None:
        extra = {"stroke_dasharray": dash} if dash else {}
        ends = {"x1": start.x, "y1": start.y, "x2": end.x, "y2": end.y}
        self.add("line", **ends, stroke=colour, stroke_width=width, opacity=opacity, stroke_linecap="round", **extra)

    def head(self, tip: Point, towards: Point, colour: str, size: float) -> None:
        """An arrow head at `tip` that points away from `towards`."""
        length = hypot(tip.x - towards.x, tip.y - towards.y) or 1.0
        dx, dy = (tip.x - towards.x) / length, (tip.y - towards.y) / length
        back = Point(tip.x - dx * size, tip.y - dy * size)
        left = f"{number(back.x - dy * size * 0.45)},{number(back.y + dx * size * 0.45)}"
        right = f"{number(back.x + dy * size * 0.45)},{number(back.y - dx * size * 0.45)}"
        self.add("polygon", points=f"{number(tip.x)},{number(tip.y)} {left} {right}", fill=colour)

    def render(self) -> str:
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Groups:
    """Ranks by dot: one each, or neighbours together when there are many."""

    num_ranks: int
    size: int

    @property
    def count(self) -> int:
        return ceil(self.num_ranks / self.size)

    def label(self, group: int) -> str:
        last = min((group + 1) * self.size, self.num_ranks) - 1
        return str(group) if self.size == 1 else f"{group * self.size}–{last}"


def draw(schedule: Schedule, report: Report) -> str:
    """The picture as SVG text."""
    groups = Groups(schedule.num_ranks, ceil(schedule.num_ranks / MAX_VERTICES))
    rows = max(RING, 26 * groups.count)
    canvas = Canvas(WIDTH, TOP + rows + 150)
    canvas.text(Point(MARGIN, 42), schedule.name, size=22, weight=600)
    machine = f"{report.topology}{' (idealised)' if report.idealised else ''}"
    facts = f"{schedule.num_ranks} ranks on {machine} · {report.num_steps} steps · {report.num_transfers:,} transfers"
    canvas.text(Point(MARGIN, 66), facts, fill=FAINT)
    loads = pair_loads(schedule, report)
    draw_machine(canvas, schedule, loads, groups, TOP + rows / 2 + 16)
    draw_steps(canvas, schedule, groups, rows)
    draw_loads(canvas, report, loads, TOP + rows + 60)
    return canvas.render()


@dataclass(frozen=True, slots=True)
class Load:
    """What one pair carries: n blocks, over a link that gives it `bandwidth` at most; `time` per byte of a block."""

    source: int
    dest: int
    blocks: float
    bandwidth: float

    @property
    def time(self) -> float:
        return self.blocks / self.bandwidth


def pair_loads(schedule: Schedule, report: Report) -> tuple[Load, ...]:
    """Every pair in use, the busiest last; by the time its bytes take, as links differ."""
    topology = schedule.topology
    link = link_of(topology, report.pair_source, report.pair_dest)
    rates = wire_bandwidth(topology, report.pair_source, report.pair_dest, link)
    columns = (report.pair_source.tolist(), report.pair_dest.tolist(), report.pair_blocks.tolist(), rates.tolist())
    loads = (Load(*values) for values in zip(*columns, strict=True))
    return tuple(sorted(loads, key=lambda load: (load.time, -load.source, -load.dest)))


# --- the machine ------------------------------------------------------------------------------------------------------


def draw_machine(canvas: Canvas, schedule: Schedule, loads: Sequence[Load], groups: Groups, middle: float) -> None:
    """The ranks on a circle, every link as a hair, every pair in use as thick as its load."""
    centre = Point(MARGIN + RING / 2, middle)
    radius = 15 if groups.count <= 16 else 9
    places = circle(centre, RING / 2 - 34, groups.count)
    arcs = group_loads(loads, groups)
    if groups.size == 1 and groups.count <= 16:
        draw_links(canvas, schedule, places)
    most = max(arcs.values(), default=1.0)
    stroke = 2.2 if len(arcs) <= 60 else 1.0
    for (source, dest), load in sorted(arcs.items(), key=lambda item: (item[1], item[0])):
        draw_arc(canvas, centre, places[source], places[dest], load / most, stroke, radius + 2)
    per_node = schedule.topology.gpus_per_node
    for index, place in enumerate(places):
        colour = NODES[index * groups.size // per_node % len(NODES)]
        canvas.add("circle", cx=place.x, cy=place.y, r=radius, fill=PAPER, stroke=colour, stroke_width=2.5)
        if groups.count <= 16:
            canvas.text(Point(place.x, place.y + 4.5), groups.label(index), size=12, anchor="middle", weight=600)
    draw_node_names(canvas, schedule, centre, groups)


def circle(centre: Point, radius: float, count: int) -> tuple[Point, ...]:
    """Evenly spaced from the top, clockwise."""
    turns = [2 * pi * index / count - pi / 2 for index in range(count)]
    return tuple(Point(centre.x + radius * cos(turn), centre.y + radius * sin(turn)) for turn in turns)


def draw_links(canvas: Canvas, schedule: Schedule, places: Sequence[Point]) -> None:
    ranks = np.arange(len(places))
    table = link_of(schedule.topology, ranks[:, None], ranks[None, :]) != NO_LINK
    for source in range(len(places)):
        for dest in range(source):
            if table[source, dest] or table[dest, source]:
                canvas.line(places[source], places[dest], GRID, 1)


def group_loads(loads: Sequence[Load], groups: Groups) -> dict[tuple[int, int], float]:
    """The time of the busiest pair between two dots, in both directions apart."""
    arcs: dict[tuple[int, int], float] = {}
    for load in loads:
        source, dest = load.source // groups.size, load.dest // groups.size
        if source != dest:
            arcs[source, dest] = max(load.time, arcs.get((source, dest), 0.0))
    return arcs


def draw_arc(
    canvas: Canvas, centre: Point, source: Point, dest: Point, share: float, stroke: float, gap: float
) -> None:
    """A bow from source to dest that leaves room for the opposite one."""
    dx, dy = dest.x - source.x, dest.y - source.y
    length = hypot(dx, dy)
    bend = 0.09 * length
    middle = Point((source.x + dest.x) / 2 - dy / length * bend, (source.y + dest.y) / 2 + dx / length * bend)
    middle = Point(middle.x + (centre.x - middle.x) * 0.06, middle.y + (centre.y - middle.y) * 0.06)
    colour = LOADS[min(int(share * len(LOADS)), len(LOADS) - 1)]
    end_length = hypot(dest.x - middle.x, dest.y - middle.y)
    tip = Point(dest.x - (dest.x - middle.x) / end_length * gap, dest.y - (dest.y - middle.y) / end_length * gap)
    width = (0.45 + share) * stroke
    path = (
        f"M{number(source.x)} {number(source.y)} Q{number(middle.x)} {number(middle.y)} {number(tip.x)} {number(tip.y)}"
    )
    canvas.add("path", d=path, fill="none", stroke=colour, stroke_width=width, opacity=0.85)
    canvas.head(tip, middle, colour, 5 + 1.8 * stroke * share)


def draw_node_names(canvas: Canvas, schedule: Schedule, centre: Point, groups: Groups) -> None:
    per_node = schedule.topology.gpus_per_node
    nodes = ceil(schedule.num_ranks / per_node)
    if nodes == 1:
        return
    for node in range(nodes):
        first, last = node * per_node, min((node + 1) * per_node, schedule.num_ranks) - 1
        turn = 2 * pi * ((first + last) / 2) / groups.size / groups.count - pi / 2
        place = Point(centre.x + (RING / 2 + 4) * cos(turn), centre.y + (RING / 2 + 4) * sin(turn) + 4)
        canvas.text(place, f"node {node}", size=11, fill=NODES[node % len(NODES)], anchor="middle", weight=600)


# --- the steps --------------------------------------------------------------------------------------------------------


def draw_steps(canvas: Canvas, schedule: Schedule, groups: Groups, rows: float) -> None:
    """Time to the right, a rank per row: each transfer is a stroke from its source to where it lands a step later."""
    columns = shown_steps(schedule)
    width = WIDTH - MARGIN - STEPS_LEFT
    stride = width / max(len(columns), 1)
    lane = rows / groups.count
    ys = [TOP + lane * (group + 0.5) + 16 for group in range(groups.count)]
    for group, y in enumerate(ys):
        canvas.line(Point(STEPS_LEFT, y), Point(STEPS_LEFT + width, y), GRID, 1)
        words = f"rank {groups.label(group)}" if groups.size == 1 else f"ranks {groups.label(group)}"
        canvas.text(Point(STEPS_LEFT - 12, y + 4), words, size=11, fill=FAINT, anchor="end")
    for index, column in enumerate(columns):
        left = STEPS_LEFT + stride * index
        head = Point(left + stride / 2, TOP + 2)
        if column is None:
            canvas.text(head, "…", size=14, fill=FAINT, anchor="middle")
            continue
        step_number, step = column
        if not isinstance(step, Step):
            draw_task(canvas, left + stride / 2, head, ys, schedule.words(step))
        else:
            label = f"step {step_number}" if stride > 52 else str(step_number)
            canvas.text(head, label, size=11, fill=FAINT, anchor="middle")
            draw_step(canvas, step, left, stride, ys, groups)
    draw_kinds(canvas, schedule, Point(STEPS_LEFT, TOP + rows + 48))


Column = tuple[int, AnyStep] | None


def shown_steps(schedule: Schedule) -> list[Column]:
    """All steps with their numbers, or the first and last around a gap."""
    columns: list[Column] = []
    step_number = 0
    for step in schedule.steps:
        step_number += isinstance(step, Step)
        columns.append((step_number, step))
    if len(columns) <= MAX_STEPS:
        return columns
    return [*columns[: MAX_STEPS - 5], None, *columns[-4:]]


def draw_task(canvas: Canvas, x: float, head: Point, ys: Sequence[float], words: str) -> None:
    canvas.text(head, words, size=11, fill=NODES[1], anchor="middle", weight=600)
    canvas.line(Point(x, ys[0] - 10), Point(x, ys[-1] + 10), NODES[1], 1.5, opacity=0.6, dash="3 4")


def draw_step(canvas: Canvas, step: Step, left: float, stride: float, ys: Sequence[float], groups: Groups) -> None:
    strokes: dict[tuple[int, int, MoveKind], None] = {}
    for moves in step.moves:
        dest = np.broadcast_to(moves.dest_rank[:, None], moves.source_rank.shape)
        valid = np.ones(dest.shape, bool) if moves.source_valid is None else moves.source_valid
        pairs = np.unique(np.stack((moves.source_rank[valid], dest[valid]), axis=1) // groups.size, axis=0)
        strokes.update({(source, end, moves.kind): None for source, end in pairs.tolist()})
    start_x, end_x = left + stride * 0.12, left + stride * 0.88
    thin = 1.1 if len(strokes) > 3 * len(ys) else 1.8
    for source, end, kind in strokes:
        start, tip = Point(start_x, ys[source]), Point(end_x, ys[end])
        is_local = source == end
        colour = KINDS[MoveKind.COPY] if is_local and kind is not MoveKind.REDUCE else KINDS[kind]
        canvas.line(start, tip, colour, thin, opacity=0.8, dash="2 4" if is_local else "")
        if not is_local:
            canvas.head(tip, start, colour, 6)
    for y in ys:
        canvas.add("circle", cx=start_x, cy=y, r=2, fill=INK)


def draw_kinds(canvas: Canvas, schedule: Schedule, at: Point) -> None:
    """The colours in use, and what they mean."""
    used = {moves.kind for moves in schedule.statements}
    x = at.x
    for kind in (kind for kind in KINDS if kind in used):
        canvas.line(Point(x, at.y), Point(x + 22, at.y), KINDS[kind], 3)
        canvas.text(Point(x + 30, at.y + 4), VERBS[kind], size=12)
        x += 110


# --- the loads --------------------------------------------------------------------------------------------------------


def draw_loads(canvas: Canvas, report: Report, loads: Sequence[Load], y: float) -> None:
    """The scale of the arcs, and the busiest pairs in words."""
    if not loads:
        canvas.text(Point(MARGIN, y), "nothing crosses a link", fill=FAINT)
        return
    most = loads[-1]
    canvas.text(Point(MARGIN, y), "time of a pair on its link, n = the bytes of a block", size=12, fill=FAINT)
    for index, colour in enumerate(LOADS):
        canvas.add("rect", x=MARGIN + 44 * index, y=y + 12, width=42, height=8, fill=colour, rx=2)
    canvas.text(Point(MARGIN, y + 38), "0", size=11, fill=FAINT)
    top = f"n / {1e-9 / most.time:.4g} GB/s"
    canvas.text(Point(MARGIN + 44 * len(LOADS), y + 38), top, size=11, fill=FAINT, anchor="end")
    ties = [load for load in reversed(loads) if load.time >= most.time * (1 - 1e-9)]
    names = ",  ".join(f"{load.source} → {load.dest}" for load in ties[:BUSIEST])
    rest = f" and {len(ties) - BUSIEST} more" if len(ties) > BUSIEST else ""
    each = " each" if len(ties) > 1 else ""
    words = f"busiest: {names}{rest}, {most.blocks:.3g} n at {most.bandwidth / 1e9:.4g} GB/s{each}"
    canvas.text(Point(STEPS_LEFT, y + 28), words, size=12)
    if report.busiest_port:
        port = report.busiest_port
        text = f"busiest port: {port.who} {port.blocks:.3g} n over {port.link}"
        canvas.text(Point(STEPS_LEFT, y + 50), text, size=12, fill=FAINT)
