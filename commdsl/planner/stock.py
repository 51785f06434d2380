"""Turns what a rank still has of its documents into offers: the run of tokens of each that is best sent to some rank.

Assumes numbers of tokens as floats, exact up to 2 ** 53. Best is the most attention for the bytes that travel: a run
[low, high) of a causal document takes its queries and all keys before `high` along, so long runs that lie early in a
document, or where keys are already, are cheap. Does not choose between documents' offers; `planner` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, sqrt

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.routes import Longs, Mask
from commdsl.machine.topology import Floats
from commdsl.planner.balance import Widths

Flags = NDArray[np.bool_]


def work(mask: Mask, low: Floats, high: Floats, length: Floats) -> Floats:
    """Pairs of tokens of the queries [low, high) of a document of `length` tokens."""
    return (high - low) * (length if mask is Mask.FULL else (high + low + 1) / 2)


def keys(mask: Mask, high: Floats, length: Floats) -> Floats:
    """The keys that queries up to `high` need."""
    return length if mask is Mask.FULL else high


@dataclass
class Stock:
    """The runs of a rank's own documents that still stay there; arrays of one length, changed as runs leave."""

    part: Longs  # of the packing
    low: Floats  # tokens, counted from the beginning of the document
    high: Floats
    length: Floats  # of the whole document
    shared: Flags  # whether there are keys of the document, or more of it, anywhere else

    def at(self, chosen: Longs | slice) -> Stock:
        """Some of the runs."""
        low, high, length = (column[chosen] for column in (self.low, self.high, self.length))
        return Stock(self.part[chosen], low, high, length, self.shared[chosen])

    def largest(self, number: int, mask: Mask) -> Longs:
        """The runs of the most attention, at most so many, in any order."""
        if len(self.part) <= number:
            return np.arange(len(self.part))
        return np.argpartition(-work(mask, self.low, self.high, self.length), number)[:number]

    def take(self, chosen: Longs, low: Floats, high: Floats) -> None:
        """Cuts [low, high) out of the chosen runs, each once; what is left before and after stays."""
        self.shared[chosen] = True
        is_head = low <= self.low[chosen]
        split = ~is_head & (high < self.high[chosen])
        behind = self.at(chosen[split])
        after = (behind.part, high[split], behind.high, behind.length, behind.shared)
        self.low[chosen[is_head]] = high[is_head]
        self.high[chosen[~is_head]] = low[~is_head]
        kept = self.high > self.low
        if kept.all() and not len(behind.part):
            return
        columns = (self.part, self.low, self.high, self.length, self.shared)
        self.part, self.low, self.high, self.length, self.shared = (
            np.concatenate((column[kept], more)) for column, more in zip(columns, after, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What one rank would take of a stock."""

    amount: float  # pairs of tokens
    slack: float  # so many more, where a run cannot be cut to measure: it is too short, or leaves too little
    query_room: float  # rows
    key_room: float  # rows
    has: Floats  # keys of each run's document that are there, rows
    may: Flags  # whether each run may go there: all its keys have a link


@dataclass(frozen=True, eq=False)
class Offers:
    """Of each run of a stock the part that would go; `value` is pairs of tokens per byte, 0 where nothing would."""

    low: Floats
    high: Floats
    work: Floats
    value: Floats

    def at(self, chosen: Longs) -> Offers:
        """Some of them."""
        return Offers(*(column[chosen] for column in (self.low, self.high, self.work, self.value)))


def offers(stock: Stock, demand: Demand, mask: Mask, widths: Widths, shortest: int) -> Offers:
    """The best of a few runs of each document, no larger than the demand."""
    low, high = _runs(stock, demand, mask, widths, shortest)
    tried = _judge(stock, demand, mask, widths, shortest, low, high)
    best = tried.value.argmax(axis=0), np.arange(len(stock.part))
    return Offers(low[best], high[best], tried.work[best], tried.value[best])


def _runs(stock: Stock, demand: Demand, mask: Mask, widths: Widths, shortest: int) -> tuple[Floats, Floats]:
    """(tried, documents) each, where they begin and end: runs that do `demand.amount`, or all there is, at the
    beginning, at the end, and where bytes are fewest.
    """
    low, high, amount = stock.low, stock.high, demand.amount
    if mask is Mask.FULL:
        rows = np.maximum(np.floor(amount / np.maximum(stock.length, 1)), shortest)
        return low[None], np.minimum(low + np.minimum(rows, demand.query_room), high)[None]
    most = np.minimum(high, demand.has + demand.key_room)
    head = np.minimum(np.maximum(np.floor(_after(low, amount)), low + shortest), most)
    # Bytes of a run of f pairs that ends at b are (b - a) q + b k, with a (a + 1) / 2 = b (b + 1) / 2 - f: the least
    # is at b / a = 1 + k / q.
    ratio = 1 + widths.pair / widths.query
    cheapest = floor(sqrt(2 * amount / (1 - ratio**-2)))
    end = np.concatenate((np.minimum(np.maximum(cheapest, head), most), most)).reshape(2, -1)
    near = (end < high) & (high - end < shortest)
    end = np.where(near, np.where(high <= most, high, high - shortest), end)
    begin = np.minimum(np.ceil(_after(end, -amount)), end - shortest)
    begin = np.maximum(np.maximum(begin, low), end - demand.query_room)
    near = (begin > low) & (begin - low < shortest)
    to_low, from_low = np.where(near, low, begin), np.where(near, low + shortest, begin)
    begins = np.concatenate((low, to_low[0], from_low[0], to_low[1], from_low[1])).reshape(5, -1)
    return begins, np.concatenate((head, end[0], end[0], end[1], end[1])).reshape(5, -1)


def _after(start: Floats, amount: float) -> Floats:
    """Where a causal document has done `amount` pairs more than at `start`, or fewer if negative."""
    return (np.sqrt(np.maximum(4 * start * (start + 1) + 8 * amount + 1, 1)) - 1) / 2


def _judge(
    stock: Stock, demand: Demand, mask: Mask, widths: Widths, shortest: int, low: Floats, high: Floats
) -> Offers:
    """What runs of each document are worth; 0 if too large, too short, or if they leave too short a rest."""
    rows = high - low
    amount = work(mask, low, high, stock.length)
    new_keys = np.maximum(keys(mask, high, stock.length) - demand.has, 0)
    before, after = low - stock.low, stock.high - high
    is_first, is_last = before == 0, after == 0
    fits = demand.may & (rows <= demand.query_room) & (new_keys <= demand.key_room)
    leaves = (is_first | (before >= shortest)) & (is_last | (after >= shortest)) & (rows >= shortest)
    fits &= (is_first & is_last) | leaves
    fits &= amount <= demand.amount + demand.slack
    size = rows * widths.query + new_keys * widths.pair
    return Offers(low, high, amount, np.where(fits, amount / np.maximum(size, 1), 0.0))
