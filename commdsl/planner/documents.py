"""Turns a packing of documents and a topology into a balanced plan: attention even, few bytes over slow links.

Assumes that what a rank does is attention: pairs of tokens, as `balance` counts them. Documents stay where they are;
what a rank has too much of goes to the nearest ranks with room, in runs of tokens that bring the most attention for the
bytes they take along. Does not measure anything. A rank may end with less than the mean: only what is too much moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Longs, Sharing, totals
from commdsl.machine.topology import Floats, Topology, Ways
from commdsl.planner.balance import Widths
from commdsl.planner.flows import Flow, flows
from commdsl.planner.packing import Cuts, Packing, Terms, to_plan
from commdsl.planner.stock import Demand, Offers, Stock, keys, offers, work

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


def balanced(home: Packing, topology: Topology, goal: Goal, terms: Terms, watch: Callable[[str], None]) -> DispatchPlan:
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


def _stocks(home: Packing, low: Floats, high: Floats, length: Floats) -> list[Stock]:
    """What each rank has at the beginning; parts of no tokens are not worth a look."""
    shared = home.num_parts[home.document] > 1
    part = (home.length > 0).nonzero()[0]
    begin = np.searchsorted(home.rank[part], np.arange(home.num_ranks + 1)).tolist()
    stock = Stock(part, low[part], high[part], length[part], shared[part])
    return [stock.at(slice(first, last)) for first, last in pairwise(begin)]


class State:
    """A plan under construction: what stays, what goes where, and the loads so far."""

    def __init__(self, home: Packing, found: Ways, goal: Goal, terms: Terms) -> None:
        self.home, self.goal, self.terms, self.mask = home, goal, terms, terms.mask
        self.ways = found
        low, high = home.begin.astype(np.float64), (home.begin + home.length).astype(np.float64)
        length = home.document_length[home.document].astype(np.float64)
        self.stocks = _stocks(home, low, high, length)
        self.load: Floats = np.bincount(home.rank, work(self.mask, low, high, length), home.num_ranks).astype(
            np.float64
        )
        self.queries = totals(home.rank, home.length, home.num_ranks).astype(np.float64)
        self.sent: list[tuple[Longs, Floats, Floats, int]] = []  # part, low, high, dest
        self.homes: dict[int, list[tuple[int, int]]] = {}  # of a document in several parts: begin, rank
        self.reach: dict[tuple[int, int], int] = {}  # keys of a shared document on a rank, rows
        self.visits: dict[tuple[int, int], int] = {}  # as `reach`, for what has come from elsewhere alone
        self.keys = np.zeros(home.num_ranks)
        self._lay_out_keys(high, length)

    def _lay_out_keys(self, high: Floats, length: Floats) -> None:
        """The keys on every rank while everything stays: those of a document once."""
        need = keys(self.mask, high, length)
        alone = self.home.num_parts[self.home.document] == 1
        self.keys += np.bincount(self.home.rank[alone], need[alone], self.home.num_ranks)
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
        moved = [self.carry_out(flow, mean) for flow in flows(self.load, aim, self.ways)]
        return any(moved)

    def carry_out(self, flow: Flow, mean: float) -> bool:
        """Sends runs of the source's own documents until the flow is met, or nothing fits; whether anything went."""
        left, most = flow.amount, LOOKED_AT
        while left > ENOUGH * mean * self.goal.tolerance:
            stock = self.stocks[flow.source]
            looked_at = stock.largest(most, self.mask)
            some = stock if len(looked_at) == len(stock.part) else stock.at(looked_at)
            wanted = self.demand(flow, some, left, mean * (1 + self.goal.tolerance))
            offered = offers(some, wanted, self.mask, self.goal.widths, self.goal.shortest)
            chosen = self.choose(flow.dest, some, offered, left)
            if len(chosen):
                left -= float(offered.work[chosen].sum())
                self.send(flow.source, flow.dest, looked_at[chosen], offered.at(chosen))
            elif len(looked_at) == len(stock.part):
                break
            else:
                most = len(stock.part)
        return left < flow.amount

    def demand(self, flow: Flow, stock: Stock, left: float, most: float) -> Demand:
        """What the destination of a flow, which may do `most` in all, would take of a stock."""
        has, may = np.zeros(len(stock.part)), np.ones(len(stock.part), bool)
        for index in stock.shared.nonzero()[0].tolist():
            document = int(self.home.document[stock.part[index]])
            has[index] = self.reach.get((document, flow.dest), 0)
            homes = self.homes.get(document)
            if homes is not None:
                last = keys(self.mask, stock.high[index], stock.length[index])
                may[index] = all(self.ways.linked[rank, flow.dest] for begin, rank in homes if begin < last)
        if not self.ways.linked[flow.source, flow.dest]:
            may[:] = False
        slack = max(most - float(self.load[flow.dest]) - left, 0.0)
        return Demand(left, slack, self.query_room(flow.dest), self.key_room(flow.dest), has, may)

    def query_room(self, rank: int) -> float:
        most = self.terms.query_capacity
        return np.inf if most is None else most - self.queries[rank]

    def key_room(self, rank: int) -> float:
        most = self.terms.key_capacity
        return np.inf if most is None else most - self.keys[rank]

    def choose(self, dest: int, stock: Stock, offered: Offers, left: float) -> Longs:
        """The best offer, and with a document as a whole those after it, as long as they are so and fit together."""
        best = int(offered.value.argmax()) if len(stock.part) else NOWHERE
        if best == NOWHERE or offered.value[best] <= 0:
            return np.empty(0, np.int64)
        is_whole = (offered.low == stock.low) & (offered.high == stock.high)
        if not is_whole[best]:
            return np.array([best])
        order = (-offered.value).argsort(kind="stable")
        order = order[offered.value[order] > 0]
        rows = (offered.high - offered.low)[order].cumsum()
        need = keys(self.mask, offered.high, stock.length)[order].cumsum()
        fits = is_whole[order] & (offered.work[order].cumsum() <= left)
        fits &= (rows <= self.query_room(dest)) & (need <= self.key_room(dest))
        number = int(fits.argmin()) if not fits.all() else len(fits)
        return order[: max(number, 1)]

    def send(self, source: int, dest: int, chosen: Longs, offered: Offers) -> None:
        """What is offered of the chosen runs leaves the source for its destination."""
        stock, document = self.stocks[source], self.home.document
        part, low, high, length = stock.part[chosen], offered.low, offered.high, stock.length[chosen]
        need = keys(self.mask, high, length).tolist()
        whole_need = keys(self.mask, stock.high[chosen], length).tolist()
        self.sent.append((part, low, high, dest))
        amount, rows = sum(offered.work.tolist()), sum((high - low).tolist())
        self.load[source], self.load[dest] = self.load[source] - amount, self.load[dest] + amount
        self.queries[source], self.queries[dest] = self.queries[source] - rows, self.queries[dest] + rows
        before = stock.shared[chosen].tolist()
        stock.take(chosen, low, high)
        for index, number in enumerate(document[part].tolist()):
            if not before[index]:
                self.reach[number, source] = int(whole_need[index])
            brought = int(need[index])
            self._bring(number, dest, brought)
            self.visits[number, dest] = max(self.visits.get((number, dest), 0), brought)
            self._leave(number, source)

    def _leave(self, number: int, source: int) -> None:
        """Keys of a document that nothing on its old rank needs any more go from the account."""
        stock = self.stocks[source]
        mine = stock.shared.nonzero()[0]
        mine = mine[self.home.document[stock.part[mine]] == number]
        wanted = keys(self.mask, stock.high[mine], stock.length[mine]).tolist()
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
        begin = self.home.begin[empty].astype(np.float64)
        stay = [(stock.part, stock.low, stock.high, rank) for rank, stock in enumerate(self.stocks)]
        parts, lows, highs, dests = zip(*stay, *self.sent, strict=True)
        dest = np.array(dests).repeat([*map(len, parts)])
        low, high = (np.concatenate((begin, *ends)).astype(np.int64) for ends in (lows, highs))
        return Cuts(np.concatenate((empty, *parts)), low, high, np.concatenate((self.home.rank[empty], dest)))
