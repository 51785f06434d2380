"""Turns offsets of a text into the lines and columns of an editor, and back.

Assumes lines that end with `\\n`. An editor counts from 0, in the units that it and the server have agreed on: a letter
beyond the first 65,536 is two of UTF-16. Does not know what stands there.
"""

from __future__ import annotations

from lsprotocol import types
from pygls.workspace import PositionCodec

from commdsl.language.diagnostics import LabelJson
from commdsl.language.records import dataclass
from commdsl.language.source import Source, Span


@dataclass(frozen=True)
class Positions:
    """Of one text."""

    source: Source
    codec: PositionCodec

    def offset(self, position: types.Position) -> int:
        starts = self.source.line_starts
        if position.line >= len(starts):
            return len(self.source.text)
        line, units = self.source.line(position.line + 1), 0
        for column, letter in enumerate(line):
            if units >= position.character:
                return starts[position.line] + column
            units += self.codec.client_num_units(letter)
        return starts[position.line] + len(line)

    def position(self, line: int, column: int) -> types.Position:
        """Of a line and column as diagnostics count them, from 1."""
        if line > len(self.source.line_starts):  # the file has changed since
            return types.Position(line - 1, 0)
        return types.Position(line - 1, self.codec.client_num_units(self.source.line(line)[: column - 1]))

    def range(self, start: int, end: int) -> types.Range:
        return types.Range(*(self.position(*self.source.position(offset)) for offset in (start, end)))

    def of_span(self, span: Span) -> types.Range:
        return self.range(span.start, span.end)

    def of_label(self, label: LabelJson) -> types.Range:
        start = self.position(label["line"], label["column"])
        return types.Range(start, self.position(label["end_line"], label["end_column"]))

    @property
    def whole(self) -> types.Range:
        return self.range(0, len(self.source.text))
