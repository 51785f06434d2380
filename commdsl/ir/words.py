"""Turns ranks and the values of loops into words of a message.

Assumes nothing. Does not know what the message is about.
"""

from __future__ import annotations

from collections.abc import Iterable


def bindings_text(bindings: tuple[tuple[str, int], ...]) -> str:
    """`, s = 3, k = 0`, to follow a rank; empty outside loops."""
    return "".join(f", {name} = {value}" for name, value in bindings)


def at_bindings(bindings: tuple[tuple[str, int], ...]) -> str:
    """` at s = 3, k = 0`, to follow what happens there; empty outside loops."""
    return bindings_text(bindings).replace(",", " at", 1)


def ranks_text(ranks: Iterable[int], limit: int = 8) -> str:
    """`rank 3`, `ranks 0 1 2`, `ranks 0 1 2 3 4 5 6 7 and 8 more`."""
    listed = [int(rank) for rank in ranks]
    shown = " ".join(str(rank) for rank in listed[:limit])
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return f"{'rank' if len(listed) == 1 else 'ranks'} {shown}{more}"
