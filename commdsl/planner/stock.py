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

    def at(self, chosen: Longs | Flags | slice) -> Stock:
        """Some of the runs."""
        low, high, length = self.low[chosen], self.high[chosen], self.length[chosen]
        return Stock(self.part[chosen], low, high, length, self.shared[chosen])

    def largest(self, number: int, mask: Mask) -> Longs:
        """The runs of the most attention, at most so many, in any order."""
        if len(self.part) <= number:
            return np.arange(len(self.part))
        return np.argpartition(-work(mask, self.low, self.high, self.length), number)[:number]

    def take(self, chosen: Longs, low: Floats, high: Floats) -> None:
        """Cuts [low, high) out of the chosen runs, each once; what is left before and after stays."""
        end, is_head = self.high[chosen], low <= self.low[chosen]
        self.shared[chosen] = True
        self.low[chosen[is_head]] = high[is_head]
        self.high[chosen[~is_head]] = low[~is_head]
        split = (~is_head & (high < end)).nonzero()[0]
        kept = self.high > self.low
        if not len(split) and np.count_nonzero(kept) == len(kept):
            return
        left, behind = self.at(kept), self.at(chosen[split])
        behind.low, behind.high = high[split], end[split]
        for name in ("part", "low", "high", "length", "shared"):
            setattr(self, name, np.concatenate((getattr(left, name), getattr(behind, name))))


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
        return Offers(self.low[chosen], self.high[chosen], self.work[chosen], self.value[chosen])


def offers(stock: Stock, demand: Demand, mask: Mask, widths: Widths, shortest: int) -> Offers:
    """The best of a few runs of each document, no larger than the demand."""
    low, high = _runs(stock, demand, mask, widths, shortest)
    tried = _judge(stock, demand, mask, widths, shortest, low, high)
    best = tried.value.argmax(axis=0) * len(stock.part) + np.arange(len(stock.part))
    return Offers(low.ravel()[best], high.ravel()[best], tried.work.ravel()[best], tried.value.ravel()[best])


def _runs(stock: Stock, demand: Demand, mask: Mask, widths: Widths, shortest: int) -> tuple[Floats, Floats]:
    """(tried, documents) each, where they begin and end: runs that do `demand.amount`, or all there is, at the
    beginning, at the end, and where bytes are fewest.
    """
    low, high, amount = stock.low, stock.high, demand.amount
    if mask is Mask.FULL:
        rows = np.maximum(np.floor(amount / np.maximum(stock.length, 1)), shortest)
        return low[None], np.minimum(low + np.minimum(rows, demand.query_room), high)[None]
    most, second = np.minimum(high, demand.has + demand.key_room), low + shortest
    head = np.minimum(np.maximum(np.floor(_after(low, amount)), second), most)
    # Bytes of a run of f pairs that ends at b are (b - a) q + b k, with a (a + 1) / 2 = b (b + 1) / 2 - f: the least
    # is at b / a = 1 + k / q.
    ratio = 1 + widths.pair / widths.query
    cheapest = floor(sqrt(2 * amount / (1 - ratio**-2)))
    end = _rows(2, most)
    np.minimum(np.maximum(head, cheapest), most, out=end[0])
    last, rest = np.where(high <= most, high, high - shortest), _rows(2, high) - end
    end = np.where((rest > 0) & (rest < shortest), _rows(2, last), end)
    begin = np.minimum(np.ceil(_after(end, -amount)), end - shortest)
    begin = np.maximum(np.maximum(begin, _rows(2, low)), end - demand.query_room)
    rest = begin - _rows(2, low)
    near = (rest > 0) & (rest < shortest)
    begins, ends = _rows(5, low), _rows(5, head)
    begins[1::2], begins[2::2] = np.where(near, _rows(2, low), begin), np.where(near, _rows(2, second), begin)
    ends[1::2], ends[2::2] = end, end
    return begins, ends


def _rows(number: int, column: Floats) -> Floats:
    """(number, documents): numpy takes three times as long to add a small array to each row of another as to add two
    of one shape.
    """
    found = np.empty((number, len(column)))
    found[:] = column
    return found


def _after(start: Floats, amount: float) -> Floats:
    """Where a causal document has done `amount` pairs more than at `start`, or fewer if negative."""
    odd = 2 * start + 1
    return (np.sqrt(np.maximum(odd * odd + 8 * amount, 1)) - 1) / 2


def _judge(
    stock: Stock, demand: Demand, mask: Mask, widths: Widths, shortest: int, low: Floats, high: Floats
) -> Offers:
    """What runs of each document are worth; 0 if too large, too short, or if they leave too short a rest."""
    tried = len(low)
    length, rows = _rows(tried, stock.length), high - low
    amount = work(mask, low, high, length)
    new_keys = np.maximum(keys(mask, high, length) - _rows(tried, demand.has), 0)
    before, after = low - _rows(tried, stock.low), _rows(tried, stock.high) - high
    is_first, is_last = before == 0, after == 0
    leaves = (is_first | (before >= shortest)) & (is_last | (after >= shortest)) & (rows >= shortest)
    fits = (is_first & is_last) | leaves
    fits &= (rows <= demand.query_room) & (new_keys <= demand.key_room)
    fits &= (amount <= demand.amount + demand.slack) & demand.may
    size = rows * widths.query + new_keys * widths.pair
    return Offers(low, high, amount, fits * amount / np.maximum(size, 1))
