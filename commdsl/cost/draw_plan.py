"""Turns a dispatch plan and its loads into a picture: the machine with what crosses it, the shards, the attention.

Assumes a plan without a fault. Writes plain SVG, the same bytes every time. Past `MAX_VERTICES` ranks, neighbours share
a dot and a row, which then shows the most loaded of them; short shards in a row of one destination are drawn as one.
Does not know times within a dispatch.
"""

from __future__ import annotations

import numpy as np

from commdsl.cost.canvas import FAINT, GRID, INK, MARGIN, NODES, PAPER, WIDTH, Canvas, Point
from commdsl.cost.draw import STEPS_LEFT, TOP
from commdsl.cost.draw_machine import LOADS, RING, Groups, Machine, draw_machine
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Longs
from commdsl.planner.balance import Balance, imbalance

SHARDS_WIDTH = 360
BARS_LEFT = STEPS_LEFT + SHARDS_WIDTH + 40
BARS_WIDTH = WIDTH - MARGIN - BARS_LEFT
LABEL_WIDTH = 22
"""Pixels from which a rectangle has room for the number of its destination."""


def draw_plan(plan: DispatchPlan, before: Balance, after: Balance) -> str:
    """The picture as SVG text; `before` has the loads with every shard at home."""
    groups = Groups.of(plan.num_ranks)
    rows = max(RING, 22 * groups.count)
    canvas = Canvas(WIDTH, TOP + rows + 150)
    canvas.text(Point(MARGIN, 42), plan.name, size=22, weight=600)
    machine = f"{after.topology.name}{' (idealised)' if after.topology.idealised else ''}"
    documents = int(plan.document.max(initial=-1)) + 1
    rule = plan.mask.value if plan.mask else "rows only"
    facts = f"{plan.num_ranks} ranks on {machine} · {documents:,} documents in {plan.shards.num:,} shards · {rule}"
    canvas.text(Point(MARGIN, 66), facts, fill=FAINT)
    _machine(canvas, after, groups, TOP + rows / 2 + 16)
    ys = [TOP + rows / groups.count * (index + 0.5) + 16 for index in range(groups.count)]
    _shards(canvas, plan, after, groups, ys)
    _bars(canvas, before, after, groups, ys)
    _words(canvas, before, after, TOP + rows + 60)
    return canvas.render()


# --- the machine ------------------------------------------------------------------------------------------------------


def _machine(canvas: Canvas, loads: Balance, groups: Groups, middle: float) -> None:
    """The machine, every pair between which anything travels as thick as its bytes."""
    size = _pairs(loads.bytes, groups)
    arcs = {(int(source), int(dest)): float(size[dest, source]) for dest, source in zip(*np.nonzero(size), strict=True)}
    colours = [_colour(loads, groups, index) for index in range(groups.count)]
    draw_machine(canvas, Machine(loads.topology, groups.num_ranks), arcs, colours, middle)


def _pairs(size: Longs, groups: Groups) -> Longs:
    """(groups, groups): bytes between different dots, from the second to the first."""
    begin = np.arange(0, len(size), groups.size)
    found: Longs = np.add.reduceat(np.add.reduceat(size, begin, axis=0), begin, axis=1)
    np.fill_diagonal(found, 0)
    return found


def _colour(loads: Balance, groups: Groups, index: int) -> str:
    """A rank's, where ranks are few enough to tell apart, else its node's."""
    if groups.count <= len(NODES):
        return NODES[index]
    return NODES[index * groups.size // loads.topology.gpus_per_node % len(NODES)]


# --- the shards -------------------------------------------------------------------------------------------------------


def _shards(canvas: Canvas, plan: DispatchPlan, loads: Balance, groups: Groups, ys: list[float]) -> None:
    """A row a rank: its tensor from left to right, what stays in grey, what leaves in the colour of where to."""
    whose = "its rows" if groups.size == 1 else "rows of the one that sends most"
    canvas.text(Point(STEPS_LEFT, TOP), f"{whose}, in colour what leaves, and for which rank", size=12, fill=FAINT)
    top = max(int(plan.shards.rows.max(initial=0)), 1)
    height = min(14.0, 0.7 * (ys[1] - ys[0]) if len(ys) > 1 else 14.0)
    for group, y in enumerate(ys):
        noun = "rank" if groups.size == 1 else "ranks"
        canvas.text(Point(STEPS_LEFT - 12, y + 4), f"{noun} {groups.label(group)}", size=11, fill=FAINT, anchor="end")
        rank = _busiest(plan, groups, group)
        for begin, end, dest in _runs(plan, rank, top):
            x, width = STEPS_LEFT + SHARDS_WIDTH * begin / top, SHARDS_WIDTH * (end - begin) / top
            fill = (
                "#cfd6de" if dest == rank else GRID if dest == NOWHERE else _colour(loads, groups, dest // groups.size)
            )
            canvas.add("rect", x=x, y=y - height / 2, width=width, height=height, fill=fill, stroke=PAPER,
                       stroke_width=0.6)  # fmt: skip
            if dest not in (rank, NOWHERE) and width >= LABEL_WIDTH:
                canvas.text(Point(x + width / 2, y + 3.5), str(dest), size=10, fill=PAPER, anchor="middle")


def _busiest(plan: DispatchPlan, groups: Groups, group: int) -> int:
    """The rank of a row: of neighbours that whose shards leave most."""
    ranks = np.arange(group * groups.size, min((group + 1) * groups.size, plan.num_ranks))
    leaves = (plan.dest != plan.shards.rank[:, None]).any(axis=1)
    away = np.bincount(plan.shards.rank[leaves], plan.shards.length[leaves], plan.num_ranks)
    return int(ranks[away[ranks].argmax()])


def _runs(plan: DispatchPlan, rank: int, top: int) -> list[tuple[int, int, int]]:
    """First row, end and destination of each run of shards that go to one rank; runs too narrow to see are left out."""
    first, last = int(plan.shards.begin[rank]), int(plan.shards.begin[rank + 1])
    runs: list[tuple[int, int, int]] = []
    for row, length, dest in zip(
        plan.shards.row[first:last].tolist(),
        plan.shards.length[first:last].tolist(),
        plan.dest[first:last, 0].tolist(),
        strict=True,
    ):
        if runs and runs[-1][2] == dest:
            runs[-1] = (runs[-1][0], row + length, dest)
        else:
            runs.append((row, row + length, dest))
    return [run for run in runs if (run[1] - run[0]) * SHARDS_WIDTH >= top]


# --- the loads --------------------------------------------------------------------------------------------------------


def _bars(canvas: Canvas, before: Balance, after: Balance, groups: Groups, ys: list[float]) -> None:
    """A row a rank: its attention as planned as a bar, at home as a stroke, the mean as a line through all."""
    old, new = (_worst(loads.attention, groups) for loads in (before, after))
    top = max(*old, *new, 1)
    canvas.text(Point(BARS_LEFT, TOP), "attention: planned ▬, at home │", size=12, fill=FAINT)
    height = min(12.0, 0.6 * (ys[1] - ys[0]) if len(ys) > 1 else 12.0)
    for y, was, now in zip(ys, old, new, strict=True):
        canvas.add("rect", x=BARS_LEFT, y=y - height / 2, width=BARS_WIDTH * now / top, height=height, fill=NODES[0])
        x = BARS_LEFT + BARS_WIDTH * was / top
        canvas.line(Point(x, y - height / 2 - 2), Point(x, y + height / 2 + 2), LOADS[-1], 2)
    mean = BARS_LEFT + BARS_WIDTH * float(after.attention.mean()) / top
    canvas.line(Point(mean, ys[0] - 14), Point(mean, ys[-1] + 14), INK, 1, dash="3 4")


def _worst(values: Longs, groups: Groups) -> list[int]:
    found: list[int] = np.maximum.reduceat(values, np.arange(0, len(values), groups.size)).tolist()
    return found


def _words(canvas: Canvas, before: Balance, after: Balance, y: float) -> None:
    """The scale of the arcs, the bytes by link, and how even it is."""
    most = int(after.bytes.max(initial=0))
    canvas.text(Point(MARGIN, y), "bytes from one dot to another, as a share of the most", size=12, fill=FAINT)
    for index, colour in enumerate(LOADS):
        canvas.add("rect", x=MARGIN + 44 * index, y=y + 12, width=42, height=8, fill=colour, rx=2)
    canvas.text(Point(MARGIN, y + 38), f"most of a pair of ranks: {most:,} B", size=11, fill=FAINT)
    links = ",  ".join(f"{link.name or 'without a link'}: {link.bytes / 1e9:.4g} GB" for link in after.links)
    canvas.text(Point(STEPS_LEFT, y + 28), f"there over {links}" if links else "nothing leaves its rank", size=12)
    even = " → ".join(f"{imbalance(loads.attention) * 100:.1f} %" for loads in (before, after))
    rows = f"{imbalance(after.query_rows) * 100:.1f} %, keys {imbalance(after.key_rows) * 100:.1f} %"
    sent = f"{imbalance(after.sent_bytes) * 100:.0f} %"
    text = f"above the mean: attention {even}, rows of queries {rows}, bytes sent {sent}"
    canvas.text(Point(STEPS_LEFT, y + 50), text, size=12, fill=FAINT)
