"""Turns measured times into the constants of the cost model, and those into times for machines that were not measured.

Assumes rows that benchmarks/collectives.py wrote, of shipped schedules. A time is a base, so much for every step in
which data crosses between ranks, and the bytes of the busiest port over an effective bandwidth; the base, the step and
the bandwidth are one protocol's on every collective, size and number of ranks. Does not measure and needs no torch.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Candidate, Case, Collective, parse_candidates
from benchmarks.record import body
from benchmarks.report import CHOSEN, COLUMNS, Kind
from commdsl import compiler
from commdsl.checks.locations import Located
from commdsl.checks.topology import link_table, missing_links
from commdsl.cost import report as cost
from commdsl.ir import resolve
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import CommError
from commdsl.language.kinds import LinkScope
from commdsl.machine.resources import data_dir
from commdsl.machine.topology import Link, Topology, switch

Floats = NDArray[np.float64]

GPUS_PER_NODE, SMS = 8, 132
NVLINK_US, NVLINK_GB_PER_S = 0.7, 450.0
"""What schedules/topologies/h200_1x8.comm states; the latency stands in where rows cannot tell a step from a base."""

ACROSS_NODES = "bulk"
"""The protocol of every transport but peer access, so of everything that crosses nodes."""


class Reading(StrEnum):
    """What happens to the steps of a schedule. The truth of a kernel that works tile by tile is between the two."""

    OVERLAP = "steps overlap"  # bytes count once, at the port that is busiest over the whole schedule
    IN_TURN = "steps in turn"  # bytes count step by step, as the cost report has each step


class RowsError(ValueError):
    """Rows that cannot be read or say nothing that the model could use."""


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule with parameters under a protocol."""

    collective: Collective
    schedule: str
    params: tuple[tuple[str, int], ...]
    protocol: str

    def __str__(self) -> str:
        return "@".join([self.schedule, *(f"{key}={value}" for key, value in self.params)]) + f":{self.protocol}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time, of the fastest tuning of its family."""

    case: Case
    family: Family
    us: float
    is_choice: bool
    steps: int
    port_bytes: tuple[float, float]  # by Reading, in its order

    def load(self, reading: Reading) -> float:
        return self.port_bytes[list(Reading).index(reading)]


@dataclass(frozen=True, slots=True)
class Constants:
    """A protocol's, as fitted to so many rows. `us_per_byte` is 0 where the rows show no cost of bytes."""

    base_us: float
    step_us: float
    us_per_byte: float
    rows: int
    step_is_stated: bool

    def us(self, sample: Sample, reading: Reading) -> float:
        return self.base_us + self.step_us * sample.steps + self.us_per_byte * sample.load(reading)

    @property
    def gb_per_s(self) -> float:
        return 1e-3 / self.us_per_byte if self.us_per_byte else float("inf")


# --- measured ---------------------------------------------------------------------------------------------------------


def read(paths: Iterable[Path]) -> tuple[Sample, ...]:
    """Our own rows with a right result, of each family the fastest; the table's choice is marked, or else the fastest
    of its collective, size and number of ranks."""
    fastest: dict[tuple[Case, Family], Sample] = {}
    for path in paths:
        lines = csv.DictReader(body(path.read_text(encoding="utf-8")))
        if set(COLUMNS) - set(lines.fieldnames or ()):
            raise RowsError(f"{path}: not written by benchmarks/collectives.py")
        found = [_sample(path, line) for line in lines if _is_ours(line)]
        for sample in found:
            key = sample.case, sample.family
            if key not in fastest or (not sample.is_choice, sample.us) < (not fastest[key].is_choice, fastest[key].us):
                fastest[key] = sample
    if not fastest:
        raise RowsError("no row of a schedule of ours with a right result")
    return _with_choices(fastest.values())


def _is_ours(line: Mapping[str, str]) -> bool:
    return line["kind"] == Kind.OURS and line["status"] == "ok" and bool(line["median_us"])


def _sample(path: Path, line: Mapping[str, str]) -> Sample:
    is_choice = line["contender"] == CHOSEN
    text = line["detail"] if is_choice else line["contender"]
    case = Case(Collective(line["collective"]), int(line["bytes"]), int(line["ranks"]))
    if not text:
        raise RowsError(f"{path}: {case.collective} of {case.nbytes} bytes does not say which schedule ran")
    family = _family(parse_candidates([text])[0])
    switched = schedule_on(family, switch(case.ranks))
    if switched is None:
        raise RowsError(f"{path}: `{text}` is no shipped schedule for {case.ranks} ranks")
    known = cost.report(switched)
    bandwidth = switched.topology.links[0].port_bandwidth
    in_turn = sum(step.seconds_per_byte for step in known.steps)
    loads = (busiest_ports(known, switched.topology)[0], in_turn * bandwidth)
    block = block_bytes(case)
    return Sample(
        case, family, float(line["median_us"]), is_choice, len(known.steps), (loads[0] * block, loads[1] * block)
    )


def _family(candidate: Candidate) -> Family:
    protocol = str(dict(candidate.tune).get("protocol", "bulk"))  # what a schedule runs with that tunes none
    return Family(candidate.collective, candidate.schedule, candidate.params, protocol)


def _with_choices(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    by_case: dict[Case, list[Sample]] = {}
    for sample in samples:
        by_case.setdefault(sample.case, []).append(sample)
    found: list[Sample] = []
    for case in sorted(by_case, key=lambda case: (list(Collective).index(case.collective), case.nbytes, case.ranks)):
        choice = min(by_case[case], key=lambda sample: (not sample.is_choice, sample.us))
        found += [replace(sample, is_choice=sample is choice) for sample in by_case[case]]
    return tuple(found)


def block_bytes(case: Case) -> int:
    """The bytes of what the cost report calls a block."""
    match case.collective:
        case Collective.ALL_REDUCE | Collective.BROADCAST:
            return case.numel * case.itemsize
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
            return case.block * case.itemsize
        case _:
            assert_never(case.collective)


# --- schedules on machines --------------------------------------------------------------------------------------------


def shipped(collective: Collective) -> tuple[Family, ...]:
    """Every shipped schedule of a collective, as it runs across nodes."""
    names = sorted(path.stem for path in (data_dir("schedules") / "collectives").glob("*.comm"))
    prefix = collective.value.replace("_", "")
    return tuple(Family(collective, name, (), ACROSS_NODES) for name in names if name.split("_")[0] == prefix)


@cache
def schedule_on(family: Family, topology: Topology) -> Schedule | None:
    """The schedule for all GPUs of a machine; None where it is for other numbers of ranks or wants links that are not
    there."""
    path = data_dir("schedules") / "collectives" / f"{family.schedule}.comm"
    if not path.is_file():
        return None
    files = compiler.read(path)
    decl = compiler.choose(files, None)
    try:
        found = resolve.resolve(files, decl, topology.num_ranks, topology, dict(family.params))
    except CommError:
        return None
    return None if any(missing_links(Located(found))) else found


def machine(nodes: int, nvlink: tuple[float, float], rail: tuple[float, float]) -> Topology:
    """Nodes of eight GPUs, those of one index joined by a rail; links as (microseconds, GB/s)."""
    links = [Link("nvlink", LinkScope.IN_NODE, nvlink[1] * 1e9, np.inf, nvlink[0] * 1e-6)]
    if nodes > 1:
        links.append(Link("rail", LinkScope.ACROSS_SAME_GPU, rail[1] * 1e9, np.inf, rail[0] * 1e-6))
    return Topology(f"h200_{nodes}x{GPUS_PER_NODE}", nodes, GPUS_PER_NODE, SMS, tuple(links))


def busiest_ports(known: cost.Report, topology: Topology) -> tuple[float, ...]:
    """What the busiest port of each link class carries in one direction over the whole schedule, in blocks."""
    used = link_table(topology, known.num_ranks)[known.pair_source, known.pair_dest]
    found = []
    for index in range(len(topology.links)):
        of_class = used == index
        ends = (known.pair_source[of_class], known.pair_dest[of_class])
        found.append(max(float(np.bincount(end, known.pair_blocks[of_class], 1).max()) for end in ends))
    return tuple(found)


# --- the fit ----------------------------------------------------------------------------------------------------------


def fit(samples: Iterable[Sample], reading: Reading) -> dict[str, Constants]:
    """The constants of every protocol with enough rows: none below 0, least squares of the relative error."""
    by_protocol: dict[str, list[Sample]] = {}
    for sample in samples:
        by_protocol.setdefault(sample.family.protocol, []).append(sample)
    fitted = {protocol: _fit(found, reading) for protocol, found in sorted(by_protocol.items())}
    return {protocol: constants for protocol, constants in fitted.items() if constants is not None}


def _fit(samples: Sequence[Sample], reading: Reading) -> Constants | None:
    """None where the rows cannot tell a base from bytes. Rows that all have as many steps cannot tell a base from a
    step: then a step is what the topology states."""
    us = np.array([sample.us for sample in samples])
    steps = np.array([float(sample.steps) for sample in samples])
    load = np.array([sample.load(reading) for sample in samples])
    most = float(load.max())
    is_stated = len(set(steps)) == 1
    columns = [np.ones_like(us), load / most] + ([] if is_stated else [steps])
    target = us - NVLINK_US * steps if is_stated else us
    matrix = np.stack(columns, axis=1) / us[:, None]
    if np.linalg.matrix_rank(matrix) < len(columns):
        return None
    base, per_load, *step = _non_negative(matrix, target / us)
    return Constants(base, NVLINK_US if is_stated else step[0], per_load / most, len(samples), is_stated)


def _non_negative(matrix: Floats, target: Floats) -> list[float]:
    """Least squares with no unknown below 0: with three unknowns, every choice of those that are not 0 is tried."""
    width = matrix.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for chosen in itertools.combinations(range(width), size):
            found = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            residual = matrix[:, chosen] @ found - target
            if (found >= 0).all() and float(residual @ residual) < least:
                best, least = np.zeros(width), float(residual @ residual)
                best[list(chosen)] = found
    return [float(value) for value in best]


def errors(samples: Iterable[Sample], model: Mapping[str, Constants], reading: Reading) -> dict[Sample, float]:
    """Modelled over measured, less 1, for every sample whose protocol the model knows."""
    return {
        sample: model[sample.family.protocol].us(sample, reading) / sample.us - 1
        for sample in samples
        if sample.family.protocol in model
    }


def left_out(samples: Sequence[Sample], reading: Reading) -> dict[Sample, float]:
    """The error of every sample under a model fitted to the other numbers of ranks alone."""
    found: dict[Sample, float] = {}
    for ranks in sorted({sample.case.ranks for sample in samples}):
        others = [sample for sample in samples if sample.case.ranks != ranks]
        found |= errors([sample for sample in samples if sample.case.ranks == ranks], fit(others, reading), reading)
    return found


def root_mean_square(values: Iterable[float]) -> float:
    found = np.array(list(values))
    return float(np.sqrt(np.mean(found**2))) if len(found) else float("inf")


def better_reading(samples: Sequence[Sample]) -> Reading:
    """That which predicts unseen numbers of ranks better; with one number of ranks, which fits better."""

    def error(reading: Reading) -> float:
        unseen = left_out(samples, reading) or errors(samples, fit(samples, reading), reading)
        return round(root_mean_square(unseen.values()), 3)  # a tie is one, whatever the last bits say

    return min(Reading, key=error)


# --- on paper ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rail:
    """What joins nodes: stated, not measured."""

    us: float
    gb_per_s: float


@dataclass(frozen=True, eq=False)
class Paper:
    """One family on a machine nobody has measured."""

    family: Family
    nodes: int
    steps: tuple[int, ...]  # by link class: NVLink, then the rail
    port_blocks: tuple[float, ...]
    base_us: float
    latency_us: float
    us_per_byte: Mapping[Reading, float]  # of a block

    @property
    def ranks(self) -> int:
        return self.nodes * GPUS_PER_NODE

    def us(self, nbytes: int, reading: Reading) -> float:
        block = block_bytes(Case(self.family.collective, nbytes, self.ranks))
        return self.base_us + self.latency_us + self.us_per_byte[reading] * block

    def shares(self) -> tuple[float, ...]:
        """What the busiest port of each link class carries, over the bytes of the larger side."""
        whole = self.family.collective in (Collective.ALL_REDUCE, Collective.BROADCAST)
        return tuple(blocks if whole else blocks / self.ranks for blocks in self.port_blocks)


def on_paper(families: Iterable[Family], nodes: int, model: Mapping[str, Constants], rail: Rail) -> list[Paper]:
    """Those families that run there and whose protocol the model knows."""
    found = []
    for family in families:
        # What two nodes have no links for, more have none for either; some of it would be slow to write out for 64.
        known = model.get(family.protocol)
        nominal = [machine(count, (NVLINK_US, NVLINK_GB_PER_S), (rail.us, rail.gb_per_s)) for count in (2, nodes)]
        if known is None or (nodes > 2 and schedule_on(family, nominal[0]) is None):
            continue
        schedule = schedule_on(family, nominal[1])
        if schedule is not None:
            found.append(_paper(family, schedule, known, rail))
    return found


def _paper(family: Family, schedule: Schedule, known: Constants, rail: Rail) -> Paper:
    """The report on a machine with the fitted constants. A step over the rail takes what one over NVLink does, with the
    rail's latency in place of the stated one of NVLink."""
    nodes = schedule.topology.num_nodes
    over_rail = rail.us + max(0.0, known.step_us - NVLINK_US)
    fitted = machine(nodes, (known.step_us, known.gb_per_s), (over_rail, rail.gb_per_s))
    report = cost.report(replace(schedule, topology=fitted))
    ports = busiest_ports(report, fitted)
    far = sum(step.latency > fitted.links[0].latency for step in report.steps)
    steps = (len(report.steps) - far, far) if nodes > 1 else (len(report.steps),)
    busiest = max(blocks / link.port_bandwidth for blocks, link in zip(ports, fitted.links, strict=True))
    per_byte = {Reading.OVERLAP: 1e6 * busiest, Reading.IN_TURN: 1e6 * report.seconds_per_byte}
    return Paper(family, nodes, steps, ports, known.base_us, 1e6 * report.latency, per_byte)
