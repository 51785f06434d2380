"""Attention over a sequence that lies on many ranks: any schedule with a `yield`, forward and backward.

Importing this imports nothing else; each name below loads what it needs when it is first used.

    placement     document lengths -> which tokens a rank has
    sequence      a whole sequence <-> the rows of a rank, and their positions
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commdsl.attention.placement import Placement as Placement
    from commdsl.attention.placement import Run as Run
    from commdsl.attention.placement import contiguous as contiguous
    from commdsl.attention.placement import zigzag as zigzag
    from commdsl.attention.sequence import positions as positions
    from commdsl.attention.sequence import shard_sequence as shard_sequence
    from commdsl.attention.sequence import unshard_sequence as unshard_sequence

__all__ = [
    "Placement",
    "Run",
    "contiguous",
    "positions",
    "shard_sequence",
    "unshard_sequence",
    "zigzag",
]

_HOME = {
    "Placement": "placement",
    "Run": "placement",
    "contiguous": "placement",
    "positions": "sequence",
    "shard_sequence": "sequence",
    "unshard_sequence": "sequence",
    "zigzag": "placement",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `commdsl.attention` has no attribute `{name}`")
    # Kept: the next use of the name costs a look into a dictionary.
    found = globals()[name] = getattr(import_module(f"commdsl.attention.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
