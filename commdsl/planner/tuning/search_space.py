"""Turns a collective into the candidates that `commdsl tune` measures: this file is the whole candidate space, as data.

Assumes that lanes which a size cannot fill stay idle, so a candidate serves a range of sizes. Does not measure and does
not search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from commdsl.machine.carriers import ANY, KB, MB, Carrier, named
from commdsl.planner.tuning.selection import Candidate, Params
from commdsl.program.moves import MOST_THREADS

SMS = 132  # of the GPU


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule and the carriers worth a look; default: all. `most`: beyond this size its traffic is hopeless."""

    schedule: str
    suits: Callable[[Carrier], bool] = lambda one: True
    params: tuple[Params, ...] = ((),)
    most: int = ANY


FAMILIES = {
    "all_reduce": (
        Family("allreduce_oneshot", lambda one: one.combines and one.has_flags_in_data, most=MB),
        Family("allreduce_twoshot", lambda one: one.combines),
        Family("allreduce_ring", lambda one: one.combines and one.streams),
    ),
    "all_gather": (Family("allgather_direct"), Family("allgather_ring", lambda one: one.streams)),
    "reduce_scatter": (
        Family("reducescatter_direct", lambda one: one.combines),
        Family("reducescatter_ring", lambda one: one.combines and one.streams),
    ),
    "all_to_all": (Family("alltoall_direct"),),
    "broadcast": (
        Family("broadcast_direct", lambda one: one.has_flags_in_data, most=256 * KB),
        Family("broadcast_tree", lambda one: one.has_flags_in_data and one.is_dense, most=256 * KB),
        Family("broadcast_scatter", lambda one: one.runs_on_sms and one.is_dense),
        Family("broadcast_chain", lambda one: one.streams, params=((("K", 8),), (("K", 16),))),
    ),
}

LADDERS: dict[str, tuple[int, ...]] = {
    "lanes": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 132, 192, 264),
    "threads": (64, 128, 256, 320, 512, 640, 1024),
    "K": (1, 2, 4, 8, 16, 32, 64),
}
"""A refinement goes one rung up or down on one of these, or on the carrier's ladder of tiles."""

SHARED = (2, 4)
"""How many lanes share an SM where a refinement tries `sms`."""


def families_with(collective: str, own: tuple[Family, ...]) -> tuple[Family, ...]:
    """The shipped ones and a user's, which stand in place of shipped ones of the same name."""
    names = {family.schedule for family in own}
    return (*(family for family in FAMILIES[collective] if family.schedule not in names), *own)


def first_candidates(
    families: tuple[Family, ...], carriers: tuple[Carrier, ...], as_written: tuple[Family, ...] = ()
) -> tuple[Candidate, ...]:
    """The coarse grid, and of a user's schedules also what they say themselves."""
    found = [Candidate(family.schedule, params) for family in as_written for params in family.params]
    for family, carrier in product(families, carriers):
        grid = carrier.grid
        if grid is not None and family.suits(carrier):
            for params, lanes, threads, tile in product(family.params, grid.lanes, grid.threads, grid.tiles):
                tune = {"lanes": lanes, "threads": threads, "tile": tile}
                found.append(_candidate(family.schedule, dict(params), protocol=carrier.name, **tune))
    return tuple(found)


def in_range(families: tuple[Family, ...], candidate: Candidate, nbytes: int, carriers: tuple[Carrier, ...]) -> bool:
    """Whether a candidate is worth measuring at a size. A carrier that is alone serves every size, and so does a
    schedule as it is written."""
    protocol = dict(candidate.tune).get("protocol")
    grid = None if protocol is None or len(carriers) == 1 else named(str(protocol)).grid
    least, most = (0, ANY) if grid is None else (grid.least, grid.most)
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
    grid = named(str(tune["protocol"])).grid
    assert grid is not None, "it is not measured"

    def made(further: dict[str, int] | None = None, **changed: int | None) -> Candidate:
        return _candidate(candidate.schedule, params | (further or {}), **(tune | changed))

    tiles = [made(tile=rung) for rung in _beside(grid.ladder, int(tune["tile"]))]
    if "lanes" not in tune:
        yield from tiles
        return
    lanes = int(tune["lanes"])
    yield from (made(lanes=rung, sms=None) for rung in _beside(LADDERS["lanes"], lanes))
    yield from (made(threads=rung) for rung in _beside(LADDERS["threads"], int(tune["threads"])))
    yield from tiles
    shares = (lanes // share for share in SHARED if lanes % share == 0)
    yield from (made(sms=sms) for sms in shares if sms != tune.get("sms"))
    for name, value in candidate.params:
        yield from (made({name: rung}, sms=None) for rung in _beside(LADDERS[name], value))


def _beside(ladder: tuple[int, ...], value: int) -> list[int]:
    return [rung for rung in ladder if rung < value][-1:] + [rung for rung in ladder if rung > value][:1]


def _candidate(schedule: str, params: dict[str, int], **given: int | str | None) -> Candidate:
    tune = {key: value for key, value in given.items() if value is not None}
    return Candidate(schedule, tuple(sorted(params.items())), tuple(sorted(tune.items())))
