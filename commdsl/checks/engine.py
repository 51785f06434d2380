"""C510: what the copy engine carries out does not combine.

Assumes nothing. Does not judge other settings of `tune`: `resolve.tuning` does, where they are written.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.checks.locations import Located, statement_key
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import MoveKind


def combining_engine(located: Located) -> Iterator[Diagnostic]:
    """One message per statement."""
    if located.schedule.tuning.protocol != "engine":
        return
    told: set[tuple[str, int, int]] = set()
    for _, _, moves in located.statements():
        key = statement_key(moves.moves.span)
        if moves.moves.kind is MoveKind.REDUCE and key not in told:
            told.add(key)
            yield Diagnostic(
                "C510",
                "the copy engine moves, it does not combine",
                Label(moves.moves.span, "this combines"),
                help=f"tune another protocol for `{located.schedule.name}`, as `bulk`",
            )
