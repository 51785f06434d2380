"""Turns a schedule with yields into how long it takes beside what its visits compute.

Assumes a schedule without tasks whose indices are checked, or of which nobody asks more than an estimate. Two clocks
run: launches go one after the other on one, visits on the other, and each waits for what it reads and for whoever
still reads the copy that it overwrites, as a Plan of launches has it. A step takes the longest latency of a link that
it uses, and the time of the busiest link, port or rank; what ranks copy at home counts where nothing crosses. Does not
measure anything, and does not know tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.routes import crossing
from commdsl.ir.classes import joining, units
from commdsl.ir.schedules import Schedule, Statement, Step, Yield
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.language.records import dataclass
from commdsl.machine.topology import NO_LINK, Topology, link_of, pair_bandwidth
from commdsl.program.lower.segments import Segment, parts

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Carrier:
    """What moves the bytes: a rank sends, and apart receives, at most `rate` bytes a second, whatever its links give.
    Seconds that a step takes more than its bytes, and that each further copy of a rank adds. `memory`: bytes a second
    that a rank reads and writes where it copies at home.
    """

    rate: float = np.inf
    latency: float = 0.0
    per_copy: float = 0.0
    memory: float = np.inf


Carriers: TypeAlias = tuple[Carrier, Carrier]
"""Of launches that only move, and of those that combine."""


@dataclass(frozen=True, slots=True)
class Load:
    """One step between ranks: seconds on its links, the most bytes that a rank sends or receives, and in how many
    copies, to one rank of one buffer each.
    """

    latency: float
    seconds: float
    most_bytes: float
    copies: int

    def time(self, carrier: Carrier) -> float:
        more = carrier.latency + (self.copies - 1) * carrier.per_copy
        return self.latency + more + max(self.seconds, self.most_bytes / carrier.rate)


@dataclass(frozen=True, eq=False)
class Launched:
    """The steps of one segment, and the buffers that live on around it. `at_home`: where nothing crosses, the most
    bytes that a rank copies. `is_alone`: it is such a one behind the last visit, and waits for that, as a Plan has it:
    SMs copy, and what computes has them.
    """

    loads: tuple[Load, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    combines: bool  # whether it adds, and does not only move
    at_home: float = 0.0
    is_alone: bool = False

    def time(self, carriers: Carriers) -> float:
        carrier = carriers[self.combines]
        crossing = sum(load.time(carrier) for load in self.loads)
        return crossing + 2 * self.at_home / carrier.memory


@dataclass(frozen=True, slots=True)
class Visited:
    """The buffers that a visit reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds: of all, of the launches alone, of the visits alone."""

    seconds: float
    launches: float
    visits: float

    @property
    def exposed(self) -> float:
        """What does not hide behind visits."""
        return self.seconds - self.visits


class UnlinkedError(ValueError):
    """The topology has no link for a transfer."""


def phases(schedule: Schedule, chunk_bytes: Mapping[str, float]) -> tuple[Launched | Visited, ...]:
    """Launches and visits in the order of the schedule. `chunk_bytes`: of a chunk of each buffer that is given; what
    moves into another is as long. Raises UnlinkedError.
    """
    names = [buffer.name for buffer in schedule.buffers]
    sizes = known_sizes(schedule, chunk_bytes)
    made: dict[tuple[object, ...], tuple[Load, ...]] = {}
    found: list[Launched | Visited] = []
    left = sum(isinstance(step, Yield) for step in schedule.steps)
    for part in parts(schedule):
        if isinstance(part, Yield):
            left -= 1
            found.append(Visited(tuple(names[b] for b in part.reads), tuple(names[b] for b in part.writes)))
            continue
        key = (part.content, tuple(sizes[buffer.name] for buffer in part.schedule.buffers))
        if key not in made:
            made[key] = tuple(_loads(part, sizes))
        reads = part.names(BufferKind.INPUT, BufferKind.INOUT)
        writes = part.names(BufferKind.OUTPUT, BufferKind.INOUT)
        combines = any(moves.kind is MoveKind.REDUCE for moves in joining(part.schedule))
        at_home = 0.0 if made[key] else _at_home(part, sizes)
        found.append(Launched(made[key], reads, writes, combines, at_home, is_alone=not (left or made[key])))
    return tuple(found)


def known_sizes(schedule: Schedule, chunk_bytes: Mapping[str, float]) -> dict[str, float]:
    """Bytes of a chunk of every buffer, where those of one are known that is made of the same."""
    grouped = tuple(zip(schedule.buffers, units(schedule).values(), strict=True))
    blocks = {unit: chunk_bytes[buffer.name] * buffer.cut for buffer, unit in grouped if buffer.name in chunk_bytes}
    found = {buffer.name: blocks[unit] / buffer.cut for buffer, unit in grouped if unit in blocks}
    return found | {name: size for name, size in chunk_bytes.items() if name in found}


def _loads(segment: Segment, sizes: Mapping[str, float]) -> Iterator[Load]:
    topology, ranks = segment.schedule.topology, segment.schedule.num_ranks
    for step in segment.schedule.steps:
        if isinstance(step, Step):
            rows = [_pairs(moves, ranks) for moves in step.moves]
            names = [segment.schedule.buffers[moves.source_buffer].name for moves in step.moves]
            if any(len(pair) for pair in rows):
                yield _load(topology, ranks, rows, [sizes[name] for name in names])


def _at_home(segment: Segment, sizes: Mapping[str, float]) -> float:
    """The most bytes that a rank copies, of a segment in which nothing crosses."""
    copied: Floats = np.zeros(segment.schedule.num_ranks)
    for moves in joining(segment.schedule):
        size = sizes[segment.schedule.buffers[moves.source_buffer].name]
        copied += size * np.bincount(moves.dest_rank, minlength=len(copied))
    return float(copied.max())


def _pairs(moves: Statement, ranks: int) -> NDArray[np.int64]:
    """source * ranks + destination of every transfer between two ranks."""
    source, dest, _ = crossing(moves)
    pairs: NDArray[np.int64] = source.astype(np.int64) * ranks + dest
    return pairs


def _load(topology: Topology, ranks: int, rows: Sequence[NDArray[np.int64]], sizes: Sequence[float]) -> Load:
    amounts: Floats = np.zeros(ranks * ranks)
    copies = np.zeros(ranks, np.int64)
    for pairs, size in zip(rows, sizes, strict=True):
        amounts += size * np.bincount(pairs, minlength=ranks * ranks)
        copies += np.bincount(np.unique(pairs) // ranks, minlength=ranks)
    pair = np.unique(np.concatenate(rows))
    source, dest = pair // ranks, pair % ranks
    link = link_of(topology, source, dest)
    if (link == NO_LINK).any():
        at = int(np.flatnonzero(link == NO_LINK)[0])
        raise UnlinkedError(f"no link from rank {source[at]} to rank {dest[at]} on `{topology.name}`")
    moved = amounts[pair]
    seconds = float((moved / pair_bandwidth(topology, source, dest, link)).max())
    for index in np.unique(link).tolist():
        there = link == index
        over = topology.links[index]
        for rank in (source, dest):
            load = np.bincount(over.port(rank[there]), moved[there])
            seconds = max(seconds, float(over.port_seconds(load).max()))
    most = max(float(np.bincount(rank, moved).max()) for rank in (source, dest))
    latency = max(topology.links[index].latency for index in np.unique(link).tolist())
    return Load(latency, seconds, most, int(copies.max()))


# --- two clocks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copies:
    """Of a buffer: which copy is current, when each was written, and when the last who reads it is done."""

    current: int = 0
    written: tuple[float, float, float] = (0.0, 0.0, 0.0)
    read: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def other(self) -> int:
        return 2 if self.current == 1 else 1

    def free(self, copy: int) -> float:
        return max(self.written[copy], self.read[copy])

    def after_read(self, end: float) -> _Copies:
        read = tuple(max(at, end) if copy == self.current else at for copy, at in enumerate(self.read))
        return _Copies(self.current, self.written, (read[0], read[1], read[2]))

    def after_write(self, copy: int, end: float) -> _Copies:
        written = tuple(end if at == copy else before for at, before in enumerate(self.written))
        return _Copies(copy, (written[0], written[1], written[2]), self.read)


def beside(found: Sequence[Launched | Visited], seconds: Sequence[float], carriers: Carriers) -> Timed:
    """How long all takes if visit v computes for `seconds[v]`."""
    when = spans(found, seconds, carriers)
    launches = sum(end - begin for phase, (begin, end) in zip(found, when, strict=True) if isinstance(phase, Launched))
    return Timed(max((end for _, end in when), default=0.0), launches, sum(seconds))


def spans(
    found: Sequence[Launched | Visited], seconds: Sequence[float], carriers: Carriers
) -> tuple[tuple[float, float], ...]:
    """Of each, when it begins and ends."""
    when: list[tuple[float, float]] = []
    buffers: dict[str, _Copies] = {}
    launching = visiting = 0.0  # the clocks
    computed = iter(seconds)
    for phase in found:
        is_launch = isinstance(phase, Launched)
        used = {name: buffers.get(name, _Copies()) for name in (*phase.reads, *phase.writes)}
        target = {name: _target(is_launch, name in phase.reads, used[name]) for name in phase.writes}
        ready = max((used[name].written[used[name].current] for name in phase.reads), default=0.0)
        free = max((used[name].free(copy) for name, copy in target.items()), default=0.0)
        start = max(launching if is_launch else visiting, ready, free)
        if isinstance(phase, Launched):
            start = max(start, visiting) if phase.is_alone else start
            end = launching = start + phase.time(carriers)
        else:
            end = visiting = start + next(computed)
        for name in phase.reads:
            buffers[name] = buffers.get(name, _Copies()).after_read(end)
        for name, copy in target.items():
            buffers[name] = buffers.get(name, _Copies()).after_write(copy, end)
        when.append((start, end))
    return tuple(when)


def _target(is_launch: bool, is_read: bool, copies: _Copies) -> int:
    """The copy that is written: a launch's is not the one that it, or a visit, reads; a visit writes in place."""
    if is_launch or not is_read:
        return copies.other
    return copies.current or 1
