"""Turns a schedule and its report into a picture: the machine with its busiest links, and beside it the steps.

Assumes a checked schedule. Writes plain SVG, the same bytes every time. Where there is room, a stroke of a step starts
with the chunks that leave. Past `MAX_STEPS` steps, the middle is left out, and the picture says so. Does not know times
within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commdsl.cost.canvas import FAINT, GRID, INK, MARGIN, NODES, WIDTH, Canvas, Point
from commdsl.cost.draw_machine import LOADS, RING, Groups, Machine, draw_machine, node_colours
from commdsl.cost.report import Report
from commdsl.cost.timeline import leaving
from commdsl.ir.schedules import AnyStep, Schedule, Step
from commdsl.ir.words import step_words
from commdsl.language.kinds import MoveKind
from commdsl.machine.topology import link_of, wire_bandwidth

MAX_STEPS = 16
LEAST_TEXT = 6.5
"""Pixels; what is smaller nobody reads."""

BUSIEST = 5
TOP = 96
STEPS_LEFT = MARGIN + RING + 90

KINDS = {MoveKind.PUT: "#2f6fde", MoveKind.GET: "#13907a", MoveKind.REDUCE: "#d9622b", MoveKind.COPY: "#8a94a3"}
VERBS = {MoveKind.PUT: "put", MoveKind.GET: "get", MoveKind.REDUCE: "reduce", MoveKind.COPY: "copy"}


def draw(schedule: Schedule, report: Report) -> str:
    """The picture as SVG text."""
    groups = Groups.of(schedule.num_ranks)
    rows = max(RING, 26 * groups.count)
    canvas = Canvas(WIDTH, TOP + rows + 150)
    canvas.text(Point(MARGIN, 42), schedule.name, size=22, weight=600)
    where = f"{report.topology}{' (idealised)' if report.idealised else ''}"
    facts = f"{schedule.num_ranks} ranks on {where} · {report.num_steps} steps · {report.num_transfers:,} transfers"
    canvas.text(Point(MARGIN, 66), facts, fill=FAINT)
    loads = pair_loads(schedule, report)
    machine = Machine(schedule.topology, schedule.num_ranks)
    draw_machine(canvas, machine, group_loads(loads, groups), node_colours(machine, groups), TOP + rows / 2 + 16)
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


def group_loads(loads: Sequence[Load], groups: Groups) -> dict[tuple[int, int], float]:
    """The time of the busiest pair between two dots, in both directions apart."""
    arcs: dict[tuple[int, int], float] = {}
    for load in loads:
        source, dest = load.source // groups.size, load.dest // groups.size
        if source != dest:
            arcs[source, dest] = max(load.time, arcs.get((source, dest), 0.0))
    return arcs


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
            draw_task(canvas, left + stride / 2, head, ys, step_words(schedule, step))
        else:
            label = f"step {step_number}" if stride > 52 else str(step_number)
            canvas.text(head, label, size=11, fill=FAINT, anchor="middle")
            draw_step(canvas, step, left, stride, ys, groups)
            if groups.size == 1:
                draw_chunks(canvas, schedule, step, left, stride, ys)
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


def draw_chunks(
    canvas: Canvas, schedule: Schedule, step: Step, left: float, stride: float, ys: Sequence[float]
) -> None:
    """What each rank sends, beside where its strokes start; nothing in a step where that is longer than a stroke."""
    names = [leaving(schedule, step, rank) for rank in range(schedule.num_ranks)]
    longest = max(map(len, names), default=0)
    size = min(9.0, 0.72 * stride / (0.62 * max(longest, 1)))
    if size < LEAST_TEXT:
        return
    for y, name in zip(ys, names, strict=True):
        canvas.text(Point(left + stride * 0.12 + 3, y - 3), name, size=size, halo=True)


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
