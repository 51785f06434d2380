"""C306, C307, C308, C330: every contribution arrives exactly once, where `ensure` says, by the functions it names.

Assumes indices in bounds, no overlapping writes, no undefined reads. One message per clause, for the first location
that breaks it: the others mostly follow from the same mistake. Does not look at the order of a reduction, which `cost`
reports, nor at what yields hand over (`rotations` does).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.contributions import Contents, forward, initial, promised
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, statement_key
from commdsl.checks.terms import Terms
from commdsl.ir.contracts import Contract
from commdsl.ir.words import bindings_text, ranks_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.records import dataclass


def broken_contracts(located: Located) -> Iterator[Diagnostic]:
    """Run the schedule and compare what every contract names with what is there."""
    contracts = [contract for contract in located.schedule.contracts if contract.rotation is None]
    if not contracts:
        return
    start = initial(located)
    end = Contents(start.sums.copy(), start.totals.copy())
    for _ in forward(located, end):
        pass
    told = set[object]()
    for contract in contracts:
        dests, clause = located.contract_dests(contract), statement_key(contract.span)
        bad = np.flatnonzero(~promised(located, contract, start).equal(end.at(dests)))
        bad = bad[np.lexsort((contract.dest_chunk[bad], contract.dest_rank[bad]))]
        if not len(bad) or clause in told:  # one clause may be of several results
            continue
        broken = _broken(located, contract, bad)
        if broken.code != "C330" or contract.dest_buffer not in told:
            told |= {clause, contract.dest_buffer}
            yield broken


def _broken(located: Located, contract: Contract, bad: NDArray[np.int64]) -> Diagnostic:
    """Recount the first of the broken rows exactly, and say how it differs."""
    row, counts = int(bad[0]), (len(bad), len(contract.dest_rank))
    location = int(located.contract_dests(contract)[row])
    terms = Terms(located)
    found, meant = terms.found(location), terms.wanted(contract, row)
    sides = terms.locations(meant), terms.locations(found)
    if sides[0] is not None and sides[1] is not None:
        return _diagnose(located, contract, Difference(location, sides[0], sides[1]), *counts)
    rank, last = located.split(location)[0], last_write(located, location)
    notes: tuple[str, ...] = (f"expected {terms.text(meant, rank)}", f"got {terms.text(found, rank)}")
    if len(bad) > 1:
        notes += (f"{len(bad)} of the {len(contract.dest_rank)} chunks that `ensure` names are wrong",)
    return Diagnostic(
        "C330",
        f"another value breaks `{contract.name}`",
        Label(contract.span, f"{located.name(location)} {terms.difference(found, meant, rank)}"),
        () if last is None else (last,),
        notes,
        help="" if contract.term is not None else _to_write(located, contract, terms, bad),
    )


def _to_write(located: Located, contract: Contract, terms: Terms, bad: NDArray[np.int64]) -> str:
    """The contract that names the functions, by the words of one that names none; of a rank, where these do not do."""
    afar = bad[contract.source_rank[contract.value[bad], 0] != contract.dest_rank[bad]]
    row = int(afar[0] if len(afar) else bad[0])  # where chunks of another rank are told from its own
    location = int(located.contract_dests(contract)[row])
    rank, left = located.split(location)[0], located.chunk_name(location).strip("`")
    found, meant = (terms.text(one, rank) for one in (terms.found(location), terms.wanted(contract, row)))
    said = meant
    if "==" in contract.span.text:
        left, said = (part.strip() for part in contract.span.text.split("==", 1))
    pairs = [(meant, said)]
    if meant.endswith(" @ all)") and said.endswith(" @ all)"):
        pairs.insert(0, (meant[len("sum(") : -len(" @ all)")], said[len("sum(") : -len(" @ all)")]))
    for old, new in pairs:
        is_alike = old.startswith("sum(") == new.startswith("sum(") and found.count(old) == 1
        if is_alike and not _ONE_ROW.search(found.replace(old, "")):
            return f"name the functions, as in `{left} == {found.replace(old, new)}`"
    return f"name the functions: on rank {rank} it is `{located.chunk_name(location).strip('`')} == {found}`"


_ONE_ROW = re.compile(r"(@ |[^)]\[[^]]*)\d| more\)|\.\.\.|(?:^|\(|, )bias ")
"""A rank or an index that holds of one row alone; what is shortened, or no contract says so."""


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
