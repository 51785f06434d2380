"""Builds the terms of a single location, and those that a contract wants there, exactly, and says how they differ.

Assumes what `contributions` does, of which this is the second opinion: it is asked where fingerprints differ. Terms are
built once each (hash-consed), so equal ones have one number. Prints them as a contract would have them, shortened.
Does not judge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.contributions import BIAS, MANY
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask
from commdsl.ir.contracts import AppliedTerm, ChunkTerm, Contract, FinishedTerm, SumTerm, Term
from commdsl.ir.functions import ACTIVATIONS, FUNCTIONS
from commdsl.ir.schedules import Task
from commdsl.language.records import dataclass

Sum: TypeAlias = tuple[tuple[int, int], ...]
"""Numbers of terms in order, with how often each is there."""

SHOWN = 3
"""Terms of a sum that a message lists."""

LONGEST = 160
"""Characters of an application in a message."""


@dataclass(frozen=True, slots=True)
class Built:
    """An initial location, or a result of a function."""

    function: str  # "": an initial location, `number`
    number: int  # of the result
    operands: tuple[Sum, ...]


class Terms:
    """All terms that were built, by number. `whole`: texts are not shortened."""

    def __init__(self, located: Located, *, whole: bool = False) -> None:
        self.located, self.whole = located, whole
        self._numbers: dict[Built, int] = {}
        self.built: list[Built] = []
        self.ranks: list[frozenset[int]] = []  # of all chunks of each

    def _number(self, built: Built) -> Sum:
        if built not in self._numbers:
            self._numbers[built] = len(self.built)
            self.built.append(built)
            parts = (self.ranks[number] for operand in built.operands for number, _ in operand)
            own = () if built.function else (int(self.located.by_rank(np.array([built.number]))[0][0]),)
            self.ranks.append(frozenset(own).union(*parts))
        return ((self._numbers[built], 1),)

    def chunk(self, location: int) -> Sum:
        return () if location == self.located.nowhere else self._number(Built("", location, ()))

    def applied(self, function: str, number: int, operands: Sequence[Sum]) -> Sum:
        commutes = function in FUNCTIONS and FUNCTIONS[function].commutes
        return self._number(Built(function, number, tuple(sorted(operands) if commutes else operands)))

    def finished(self, of: Sum, bias: Sum | None, activation: str | None, residual: Sum | None) -> Sum:
        if bias is not None:
            of = summed((of, self.applied(BIAS, 0, (bias,))))
        if activation is not None:
            of = self.applied(activation, 0, (of,))
        return of if residual is None else summed((of, residual))

    # --- what is there ------------------------------------------------------------------------------------------------

    def found(self, location: int) -> Sum:
        """Return what a location holds at the end, by those rows of statements alone that lead there."""
        given = self.located.given()
        held: dict[int, Sum] = {}

        def read(place: int) -> Sum:
            if place not in held:
                held[place] = self.chunk(place) if given[place] else ()
            return held[place]

        for step, rows in reversed(list(_leading_there(self.located, location))):
            if isinstance(step, LocatedTask):
                made = {int(step.writes.flat[row]): self._task(step, row, read) for row in rows[0].tolist()}
            else:
                made = {
                    int(moves.dest[row]): self._row(moves, row, read)
                    for moves, some in zip(step.moves, rows, strict=True)
                    for row in some.tolist()
                }
            held |= made
        return read(location)

    def _task(self, task: LocatedTask, row: int, read: Callable[[int], Sum]) -> Sum:
        if not isinstance(task.step, Task):
            return self.chunk(int(task.origins.flat[row]))
        return self.applied(task.step.function, 0, [read(one) for one in task.operands[row].tolist()])

    def _row(self, moves: LocatedMoves, row: int, read: Callable[[int], Sum]) -> Sum:
        new = summed([read(one) for one in moves.sources[row].tolist()])
        if moves.given is not None:
            new = self.applied(*moves.function, (new, *(read(one) for one in moves.given[row].tolist())))
        if moves.moves.accumulate:
            new = summed((new, read(int(moves.dest[row]))))
        bias, residual = (None if at is None else read(int(at[row])) for at in (moves.bias, moves.residual))
        return self.finished(new, bias, moves.moves.epilogue.activation, residual)

    # --- what is wanted -----------------------------------------------------------------------------------------------

    def wanted(self, contract: Contract, row: int) -> Sum:
        """Return what a contract says of one of its chunks."""
        if contract.term is None:
            return summed([self.chunk(one) for one in self.located.contract_sources(contract)[contract.value[row]]])
        return self._meant(contract.term, row)

    def _meant(self, term: Term, row: int) -> Sum:
        match term:
            case ChunkTerm(buffer, rank, chunk):
                return self.chunk(int(self.located.at_start(buffer, rank[row : row + 1], chunk[row : row + 1])[0]))
            case SumTerm(_, parts, rows):
                pairs = zip(parts, rows, strict=True)
                return summed([self._meant(of, one) for of, at in pairs for one in np.flatnonzero(at == row).tolist()])
            case AppliedTerm(function, operands, result):
                return self.applied(function, result, [self._meant(one, row) for one in operands])
            case FinishedTerm(of, bias, activation, residual):
                added = [None if one is None else self._meant(one, row) for one in (bias, residual)]
                return self.finished(self._meant(of, row), added[0], activation, added[1])
            case _:
                assert_never(term)

    # --- words --------------------------------------------------------------------------------------------------------

    def locations(self, terms: Sum) -> NDArray[np.int64] | None:
        """Return how often each initial location is in a sum; None where a function makes a part of it."""
        counts = np.zeros(self.located.size, np.int64)
        for number, times in terms:
            if self.built[number].function:
                return None
            counts[self.built[number].number] = min(times, int(MANY))
        return counts

    def text(self, terms: Sum, rank: int) -> str:
        """A sum on a rank, whose own chunks stand without `@`, as a contract would say it where it can."""
        core, ends = list(terms), list[str]()
        chunks = [one for one in core if not self.built[one[0]].function]
        if len(chunks) == 1 < len(core) and chunks[0][1] == 1:
            ends = [f"residual {self._one(chunks[0][0], rank)}"]
            core.remove(chunks[0])
        if len(core) == 1 and core[0][1] == 1 and self.built[core[0][0]].function in ACTIVATIONS:
            built = self.built[core[0][0]]
            ends, core = [built.function, *ends], list(built.operands[0])
        biases = [one for one in core if self.built[one[0]].function == BIAS]
        if len(biases) == 1 < len(core) and biases[0][1] == 1:
            ends = [f"bias {self.text(self.built[biases[0][0]].operands[0], rank)}", *ends]
            core.remove(biases[0])
        if not ends:
            return self._plain(terms, rank)
        said = self.text(tuple(core), rank)
        return f"{_enclosed(said)} with {', '.join(ends)}"

    def _plain(self, terms: Sum, rank: int) -> str:
        """Terms that are added up, the rank's own first; those that every rank has alike are one `@ all`."""
        num_ranks, alike = self.located.schedule.num_ranks, defaultdict[str, list[int]](list)
        said = list[tuple[int, str]]()
        for number, times in terms:
            ranks = self.ranks[number]
            if len(ranks) > 1 or times > 1:
                text = self._one(number, rank)
                said.append((min(ranks), f"{text} {times} times" if times > 1 else text))
            else:
                alike[self._one(number, min(ranks))] += ranks
        for text, homes in alike.items():
            if 1 < num_ranks == len(homes):
                said.append((-1, f"sum({_enclosed(text)} @ all)"))
            else:
                said += [(-1, text) if one == rank else (one, f"{_enclosed(text)} @ {one}") for one in homes]
        if len(said) < 2:
            return "".join(text for _, text in said) or "nothing"
        shown = len(said) if self.whole else SHOWN
        more = f" and {len(said) - shown} more" if len(said) > shown else ""
        listed = [text[len("sum(") : -1] if text.endswith("@ all)") else text for _, text in sorted(said)]
        return f"sum({', '.join(listed[:shown])}{more})"

    def _one(self, number: int, rank: int) -> str:
        built = self.built[number]
        if not built.function:
            ranks, numbers = self.located.by_rank(np.array([built.number]))
            name = self.located.origin_name(int(numbers[0])).replace("`", "")
            return name if ranks[0] == rank else f"{name} @ {ranks[0]}"
        operands = [self.text(one, rank) for one in built.operands]
        if built.function == BIAS:
            return f"bias {operands[0]}"
        if built.function in ACTIVATIONS:
            return f"{_enclosed(operands[0])} with {built.function}"
        several = built.function in FUNCTIONS and FUNCTIONS[built.function].num_results > 1
        text = f"{built.function}({', '.join(map(_enclosed, operands))})" + (f"[{built.number}]" if several else "")
        return text if self.whole or len(text) <= LONGEST else text[:LONGEST] + "..."

    def difference(self, found: Sum, wanted: Sum, rank: int) -> str:
        """Say where two sums part: as deep inside as they differ in one term, and in one operand of it, alone."""
        counts, due = Counter(dict(found)), Counter(dict(wanted))
        more, fewer = counts - due, due - counts
        if len(more) == len(fewer) == 1 and more.total() == fewer.total() == 1:
            left, right = (self.built[next(iter(one))] for one in (more, fewer))
            if left.function and (left.function, left.number) == (right.function, right.number):
                parts = [pair for pair in zip(left.operands, right.operands, strict=True) if pair[0] != pair[1]]
                if len(parts) == 1:
                    return self.difference(*parts[0], rank)
        texts = [self.text(tuple(sorted(one.items())), rank) for one in (more, fewer)]
        if not more:
            return f"lacks `{texts[1]}`"
        return f"has `{texts[0]}`" + (f" in place of `{texts[1]}`" if fewer else " besides")


def _enclosed(text: str) -> str:
    """A text in parentheses, if it ends with something outside of any."""
    depth, outside = 0, ""
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        outside += letter if depth == 0 else ""
    return f"({text})" if " with " in outside else text


def summed(parts: Sequence[Sum]) -> Sum:
    """Return all terms of several sums."""
    if len(parts) == 1:
        return parts[0]
    found = Counter[int]()
    for part in parts:
        found.update(dict(part))
    return tuple(sorted(found.items()))


def _leading_there(
    located: Located, location: int
) -> Iterator[tuple[LocatedStep | LocatedTask, tuple[NDArray[np.int64], ...]]]:
    """Yield, from the last step, each step with the rows of its statements that a location's content comes by."""
    live = np.zeros(located.size, np.bool_)
    live[location] = True
    for step in reversed(located.steps):
        if isinstance(step, LocatedTask):
            rows = np.flatnonzero(live[step.writes.ravel()])
            if len(rows):
                live[step.writes.ravel()[rows]] = False
                if isinstance(step.step, Task):
                    live[step.operands[rows]] = True
                yield step, (rows,)
            continue
        found = tuple(np.flatnonzero(live[moves.dest]) for moves in step.moves)
        if not any(len(rows) for rows in found):
            continue
        for moves, rows in zip(step.moves, found, strict=True):
            if not moves.moves.accumulate:
                live[moves.dest[rows]] = False
        for moves, rows in zip(step.moves, found, strict=True):
            live[moves.reads[rows]] = True
        yield step, found
