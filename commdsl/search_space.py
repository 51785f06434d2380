"""Turns a collective into the candidates that `commdsl tune` measures: this file is the whole candidate space, as data.

Assumes that lanes which a size cannot fill stay idle, so a candidate serves a range of sizes. Does not measure and does
not search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from commdsl.selection import Candidate, Params

KB, MB = 1 << 10, 1 << 20
ANY = 1 << 62


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a search begins for one protocol: every combination is measured."""

    lanes: tuple[int, ...]
    threads: tuple[int, ...]
    tiles: tuple[int, ...]


GRIDS = {
    "packet": Grid((8, 32), (512,), (4 * KB, 16 * KB)),
    "line": Grid((16, 64), (512,), (14 * KB,)),  # whole lines of 112 bytes
    "bulk": Grid((32, 128), (512,), (32 * KB, 128 * KB)),
}

RANGES = {"packet": (0, 2 * MB), "line": (4 * KB, 64 * MB), "bulk": (32 * KB, ANY)}
"""Sizes outside of which a protocol is not measured: it has lost by far."""


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule with the protocols worth a look. `most`: beyond this size its traffic is hopeless."""

    schedule: str
    protocols: tuple[str, ...]
    params: tuple[Params, ...] = ((),)
    most: int = ANY
    powers_of_two: bool = False


FAMILIES = {
    "all_reduce": (
        Family("allreduce_oneshot", ("packet", "line"), most=MB),
        Family("allreduce_twoshot", ("packet", "line", "bulk")),
        Family("allreduce_halving_doubling", ("packet",), most=256 * KB, powers_of_two=True),
        Family("allreduce_ring", ("line", "bulk")),
    ),
    "all_gather": (Family("allgather_direct", ("packet", "line", "bulk")), Family("allgather_ring", ("line", "bulk"))),
    "reduce_scatter": (
        Family("reducescatter_direct", ("packet", "line", "bulk")),
        Family("reducescatter_ring", ("line", "bulk")),
    ),
    "all_to_all": (Family("alltoall_direct", ("packet", "line", "bulk")), Family("alltoall_rotated", ("line", "bulk"))),
    "broadcast": (
        Family("broadcast_tree", ("packet", "line")),
        Family("broadcast_chain", ("line", "bulk"), params=((("K", 4),), (("K", 16),))),
    ),
}

LADDERS: dict[str, tuple[int, ...]] = {
    "lanes": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "threads": (64, 128, 256, 512, 1024),
    "tile": tuple(KB << power for power in range(13)),
    "line tile": tuple(1792 << power for power in range(12)),
    "K": (1, 2, 4, 8, 16, 32, 64),
}
"""A refinement goes one rung up or down on one of these."""

SHARED = (2, 4)
"""How many lanes share an SM where a refinement tries `sms`."""


def first_candidates(collective: str, ranks: int, protocols: tuple[str, ...]) -> tuple[Candidate, ...]:
    """The coarse grid."""
    found: list[Candidate] = []
    for family in FAMILIES[collective]:
        if family.powers_of_two and ranks & (ranks - 1):
            continue
        for protocol in family.protocols:
            grid = GRIDS[protocol]
            for params, lanes, threads, tile in product(family.params, grid.lanes, grid.threads, grid.tiles):
                if protocol in protocols:
                    found.append(_candidate(family.schedule, dict(params), protocol, lanes, threads, tile, None))
    return tuple(found)


def in_range(collective: str, candidate: Candidate, nbytes: int, protocols: tuple[str, ...]) -> bool:
    """Whether a candidate is worth measuring at a size. A protocol that is alone serves every size."""
    protocol = str(dict(candidate.tune)["protocol"])
    least, most = RANGES[protocol] if len(protocols) > 1 else (0, ANY)
    family = next(family for family in FAMILIES[collective] if family.schedule == candidate.schedule)
    return least <= nbytes <= min(most, family.most)


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """All that differ in one setting by one rung."""
    params, tune = dict(candidate.params), dict(candidate.tune)
    protocol, sms = str(tune["protocol"]), tune.get("sms")
    lanes, threads, tile = (int(tune[key]) for key in ("lanes", "threads", "tile"))

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
    schedule: str, params: dict[str, int], protocol: str, lanes: int, threads: int, tile: int, sms: int | None
) -> Candidate:
    tune: dict[str, int | str] = {"lanes": lanes, "protocol": protocol, "threads": threads, "tile": tile}
    if sms is not None:
        tune["sms"] = sms
    return Candidate(schedule, tuple(sorted(params.items())), tuple(sorted(tune.items())))
