"""Turns a collective into the candidates that `commdsl tune` measures: this file is the whole candidate space, as data.

Assumes that lanes which a size cannot fill stay idle, so a candidate serves a range of sizes. Does not measure and does
not search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from commdsl.planner.tuning.selection import Candidate, Params
from commdsl.program.moves import MOST_THREADS

KB, MB = 1 << 10, 1 << 20
ANY = 1 << 62
SMS = 132  # of the GPU


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a search begins for one protocol: every combination is measured."""

    lanes: tuple[int | None, ...]
    threads: tuple[int | None, ...]
    tiles: tuple[int, ...]


GRIDS = {
    "packet": Grid((128,), (256, 512), (4 * KB,)),
    "line": Grid((64, 132), (256, 640), (3840, 9600)),  # whole pairs of lines of 120 bytes
    "bulk": Grid((128,), (256,), (32 * KB, 128 * KB)),
    "engine": Grid((None,), (None,), (8 * MB, 32 * MB)),  # takes no lane
}

RANGES = {"packet": (0, 256 * KB), "line": (0, 64 * MB), "bulk": (MB, ANY), "engine": (64 * MB, ANY)}
"""Sizes outside of which a protocol is not measured: it has lost by far."""


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule with the protocols worth a look. `most`: beyond this size its traffic is hopeless."""

    schedule: str
    protocols: tuple[str, ...]
    params: tuple[Params, ...] = ((),)
    most: int = ANY


FAMILIES = {
    "all_reduce": (
        Family("allreduce_oneshot", ("packet", "line"), most=MB),
        Family("allreduce_twoshot", ("packet", "line", "bulk")),
        Family("allreduce_ring", ("bulk",)),
    ),
    "all_gather": (
        Family("allgather_direct", ("packet", "line", "bulk", "engine")),
        Family("allgather_ring", ("bulk",)),
    ),
    "reduce_scatter": (
        Family("reducescatter_direct", ("packet", "line", "bulk")),
        Family("reducescatter_ring", ("bulk",)),
    ),
    "all_to_all": (Family("alltoall_direct", ("packet", "line", "bulk", "engine")),),
    "broadcast": (
        Family("broadcast_direct", ("packet", "line"), most=256 * KB),
        Family("broadcast_tree", ("line",), most=256 * KB),
        Family("broadcast_scatter", ("line", "bulk")),
        Family("broadcast_chain", ("bulk",), params=((("K", 8),), (("K", 16),))),
    ),
}

LADDERS: dict[str, tuple[int, ...]] = {
    "lanes": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 132, 192, 264),
    "threads": (64, 128, 256, 320, 512, 640, 1024),
    "tile": tuple(KB << power for power in range(17)),
    "line tile": (1920, 3840, 4800, 7680, 9600, 15360, 30720, 61440),
    "K": (1, 2, 4, 8, 16, 32, 64),
}
"""A refinement goes one rung up or down on one of these."""

SHARED = (2, 4)
"""How many lanes share an SM where a refinement tries `sms`."""


def families_with(collective: str, own: tuple[Family, ...]) -> tuple[Family, ...]:
    """The shipped ones and a user's, which stand in place of shipped ones of the same name."""
    names = {family.schedule for family in own}
    return (*(family for family in FAMILIES[collective] if family.schedule not in names), *own)


def first_candidates(
    families: tuple[Family, ...], protocols: tuple[str, ...], as_written: tuple[Family, ...] = ()
) -> tuple[Candidate, ...]:
    """The coarse grid, and of a user's schedules also what they say themselves."""
    found = [Candidate(family.schedule, params) for family in as_written for params in family.params]
    for family in families:
        for protocol in family.protocols:
            grid = GRIDS[protocol]
            for params, lanes, threads, tile in product(family.params, grid.lanes, grid.threads, grid.tiles):
                if protocol in protocols:
                    found.append(_candidate(family.schedule, dict(params), protocol, lanes, threads, tile, None))
    return tuple(found)


def in_range(families: tuple[Family, ...], candidate: Candidate, nbytes: int, protocols: tuple[str, ...]) -> bool:
    """Whether a candidate is worth measuring at a size. A protocol that is alone serves every size, and so does a
    schedule as it is written."""
    protocol = dict(candidate.tune).get("protocol")
    least, most = RANGES[str(protocol)] if protocol is not None and len(protocols) > 1 else (0, ANY)
    family = next(family for family in families if family.schedule == candidate.schedule)
    return least <= nbytes <= min(most, family.most)


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """All that differ in one setting by one rung, and that a block of threads can hold; none of what is as written."""
    if not candidate.tune:
        return iter(())
    return (found for found in _one_rung_off(candidate) if _fits(dict(found.tune)))


def _fits(tune: dict[str, int | str]) -> bool:
    if "lanes" not in tune:
        return True
    lanes = int(tune["lanes"])
    return -(-lanes // int(tune.get("sms", min(lanes, SMS)))) * int(tune["threads"]) <= MOST_THREADS


def _one_rung_off(candidate: Candidate) -> Iterator[Candidate]:
    params, tune = dict(candidate.params), dict(candidate.tune)
    protocol, sms = str(tune["protocol"]), tune.get("sms")
    tile = int(tune["tile"])
    if "lanes" not in tune:
        for rung in _beside("tile", tile):
            yield _candidate(candidate.schedule, params, protocol, None, None, rung, None)
        return
    lanes, threads = int(tune["lanes"]), int(tune["threads"])

    def made(**changed: int | None) -> Candidate:
        values = {"lanes": lanes, "threads": threads, "tile": tile, "sms": sms, **changed}
        return _candidate(candidate.schedule, params, protocol, **values)  # type: ignore[arg-type]  # all are whole

    for rung in _beside("lanes", lanes):
        yield made(lanes=rung, sms=None)
    for rung in _beside("threads", threads):
        yield made(threads=rung)
    for rung in _beside("line tile" if protocol == "line" else "tile", tile):
        yield made(tile=rung)
    for share in SHARED:
        if lanes % share == 0 and lanes // share != sms:
            yield made(sms=lanes // share)
    for name, value in candidate.params:
        for rung in _beside(name, value):
            yield _candidate(candidate.schedule, {**params, name: rung}, protocol, lanes, threads, tile, None)


def _beside(ladder: str, value: int) -> list[int]:
    below = [rung for rung in LADDERS[ladder] if rung < value][-1:]
    return below + [rung for rung in LADDERS[ladder] if rung > value][:1]


def _candidate(
    schedule: str,
    params: dict[str, int],
    protocol: str,
    lanes: int | None,
    threads: int | None,
    tile: int,
    sms: int | None,
) -> Candidate:
    given = {"lanes": lanes, "protocol": protocol, "threads": threads, "tile": tile, "sms": sms}
    tune = {key: value for key, value in given.items() if value is not None}
    return Candidate(schedule, tuple(sorted(params.items())), tuple(sorted(tune.items())))
