"""Turns random machines into a table: how near `commdsl synth` comes to the least time, and how long it takes.

Assumes no GPU. Machines have 4 to 16 GPUs in one to four nodes, links of several kinds and speeds, each by itself or
through ports that some GPUs share, one way, missing or slower. Every schedule is proved, as the command does it.
Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import record
from commdsl import compiler
from commdsl.commands.synth import make, parse
from commdsl.ir import resolve
from commdsl.machine.topology import NO_LINK, link_of

COLLECTIVES = ("allgather", "reducescatter")
SHAPES = [(1, gpus) for gpus in range(4, 17)] + [
    (nodes, gpus) for nodes in (2, 3, 4) for gpus in range(2, 9) if 4 <= nodes * gpus <= 16
]
MOST_RATIO = 1.15
Pair = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One schedule: `ratio` is the time that its links take over the least of any schedule."""

    collective: str
    machine: int
    nodes: int
    gpus: int
    ratio: float
    steps: int
    transfers: int
    seconds: float


COLUMNS = tuple(Row.__annotations__)


def machine(seed: int) -> str:
    """A topology's text. One that does not join all ranks is drawn again."""
    random = Random(seed)
    while True:
        nodes, gpus = random.choice(SHAPES)
        lines = [f"nodes {nodes}   gpus {gpus} per node   sms 100", *_in_node(random, gpus)]
        if nodes > 1:
            scope = random.choice(("across nodes", "across nodes same gpu"))
            lines.append(f"link net {scope}   {_rate(random, gpus, (12, 25, 50))}   4 us")
        links = _links(_text_of(seed, lines))
        cuts, slow = random.randrange(3), random.randrange(3)
        some = random.sample(np.argwhere(links).tolist(), min(cuts + slow, int(links.sum())))
        lines += [f"missing ({a}, {b})" for a, b in some[:cuts]]
        lines += [f"degraded ({a}, {b})   8 GB/s" for a, b in some[cuts:]]
        text = _text_of(seed, lines)
        if connected_components(_links(text), connection="strong", return_labels=False) == 1:
            return text


def _text_of(seed: int, lines: list[str]) -> str:
    return "\n".join([f"topology random_{seed} {{", *(f"  {line}" for line in lines), "}", ""])


def _links(text: str) -> NDArray[np.bool_]:
    """(ranks, ranks): which are joined."""
    (topology,) = resolve.topologies(compiler.read_text(text, "machine.comm", Path())).values()
    ranks = np.arange(topology.num_ranks)
    joined: NDArray[np.bool_] = link_of(topology, ranks[:, None], ranks[None, :]) != NO_LINK
    return joined


def _in_node(random: Random, gpus: int) -> Iterator[str]:
    kind = random.choice(("switch", "mesh", "wired", "wired", "mixed"))
    speeds = (10, 25, 50, 100, 300, 450)
    if kind in ("switch", "mesh"):
        yield f"link nvlink in node   {random.choice(speeds)} GB/s per {'gpu' if kind == 'switch' else 'pair'}   1 us"
        return
    order = random.sample(range(gpus), gpus)
    ring = {_pair(order[i - 1], order[i]) for i in range(gpus)}
    chords = {(a, b) for a in range(gpus) for b in range(a + 1, gpus) if random.random() < 0.25}
    wired = sorted(ring | chords)
    slow = sorted(random.sample(wired, len(wired) // 3))
    yield f"link fast pairs {_listed(set(wired) - set(slow))}   {_rate(random, gpus, speeds)}   1 us"
    if slow:
        kind_of = random.choice(("pairs", "pairs", "arcs"))
        yield f"link slow {kind_of} {_listed(slow)}   {_rate(random, gpus, speeds)}   1 us"
    if kind == "mixed":
        yield f"link rest in node   {_rate(random, gpus, (5, 10, 25))}   2 us"


def _pair(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)


def _listed(pairs: Iterable[Pair]) -> str:
    return " ".join(f"({a}, {b})" for a, b in sorted(pairs))


def _rate(random: Random, gpus: int, speeds: tuple[int, ...]) -> str:
    shared = [f"{count} gpus" for count in range(2, gpus) if gpus % count == 0] or ["node"]
    per = random.choice(("pair", "pair", "gpu", "gpu", random.choice(shared)))
    return f"{random.choice(speeds)} GB/s per {per}"


def measure(collective: str, seed: int, folder: Path) -> Row:
    path = folder / f"random_{seed}.comm"
    path.write_text(machine(seed), encoding="utf-8")
    start = time.process_time()
    costs = make(parse(collective, str(path), None, None)).costs
    seconds = time.process_time() - start
    topology = compiler.find_topology((), str(path), 1)
    sizes = topology.num_nodes, topology.gpus_per_node
    return Row(collective, seed, *sizes, costs.bandwidth_ratio, costs.num_steps, costs.num_transfers, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=100)
    record.add_options(parser)
    chosen = parser.parse_args()
    record.check_options(parser, chosen)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(chosen.machines):
            for collective in COLLECTIVES:
                rows.append(measure(collective, seed, Path(folder)))
                print(" ".join(map(str, fields(rows[-1]))), flush=True)
    if chosen.save:
        record.save_lines(chosen, COLUMNS, map(fields, rows))
    for collective in COLLECTIVES:
        some = [row for row in rows if row.collective == collective]
        for name in ("ratio", "seconds"):
            values = [getattr(row, name) for row in some]
            print(f"{collective}, {name}: median {statistics.median(values):.3f}, largest {max(values):.3f}")
    return int(max(row.ratio for row in rows) > MOST_RATIO)


def fields(row: Row) -> list[object]:
    return [f"{value:.4g}" if isinstance(value, float) else value for value in astuple(row)]


if __name__ == "__main__":
    sys.exit(main())
