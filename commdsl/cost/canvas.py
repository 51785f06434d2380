"""What pictures are drawn on: points, and an SVG under construction.

Assumes sizes in pixels. Writes plain SVG, the same bytes every time. Does not know what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from xml.etree import ElementTree

WIDTH, MARGIN = 1180, 36

INK, FAINT, PAPER, GRID = "#1d2733", "#6b7785", "#ffffff", "#e6eaef"
NODES = ("#2f6fde", "#7b4fc9", "#13907a", "#b8781a", "#c2417c", "#4b7d2a", "#356d8c", "#8c4a35")
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
        self,
        at: Point,
        words: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str = "start",
        weight: int = 400,
        halo: bool = False,
    ) -> None:
        """With a halo it is read where lines cross it."""
        behind: dict[str, str | float] = {"stroke": PAPER, "stroke_width": 2.5, "paint_order": "stroke"} if halo else {}
        element = self.add("text", x=at.x, y=at.y, font_size=size, fill=fill, text_anchor=anchor, font_weight=weight,
                           **behind)  # fmt: skip
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
