"""Turns a schedule into what it costs on its topology: steps, bytes over links and ports, time, and the least there
could be.

Assumes a schedule that `checks` accepts. The model is alpha-beta: a step by itself lasts the longest latency of a link
it uses plus the time of its busiest port or pair, and the schedule as long as the longest chain of moves that wait for
each other (`waits`). The emitted kernel overlaps dependent moves tile by tile, so a big tensor can do better. Does not
measure anything: on H200s kernels take 2 to 5 us more, as they start and signal, and links carry 0.8 of their rate
(`tests/test_waits.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.determinism import same_bits
from commdsl.checks.locations import Located, LocatedStep
from commdsl.checks.size_classes import ClassedMoves, classes_of_moves, split
from commdsl.checks.topology import link_table
from commdsl.cost.bounds import Limit, limit
from commdsl.cost.waits import Moved, groups, longest_chain
from commdsl.ir.classes import classes, units
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Diagnostic, Label, Severity
from commdsl.language.records import dataclass
from commdsl.machine.topology import pair_bandwidth, users_text

DEFAULT_BLOCK_BYTES = 64 << 20
FAR = 4.0
"""A schedule that no tensor size brings within this factor of the bound gets a warning."""


@dataclass(frozen=True, slots=True)
class PortLoad:
    """What goes out of a port, or into it, over links of one class, in blocks (multiples of the block size). It is that
    of so many ranks from `rank` on.
    """

    link: str
    rank: int
    sends: bool
    blocks: float
    sharing: int = 1

    @property
    def who(self) -> str:
        """`rank 3 sends`, `ranks 4 to 7 receive`."""
        return users_text(self.rank, self.sharing, sends=self.sends)


@dataclass(frozen=True, slots=True)
class PairLoad:
    """What goes from one rank to another, in blocks."""

    source: int
    dest: int
    blocks: float


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """What crosses links of buffers that moves join, in blocks of theirs: others need not be as long."""

    buffers: tuple[str, ...]
    element: str | None  # the type that is declared for them
    blocks: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step that crosses links: by itself it takes latency + seconds_per_byte * block_bytes."""

    index: int
    bindings: tuple[tuple[str, int], ...]
    line: int
    transfers: int
    blocks: float  # all that crosses links
    port: PortLoad
    pair: PairLoad
    latency: float
    seconds_per_byte: float

    def seconds(self, block_bytes: int) -> float:
        return self.latency + self.seconds_per_byte * block_bytes


@dataclass(frozen=True, eq=False)
class Report:
    """What a schedule costs; loads in blocks hold for every tensor size, `seconds` and the like for `block_bytes`."""

    schedule: str
    contract: str
    num_ranks: int
    topology: str
    idealised: bool
    block_bytes: int
    num_steps: int  # steps in which anything moves
    num_transfers: int  # between different ranks
    num_copies: int  # within a rank
    num_yields: int
    blocks: float  # moved between ranks in all
    classes: tuple[ClassLoad, ...]  # what `blocks` is the sum of: one, unless blocks may differ in length
    busiest_port: PortLoad | None
    busiest_pair: PairLoad | None
    steps: tuple[StepCost, ...] = field(repr=False)
    latency: float  # of the longest chain of moves that wait for each other, as the next
    seconds_per_byte: float
    pair_source: NDArray[np.int32] = field(repr=False)  # every pair that carries anything
    pair_dest: NDArray[np.int32] = field(repr=False)
    pair_blocks: NDArray[np.float64] = field(repr=False)
    limit: Limit
    same_bits: bool  # wherever the contract wants one value on several ranks, they get the same bits
    rounded_to: str | None  # the type in which values travel, where that is another than the caller's

    def seconds_for(self, block_bytes: int) -> float:
        return self.latency + self.seconds_per_byte * block_bytes

    def least_seconds_for(self, block_bytes: int) -> float:
        return self.limit.latency + self.limit.seconds_per_byte * block_bytes

    @property
    def seconds(self) -> float:
        return self.seconds_for(self.block_bytes)

    @property
    def least_seconds(self) -> float:
        return self.least_seconds_for(self.block_bytes)

    @property
    def ratio(self) -> float:
        """Time over the least time, for `block_bytes`; 1 is optimal in this model."""
        return _ratio(self.seconds, self.least_seconds)

    @property
    def latency_ratio(self) -> float:
        """The ratio for tensors so small that only latency counts."""
        return _ratio(self.latency, self.limit.latency)

    @property
    def bandwidth_ratio(self) -> float:
        """The ratio for tensors so large that only bandwidth counts."""
        return _ratio(self.seconds_per_byte, self.limit.seconds_per_byte)


def _ratio(value: float, least: float) -> float:
    if least > 0:
        return value / least
    return 1.0 if value == 0 else float("inf")


def report(schedule: Schedule, block_bytes: int = DEFAULT_BLOCK_BYTES) -> Report:
    """The cost for blocks of `block_bytes`: for an all-reduce the tensor, for an all-gather one rank's part of it."""
    located = Located(schedule)
    links = link_table(schedule.topology, schedule.num_ranks).ravel()
    loads = _loads(located, links)
    names = {contract.name: None for contract in schedule.contracts}
    pair_key, pair_blocks = _sum_by_key(
        np.concatenate([load.moved.pair for load in loads] or [np.zeros(0, np.int64)]),
        np.concatenate([load.moved.blocks for load in loads] or [np.zeros(0)]),
    )
    steps = tuple(_step_costs(schedule, links, loads))
    latency, seconds_per_byte = longest_chain(located, {load.index: load.moved for load in loads})
    whole = pair_key, pair_blocks, links[pair_key]
    return Report(
        schedule=schedule.name,
        contract=", ".join(names),
        num_ranks=schedule.num_ranks,
        topology=schedule.topology.name,
        idealised=schedule.topology.idealised,
        block_bytes=block_bytes,
        num_steps=len(loads),
        num_transfers=sum(step.transfers for step in steps),
        num_copies=sum(load.num_copies for load in loads),
        num_yields=schedule.num_yields,
        blocks=float(pair_blocks.sum()),
        classes=tuple(_by_class(schedule, loads)),
        busiest_port=_busiest_port(schedule, *whole)[0] if len(pair_key) else None,
        busiest_pair=_busiest_pair(schedule, *whole)[0] if len(pair_key) else None,
        steps=steps,
        latency=latency,
        seconds_per_byte=seconds_per_byte,
        pair_source=(pair_key // schedule.num_ranks).astype(np.int32),
        pair_dest=(pair_key % schedule.num_ranks).astype(np.int32),
        pair_blocks=pair_blocks,
        limit=limit(schedule),
        same_bits=same_bits(located),
        rounded_to=None if schedule.cast is None else schedule.cast.element,
    )


@dataclass(frozen=True, eq=False)
class _Load:
    """What one step moves."""

    index: int
    step: LocatedStep
    moved: Moved
    num_copies: int
    by_source: tuple[tuple[int, float], ...]  # of each statement its source, and the blocks that cross links


def _loads(located: Located, links: NDArray[np.int32]) -> list[_Load]:
    """One for each step in which anything moves."""
    by_step: dict[int, list[ClassedMoves]] = {}
    for one in classes_of_moves(located):
        by_step.setdefault(one.step_index, []).append(one)
    return [_load(located, links, index, moves) for index, moves in by_step.items()]


def _load(located: Located, links: NDArray[np.int32], index: int, statements: list[ClassedMoves]) -> _Load:
    each = [_moved(located, links, one) for one in statements]
    columns = zip(*((one.reads, one.writes, one.crosses, one.pair, one.link, one.blocks) for one in each), strict=True)
    moved = each[0] if len(each) == 1 else Moved(*map(np.concatenate, columns))
    copies = sum(int(np.count_nonzero(~one.crosses)) for one in each)
    by_source = tuple(
        (one.located.moves.source_buffer, float(its.blocks.sum())) for one, its in zip(statements, each, strict=True)
    )
    return _Load(index, statements[0].step, moved, copies, by_source)


def _moved(located: Located, links: NDArray[np.int32], one: ClassedMoves) -> Moved:
    sources = one.located.sources
    valid = sources != located.nowhere
    reads, writes = sources[valid], np.broadcast_to(one.located.dest[:, None], sources.shape)[valid]
    source_rank, dest_rank = reads // located.chunks_per_rank, writes // located.chunks_per_rank
    crosses = source_rank != dest_rank
    pair = (source_rank * located.schedule.num_ranks + dest_rank)[crosses]
    size = np.broadcast_to(1.0 / split(located, one.moved)[1][:, None], sources.shape)[valid][crosses]
    return Moved(reads, writes, crosses, pair, links[pair], size)


def _by_class(schedule: Schedule, loads: list[_Load]) -> Iterator[ClassLoad]:
    """Of each class that crosses links, in the order of their first buffers."""
    group, known = classes(schedule), units(schedule)
    totals: dict[int, float] = {}
    for buffer, blocks in (one for load in loads for one in load.by_source):
        totals[group[buffer]] = totals.get(group[buffer], 0.0) + blocks
    for number in sorted(number for number, blocks in totals.items() if blocks):
        names = tuple(buffer.name for at, buffer in enumerate(schedule.buffers) if group[at] == number)
        unit = known[names[0]]
        yield ClassLoad(names, None if unit is None else unit.element, totals[number])


def _sum_by_key(keys: NDArray[np.int64], amounts: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if len(keys) > keys.max(initial=0):  # more than there are numbers: counted, not sorted
        distinct = np.flatnonzero(np.bincount(keys))
        return distinct, np.bincount(keys, amounts)[distinct].astype(np.float64)
    order, starts = groups(keys)
    return keys[order[starts]], np.add.reduceat(amounts[order], starts)


def _step_costs(schedule: Schedule, links: NDArray[np.int32], loads: list[_Load]) -> Iterator[StepCost]:
    """Of the steps that cross links. One that moves as much between the same ranks as that before it costs the same."""
    before: tuple[Moved, StepCost] | None = None
    for load in loads:
        moved, of = load.moved, load.step.step
        if not len(moved.pair):
            continue
        if before and moved.is_like(before[0]):
            cost = replace(before[1], index=load.index, bindings=of.bindings, line=of.span.position[0])
        else:
            cost = _step_cost(schedule, links, load)
        before = moved, cost
        yield cost


def _step_cost(schedule: Schedule, links: NDArray[np.int32], load: _Load) -> StepCost:
    pair, blocks = _sum_by_key(load.moved.pair, load.moved.blocks)
    link = links[pair]
    port, port_seconds = _busiest_port(schedule, pair, blocks, link)
    busiest, pair_seconds = _busiest_pair(schedule, pair, blocks, link)
    return StepCost(
        index=load.index,
        bindings=load.step.step.bindings,
        line=load.step.step.span.position[0],
        transfers=len(load.moved.pair),
        blocks=float(blocks.sum()),
        port=port,
        pair=busiest,
        latency=max(schedule.topology.links[index].latency for index in _classes(link)),
        seconds_per_byte=max(port_seconds, pair_seconds),
    )


def _classes(link: NDArray[np.int32]) -> list[int]:
    """The link classes in use; `np.unique` would import numpy's masked arrays for it, a tenth of a short check."""
    return np.flatnonzero(np.bincount(link)).tolist()


def _busiest_port(
    schedule: Schedule, pair: NDArray[np.int64], blocks: NDArray[np.float64], link: NDArray[np.int32]
) -> tuple[PortLoad, float]:
    """The port that takes longest, and its seconds per byte of a block; the fullest where ports have no limit."""
    num_ranks = schedule.num_ranks
    candidates: list[tuple[float, float, PortLoad]] = []
    for index in _classes(link):
        there = link == index
        described = schedule.topology.links[index]
        for sends, rank in ((True, pair // num_ranks), (False, pair % num_ranks)):
            load = np.bincount(described.port(rank[there]), blocks[there], minlength=num_ranks)
            times = described.port_seconds(load)
            at = int((times if described.has_ports else load).argmax())
            amount = float(load[at])
            candidates.append(
                (float(times[at]), amount, PortLoad(described.name, at, sends, amount, described.sharing))
            )
    seconds, _, port = max(candidates, key=lambda candidate: candidate[:2])
    return port, seconds


def _busiest_pair(
    schedule: Schedule, pair: NDArray[np.int64], blocks: NDArray[np.float64], link: NDArray[np.int32]
) -> tuple[PairLoad, float]:
    """As `_busiest_port`, for pairs of ranks."""
    source, dest = pair // schedule.num_ranks, pair % schedule.num_ranks
    seconds = blocks / pair_bandwidth(schedule.topology, source, dest, link)
    at = int(np.lexsort((-np.arange(len(pair)), blocks, seconds))[-1])
    return PairLoad(int(source[at]), int(dest[at]), float(blocks[at])), float(seconds[at])


def far_from_bound(schedule: Schedule, costs: Report) -> Iterator[Diagnostic]:
    """C406, a warning: no tensor size brings the schedule near the bound, neither small ones nor large ones."""
    factor = min(costs.latency_ratio, costs.bandwidth_ratio)
    if factor > FAR * (1 + 1e-9) and costs.limit.seconds_per_byte > 0:
        yield Diagnostic(
            "C406",
            f"at least {factor:.1f} times the time of the lower bound",
            Label(schedule.span, f"on {schedule.num_ranks} ranks of `{schedule.topology.name}`"),
            notes=(
                f"small tensors: {costs.latency_ratio:.1f} times the least latency, {costs.num_steps} steps",
                f"large tensors: {costs.bandwidth_ratio:.1f} times the least, {costs.limit.reason}",
            ),
            help="use more links at once, or cut the tensor into chunks that travel one behind the other",
            severity=Severity.WARNING,
        )
