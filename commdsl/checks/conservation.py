"""C306, C307, C308: every contribution arrives exactly once, where `ensure` says.

Assumes indices in bounds, no overlapping writes, no undefined reads. One message per contract, for the first location
that breaks it: the others mostly follow from the same mistake. Does not look at the order of a reduction, which `cost`
reports, nor at what yields hand over (`rotations` does), nor at which rows which block of a factor has multiplied
(`factors` does).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.contributions import Contents, combine, forward, initial, recount
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep
from commdsl.ir.schedules import Contract
from commdsl.ir.words import bindings_text, ranks_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.records import dataclass


def broken_contracts(located: Located) -> Iterator[Diagnostic]:
    """Runs the schedule and compares what every contract names with what is there: what moves, and what it was
    multiplied by, each by itself.
    """
    promised = [contract for contract in located.schedule.contracts if contract.rotation is None]
    factors = {factor for _, factor, _ in located.schedule.products}
    is_factor = located.of_factors()
    for among, contracts in (
        (~is_factor, [one for one in promised if one.source_buffer not in factors]),
        (is_factor, [one for one in promised if one.source_buffer in factors]),
    ):
        if contracts:
            start, end = at_ends(located, among)
            for contract in contracts:
                yield from _check_rows(located, contract, among, start, end)


def at_ends(located: Located, among: NDArray[np.bool_]) -> tuple[Contents, Contents]:
    """What locations hold before and after the schedule, of the contributions of some."""
    start = initial(located, among)
    end = Contents(start.sums.copy(), start.totals.copy())
    for _ in forward(located, end):
        pass
    return start, end


def _check_rows(
    located: Located, contract: Contract, among: NDArray[np.bool_], start: Contents, end: Contents
) -> Iterator[Diagnostic]:
    dests, sources = located.contract_dests(contract), located.contract_sources(contract)
    good = combine(start, sources).at(contract.value.astype(np.int64)).equal(end.at(dests))
    bad = np.flatnonzero(~good)
    if len(bad) == 0:
        return
    row = int(bad[np.lexsort((contract.dest_chunk[bad], contract.dest_rank[bad]))[0]])
    location = int(dests[row])
    counts = np.where(among, recount(located, location), 0)
    wanted = np.zeros_like(counts)
    np.add.at(wanted, sources[contract.value[row]], 1)
    wanted[located.nowhere] = 0
    yield _diagnose(located, contract, Difference(location, wanted, counts), len(bad), len(dests))


@dataclass(frozen=True, eq=False)
class Difference:
    """One location that broke its contract: how often each initial location should contribute, and does."""

    location: int
    wanted: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def missing(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.counts < self.wanted)

    @property
    def foreign(self) -> NDArray[np.int64]:
        return np.flatnonzero((self.wanted == 0) & (self.counts > 0))

    @property
    def repeated(self) -> NDArray[np.int64]:
        return np.flatnonzero((self.wanted > 0) & (self.counts > self.wanted))


def _diagnose(located: Located, contract: Contract, difference: Difference, num_bad: int, num_rows: int) -> Diagnostic:
    where = located.name(difference.location)
    last = last_write(located, difference.location)
    notes: tuple[str, ...] = (
        f"expected {contributors(located, difference.wanted)}",
        f"got {contributors(located, difference.counts)}",
    )
    if num_bad > 1:
        notes += (f"{num_bad} of the {num_rows} chunks that `ensure` names are wrong",)
    what = in_words(located, difference)
    if len(difference.foreign):
        code, headline = "C308", f"a wrong contribution breaks `{contract.name}`"
    elif len(difference.repeated):
        code, headline = "C307", f"a contribution counted twice breaks `{contract.name}`"
        last = _first_doubling(located, int(difference.repeated[0])) or last
    else:
        code, headline = "C306", f"a missing contribution breaks `{contract.name}`"
    secondary = () if last is None else (last,)
    return Diagnostic(code, headline, Label(contract.span, f"{where} {what}"), secondary, notes)


def in_words(located: Located, difference: Difference) -> str:
    """The worst of it: what does not belong there, what is there too often, or what is not."""
    if len(difference.foreign):
        return _foreign(located, difference)
    return _repeated(located, difference) if len(difference.repeated) else _missing(located, difference)


def _missing(located: Located, difference: Difference) -> str:
    if not difference.counts.any():
        return "is never written"
    some = difference.missing[difference.counts[difference.missing] > 0]
    if len(some):  # of a contribution that the contract names several times
        return _times(located, difference, int(some[0]))
    return f"lacks {listing(located, difference.missing)}"


def _repeated(located: Located, difference: Difference) -> str:
    return _times(located, difference, int(difference.repeated[0]))


def _times(located: Located, difference: Difference, initial: int) -> str:
    """Say how often one contribution is there, and how often it should be where that is not once."""
    got, wanted = (_times_text(int(counts[initial])) for counts in (difference.counts, difference.wanted))
    return f"has {listing(located, np.array([initial]))} {got}" + ("" if wanted == "once" else f", not {wanted}")


def _times_text(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _foreign(located: Located, difference: Difference) -> str:
    expected = difference.wanted.any() and not difference.counts[difference.wanted > 0].any()
    verb = "holds" if expected else "also holds"
    return f"{verb} {listing(located, difference.foreign)}"


def listing(located: Located, initials: NDArray[np.int64]) -> str:
    """`x[3]` of ranks 0 2 and `x[1]` of rank 0; at most two chunk names."""
    ranks, numbers = located.by_rank(initials)
    distinct = np.unique(numbers)
    parts = [f"{located.origin_name(int(one))} of {ranks_text(ranks[numbers == one])}" for one in distinct[:2]]
    return " and ".join(parts) + (f" and {len(distinct) - 2} more chunks" if len(distinct) > 2 else "")


def contributors(located: Located, counts: NDArray[np.int64]) -> str:
    """All contributions in words, with multiplicity."""
    groups = [(int(times), np.flatnonzero(counts == times)) for times in np.unique(counts[counts > 0])]
    if not groups:
        return "nothing"
    return ", ".join(
        listing(located, initials) + ("" if times == 1 else f" {times} times") for times, initials in groups
    )


def last_write(located: Located, location: int) -> Label | None:
    """The statement or the function that wrote a location last."""
    for step in reversed(located.steps):
        if isinstance(step, LocatedStep):
            for moves in step.moves:
                rows = np.flatnonzero(moves.dest == location)
                if len(rows):
                    return _label(located, step, moves, int(rows[0]), "written last here")
        elif (step.writes == location).any():
            return Label(step.step.span, f"written last here: {located.name(location)}")
    return None


def _first_doubling(located: Located, contribution: int) -> Label | None:
    """Where the first chunk comes about that holds one contribution twice; follows that contribution alone."""
    single = Contents(np.zeros((located.size, 1), dtype=np.uint64), np.zeros(located.size, dtype=np.int64))
    single.totals[contribution] = 1
    for step in forward(located, single):
        if isinstance(step, LocatedStep):
            for moves in step.moves:
                rows = np.flatnonzero(single.totals[moves.dest] > 1)
                if len(rows):
                    return _label(located, step, moves, int(rows[0]), "counted twice first here")
    return None


def _label(located: Located, step: LocatedStep, moves: LocatedMoves, row: int, what: str) -> Label:
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    return Label(moves.moves.span, f"{what}: {located.name(int(moves.dest[row]))}, by {who}")
