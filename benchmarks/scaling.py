"""How cost grows with the number of ranks: measured beside the cost model, and by that model on paper to 64 nodes.

    python benchmarks/scaling.py measured/x2.csv measured/x4.csv [--markdown] [--plot scaling.svg]

Turns CSVs of benchmarks/collectives.py into the constants of the model, its errors, and times for one node of eight
GPUs and for 2, 8 and 64 such nodes joined by rails. Assumes that the rows are of one kind of GPU. Does not measure:
what is on paper says so. NVLink's constants are fitted; the rail's are stated, nothing here was measured across nodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import Collective, size_name
from benchmarks.report import grid, markdown, number
from benchmarks.scaling_model import (
    ACROSS_NODES,
    GPUS_PER_NODE,
    NVLINK_US,
    Constants,
    Paper,
    Rail,
    Reading,
    RowsError,
    Sample,
    better_reading,
    errors,
    fit,
    left_out,
    on_paper,
    read,
    root_mean_square,
    shipped,
)

NODES = (1, 2, 8, 64)
RAIL_US, RAIL_GB_PER_S = 4.0, 50.0
SIZES = (64 << 10, 16 << 20, 1 << 30)

Table: TypeAlias = tuple[list[str], list[list[str]]]


@dataclass(frozen=True, eq=False)
class Study:
    """The rows, the model under both readings, and what it says of other machines."""

    samples: tuple[Sample, ...]
    models: dict[Reading, dict[str, Constants]]
    better: Reading
    unseen: dict[Reading, dict[Sample, float]]  # the error without the sample's number of ranks
    paper: tuple[dict[Reading, Paper], ...]
    rail: Rail

    def paper_of(self, collective: Collective, nodes: int) -> list[dict[Reading, Paper]]:
        return [
            both
            for both in self.paper
            if (both[self.better].family.collective, both[self.better].nodes) == (collective, nodes)
        ]

    def fastest(self, collective: Collective, nodes: int, nbytes: int) -> dict[Reading, Paper] | None:
        """On paper, by the better reading."""
        found = self.paper_of(collective, nodes)
        return min(found, key=lambda both: both[self.better].us(nbytes, self.better), default=None)

    def collectives(self) -> list[Collective]:
        return list(dict.fromkeys(sample.case.collective for sample in self.samples))

    def ranks(self) -> list[int]:
        return sorted({sample.case.ranks for sample in self.samples})


def study(paths: Sequence[Path], rail: Rail) -> Study:
    samples = read(paths)
    models = {reading: fit(samples, reading) for reading in Reading}
    shared = models[Reading.OVERLAP].keys() & models[Reading.IN_TURN].keys()
    models = {reading: {name: model[name] for name in sorted(shared)} for reading, model in models.items()}
    unseen = {reading: left_out(samples, reading) for reading in Reading}
    if not shared:
        raise RowsError("no protocol has rows of two sizes: there is nothing to fit")
    paper: list[dict[Reading, Paper]] = []
    measured = list(dict.fromkeys(sample.family for sample in samples))
    candidates = [family for name in dict.fromkeys(one.collective for one in measured) for family in shipped(name)]
    across = [one.family for one in on_paper(candidates, 2, models[Reading.OVERLAP], rail)]
    for nodes in NODES:
        families = dict.fromkeys([*measured, *across] if nodes == 1 else across)
        found = {reading: on_paper(families, nodes, models[reading], rail) for reading in Reading}
        pairs = zip(found[Reading.OVERLAP], found[Reading.IN_TURN], strict=True)
        paper += [{Reading.OVERLAP: overlap, Reading.IN_TURN: in_turn} for overlap, in_turn in pairs]
    return Study(samples, models, better_reading(samples), unseen, tuple(paper), rail)


# --- tables -----------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    return "-" if value is None else f"{round(100 * value):+d}%"


def spread(values: Sequence[float]) -> str:
    """The root mean square and the worst of some errors."""
    if not values:
        return "-"
    return f"{100 * root_mean_square(values):.0f}% ({100 * max(map(abs, values)):.0f}%)"


def constants(found: Study) -> Table:
    header = ["protocol", "reading", "rows", "base us", "us a step", "GB/s a port", "error (worst)", "P left out"]
    lines = []
    for reading in Reading:
        fitted = errors(found.samples, found.models[reading], reading)
        for protocol, known in found.models[reading].items():
            both = [
                [error for sample, error in some.items() if sample.family.protocol == protocol]
                for some in (fitted, found.unseen[reading])
            ]
            lines.append(
                [
                    protocol,
                    ("*" if reading is found.better else "") + reading,
                    str(known.rows),
                    number(known.base_us),
                    number(known.step_us) + (" stated" if known.step_is_stated else ""),
                    number(known.gb_per_s, 0) if known.us_per_byte else "no cost seen",
                    *map(spread, both),
                ]
            )
    return header, lines


def beside(found: Study) -> Table:
    """What ran, measured, and the same in the model."""
    header = ["collective", "size", "P", "what ran", "steps", "measured us", "modelled us", "error", "P left out"]
    model, unseen = found.models[found.better], found.unseen[found.better]
    fitted = errors(found.samples, model, found.better)
    lines = []
    for sample in found.samples:
        if sample.is_choice:
            known = model.get(sample.family.protocol)
            lines.append(
                [
                    sample.case.collective.value,
                    size_name(sample.case.nbytes),
                    str(sample.case.ranks),
                    str(sample.family),
                    str(sample.steps),
                    number(sample.us),
                    number(known.us(sample, found.better) if known else None),
                    percent(fitted.get(sample)),
                    percent(unseen.get(sample)),
                ]
            )
    return header, lines


def details(found: Study) -> Table:
    """Every schedule on every machine that is only on paper; `*` is the fastest of its collective there."""
    header = ["machine", "collective", "on paper", "steps", "NVLink port", "rail port"]
    header += [f"{size_name(nbytes)}, us" for nbytes in SIZES]
    lines = []
    for nodes in NODES:
        for collective in found.collectives():
            for both in found.paper_of(collective, nodes):
                one = both[found.better]
                lines.append(
                    [
                        f"{nodes} x {GPUS_PER_NODE}",
                        collective.value,
                        str(one.family),
                        "+".join(map(str, one.steps)),
                        *(f"{share:.3g}" for share in one.shares()),
                        *([] if nodes > 1 else ["-"]),
                        *(_range(found, both, nbytes) for nbytes in SIZES),
                    ]
                )
    return header, lines


def _range(found: Study, both: dict[Reading, Paper], nbytes: int) -> str:
    one = both[found.better]
    is_fastest = both is found.fastest(one.family.collective, one.nodes, nbytes)
    return ("*" if is_fastest else "") + between(bounds(both, nbytes))


def bounds(both: dict[Reading, Paper], nbytes: int) -> tuple[float, float]:
    """Both readings, the smaller first."""
    times = [one.us(nbytes, reading) for reading, one in both.items()]
    return min(times), max(times)


def between(times: tuple[float, float]) -> str:
    return "-".join(dict.fromkeys(map(number, times)))


def growth(found: Study) -> Table:
    """Microseconds over the number of ranks: first what was measured, then what is on paper."""
    header = ["collective", "size", *(f"P={ranks} measured" for ranks in found.ranks())]
    header += [f"P={nodes * GPUS_PER_NODE} ({nodes} x {GPUS_PER_NODE}) paper" for nodes in NODES]
    lines = []
    for collective in found.collectives():
        for nbytes in SIZES:
            points = measured_points(found, collective, nbytes)
            lines.append(
                [
                    collective.value,
                    size_name(nbytes),
                    *(number(points.get(ranks)) for ranks in found.ranks()),
                    *(
                        between(at) if (at := paper_bounds(found, collective, nodes, nbytes)) else "-"
                        for nodes in NODES
                    ),
                ]
            )
    return header, lines


def measured_points(found: Study, collective: Collective, nbytes: int) -> dict[int, float]:
    return {
        sample.case.ranks: sample.us
        for sample in found.samples
        if sample.is_choice and (sample.case.collective, sample.case.nbytes) == (collective, nbytes)
    }


def paper_bounds(found: Study, collective: Collective, nodes: int, nbytes: int) -> tuple[float, float] | None:
    fastest = found.fastest(collective, nodes, nbytes)
    return bounds(fastest, nbytes) if fastest else None


def notes(found: Study) -> list[str]:
    """What the tables assume and leave out."""
    said = [
        f'Measured: P = {", ".join(map(str, found.ranks()))}. All else is on paper, with "{found.better}" (marked *):'
        " of the two readings it errs less, or no more, on numbers of ranks left out of the fit.",
        "A time is a base, a latency for every step, and the busiest port's bytes over its effective bandwidth. Errors"
        " are modelled over measured, less 1: root mean square (worst).",
        f"On paper NVLink has the fitted constants. The rail has stated ones, {found.rail.gb_per_s:g} GB/s a GPU and"
        f" {found.rail.us:g} us in place of NVLink's {NVLINK_US} us; no rail was measured. Across nodes all is"
        f" `{ACROSS_NODES}`. Port: bytes over the larger side. A range is the two readings: rows of"
        " one node cannot tell whether NVLink and a rail are busy at the same time.",
    ]
    protocols = found.models[found.better]
    left = sorted({sample.family.protocol for sample in found.samples} - protocols.keys())
    said += [f"Not fitted, too few rows: {protocol}." for protocol in left]
    if ACROSS_NODES not in protocols:
        said.append(f"Nothing across nodes: no `{ACROSS_NODES}` rows to fit.")
    else:
        lacking = [name.value for name in found.collectives() if not found.paper_of(name, NODES[-1])]
        said += [f"No shipped schedule runs over rails: {', '.join(lacking)}."] if lacking else []
        least = min(sample.case.nbytes for sample in found.samples if sample.family.protocol == ACROSS_NODES)
        if least > SIZES[0]:
            said.append(f"`{ACROSS_NODES}` was measured from {size_name(least)} on: below, its base is extrapolated.")
    return said


def text(found: Study, table: Callable[[Sequence[str], Sequence[Sequence[str]]], str]) -> str:
    parts = [
        ("Constants fitted to the measured rows", constants),
        ("Measured beside modelled", beside),
        ("On paper, not measured", details),
        ("Growth: microseconds of the fastest", growth),
    ]
    return "\n\n".join([*(f"{title}\n\n{table(*make(found))}" for title, make in parts), *notes(found)])


# --- plot -------------------------------------------------------------------------------------------------------------


def plot(path: Path, found: Study) -> None:
    """A panel a collective: microseconds over ranks; full marks are measured, open ones on paper."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = found.collectives()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False)
    for axis, collective in zip(axes[0], panels, strict=True):
        for index, nbytes in enumerate(SIZES):
            measured = measured_points(found, collective, nbytes)
            paper = {nodes * GPUS_PER_NODE: paper_bounds(found, collective, nodes, nbytes) for nodes in NODES}
            known = {ranks: times for ranks, times in paper.items() if times}
            style = {"color": f"C{index}", "marker": "o"}
            axis.plot(list(measured), list(measured.values()), label=size_name(nbytes), **style)
            low, high = ([times[end] for times in known.values()] for end in range(2))
            for line in (low, high):
                axis.plot(list(known), line, linestyle="--", markerfacecolor="white", **style)
            axis.fill_between(list(known), low, high, color=f"C{index}", alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=10)
        axis.set(title=collective.value, xlabel="ranks", ylabel="microseconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle("full: measured; open, dashed: on paper, between steps that overlap and steps in turn")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("csv", nargs="+", type=Path, help="written by benchmarks/collectives.py --save, each for a number of ranks")
    add("--rail-us", type=float, default=RAIL_US, help="stated latency between nodes")
    add("--rail-gb-per-s", type=float, default=RAIL_GB_PER_S, help="stated bandwidth between nodes, of each GPU")
    add("--plot", type=Path, help="a .png or .svg")
    add("--markdown", action="store_true", help="tables as for benchmarks/README.md")
    found = parser.parse_args(arguments)
    if found.rail_us <= NVLINK_US or found.rail_gb_per_s <= 0:
        parser.error(f"a rail takes more than NVLink's {NVLINK_US} us and carries something")
    return found


def main() -> None:
    options = options_of(sys.argv[1:])
    try:
        found = study(options.csv, Rail(options.rail_us, options.rail_gb_per_s))
    except (OSError, ValueError) as error:
        sys.exit(f"scaling.py: {error}")
    print(text(found, markdown if options.markdown else grid))
    if options.plot:
        plot(options.plot, found)


if __name__ == "__main__":
    main()
