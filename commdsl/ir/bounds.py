"""C301 of one side of a statement or of a contract: the first of its ranks and chunks that is not there.

Assumes flat chunk indices, -1 where one of several indices is outside. Does not know what names the side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Buffer, Ints
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.records import dataclass
from commdsl.language.source import Span


@dataclass(frozen=True)
class Outside:
    """A row that names what is not there, in words, and what there is."""

    row: int
    what: str
    there_is: str

    def diagnostic(self, span: Span, where: str) -> Diagnostic:
        return Diagnostic(
            "C301",
            "an index out of range",
            Label(span, f"{where}: {self.what} does not exist"),
            notes=(self.there_is,),
            help="wrap the index with `%`, or leave the case out with `where`",
        )


def outside(
    buffer: Buffer, num_ranks: int, rank: Ints, chunk: Ints, valid: NDArray[np.bool_] | None = None
) -> Outside | None:
    """The first row, of one or of several entries, that leaves the buffer, or else the ranks; only where `valid`."""
    found = _first(chunk, buffer.num_chunks, valid)
    if found is not None:
        return Outside(found[0], _chunk_text(buffer, found[1]), f"it is declared `{buffer.declared}`")
    found = _first(rank, num_ranks, valid)
    return None if found is None else Outside(found[0], f"rank {found[1]}", f"the ranks are 0 ..< {num_ranks}")


def _chunk_text(buffer: Buffer, chunk: int) -> str:
    return f"a chunk of `{buffer.name}`" if len(buffer.dims) > 1 and chunk < 0 else f"`{buffer.name}[{chunk}]`"


def _first(index: Ints, limit: int, valid: NDArray[np.bool_] | None) -> tuple[int, int] | None:
    if index.size == 0 or (int(index.min()) >= 0 and int(index.max()) < limit):
        return None
    wrong = (index < 0) | (index >= limit)
    if valid is not None:
        wrong &= valid
    where = np.argwhere(wrong)
    return None if len(where) == 0 else (int(where[0, 0]), int(index[tuple(where[0])]))
