"""Turns rows that cross once per node into the memory in which they wait on the rank that forwards them.

Assumes a legal phase. Does not say what forwards them (`phases`), nor where its memory begins.

A rank forwards what its likes of the other nodes send, the ranks of its own number there. Each has a segment of its
own, in which every row of it has its place, whether it comes or not: for all of them there is room, so none ever waits
for room. By tensor, then by what a row is told with: its keys, their places, its values.
"""

from __future__ import annotations

from collections.abc import Sequence

from commdsl.program.phases import PushAgain, PushByKey

KEY_BYTES = 4
"""Of a key, of a place, of a value."""


def crossing_widths(push: PushByKey | PushAgain, rows: Sequence[int] = (), keys: int = 0) -> tuple[int, ...]:
    """Bytes of one row in each of the memories. `rows`: as rows travel, of each tensor, those of scales behind them;
    `keys`: of a row.
    """
    tensors = len(push.rows) if isinstance(push, PushByKey) else 1
    told = 3 if isinstance(push, PushByKey) and push.value is not None else 2
    return (*(*rows, *(0,) * tensors)[:tensors], *(KEY_BYTES * keys,) * told)


def crossing_bytes(widths: Sequence[int], rows: int, nodes: int) -> int:
    """Of a segment for each of the other nodes, of so many rows."""
    return sum(_bytes(width, rows, nodes) for width in widths)


def crossing_at(widths: Sequence[int], rows: int, nodes: int, begin: int) -> tuple[int, ...]:
    """Where each memory begins, the first at `begin`."""
    found = [begin]
    for width in widths[:-1]:
        found.append(found[-1] + _bytes(width, rows, nodes))
    return tuple(found)


LINE = 256


def _bytes(width: int, rows: int, nodes: int) -> int:
    return -(-width * rows * (nodes - 1) // LINE) * LINE
