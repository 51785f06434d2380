"""Turns a packing of documents and a topology into a balanced plan: attention even, few bytes over slow links.

Assumes that what a rank does is attention: pairs of tokens, as `balance` counts them. Documents stay where they are;
what a rank has too much of goes to the nearest ranks with room, in runs of tokens that bring the most attention for the
bytes they take along. Does not measure anything. A rank may end with less than the mean: only what is too much moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Longs, Sharing
from commdsl.machine.topology import Floats, Topology, Ways
from commdsl.planner.balance import Widths
from commdsl.planner.flows import Flow, flows
from commdsl.planner.packing import Cuts, Packing, Terms, to_plan
from commdsl.planner.stock import (
    DOCUMENT,
    HIGH,
    LENGTH,
    LOW,
    NO_ROOM,
    PART,
    SHARED,
    Demand,
    Offers,
    Stock,
    keys,
    offers,
    work,
)

ROUNDS = 6
"""Flows are planned again for what is left: whole tokens in runs of a least length may miss an amount."""

ENOUGH = 0.125
"""A flow ends when less than this share of the tolerance is left of it: a short run would bring all its keys along."""

LOOKED_AT = 4096
"""So many of a rank's runs are looked at, those of the most attention; all only where none of them fits."""


class CapacityError(ValueError):
    """The rows that a rank may receive do not suffice; says which rank, and what it would receive."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan is to reach."""

    tolerance: float = 0.02  # a rank may have so much more attention than the mean
    shortest: int = 128  # tokens; nothing is cut shorter, as attention kernels are slow below
    widths: Widths = field(default_factory=Widths)
    relay: bool = False  # ranks without a link may send to each other, along the shortest way


def balanced(
    home: Packing, topology: Topology, goal: Goal, terms: Terms, watch: Callable[[str], None] = lambda _: None
) -> DispatchPlan:
    """A plan by which no rank does more than the mean times (1 + tolerance), as far as links and capacities allow.

    `watch` is told before each round of flows. Raises ValueError if the topology has another number of ranks, or if
    `terms` have a capacity for keys that are not sent once per rank, as which they are counted here; CapacityError if a
    rank would receive more rows than `terms` allow.
    """
    if terms.sharing is not Sharing.RANK and terms.key_capacity is not None:
        raise ValueError("a capacity for keys is for those that are sent once per rank")
    if topology.num_ranks != home.num_ranks:
        raise ValueError(f"documents lie on {home.num_ranks} ranks, `{topology.name}` has {topology.num_ranks}")
    found = topology.ways
    if goal.relay:
        found = Ways(found.distance)
    state = State(home, found, goal, terms)
    for turn in range(ROUNDS):
        watch(f"balancing, round {turn + 1} of at most {ROUNDS}")
        if not state.turn((turn + 1) / (turn + 2)):
            break
    state.refuse_overflow()
    return to_plan(home, state.cuts(), terms)


def _summed(home: Packing, number: Floats) -> Floats:
    """(num_ranks,): over the parts that lie on each rank."""
    return np.bincount(home.rank, number, home.num_ranks).astype(np.float64)


def _stocks(home: Packing, low: Floats, high: Floats, length: Floats, shared: NDArray[np.bool_]) -> list[Stock]:
    """What each rank has at the beginning; parts of no tokens are not worth a look."""
    some = home.length.nonzero()[0]
    runs: Floats = np.array((np.arange(len(low)), home.document, low, high, length, shared), np.float64)
    runs = runs.take(some, axis=1)
    begin = home.rank[some].searchsorted(np.arange(home.num_ranks + 1)).tolist()
    return [Stock(runs[:, first:last]) for first, last in pairwise(begin)]


@dataclass(slots=True)
class _UnderWay:
    """A flow, of which something is left to be sent."""

    flow: Flow
    left: float
    most: int = LOOKED_AT  # runs that are looked at


def _apart(under_way: list[_UnderWay]) -> list[_UnderWay]:
    """Flows that need not wait for each other: the first of every rank, of those that share none."""
    busy: set[int] = set()
    found = []
    for one in under_way:
        ends = one.flow.source, one.flow.dest
        if busy.isdisjoint(ends):
            found.append(one)
        busy.update(ends)
    return found


class State:
    """A plan under construction: what stays, what goes where, and the loads so far."""

    def __init__(self, home: Packing, found: Ways, goal: Goal, terms: Terms) -> None:
        self.home, self.goal, self.terms, self.mask = home, goal, terms, terms.mask
        self.ways = found
        low, high = home.begin.astype(np.float64), (home.begin + home.length).astype(np.float64)
        length = home.document_length[home.document].astype(np.float64)
        alone = home.num_parts[home.document] == 1
        self.stocks = _stocks(home, low, high, length, ~alone)
        self.load: Floats = _summed(home, work(self.mask, low, high, length))
        self.queries = _summed(home, high - low)
        self.sent: list[tuple[Floats, int]] = []  # runs as those of a stock, and where they go
        self.homes: dict[int, list[tuple[int, int]]] = {}  # of a document in several parts: begin, rank
        self.reach: dict[tuple[int, int], int] = {}  # keys of a shared document on a rank, rows
        self.visits: dict[tuple[int, int], int] = {}  # as `reach`, for what has come from elsewhere alone
        self.keys: Floats = np.zeros(home.num_ranks)
        self._lay_out_keys(keys(self.mask, high, length), alone)

    def _lay_out_keys(self, need: Floats, alone: NDArray[np.bool_]) -> None:
        """The keys on every rank while everything stays: those of a document once. `alone`: the part is all of it."""
        self.keys += _summed(self.home, need * alone)
        for part in (~alone & (self.home.length > 0)).nonzero()[0].tolist():
            document, rank = int(self.home.document[part]), int(self.home.rank[part])
            self.homes.setdefault(document, []).append((int(self.home.begin[part]), rank))
            self._bring(document, rank, int(need[part]))

    def _bring(self, document: int, rank: int, need: int) -> None:
        """The first `need` keys of a document are wanted on a rank."""
        has = self.reach.get((document, rank), 0)
        self.keys[rank] += max(need - has, 0)
        self.reach[document, rank] = max(need, has)

    # --- a round ------------------------------------------------------------------------------------------------------

    def turn(self, share: float) -> bool:
        """Moves what is above the mean by more than `share` of the tolerance; whether that changed anything.

        The rest of the tolerance is for runs that are larger than their amount, and grows smaller from turn to turn:
        what is left then needs room on many ranks.
        """
        mean = float(self.load.mean())
        if self.load.max() <= mean * (1 + self.goal.tolerance):
            return False
        aim = mean * (1 + self.goal.tolerance * share)
        before = len(self.sent)
        under_way = [_UnderWay(flow, flow.amount) for flow in flows(self.load, aim, self.ways)]
        while under_way := [one for one in under_way if one.left > ENOUGH * mean * self.goal.tolerance]:
            self.carry_on(_apart(under_way), mean)
        return len(self.sent) > before

    def carry_on(self, now: list[_UnderWay], mean: float) -> None:
        """Sends a run, or several documents, of the source's own for each of some flows; one that nothing fits ends."""
        looked_at = [self.stocks[one.flow.source].largest(one.most, self.mask) for one in now]
        stocks = [self.stocks[one.flow.source].at(some) for one, some in zip(now, looked_at, strict=True)]
        wanted = self.demand(now, stocks, mean * (1 + self.goal.tolerance))
        every = offers(wanted, self.mask, self.goal.widths, self.goal.shortest)
        end = 0
        for one, stock, some in zip(now, stocks, looked_at, strict=True):
            begin, end = end, end + len(some)
            offered, flow = every.at(slice(begin, end)), one.flow
            chosen = self.choose(flow.dest, stock, offered, one.left)
            if len(chosen):
                one.left -= self.send(flow.source, flow.dest, some[chosen], offered.at(chosen))
            elif len(some) == len(self.stocks[flow.source]):
                one.left = 0.0
            else:
                one.most = len(self.stocks[flow.source])

    def demand(self, now: list[_UnderWay], stocks: list[Stock], most: float) -> Floats:
        """The `Demand` of the destinations of flows, which may do `most` in all, for a stock each."""
        terms = []
        for one in now:
            dest, left = one.flow.dest, one.left
            terms.append((left, max(most - float(self.load[dest]), left), self.query_room(dest), self.key_room(dest)))
        sizes = [len(stock) for stock in stocks]
        found = np.zeros((len(Demand._fields), sum(sizes)))
        found[:3] = np.concatenate([stock.runs[LOW : LENGTH + 1] for stock in stocks], axis=1)
        found[4:] = np.array(terms).T.repeat(sizes, axis=1)
        wanted = Demand(*found)
        for one, stock, begin in zip(now, stocks, accumulate(sizes, initial=0), strict=False):
            self._look_up(one.flow, stock, begin, wanted)
        return found

    def _look_up(self, flow: Flow, stock: Stock, begin: int, wanted: Demand) -> None:
        """What the destination of a flow has of the documents of a stock, whose runs stand there in `wanted`, and may
        have.
        """
        if not self.ways.linked[flow.source, flow.dest]:
            wanted.query_room[begin : begin + len(stock)] = NO_ROOM
        for index in stock.runs[SHARED].nonzero()[0].tolist():
            document, dest = int(stock.runs[DOCUMENT, index]), flow.dest
            wanted.has[begin + index] = self.reach.get((document, dest), 0)
            if document in self.homes:
                last = keys(self.mask, stock.runs[HIGH, index], stock.runs[LENGTH, index])
                if not all(self.ways.linked[rank, dest] for first, rank in self.homes[document] if first < last):
                    wanted.query_room[begin + index] = NO_ROOM

    def query_room(self, rank: int) -> float:
        most = self.terms.query_capacity
        return np.inf if most is None else most - self.queries[rank]

    def key_room(self, rank: int) -> float:
        most = self.terms.key_capacity
        return np.inf if most is None else most - self.keys[rank]

    def choose(self, dest: int, stock: Stock, offered: Offers, left: float) -> Longs:
        """The best offer, and with a document as a whole those after it, as long as they are so and fit together."""
        best = int(offered.value.argmax()) if len(stock) else NOWHERE
        if best == NOWHERE or offered.value[best] <= 0:
            return np.empty(0, np.int64)
        low, high, length = stock.runs[LOW : LENGTH + 1]
        if offered.low[best] > low[best] or offered.high[best] < high[best]:
            return np.array([best])
        is_whole = (offered.low == low) & (offered.high == high)
        order = (-offered.value).argsort(kind="stable")
        order = order[offered.value[order] > 0]
        rows = (offered.high - offered.low)[order].cumsum()
        need = keys(self.mask, offered.high, length)[order].cumsum()
        fits = is_whole[order] & (offered.work[order].cumsum() <= left)
        fits &= (rows <= self.query_room(dest)) & (need <= self.key_room(dest))
        number = int(fits.argmin()) if not fits.all() else len(fits)
        return order[: max(number, 1)]

    def send(self, source: int, dest: int, chosen: Longs, offered: Offers) -> float:
        """What is offered of the chosen runs leaves the source for its destination: so much attention."""
        stock = self.stocks[source]
        runs = stock.runs.take(chosen, axis=1)
        left, ends, amount = runs.T.tolist(), offered.high.tolist(), float(sum(offered.work.tolist()))
        rows = sum(ends) - sum(offered.low.tolist())
        runs[LOW], runs[HIGH] = offered.low, offered.high
        self.sent.append((runs, dest))
        self.load[source], self.load[dest] = self.load[source] - amount, self.load[dest] + amount
        self.queries[source], self.queries[dest] = self.queries[source] - rows, self.queries[dest] + rows
        stock.take(chosen, offered.low, offered.high)
        for (_, document, _, high, length, was_shared), end in zip(left, ends, strict=True):
            number = int(document)
            if not was_shared:
                self.reach[number, source] = int(keys(self.mask, high, length))
            brought = int(keys(self.mask, end, length))
            self._bring(number, dest, brought)
            self.visits[number, dest] = max(self.visits.get((number, dest), 0), brought)
            self._leave(number, source)
        return amount

    def _leave(self, number: int, source: int) -> None:
        """Keys of a document that nothing on its old rank needs any more go from the account."""
        runs = self.stocks[source].runs
        mine = runs.take((runs[DOCUMENT] == number).nonzero()[0], axis=1)
        wanted = keys(self.mask, mine[HIGH], mine[LENGTH]).tolist()
        still = int(max(self.visits.get((number, source), 0), *wanted, 0))
        self.keys[source] -= self.reach[number, source] - still
        self.reach[number, source] = still

    # --- the outcome --------------------------------------------------------------------------------------------------

    def refuse_overflow(self) -> None:
        """Raises CapacityError for the rank that is furthest above what it may receive."""
        for noun, rows, most in (
            ("queries", self.queries, self.terms.query_capacity),
            ("keys", self.keys, self.terms.key_capacity),
        ):
            rank = int(rows.argmax())
            if most is not None and rows[rank] > most:
                raise CapacityError(f"rank {rank} would receive {int(rows[rank])} rows of {noun}, may receive {most}")

    def cuts(self) -> Cuts:
        """What was sent, what stays, and the parts of no tokens, which stay."""
        empty = (self.home.length == 0).nonzero()[0]
        stay = [(stock.runs, rank) for rank, stock in enumerate(self.stocks)]
        runs, dests = zip(*stay, *self.sent, strict=True)
        part, low, high = np.concatenate(runs, axis=1)[[PART, LOW, HIGH]].astype(np.int64)
        dest = np.array(dests).repeat([one.shape[1] for one in runs])
        first = empty, self.home.begin[empty], self.home.begin[empty], self.home.rank[empty]
        return Cuts(*map(np.concatenate, zip(first, (part, low, high, dest), strict=True)))
