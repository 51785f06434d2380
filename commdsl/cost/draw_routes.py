"""Turns the routes of a rotation into a picture: all of them on the machine, then each by itself, in one colour each.

Assumes a checked schedule. Writes plain SVG, the same bytes every time. A node is a box. Colours keep apart for readers
who see few, and stand out from the paper; past those there are, strokes are dashed. Past `MOST_ROUTES` routes or
`MOST_RANKS` ranks there is no such picture, and `draw` makes its own. Does not know times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from textwrap import wrap

import numpy as np

from commdsl.cost.canvas import FAINT, MARGIN, PAPER, WIDTH, Canvas, Point
from commdsl.cost.draw import draw
from commdsl.cost.draw_machine import Frame, Machine, bow, draw_hairs
from commdsl.cost.report import Report
from commdsl.cost.routes import NOBODY, Route, routes
from commdsl.ir.schedules import Schedule

MOST_ROUTES, MOST_RANKS = 32, 32
HEAD = 92  # the title's part of the picture
GAP = 26
CAPTION = 40  # below a small picture
LARGE = (470.0, 700.0)  # width of the machine with all routes: of one column of nodes, of more
MOST_SMALL, MOST_BESIDE = 8, 4  # in a row
FEW = 8  # routes that are drawn beside a machine of no more ranks

NAMES = {"cycle": "Hamiltonian cycle", "route": "route"}

COLOURS = (
    *("#0064c8", "#d55500", "#008a64", "#c03a94", "#1f2530", "#2f9be0", "#7b1620"),
    *("#5a3fd6", "#e0506a", "#a8622e", "#117f93", "#00497f", "#b07f00", "#4f2a12"),
)
"""Seven, and seven more; least distance within either: 19 in CIELAB, also as protanopes and deuteranopes see them."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 3")
"""Of each seven routes; the colours begin anew after two."""


def picture(schedule: Schedule, report: Report) -> str:
    """The routes of a schedule that rotates, as SVG text; of any other schedule, and of many routes, its steps."""
    rotates = any(contract.name == "rotation" for contract in schedule.contracts)
    found = routes(schedule) if rotates and schedule.num_ranks <= MOST_RANKS else ()
    return draw_routes(schedule, report, found) if 0 < len(found) <= MOST_ROUTES else draw(schedule, report)


def draw_routes(schedule: Schedule, report: Report, found: Sequence[Route]) -> str:
    """The machine with all routes, and a small one for each: beside it where they fit, else below with words beside."""
    machine = Machine(schedule.topology, schedule.num_ranks)
    columns, rows = machine.grid
    large = LARGE[min(columns, 2) - 1]
    edge = MARGIN + large + GAP
    beside = columns == 1 and 1 < len(found) <= FEW and schedule.num_ranks <= FEW
    tall = max(large * rows / columns, 0.0 if beside else 22.0 * len(found))
    area = (edge, HEAD) if beside else (MARGIN, HEAD + tall + GAP)
    each = small_columns(len(found), MOST_BESIDE if beside else MOST_SMALL // columns)
    cell = (WIDTH - MARGIN + GAP - area[0]) / each
    small = min(cell - GAP, large / 2)
    pitch = small * rows / columns + CAPTION + (33 if beside else 0)
    below = 0 if beside or len(found) == 1 else ceil(len(found) / each) * pitch
    canvas = Canvas(WIDTH, HEAD + tall + MARGIN + (GAP + below if below else 0))
    head(canvas, schedule, report, found)
    draw_machine(canvas, machine.frame(Point(MARGIN, HEAD), large), machine, found, range(len(found)))
    if not beside:
        draw_words(canvas, found, Point(edge + 10, HEAD), tall)
    for index in range(len(found) if below or beside else 0):
        corner = Point(area[0] + index % each * cell, area[1] + index // each * pitch)
        draw_machine(canvas, machine.frame(corner, small), machine, found, [index])
        under = Point(corner.x, corner.y + small * rows / columns + 17)
        draw_name(canvas, found, index, under)
        if beside:
            for line, text in enumerate(folded(words(found[index]), int(small / 6.7), 2)):
                canvas.text(Point(under.x, under.y + 17 + 15 * line), text, size=11.5, fill=FAINT)
    return canvas.render()


def small_columns(count: int, most: int) -> int:
    """In how many columns small machines stand: few rows that are even."""
    return ceil(count / ceil(count / most))


def head(canvas: Canvas, schedule: Schedule, report: Report, found: Sequence[Route]) -> None:
    machine = f"{report.topology}{' (idealised)' if report.idealised else ''}"
    what = f"{len(found)} {NAMES[kind(found)]}{'s' if len(found) > 1 else ''}"
    apart = ", no link in two of them" if len(found) > 1 and disjoint(found) else ""
    canvas.text(Point(MARGIN, 42), schedule.name, size=22, weight=600)
    ranks = f"{schedule.num_ranks} ranks on {machine}"
    canvas.text(Point(MARGIN, 66), f"{ranks} · {what}{apart} · {report.num_steps} steps", fill=FAINT)


def kind(found: Sequence[Route]) -> str:
    return "cycle" if all(route.is_cycle for route in found) else "route"


def disjoint(found: Sequence[Route]) -> bool:
    """Whether no ordered pair of ranks is on two routes."""
    table = np.stack([route.after for route in found])
    return all(len(set(there)) == len(there) for column in table.T for there in [column[column != NOBODY].tolist()])


# --- the machine ------------------------------------------------------------------------------------------------------


def draw_machine(canvas: Canvas, at: Frame, machine: Machine, found: Sequence[Route], shown: Sequence[int]) -> None:
    """Boxes, hairs, the routes of these numbers, and the ranks on top."""
    for index, (corner, side) in enumerate(at.boxes):
        extents = {"x": corner.x, "y": corner.y, "width": side, "height": side}
        canvas.add("rect", **extents, rx=0.03 * side, fill="#f7f9fb", stroke="#c9d1da", stroke_width=1)
        if len(at.boxes) > 1 and side > 200:
            canvas.text(Point(corner.x + 9, corner.y + 18), f"node {index}", size=12, fill=FAINT)
    draw_hairs(canvas, machine, at.places, at.radius)
    arcs = sum(np.count_nonzero(found[index].after != NOBODY) for index in shown)
    width = 2.0 if arcs <= 64 else 1.2
    for index in shown:
        after = found[index].after.tolist()
        for source, dest in enumerate(after):
            if dest != NOBODY:
                draw_arc(canvas, at, source, dest, index, width)
    for rank, place in enumerate(at.places):
        shape = {"cx": place.x, "cy": place.y, "r": at.radius, "stroke_width": 1.6 if at.shows_numbers else 1}
        canvas.add("circle", **shape, fill=PAPER, stroke="#55606e")
        if at.shows_numbers:
            size = min(12.0, 1.15 * at.radius)
            canvas.text(Point(place.x, place.y + 0.36 * size), str(rank), size=size, anchor="middle", weight=600)


def draw_arc(canvas: Canvas, at: Frame, source: int, dest: int, index: int, width: float) -> None:
    """A bow from rank to rank that leaves room for the opposite one, with an arrow head."""
    line = bow(at.places, source, dest, 0.10 if at.centres[source] == at.centres[dest] else 0.06, at.radius)
    colour, dash = stroke(index)
    more = {"stroke_dasharray": dash} if dash else {}
    canvas.add("path", d=line.path, fill="none", stroke=colour, stroke_width=width, **more)
    canvas.head(line.tip, line.middle, colour, min(9.0, 3.5 + 0.45 * at.radius))


def stroke(index: int) -> tuple[str, str]:
    """The colour of a route and its dashes: no two of MOST_ROUTES are drawn alike."""
    return COLOURS[index % len(COLOURS)], DASHES[index // (len(COLOURS) // 2) % len(DASHES)]


# --- the words --------------------------------------------------------------------------------------------------------


def draw_words(canvas: Canvas, found: Sequence[Route], at: Point, height: float) -> None:
    """What each stroke stands for, in as many lines as there is room for."""
    room = height / len(found)
    size = min(12.0, 0.62 * room)
    most = int((WIDTH - MARGIN - at.x - 106) / (0.58 * size))
    texts = [folded(words(route), most, max(1, int((room - 6) / (1.3 * size)))) for route in found]
    pitch = min(room, 1.3 * size * max(map(len, texts)) + 14)
    for index, text in enumerate(texts):
        y = at.y + pitch * index + 1.2 * size
        draw_name(canvas, found, index, Point(at.x, y))
        for number_of, line in enumerate(text):
            canvas.text(Point(at.x + 106, y + 1.3 * size * number_of), line, size=size, fill=FAINT)


def draw_name(canvas: Canvas, found: Sequence[Route], index: int, at: Point) -> None:
    """The stroke of a route and its number."""
    colour, dash = stroke(index)
    canvas.line(Point(at.x, at.y - 4), Point(at.x + 26, at.y - 4), colour, 3, dash=dash)
    canvas.text(Point(at.x + 36, at.y), f"{kind(found)} {index}", size=12.5, weight=600)


def words(route: Route) -> str:
    """`0 1 7 2 6 3 5 4` for a cycle through all ranks; `(0 2) (1 3)` or `0 → 2, 1 → 3` for none; of a shift how far."""
    if is_shift(route):
        return f"r → (r + {int(route.after[0])}) % {len(route.after)}"
    if route.is_cycle:
        return " ".join(map(str, route.chains[0][:-1]))
    closed = all(chain[0] == chain[-1] for chain in route.chains)
    return (" " if closed else ", ").join(chain_words(chain) for chain in route.chains)


def chain_words(chain: tuple[int, ...]) -> str:
    closed = chain[0] == chain[-1]
    return f"({' '.join(map(str, chain[:-1]))})" if closed else " → ".join(map(str, chain))


def is_shift(route: Route) -> bool:
    """Whether every rank hands on, over the same distance."""
    distance = (route.after - np.arange(len(route.after))) % len(route.after)
    return NOBODY not in route.after and len(set(distance.tolist())) == 1


def folded(text: str, most: int, lines: int) -> list[str]:
    """Lines of at most so many characters; three dots where they are too few."""
    return wrap(text, most, max_lines=lines, placeholder=" …")
