"""Turns what the command line says into a language server that an editor talks to, until the editor ends it.

Assumes the extra `lsp`, or says that it is missing. Does not know the protocol.
"""

from __future__ import annotations

import os

from commdsl.commands.arguments import UsageError, target
from commdsl.commands.output import Exit

STDOUT = 1
UNLESS_SAID = "2..8"
"""Ranks: a schedule is checked for those of them that it is for."""


def lsp(ranks: str | None, on: str | None) -> Exit:
    """Answers an editor over standard input and output."""
    try:
        # 300 ms, and nobody else needs it
        from commdsl.commands.lsp.answers import answering
        from commdsl.commands.lsp.session import Server
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not here: pip install 'commdsl[lsp]'") from error
    ranks = UNLESS_SAID if ranks is None and on is None else ranks
    with open(os.dup(STDOUT), "wb") as out:  # pygls closes what it writes to
        answering(Server(target(ranks, on, ()))).start_io(stdout=out)
    return Exit.FINE
