"""Turns times of products and of what travels into two lines of a terminal, side by side.

Assumes times from one zero on. Does not know where they come from: a model, or time stamps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDTH = 64
"""Columns of the picture."""

WORDS = "products", "travels"


class Bar(NamedTuple):
    """Seconds."""

    begin: float
    end: float


def drawn(lines: Sequence[Sequence[Bar]]) -> Iterator[str]:
    """A line of what is multiplied and one of what travels: each is its number's last digit, as long as it is."""
    last = max((bar.end for bars in lines for bar in bars), default=1.0)
    for words, bars in zip(WORDS, lines, strict=True):
        cells = [" "] * WIDTH
        for number, bar in enumerate(bars):
            begin, end = (round(WIDTH * at / last) for at in bar)
            cells[begin : max(end, begin + 1)] = str(number % 10) * max(end - begin, 1)
        yield f"{words:8} |{''.join(cells[:WIDTH])}|"
