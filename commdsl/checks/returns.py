"""C314: what yields write about the pieces that visit them comes back to the pieces' owners, each contribution once.

Assumes that rotations are kept: `rotations` proves that every piece is handed over once where it is to be. What a yield
writes about a piece is written to the same place of a buffer that moves join to the one that comes back: one
contribution for each piece that is new at that yield. A buffer that it reads as well keeps what was there. What the
buffers hold at first counts as nothing: the caller gives zeros. Does not look at the order of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.conservation import Difference, contributors, in_words, last_write
from commdsl.checks.contributions import Contents, combine, summed, transposed
from commdsl.checks.locations import Located, LocatedStep, LocatedTask, Locations
from commdsl.checks.rotations import visiting
from commdsl.ir.classes import connected
from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.held import Handed, handed
from commdsl.ir.marks import mark
from commdsl.ir.schedules import Task
from commdsl.ir.words import at_bindings
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.records import dataclass
from commdsl.language.source import Span


def broken_returns(located: Located) -> Iterator[Diagnostic]:
    """One message per contract, for the first chunk that breaks it."""
    for contract in located.schedule.contracts:
        if contract.rotation is not None and contract.rotation.back:
            fault = _Returns(located, contract, contract.rotation).fault()
            if fault is not None:
                yield fault


@dataclass(frozen=True, eq=False)
class _Written:
    """What a task writes to one buffer: (num_ranks, chunks) each. `own`: where a contribution of its own comes with it;
    `keeps`: whether what was there stays.
    """

    places: Locations
    origins: Locations
    own: NDArray[np.bool_]
    keeps: bool


class _Returns:
    """What becomes of the contributions to what one rotation brings back."""

    def __init__(self, located: Located, contract: Contract, rotation: Rotation) -> None:
        self.located, self.contract, self.rotation = located, contract, rotation
        self.buffers = located.schedule.buffers
        self.classes = connected(located.schedule)
        self.groups = [self.classes[buffer] for buffer in rotation.back]
        self.written: dict[int, list[_Written]] = {}  # by step
        self.due: list[list[tuple[Locations, Locations]]] = [[] for _ in rotation.back]  # pieces, and what is theirs

    def fault(self) -> Diagnostic | None:
        if len({*self.groups}) < len(self.groups):
            names = " and ".join(f"`{self.buffers[buffer].name}`" for buffer in self.rotation.back)
            return self._diagnostic(self.contract.span, f"moves join {names}: nobody knows which is about which")
        for now in handed(self.located.schedule):
            for number in range(len(self.groups)):
                found = self._yield(now, number)
                if found is not None:
                    return found
        for index, step in enumerate(self.located.steps):
            if isinstance(step, LocatedTask) and isinstance(step.step, Task):
                self.written[index] = [_Written(step.writes, step.origins, np.ones(step.writes.shape, np.bool_), False)]
        return self._compared()

    def _yield(self, now: Handed, number: int) -> Diagnostic | None:
        """Pairs what a yield writes with the pieces that it is handed, both in its order."""
        seen = visiting(self.located, self.rotation, number, now)
        written = [one for one in now.step.writes if self.classes[one] == self.groups[number]]
        size = sum(self.buffers[one].num_chunks for one in written)
        if seen.fresh.any() and size != seen.fresh.shape[1]:
            source, back = (self.buffers[one[number]].name for one in (self.rotation.sources, self.rotation.back))
            sizes = seen.fresh.shape[1], size or "none"
            what = f"is handed {sizes[0]} chunks of `{source}`, and writes {sizes[1]} that `{back}` gets"
            return self._diagnostic(now.step.span, what + at_bindings(now.step.bindings))
        new, pieces = np.zeros((len(seen.fresh), size), np.bool_), np.zeros((len(seen.fresh), size), np.int64)
        if size == seen.fresh.shape[1]:
            new, pieces = seen.fresh & (seen.pieces >= 0), seen.pieces
        task, first = self.located.steps[now.index], 0
        assert isinstance(task, LocatedTask)
        for buffer in written:
            columns = np.isin(task.writes[0], self.located.whole(buffer)[0])
            places, origins = task.writes[:, columns], task.origins[:, columns]
            part = slice(first, first + places.shape[1])
            own, first, keeps = new[:, part], part.stop, buffer in now.step.reads
            made = _Written(places, origins, own if keeps else np.ones_like(own), keeps)
            self.written.setdefault(now.index, []).append(made)
            self.due[number].append((pieces[:, part][own], origins[own]))
        return None

    # --- where they come to be ----------------------------------------------------------------------------------------

    def _compared(self) -> Diagnostic | None:
        held = self._run()
        for number, buffer in enumerate(self.rotation.back):
            places = self.located.whole(buffer).ravel()
            wanted = Contents(np.zeros((len(places), 1), np.uint64), np.zeros(len(places), np.int64))
            for pieces, origins in self.due[number]:
                np.add.at(wanted.sums[:, 0], pieces, mark(origins.astype(np.uint64)))
                np.add.at(wanted.totals, pieces, 1)
            bad = np.flatnonzero(~wanted.equal(held.at(places)))
            if len(bad):
                return self._differs(number, int(bad[0]), int(places[bad[0]]), len(bad), len(places))
        return None

    def _run(self) -> Contents:
        """What every location holds at the end, of what tasks made alone."""
        held = Contents(np.zeros((self.located.size, 1), np.uint64), np.zeros(self.located.size, np.int64))
        for index, step in enumerate(self.located.steps):
            if isinstance(step, LocatedTask):
                for one in self.written.get(index, ()):
                    sums = np.where(one.own, mark(one.origins.astype(np.uint64)), np.uint64(0)).reshape(-1, 1)
                    made, before = Contents(sums, one.own.astype(np.int64).ravel()), held.at(one.places.ravel())
                    held.put(one.places.ravel(), summed(made, before) if one.keeps else made)
                continue
            results = []
            for moves in (one for one in step.moves if self.classes[one.moves.dest_buffer] in self.groups):
                made = combine(held, moves.sources)
                results.append((moves.dest, summed(made, held.at(moves.dest)) if moves.moves.accumulate else made))
            for dest, made in results:
                held.put(dest, made)
        return held

    def _counts(self, location: int) -> NDArray[np.int64]:
        """How often what each task made is in one location at the end; exact."""
        weight = np.zeros(self.located.size, np.int64)
        weight[location] = 1
        for index, step in reversed([*enumerate(self.located.steps)]):
            if isinstance(step, LocatedStep):
                transposed(step, weight)
                continue
            for one in self.written.get(index, ()):
                weight[one.origins] = np.where(one.own, weight[one.places], 0)
                weight[one.places] = weight[one.places] if one.keeps else 0
        weight[: self.located.nowhere + 1] = 0
        return weight

    def _differs(self, number: int, piece: int, location: int, num_bad: int, num_pieces: int) -> Diagnostic:
        wanted = np.zeros(self.located.size, np.int64)
        for pieces, origins in self.due[number]:
            wanted[origins[pieces == piece]] = 1
        found = Difference(location, wanted, self._counts(location))
        notes: tuple[str, ...] = tuple(
            f"{word} {contributors(self.located, counts)}"
            for word, counts in (("expected", found.wanted), ("got", found.counts))
        )
        if num_bad > 1:
            notes += (f"{num_bad} of the {num_pieces} chunks that come back are wrong",)
        last = last_write(self.located, location)
        what = f"{self.located.name(location)} {in_words(self.located, found)}"
        return self._diagnostic(self.contract.span, what, notes, () if last is None else (last,))

    def _diagnostic(
        self, span: Span, what: str, notes: tuple[str, ...] = (), secondary: tuple[Label, ...] = ()
    ) -> Diagnostic:
        return Diagnostic(
            "C314",
            "what is written about a piece comes back to its owner once",
            Label(span, what),
            secondary,
            notes,
            help="write about every piece at the yield that is handed it, and add that up at its owner",
        )
