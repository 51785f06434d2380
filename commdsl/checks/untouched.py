"""C181: every chunk of an output is written on some rank, and every chunk of an input is read on some.

Assumes indices in bounds. What a rank alone leaves is free: a root has what others have not. Does not ask whether what
is written is right; `conservation` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedTask
from commdsl.language.diagnostics import Diagnostic, Label, Severity
from commdsl.language.kinds import BufferKind


def untouched_chunks(located: Located) -> Iterator[Diagnostic]:
    """One message per buffer."""
    read, left = _read(located), located.left()
    for number, buffer in enumerate(located.schedule.buffers):
        match buffer.kind:
            case BufferKind.OUTPUT:
                touched, what, why = left, "writes", "every caller is given it, with whatever lies there"
            case BufferKind.INPUT:
                touched, what, why = read, "reads", "every caller has to bring it"
            case BufferKind.INOUT | BufferKind.SCRATCH:
                continue
        idle = np.flatnonzero(~touched[located.whole(number)].any(axis=0))
        if len(idle):
            name = located.chunk_name(int(located.whole(number)[0, idle[0]]))
            yield Diagnostic(
                "C181",
                f"no rank {what} {name}",
                Label(buffer.span, f"{len(idle)} of {buffer.num_chunks} chunks: {why}"),
                help="declare fewer chunks, or move what belongs there",
                severity=Severity.WARNING,
            )


def _read(located: Located) -> NDArray[np.bool_]:
    found = np.zeros(located.size, np.bool_)
    for step in located.steps:
        if isinstance(step, LocatedTask):
            found[step.reads] = True
            continue
        for moves in step.moves:
            found[moves.reads] = True
    return found
