"""Draws random topologies as `.comm` text that have a link under every transfer of a schedule.

Assumes the ordered pairs of ranks between which something moves. Does not use any stage of commdsl.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from hypothesis import strategies as st

Arcs = tuple[tuple[int, int], ...]
"""Ordered pairs of ranks."""


@dataclass(frozen=True)
class DrawnMachine:
    """A topology `machine` in these lines; without any every two ranks have a link."""

    lines: tuple[str, ...] = ()
    nodes: int = 1

    @property
    def name(self) -> str | None:
        return "machine" if self.lines else None


SWITCH = DrawnMachine()


@st.composite
def machines(draw: st.DrawFn, ranks: int, arcs: Arcs) -> DrawnMachine:
    """Some links are one way, some both ways, a general class is for the rest; a port is of one GPU, of several or of a
    node, some slower than others; of links that nobody uses one may be missing, and one that is used may be slower.
    GPUs may lie on axes, whose neighbours are joined.
    """
    if draw(st.booleans()):
        return SWITCH
    gpus = draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0]))
    near = {(a % gpus, b % gpus) for a, b in arcs if a // gpus == b // gpus}
    width = draw(st.sampled_from([count for count in range(2, gpus) if gpus % count == 0] or [0]))
    along = width > 0 and draw(st.booleans())
    listed = {pair for pair in sorted(near) if draw(st.booleans())} if not along else around(gpus, width)
    scope = draw(st.sampled_from(["arcs", "pairs"]))
    joined = listed | ({(b, a) for a, b in listed} if scope == "pairs" else set())
    general = gpus > 1 and (not near <= joined or draw(st.booleans()))
    alike = all(a % gpus == b % gpus for a, b in arcs if a // gpus != b // gpus) and draw(st.booleans())

    def is_linked(a: int, b: int) -> bool:
        if a // gpus == b // gpus:
            return general or (a % gpus, b % gpus) in joined
        return not alike or a % gpus == b % gpus

    counted = f"x = {gpus // width}, y = {width}" if along else f"{gpus}"
    lines = [f"  nodes {ranks // gpus}   gpus {counted} per node   sms 132"]
    for name, where, there in (
        ("hop", f"{scope} {'along x, y' if along else spelled(sorted(listed))}", bool(listed)),
        ("rest", "in node", general),
        ("net", "across nodes" + " same gpu" * alike, gpus < ranks),
    ):
        lines += [f"  link {name} {where}   {draw(rates(gpus, ranks // gpus, name != 'hop' or along))}"] * there
    idle = [pair for pair in permutations(range(ranks), 2) if is_linked(*pair) and pair not in arcs]
    if idle and draw(st.booleans()):
        lines.append(f"  missing {spelled([draw(st.sampled_from(idle))])}")
    if arcs and draw(st.booleans()):
        lines.append(f"  degraded {spelled([draw(st.sampled_from(arcs))])}   3 GB/s")
    return DrawnMachine(("topology machine {", *lines, "}"), ranks // gpus)


def around(gpus: int, width: int) -> set[tuple[int, int]]:
    """From each GPU to the next of its row of so many, and to that below it, behind the last the first."""
    rows = {(gpu, gpu - gpu % width + (gpu + 1) % width) for gpu in range(gpus)}
    return rows | {(gpu, (gpu + width) % gpus) for gpu in range(gpus)}


def spelled(pairs: list[tuple[int, int]]) -> str:
    return " ".join(f"({a}, {b})" for a, b in pairs)


@st.composite
def rates(draw: st.DrawFn, gpus: int, nodes: int, of_all: bool) -> str:
    """`of_all`: every GPU has such a link."""
    several = {f"{count} gpus": count for count in range(2, gpus + 1) if gpus % count == 0}
    sharing = {"pair": 1, "gpu": 1, "node": gpus, **several}
    per = draw(st.sampled_from([*sharing]))
    conditions = ["node == 0"] * (nodes > 1) + ["gpu == 0"] * (of_all and sharing[per] < gpus)
    chosen = [f" if {draw(st.sampled_from(conditions))} else 25 GB/s"] if conditions and draw(st.booleans()) else [""]
    return f"{draw(st.sampled_from([10, 50, 450]))} GB/s{chosen[0]} per {per}   1 us"
