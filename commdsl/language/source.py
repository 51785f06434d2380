"""Turns offsets into lines: a named text, and spans of it.

Assumes offsets count characters of the text. Does not read files (the caller does) and does not parse.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from commdsl.machine.printable import printable


@dataclass(frozen=True)
class Source:
    """A `.comm` text with the name under which diagnostics show it."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        return (0, *(i + 1 for i, char in enumerate(self.text) if char == "\n"))

    def position(self, offset: int) -> tuple[int, int]:
        """The 1-based line and column of an offset."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a 1-based line, without its newline."""
        return self.text.split("\n")[number - 1]


Texts: TypeAlias = tuple[Source, ...]
"""A `.comm` text in hand and, behind it, all that it uses: nothing of them is looked for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of characters of one source."""

    source: Source
    start: int
    end: int

    def __reduce__(self) -> tuple[type[Span], tuple[Source, int, int]]:
        """A long text has very many, which are pickled so in a third of the time."""
        return Span, (self.source, self.start, self.end)

    @property
    def position(self) -> tuple[int, int]:
        return self.source.position(self.start)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def is_in(self, other: Span) -> bool:
        return self.source == other.source and other.start <= self.start and self.end <= other.end

    def __str__(self) -> str:
        line, _ = self.position
        return f"{printable(self.source.name, lines=False)}:{line}"
