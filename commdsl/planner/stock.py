"""Turns what a rank still has of its documents into offers: the run of tokens of each that is best sent to some rank.

Assumes numbers of tokens as floats, exact up to 2 ** 53. Best is the most attention for the bytes that travel: a run
[low, high) of a causal document takes its queries and all keys before `high` along, so long runs that lie early in a
document, or where keys are already, are cheap. Does not choose between documents' offers; `planner` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from commdsl.ir.routes import Longs, Mask
from commdsl.machine.topology import Floats
from commdsl.planner.balance import Widths

Rows = TypeVar("Rows", float, Floats)


def work(mask: Mask, low: Floats, high: Floats, length: Floats) -> Floats:
    """Pairs of tokens of the queries [low, high) of a document of `length` tokens."""
    return (high - low) * (length if mask is Mask.FULL else (high + low + 1) / 2)


def keys(mask: Mask, high: Rows, length: Rows) -> Rows:
    """The keys that queries up to `high` need."""
    return length if mask is Mask.FULL else high


PART, DOCUMENT, LOW, HIGH, LENGTH, SHARED = range(6)


@dataclass(slots=True)
class Stock:
    """The runs of a rank's own documents that still stay there; they change as runs leave. What is said of a run is one
    array, as it comes and goes together: its part of the packing, its document, where it begins and ends in that, the
    length of that, and whether there are keys of that, or more of it, anywhere else.
    """

    runs: Floats  # (6, n)

    def __len__(self) -> int:
        return len(self.runs[PART])

    def at(self, chosen: Longs) -> Stock:
        """Some of the runs, as they are now."""
        return Stock(self.runs.take(chosen, axis=1))

    def largest(self, number: int, mask: Mask) -> Longs:
        """The runs of the most attention, at most so many, in any order."""
        if len(self) <= number:
            return np.arange(len(self))
        return np.argpartition(-work(mask, *self.runs[LOW : LENGTH + 1]), number)[:number]

    def take(self, chosen: Longs, low: Floats, high: Floats) -> None:
        """Cuts [low, high) out of the chosen runs, each once; what is left before and after stays."""
        runs, begins, ends = self.runs, self.runs[LOW], self.runs[HIGH]
        end, is_head = ends[chosen], low <= begins[chosen]
        runs[SHARED][chosen] = 1.0
        begins[chosen] = np.where(is_head, high, begins[chosen])
        ends[chosen] = np.where(is_head, end, low)
        split = ~is_head & (high < end)
        behind = runs.take(chosen[split], axis=1)
        behind[LOW], behind[HIGH] = high[split], end[split]
        kept = (ends > begins).nonzero()[0]
        if behind.size or len(kept) < len(self):
            self.runs = np.concatenate((runs.take(kept, axis=1), behind), axis=1)


NO_ROOM = -1.0
"""Of a rank that a run may not go to: not all its keys have a link."""


class Demand(NamedTuple):
    """n runs, and what would be taken of each where it would go, as if it were the only one; (n,) each."""

    low: Floats
    high: Floats
    length: Floats
    has: Floats  # keys of its document that are there, rows
    amount: Floats  # pairs of tokens
    most: Floats  # so many, where a run cannot be cut to measure: it is too short, or leaves too little
    query_room: Floats  # rows, or NO_ROOM
    key_room: Floats  # rows


class Offers(NamedTuple):
    """Of each run of a stock the part that would go; `value` is pairs of tokens per byte, 0 where nothing would."""

    low: Floats
    high: Floats
    work: Floats
    value: Floats

    def at(self, chosen: Longs | slice) -> Offers:
        """Some of them."""
        return Offers(self.low[chosen], self.high[chosen], self.work[chosen], self.value[chosen])


def offers(wanted: Floats, mask: Mask, widths: Widths, shortest: int) -> Offers:
    """The best of a few runs of each document, no larger than the demand: `wanted` are the numbers of a `Demand`."""
    tried = 1 if mask is Mask.FULL else 5
    low, high = _whole(wanted, shortest) if mask is Mask.FULL else _runs(wanted, widths, shortest)
    found = _judge(_times(tried, wanted), mask, widths, shortest, low, high)
    number = wanted.shape[1]
    return found.at(found.value.reshape(tried, number).argmax(axis=0) * number + np.arange(number))


def _times(number: int, wanted: Floats) -> Demand:
    """So often, one behind the other: numpy takes three times as long to add a small array to each row of another as to
    add two of one shape.
    """
    return Demand(*wanted[:, None].repeat(number, axis=1).reshape(len(wanted), -1))


def _whole(wanted: Floats, shortest: int) -> tuple[Floats, Floats]:
    """Where runs of documents without a causal mask begin and end: at the beginning, of the amount wanted."""
    low, high, length, _, amount, _, query_room, _ = wanted
    rows = np.maximum(np.floor(amount / np.maximum(length, 1)), shortest)
    return low, np.minimum(low + np.minimum(rows, query_room), high)


def _runs(wanted: Floats, widths: Widths, shortest: int) -> tuple[Floats, Floats]:
    """Where five runs of each causal document begin and end: that do the amount wanted, or all there is, at the
    beginning, at the end, and where bytes are fewest.
    """
    one, two, number = Demand(*wanted), _times(2, wanted), wanted.shape[1]
    end, second = np.minimum(two.high, two.has + two.key_room), two.low + shortest
    last, most = np.where(two.high <= end, two.high, two.high - shortest), end[:number]
    head = np.minimum(np.maximum(np.floor(_after(one.low, one.amount)), second[:number]), most)
    # Bytes of a run of f pairs that ends at b are (b - a) q + b k, with a (a + 1) / 2 = b (b + 1) / 2 - f: the least
    # is at b / a = 1 + k / q.
    ratio = 1 + widths.pair / widths.query
    cheapest = np.floor(np.sqrt(2 * one.amount / (1 - ratio**-2)))
    end[:number] = np.minimum(np.maximum(head, cheapest), most)
    rest = two.high - end
    end = np.where((rest > 0) & (rest < shortest), last, end)
    begin = np.minimum(np.ceil(_after(end, -two.amount)), end - shortest)
    begin = np.maximum(np.maximum(begin, two.low), end - two.query_room)
    rest = begin - two.low
    near = (rest > 0) & (rest < shortest)
    to_low, from_low = np.where(near, two.low, begin), np.where(near, second, begin)
    begins = one.low, to_low[:number], from_low[:number], to_low[number:], from_low[number:]
    ends = head, end[:number], end[:number], end[number:], end[number:]
    return np.concatenate(begins), np.concatenate(ends)


def _after(start: Floats, amount: Floats) -> Floats:
    """Where a causal document has done `amount` pairs more than at `start`, or fewer if negative."""
    odd = 2 * start + 1
    return (np.sqrt(np.maximum(odd * odd + 8 * amount, 1)) - 1) / 2


def _judge(wanted: Demand, mask: Mask, widths: Widths, shortest: int, low: Floats, high: Floats) -> Offers:
    """What runs of documents are worth; 0 if too large, too short, or if they leave too short a rest."""
    rows = high - low
    amount = work(mask, low, high, wanted.length)
    new_keys = np.maximum(keys(mask, high, wanted.length) - wanted.has, 0)
    before, after = low - wanted.low, wanted.high - high
    is_first, is_last = before == 0, after == 0
    leaves = (is_first | (before >= shortest)) & (is_last | (after >= shortest)) & (rows >= shortest)
    fits = (is_first & is_last) | leaves
    fits &= (rows <= wanted.query_room) & (new_keys <= wanted.key_room) & (amount <= wanted.most)
    size = rows * widths.query + new_keys * widths.pair
    return Offers(low, high, amount, fits * amount / np.maximum(size, 1))
