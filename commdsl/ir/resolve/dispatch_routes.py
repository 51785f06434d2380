"""Turns the routes of a dispatch into ByTable and ByKey, with the order in which rows are placed.

Assumes the names of parameters and ranks in sight. Does not look at tensors: which takes which route, `dispatches`
says; nor at the way back (`dispatch_back`). The rank of every key is worked out here, for all keys at once.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

import numpy as np

from commdsl.ir.dispatches import (
    BY_KEY,
    BY_QUERY,
    BY_SOURCE,
    MOST_ALIGNED,
    MOST_KEYS,
    ByKey,
    ByTable,
    Often,
    Route,
    Sort,
)
from commdsl.ir.resolve.casts import check_cast, stretch_of
from commdsl.ir.resolve.evaluate import Evaluator, Value
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, Poisoned, nearest
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label
from commdsl.language.source import Span
from commdsl.machine.topology import Topology

Order: TypeAlias = tuple[Sort, ...]


class RouteRules:
    """The routes of one dispatch, held to the laws that need no table and no keys."""

    def __init__(
        self,
        decl: syn.DispatchDecl,
        ranks: int,
        topology: Topology,
        names: ExpressionRules,
        evaluator: Evaluator,
        scope: dict[str, Value],
        faults: Faults,
    ) -> None:
        self.decl, self.ranks, self.faults = decl, ranks, faults
        self.names, self.evaluator, self.scope = names, evaluator, scope
        self.gpus = topology.gpus_per_node
        self.written = [item for item in decl.body if isinstance(item, syn.TableRoute | syn.KeyRoute)]
        self.keys = [item for item in decl.body if isinstance(item, syn.KeyDecl)]
        self.values = [item for item in decl.body if isinstance(item, syn.ValueDecl)]
        self.places = [item for item in decl.body if isinstance(item, syn.PlaceDecl)]
        self.backs = [item for item in decl.body if isinstance(item, syn.BackDecl)]
        self.tables = [route for route in self.written if isinstance(route, syn.TableRoute)]
        self.by_key = [route for route in self.written if isinstance(route, syn.KeyRoute)]

    def routes(self) -> tuple[Route, ...]:
        """Every route that has a place, unless something is wrong."""
        self._tables_once()
        is_one, value = self._one_kind(), self._value()
        orders = self._orders()
        found: list[Route] = []
        for route in self.written:
            order = orders.get(_name(route))
            if order is None:
                of = f" {route.name.text}" if isinstance(route, syn.TableRoute) else ""
                wanted = _written(BY_SOURCE, "") if isinstance(route, syn.TableRoute) else self._by_key_order()
                self.faults.report("C632", f"{_shown(route)} does not say where rows are placed", route.span,
                                   "in what order?", help=f"write `place{of} by ({wanted})`")  # fmt: skip
            match route:
                case syn.TableRoute(name, _, copies, _):
                    found += [] if order is None else [ByTable(name.text, copies is not None, order)]
                case syn.KeyRoute():
                    with self.names.block():  # a key is a number here alone
                        for key in self.keys:
                            self.names.declare(key.name, Kind.NUMBER)
                        rank_of = self._rank_of(route)
                    aligned, node = self._aligned(), self._node(route)
                    if is_one and not (rank_of is None or order is None or aligned is None or node is None):
                        name_of_key = self.keys[0].name.text
                        found.append(ByKey(name_of_key, rank_of, order, _often(route), aligned, value, node))
                case _:
                    assert_never(route)
        if len(found) == len(self.written):
            self._by_query([route for route in found if isinstance(route, ByTable)])
        return tuple(found)

    def _tables_once(self) -> None:
        first: dict[str, Span] = {}
        for name in (route.name for route in self.tables):
            if name.text in first:
                self.faults.report("C102", f"route `{name.text}` is declared twice", name.span, "a second time here",
                                   secondary=(Label(first[name.text], "first here"),))  # fmt: skip
            first.setdefault(name.text, name.span)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _one_kind(self) -> bool:
        """C637: tables, or one key and one route by it."""
        law = "a dispatch goes by its tables or by one key"
        for key in self.keys[1:]:
            self.faults.report("C637", law, key.span, "a second key",
                               secondary=(Label(self.keys[0].span, "first here"),))  # fmt: skip
        for route in self.by_key[1:]:
            self.faults.report("C637", law, route.span, "a second route by keys",
                               secondary=(Label(self.by_key[0].span, "first here"),),
                               help="one route takes several tensors: `route x, scale by ...`")  # fmt: skip
        if self.by_key and self.tables:
            self.faults.report("C637", law, self.by_key[0].span, f"`{self.tables[0].name.text}` is a table",
                               help="what goes by the key is a dispatch of its own")  # fmt: skip
        if self.keys and not self.by_key:
            name = self.keys[0].name.text
            self.faults.report("C637", law, self.keys[0].span, "no route goes by it",
                               help=f"write `route x by {name} / (E / P)`")  # fmt: skip
        if self.by_key and not self.keys:
            self.faults.report("C637", law, self.by_key[0].span, "there is no key",
                               help="declare it: `key expert[T, K] of E`")  # fmt: skip
        return len(self.keys) == len(self.by_key) == 1 and not self.tables

    def _rank_of(self, route: syn.KeyRoute) -> tuple[int, ...] | None:
        """The rank of each key; None after a fault."""
        if not self.keys:
            return None
        key = self.keys[0]
        if key.of.text == key.name.text:
            self.faults.report("C101", f"`{key.of.text}` is not known", key.of.span, "the key itself",
                               help="how many keys there are is a parameter: `of E`")  # fmt: skip
            return None
        self.names.expect(key.of, Kind.NUMBER)
        before = len(self.faults.found)
        self.names.expect(route.rank, Kind.NUMBER)
        if len(self.faults.found) > before or self.names.scope[key.name.text].span != key.name.span:
            return None
        if key.name.span not in self.names.used:
            self.faults.report("C637", "a dispatch goes by its tables or by one key", route.rank.span,
                               f"does not depend on `{key.name.text}`",
                               help="every row would go to one rank")  # fmt: skip
            return None
        try:
            count = self.evaluator.constant(key.of, self.scope)
            if not 1 <= count <= MOST_KEYS:
                self.faults.fail("C509", f"there are 1 to {MOST_KEYS} keys", key.of.span, f"this is {count}")
            every = {**self.scope, key.name.text: np.arange(count)}
            ranks = np.broadcast_to(np.asarray(self.evaluator.number(route.rank, every)), (count,))
        except Poisoned:
            return None
        return tuple(ranks.tolist()) if self._is_even(ranks, key, route) else None

    def _is_even(self, ranks: np.ndarray, key: syn.KeyDecl, route: syn.KeyRoute) -> bool:
        """C638: the ranks have equally many keys, and every key a rank."""
        count, name = len(ranks), key.name.text
        law = f"{self.ranks} ranks have equally many of {count} keys"
        if count % self.ranks:
            near = [many for many in (count // self.ranks * self.ranks, (count // self.ranks + 1) * self.ranks) if many]
            self.faults.report("C638", law, key.of.span, f"`{key.of.text}` is {count}",
                               help=f"{' or '.join(map(str, near))} keys would fit")  # fmt: skip
            return False
        outside = np.flatnonzero((ranks < 0) | (ranks >= self.ranks))
        if len(outside):
            at = int(outside[0])
            self.faults.report("C638", law, route.rank.span, f"`{name}` {at} goes to rank {int(ranks[at])}",
                               help=f"the ranks are 0 ..< {self.ranks}")  # fmt: skip
            return False
        share = np.bincount(ranks, minlength=self.ranks)
        if (share != share[0]).any():
            few, many = int(share.argmin()), int(share.argmax())
            label = f"rank {many} has {int(share[many])}, rank {few} has {int(share[few])}"
            self.faults.report("C638", law, route.rank.span, label,
                               help=f"`{name} / ({key.of.text} / {self.decl.ranks.text})` is even")  # fmt: skip
            return False
        return True

    def _value(self) -> str | None:
        """The value that travels. C631, C643, C630: there is one, it belongs to keys, and it goes or weighs."""
        for item in self.values[1:]:
            self.faults.report("C631", "a dispatch has at most one value", item.span, "a second one",
                               secondary=(Label(self.values[0].span, "first here"),))  # fmt: skip
        for item in self.values[:1]:
            name = item.name.text
            weighs = any(back.weight is not None and back.weight.name.text == name for back in self.backs)
            if not self.by_key:
                self._of_keys(item.span, "a value is one for each key of a row")
            elif any(name == tensor.text for route in self.by_key for tensor in route.tensors):
                return name
            elif not weighs:
                self.faults.report("C630", f"`{name}` has no route", item.span, "goes nowhere",
                                   help=f"write for example `route x, {name} by ...`")  # fmt: skip
        return None

    def _of_keys(self, span: Span, law: str) -> None:
        """C643."""
        self.faults.report("C643", law, span, "there is no route by keys",
                           help="leave it out: this dispatch goes by tables")  # fmt: skip

    def stretch(self, cast: syn.Cast) -> int:
        """Elements that travel in float8 with one scale, 0 after a fault. C123, C643, C509: it is float8, of rows that
        go by keys, and a warp can share a stretch out.
        """
        before = len(self.faults.found)
        check_cast(self.names, cast, ("float8",), "rows")
        if not self.by_key:
            self._of_keys(cast.span, "rows travel in float8 where they go by keys")
        if len(self.faults.found) > before:
            return 0
        try:
            return stretch_of(cast, self.evaluator, self.scope, self.faults)
        except Poisoned:
            return 0

    def _node(self, route: syn.KeyRoute) -> int | None:
        """Ranks of a node, where a row crosses to each node once; 0 where it goes straight to all, which it does if
        there is one node; None after a fault. C651: nodes are full, so that a rank has its like in each.
        """
        gpus = self.gpus
        if route.once is None or route.once.per == "rank" or self.ranks <= gpus:
            return 0
        if self.ranks % gpus == 0:
            return gpus
        nodes = "one node" if self.ranks < 2 * gpus else f"{self.ranks // gpus} nodes"
        label = f"{self.ranks} ranks fill {nodes} of {gpus}, and a part of another"
        self.faults.report("C651", "rows cross once per node between nodes that are full", route.once.span, label,
                           help=f"ask for a multiple of {gpus} ranks")  # fmt: skip
        return None

    def _aligned(self) -> int | None:
        """Of the place by keys; None after a fault."""
        for place in self.places:
            if place.aligned is not None:
                before = len(self.faults.found)
                self.names.expect(place.aligned, Kind.NUMBER)
                if len(self.faults.found) > before:
                    return None
                try:
                    found = self.evaluator.constant(place.aligned, self.scope)
                    if not 1 <= found <= MOST_ALIGNED:
                        law = f"rows are aligned to 1 to {MOST_ALIGNED}"
                        self.faults.fail("C509", law, place.aligned.span, f"this is {found}")
                except Poisoned:
                    return None
                return found
        return 1

    # --- places -------------------------------------------------------------------------------------------------------

    def _orders(self) -> dict[str, Order]:
        """The order of each route that has one; of a route by keys under the name ''."""
        names = [_name(route) for route in self.written]
        orders: dict[str, Order] = {}
        unsure = False
        for place in self.places:
            if place.aligned is not None and not self.by_key:
                self._of_keys(place.aligned.span, "the rows of each key are aligned")
            if place.route is None and len(names) != 1 and "" not in names:  # a route by keys has no name
                first = next((name for name in names if name), "ROUTE")
                self.faults.report("C632", "the place of which route?", place.span, f"there are {len(names)}",
                                   help=f"write `place {first} by ...`")  # fmt: skip
                unsure = True
                continue
            nameless = "" if "" in names else names[0]
            name = nameless if place.route is None else place.route.text
            if place.route is not None and name not in names:
                self.faults.report("C101", f"`{name}` is not known", place.route.span, "no such route",
                                   help=nearest(name, [one for one in names if one]))  # fmt: skip
                unsure = True
                continue
            if name in orders:
                of = f"of `{name}` " if name else ""
                self.faults.report("C605", f"the place {of}is said twice", place.span, "a second time here")
            order = self._order(place, self.written[names.index(name)])
            if order is None:
                unsure = True
            else:
                orders.setdefault(name, order)
        # One mistake, one message: a place that is nobody's was meant for a route that now lacks one.
        return {name: orders.get(name, BY_SOURCE) for name in names} if unsure else orders

    def _order(self, place: syn.PlaceDecl, route: syn.RouteDecl) -> Order | None:
        """C639: the order, if it is one that rows of this route can lie in."""
        found: list[Sort] = []
        known = [key.name.text for key in self.keys]
        for sort in place.order:
            if isinstance(sort.by, syn.Name) and sort.by.text not in known:
                help = nearest(sort.by.text, [*known, "source rank", "shard", "query", "row"])
                self.faults.report("C101", f"`{sort.by.text}` is not known", sort.span, "no such key", help=help)
                return None
            found.append(Sort.KEY if isinstance(sort.by, syn.Name) else Sort(sort.by))
        order = tuple(found)
        allowed = (BY_SOURCE, BY_QUERY) if isinstance(route, syn.TableRoute) else (BY_KEY,)
        if order in allowed:
            return order
        by = known[0] if known else "KEY"
        wanted = " or ".join(f"({_written(one, by)})" for one in allowed)
        self.faults.report("C639", f"rows of {_shown(route)} do not lie in this order", place.span,
                           "no place follows from it", help=f"write `place ... by {wanted}`")  # fmt: skip
        return None

    def _by_key_order(self) -> str:
        return _written(BY_KEY, self.keys[0].name.text if self.keys else "KEY")

    def _by_query(self, routes: list[ByTable]) -> None:
        """Keys lie where the queries that need them are, so there is one route of queries, each to one rank."""
        queries = [route for route in routes if route.order == BY_SOURCE and not route.many]
        by_query = [route for route in routes if route.order == BY_QUERY]
        single = [route.name for route in by_query if not route.many]
        for name in single:
            self.faults.report("C633", "what is placed by query goes to several ranks", self._place_of(name),
                               f"`{name}` has one rank a shard",
                               help=f"write `route {name}[S, C]`: a rank for each of C copies")  # fmt: skip
        for route in by_query:
            if not single and len(queries) != 1:
                label, help = f"there are {len(queries)}", "one `route NAME[S]` is placed by (source rank, shard)"
                self.faults.report(
                    "C633", "one route is that of the queries", self._place_of(route.name), label, help=help
                )

    def _place_of(self, name: str) -> Span:
        return next(place.span for place in self.places if place.route is None or place.route.text == name)


def _often(route: syn.KeyRoute) -> Often:
    if route.once is None:
        return Often.EACH
    return Often.INDEX if route.once.by_index else Often.ONCE


def _name(route: syn.RouteDecl) -> str:
    return route.name.text if isinstance(route, syn.TableRoute) else ""


def _shown(route: syn.RouteDecl) -> str:
    return f"`{route.name.text}`" if isinstance(route, syn.TableRoute) else "the route by keys"


def _written(order: Order, key: str) -> str:
    return ", ".join(key if sort is Sort.KEY else sort.value for sort in order)
