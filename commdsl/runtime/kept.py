"""Turns a table of what calls have made into one that has an end: what came last stays.

Assumes that what goes can be made again, as it is when it is needed. Does not look anything up: whoever has a table
looks there at no more than a dict's cost.
"""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")


def keep(known: dict[Key, Made], key: Key, made: Made, most: int) -> None:
    """One more; the oldest goes where there are so many already. Not all: a program that meets one shape, or address,
    more than there is room for would make every one of them again.
    """
    while len(known) >= most:
        known.pop(next(iter(tuple(known))), None)  # another thread may be here
    known[key] = made
