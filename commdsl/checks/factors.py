"""C316, C317: contracts say by which block of a factor rows are multiplied, and those are.

Assumes that contracts of rows, and contracts of blocks, are kept each by themselves (`conservation`). A sum of products
may have all rows and all blocks, and yet others of them multiplied with one another. So each location has the sum of
the marks of its contributions, and a product the product of two: it is linear in both, as what it stands for.
Does not say which pair is wrong: of a sum, nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.checks.conservation import at_ends
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, Locations
from commdsl.ir.marks import Marks, mark
from commdsl.ir.schedules import Contract
from commdsl.language.diagnostics import Diagnostic, Label


def unsaid_factors(located: Located) -> Iterator[Diagnostic]:
    """C316, for every contract of what one of several blocks of a factor has multiplied, where none says which."""
    schedule = located.schedule
    factor = next((factor for _, factor, _ in schedule.products if schedule.buffers[factor].num_chunks > 1), None)
    if factor is None:
        return
    _, end = at_ends(located, located.of_factors())
    unsaid = end.totals > 0
    for contract in schedule.contracts:
        if contract.source_buffer == factor:
            unsaid[located.contract_dests(contract)] = False
    for contract in schedule.contracts:
        dests = located.contract_dests(contract)
        if unsaid[dests].any():
            name = schedule.buffers[factor].name
            where = located.name(int(dests[unsaid[dests].argmax()]))
            label = Label(contract.span, f"{where} is multiplied by a block of `{name}`")
            help = f"say by which, in another `==` of it: `{name}[...] @ ...`"
            yield Diagnostic("C316", "a contract does not say what its rows are multiplied by", label, help=help)


def wrong_pairs(located: Located) -> Iterator[Diagnostic]:
    """C317, for every contract whose rows are multiplied by other blocks of a factor than beside them in the text."""
    factors = {factor for _, factor, _ in located.schedule.products}
    contracts = [one for one in located.schedule.contracts if one.rotation is None]
    said = [one for one in contracts if one.source_buffer in factors]
    if not said:
        return
    given, found = _initial(located), _at_end(located)
    for rows in (one for one in contracts if one.source_buffer not in factors):
        for blocks in said:
            wrong = _unequal(located, rows, blocks, given, found)
            if wrong is not None:
                name = located.schedule.buffers[blocks.source_buffer].name
                label = f"rows in {located.name(wrong)} are multiplied by other blocks of `{name}`"
                help = (
                    "multiply the first chunk that one `==` of it has by the first block that the other has, and so on"
                )
                headline = "rows are multiplied by other blocks than a contract says"
                yield Diagnostic("C317", headline, Label(rows.span, label), help=help)


def _unequal(located: Located, rows: Contract, blocks: Contract, given: Marks, found: Marks) -> int | None:
    """A location of which both contracts speak, that does not have the products of their terms, one by one."""
    dests, of_rows, of_blocks = np.intersect1d(
        located.contract_dests(rows), located.contract_dests(blocks), return_indices=True
    )
    if not len(dests):
        return None
    terms = [given[located.contract_sources(one)][one.value[at]] for one, at in ((rows, of_rows), (blocks, of_blocks))]
    if terms[0].shape != terms[1].shape:
        return int(dests[0])
    good = (terms[0] * terms[1]).sum(axis=1) == found[dests]
    return None if good.all() else int(dests[good.argmin()])


def _initial(located: Located) -> Marks:
    marks = np.where(located.given(), mark(np.arange(located.size, dtype=np.uint64)), np.uint64(0))
    marks[located.nowhere] = 0
    return marks


def _at_end(located: Located) -> Marks:
    marks = _initial(located)
    for step in located.steps:
        if not isinstance(step, LocatedStep):
            marks[step.writes] = marks[step.origins]
            continue
        made: list[tuple[Locations, Marks]] = [(moves.dest, _made(moves, marks)) for moves in step.moves]
        for dest, new in made:
            marks[dest] = new
    return marks


def _made(moves: LocatedMoves, marks: Marks) -> Marks:
    """What a statement writes."""
    new: Marks = marks[moves.sources].sum(axis=1)
    if moves.factors is not None:
        new = new * marks[moves.factors]
    return new + marks[moves.dest] if moves.moves.accumulate else new
