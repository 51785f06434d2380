"""Turns what a place holds into one 64-bit number, and such numbers back into words.

Assumes numbers of different values differ: they are made of marks, which are keyed for each process, so two values
share a number once in 2^64 and nobody can choose which. Does not follow anything; `meaning` and `computes` do, each in
its own way.

A value is a chunk that a rank was given, or several values combined. Order and nesting of what is combined are part of
it, as they decide how results are rounded. What combines one value alone is it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.marks import OPENING, finish, mark
from commdsl.ir.schedules import Buffer, Cast, Schedule
from commdsl.language.diagnostics import InternalError
from commdsl.language.kinds import GIVEN

Values: TypeAlias = NDArray[np.uint64]
Mask: TypeAlias = NDArray[np.bool_]
Column: TypeAlias = tuple[Values, Mask | None]
"""One operand of every row, and in which rows there is one (None: in all)."""

UNWRITTEN = np.uint64(0)
"""At the end: nothing was written there."""

STALE = np.uint64(1)
"""Of a place nothing was written to in this round: it holds what a round or a call before left."""

CLASH = np.uint64(2)
"""Of a place two different values were stored to at once."""

MISREAD = np.uint64(3)
"""Of a chunk that was read in another form than it lies in."""

_WORDS = {
    int(UNWRITTEN): "nothing",
    int(STALE): "what an earlier round left",
    int(CLASH): "one of two values that are stored at once",
    int(MISREAD): "what lies in another form than it is read in",
}

_BEHIND = np.uint64(0xD1342543DE82EF95)
"""Sets the combination of several apart from what it is combined with: a value may be added to itself."""

MOST_NESTED, MOST_LETTERS = 12, 400
"""How deep and how far a message spells one value out."""


def given(schedule: Schedule, buffer: int) -> Values:
    """What the caller puts into a buffer: every chunk of every rank, rank by rank, a value of its own."""
    before = sum(earlier.num_chunks for earlier in schedule.buffers[:buffer]) * schedule.num_ranks
    size = schedule.buffers[buffer].num_chunks * schedule.num_ranks
    return mark(np.arange(before + 1, before + size + 1, dtype=np.uint64))


def computed(schedule: Schedule, step: int, buffer: int) -> Values:
    """What the caller computes at a step, into a buffer: nobody knows it, so every chunk is a value of its own."""
    before = sum(earlier.num_chunks for earlier in schedule.buffers[:buffer]) * schedule.num_ranks
    size = schedule.buffers[buffer].num_chunks * schedule.num_ranks
    numbers = np.arange(before + 1, before + size + 1, dtype=np.uint64) + (np.uint64(step + 1) << np.uint64(40))
    return mark(numbers)


def combined(columns: Iterable[Column], operation: str | None = None) -> Values:
    """The operands of every row combined in the order of the columns, by an operation that the text names, or the
    call.
    """
    made, counts, number = np.zeros(0, np.uint64), None, 0
    for number, (operand, valid) in enumerate(columns):
        if counts is None and valid is None:
            made = operand if number == 0 else finish(made * (OPENING if number == 1 else _BEHIND) + operand)
            continue
        here = np.ones(len(operand), np.bool_) if valid is None else valid
        if counts is None:
            made = made if number else np.zeros(len(operand), np.uint64)
            counts = np.full(len(operand), number)
        joined = finish(made * np.where(counts == 1, OPENING, _BEHIND) + operand)
        made = np.where(here, np.where(counts == 0, operand, joined), made)
        counts += here
    if operation is None:
        return made
    several = np.full(len(made), number > 0) if counts is None else counts > 1
    return np.where(several, applied(operation, made), made)


def applied(function: str, values: Values) -> Values:
    """What a function makes of operands that were combined: another value for every function, and for every order."""
    digest = blake2b(function.encode(), digest_size=8).digest()
    return finish(values ^ np.uint64(int.from_bytes(digest, "little")))


MISWEIGHED = "an average by other weights of "
"""What a combination is, as `applied` and messages have it, whose operands are not weighed by what they hold."""


@dataclass(frozen=True, eq=False)
class Book:
    """How values came about, noted where a message is to be made of them."""

    schedule: Schedule
    made: list[Values] = field(default_factory=list)
    operands: list[tuple[Column, ...]] = field(default_factory=list)
    how: list[str] = field(default_factory=list)  # what joins the operands in words, or a function's name

    def note(self, made: Values, operands: tuple[Column, ...], *, function: str | None = None) -> None:
        self.made.append(made)
        self.operands.append(operands)
        self.how.append(function or "+")

    def given(self) -> list[tuple[Buffer, Values]]:
        """Every chunk that any rank is given."""
        held = enumerate(self.schedule.buffers)
        return [(buffer, given(self.schedule, number)) for number, buffer in held if buffer.kind in GIVEN]

    def all_values(self) -> Values:
        """Every value there was."""
        return np.unique(np.concatenate([values for _, values in self.given()] + self.made))

    def words(self, value: np.uint64) -> str:
        """`chunk 3 of `x` of rank 2 + chunk 3 of `x` of rank 0`: combined from left to right, the inner first."""
        text = self._words(value, 0)
        return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS].rpartition(" ")[0] + " ..."

    def _words(self, value: np.uint64, depth: int) -> str:
        if int(value) in _WORDS:
            return _WORDS[int(value)]
        for buffer, values in self.given():
            at = np.flatnonzero(values == value)
            if len(at):
                rank, chunk = divmod(int(at[0]), buffer.num_chunks)
                return f"rank {rank}'s chunk {chunk} of `{buffer.name}`"
        return self._made(value, depth) if depth < MOST_NESTED else "..."

    def _made(self, value: np.uint64, depth: int) -> str:
        parts, how = self.parts(value)
        if not parts:
            raise InternalError("a value of the Plan came about in no operation")
        inner = [self._words(part, depth + 1) for part in parts]
        if how != "+":
            return f"{how}({', '.join(inner)})"
        return " + ".join(f"({part})" if " + " in part else part for part in inner)

    def parts(self, value: np.uint64) -> tuple[list[np.uint64], str]:
        """What a value was made of, nothing for what was given; and how."""
        for made, operands, how in zip(self.made, self.operands, self.how, strict=True):
            at = np.flatnonzero(made == value)
            parts = [column[at[0]] for column, valid in operands if len(at) and (valid is None or valid[at[0]])]
            if parts and parts != [value]:
                return parts, how
        return [], "+"


def rounded(values: Values, here: Mask, cast: Cast, book: Book | None) -> Values:
    """What is left of values that a cast rounds, which it does `here`."""
    if not here.any():
        return values
    made = np.where(here, applied(cast.words, values), values)
    if book is not None:
        book.note(made, ((values, None),), function=cast.words)
    return made


def difference(means: Book, does: Book, wanted: np.uint64, got: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The innermost part in which two values differ, if it is the only one."""
    while True:
        parts, others = means.parts(wanted), does.parts(got)
        pairs = [pair for pair in zip(parts[0], others[0], strict=False) if pair[0] != pair[1]]
        if len(parts[0]) != len(others[0]) or len(pairs) != 1:
            return wanted, got
        wanted, got = pairs[0]
