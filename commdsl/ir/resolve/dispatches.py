"""Turns `dispatch` and `combine` declarations into Dispatch and Combine, for one number of ranks and one topology.

Assumes nothing beyond the grammar. Does not know a table: bounds and counts are proved at run time, on the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commdsl.ir.dispatches import Combine, Dispatch, Order, Put, Route, RowTensor
from commdsl.ir.resolve.evaluate import Evaluator
from commdsl.ir.resolve.expressions import ExpressionRules, Kind, Symbol
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.ir.resolve.tuning import Machine, tuning
from commdsl.ir.schedules import RoleSet, Tuning
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label
from commdsl.language.source import Span
from commdsl.machine.topology import Topology

MOST_TENSORS = 3
REDUCTIONS = ("sum",)
SETTINGS = ("threads", "sms", "tile")
"""What `tune` says of a dispatch: it has no lanes, and the form of its messages is `put`'s."""

ORDERS = {"source": Order.SOURCE, "query": Order.QUERY}


def build_dispatch(
    decl: syn.DispatchDecl, ranks: int, topology: Topology, role_sets: tuple[RoleSet, ...], faults: Faults
) -> Dispatch | None:
    """What `decl` means; None after a fault, which is in `faults`."""
    if ranks < 1 or ranks > topology.num_ranks:
        faults.report("C502", f"expected 1 to {topology.num_ranks} ranks, got {ranks}", decl.ranks.span,
                      f"`{topology.name}` has {topology.num_ranks}",
                      help="ask for fewer ranks or name a larger topology")  # fmt: skip
        return None
    rules = _Rules(decl, faults)
    tensors, routes = rules.tensors(), rules.routes()
    rules.counts()
    put = rules.once(syn.PutForm, "how rows travel")
    role = rules.role(role_sets)
    tuned = rules.tuning(ranks, topology, role, role_sets)
    if faults.found:
        return None
    form = Put.ROWS if put is None else Put(put.form)
    return Dispatch(decl.name.text, ranks, tensors, routes, form, tuned, role, topology, role_sets, decl.span)


def build_combine(decl: syn.CombineDecl, dispatches: Sequence[syn.DispatchDecl], faults: Faults) -> Combine:
    """What `decl` means."""
    names = [dispatch.name.text for dispatch in dispatches]
    if decl.inverts.text not in names:
        help = nearest(decl.inverts.text, names) or "declare it: `dispatch NAME for P ranks { ... }`"
        faults.report("C635", f"there is no dispatch `{decl.inverts.text}`", decl.inverts.span, "not declared",
                      help=help)  # fmt: skip
    if decl.reduction.text not in REDUCTIONS:
        label, help = f"`{decl.reduction.text}` is not known", "the way back adds up the gradients of the copies"
        faults.report("C636", "copies are combined by `sum`", decl.reduction.span, label, help=help)
    return Combine(decl.name.text, decl.inverts.text, decl.reduction.text, decl.span)


@dataclass
class _Rules:
    """One dispatch, held to the laws that need no table."""

    decl: syn.DispatchDecl
    faults: Faults

    def __post_init__(self) -> None:
        body = self.decl.body
        self.rows = [item for item in body if isinstance(item, syn.RowsDecl)]
        self.written = [item for item in body if isinstance(item, syn.RouteDecl)]
        self.places = [item for item in body if isinstance(item, syn.PlaceDecl)]

    # --- tensors and routes -------------------------------------------------------------------------------------------

    def tensors(self) -> tuple[RowTensor, ...]:
        self._names_once(self.rows, "tensor")
        if not 1 <= len(self.rows) <= MOST_TENSORS:
            at = self.rows[MOST_TENSORS].span if self.rows else self.decl.name.span
            label = f"this has {len(self.rows)}" if self.rows else "no `rows`"
            self.faults.report("C631", f"a dispatch has 1 to {MOST_TENSORS} tensors", at, label,
                               help="what more there is goes with a dispatch of its own" if self.rows else
                               "write for example `rows x[T]`")  # fmt: skip
        names = [tensor.name.text for tensor in self.rows]
        route_of: dict[str, tuple[int, Span]] = {}
        for number, route in enumerate(self.written):
            for tensor in route.tensors:
                if tensor.text not in names:
                    self.faults.report("C101", f"`{tensor.text}` is not known", tensor.span, "no such tensor",
                                       help=nearest(tensor.text, names))  # fmt: skip
                elif tensor.text in route_of:
                    first = (Label(route_of[tensor.text][1], "first here"),)
                    self.faults.report("C630", f"`{tensor.text}` has two routes", tensor.span, "a second one here",
                                       secondary=first)  # fmt: skip
                route_of.setdefault(tensor.text, (number, tensor.span))
        for declared in self.rows:
            if declared.name.text not in route_of:
                name = declared.name.text
                self.faults.report("C630", f"`{name}` has no route", declared.span, "goes nowhere",
                                   help=f"write for example `route home[S] for {name}`")  # fmt: skip
        return tuple(RowTensor(name, route_of[name][0]) for name in names if name in route_of)

    def routes(self) -> tuple[Route, ...]:
        self._names_once(self.written, "route")
        orders = self._orders()
        for route in self.written:
            if route.name.text not in orders:
                self.faults.report("C632", f"`{route.name.text}` does not say where rows are placed", route.span,
                                   "in what order?",
                                   help=f"write `place {route.name.text} by (source rank, shard)`")  # fmt: skip
        found = tuple(
            Route(route.name.text, route.copies is not None, orders[route.name.text])
            for route in self.written
            if route.name.text in orders
        )
        if len(found) == len(self.written):
            self._by_query(found)
        return found

    def _orders(self) -> dict[str, Order]:
        """The order of each route that has one."""
        names = [route.name.text for route in self.written]
        orders: dict[str, Order] = {}
        unsure = False
        for place in self.places:
            if place.route is None and len(names) != 1:
                self.faults.report("C632", "the place of which route?", place.span, f"there are {len(names)}",
                                   help=f"write `place {names[0] if names else 'ROUTE'} by ...`")  # fmt: skip
                unsure = True
                continue
            name = names[0] if place.route is None else place.route.text
            if place.route is not None and name not in names:
                self.faults.report("C101", f"`{name}` is not known", place.route.span, "no such route",
                                   help=nearest(name, names))  # fmt: skip
                unsure = True
            elif name in orders:
                self.faults.report("C605", f"the place of `{name}` is said twice", place.span, "a second time here")
            orders.setdefault(name, ORDERS[place.order])
        # One mistake, one message: a place that is nobody's was meant for a route that now lacks one.
        return {name: orders.get(name, Order.SOURCE) for name in names} if unsure else orders

    def _by_query(self, routes: tuple[Route, ...]) -> None:
        """Keys lie where the queries that need them are, so there is one route of queries, each to one rank."""
        queries = [route for route in routes if route.order is Order.SOURCE and not route.many]
        by_query = [route for route in routes if route.order is Order.QUERY]
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

    def _names_once(self, decls: Sequence[syn.RowsDecl | syn.RouteDecl], what: str) -> None:
        first: dict[str, Span] = {}
        for decl in decls:
            name = decl.name
            if name.text in first:
                self.faults.report("C102", f"{what} `{name.text}` is declared twice", name.span, "a second time here",
                                   secondary=(Label(first[name.text], "first here"),))  # fmt: skip
            first.setdefault(name.text, name.span)

    def counts(self) -> None:
        """A name counts one thing, and one thing has one name: rows, shards, copies."""
        meaning: dict[str, tuple[str, Span]] = {self.decl.ranks.text: ("ranks", self.decl.ranks.span)}
        name_of: dict[str, syn.Name] = {}
        used = [("rows", tensor.count) for tensor in self.rows]
        used += [("shards", route.shards) for route in self.written]
        used += [("copies", route.copies) for route in self.written if route.copies is not None]
        for what, name in used:
            known, where = meaning.setdefault(name.text, (what, name.span))
            before = name_of.setdefault(what, name)
            if known != what:
                self.faults.report("C634", f"`{name.text}` is the number of {known}", name.span, f"here of {what}",
                                   secondary=(Label(where, "first here"),), help="name this one otherwise")  # fmt: skip
            elif what != "copies" and before.text != name.text:
                self.faults.report("C634", f"the number of {what} is `{before.text}`", name.span, "another name here",
                                   secondary=(Label(before.span, "first here"),),
                                   help=f"all of a dispatch have equally many: write `{before.text}`")  # fmt: skip

    # --- the machine --------------------------------------------------------------------------------------------------

    def once(self, kind: type[syn.PutForm], what: str) -> syn.PutForm | None:
        found = [item for item in self.decl.body if isinstance(item, kind)]
        for item in found[1:]:
            self.faults.report("C605", f"{what} is said twice", item.span, "a second time here",
                               secondary=(Label(found[0].span, "first here"),))  # fmt: skip
        return found[0] if found else None

    def role(self, role_sets: tuple[RoleSet, ...]) -> str | None:
        names = [name for roles in role_sets for name, _, _ in roles.roles]
        found = [item for item in self.decl.body if isinstance(item, syn.On)]
        for item in found[:1]:
            if item.role.text not in names:
                help = nearest(item.role.text, names) or "declare it: `roles NAME { ROLE sms 0 ..< 16 }`"
                self.faults.report("C117", f"there is no role `{item.role.text}`", item.role.span, "not declared",
                                   help=help)  # fmt: skip
        for item in found[1:]:
            self.faults.report("C506", "a dispatch runs on one role", item.span, f"already on `{found[0].role.text}`")
        return found[0].role.text if found else None

    def tuning(self, ranks: int, topology: Topology, role: str | None, role_sets: tuple[RoleSet, ...]) -> Tuning:
        entries = [entry for item in self.decl.body if isinstance(item, syn.Tune) for entry in item.entries]
        rules = ExpressionRules(self.faults)
        gpus = topology.gpus_per_node
        scope = {"gpus": gpus, "nodes": -(-ranks // gpus), self.decl.ranks.text: ranks}
        rules.scope = {name: Symbol(Kind.NUMBER, None, 0) for name in scope}
        known = list[syn.TuneEntry]()
        for entry in entries:
            key = entry.key.text
            if key not in SETTINGS:
                what = f"nothing of a dispatch is tuned by `{key}`"
                self.faults.report("C506", what, entry.key.span, "has no effect", help=nearest(key, SETTINGS))
                continue
            if not isinstance(entry.value, syn.Quantity):
                rules.expect(entry.value, Kind.NUMBER)
            known.append(entry)
        if self.faults.found:
            return Tuning()
        ranges = (item for roles in role_sets for item in roles.roles)
        sms = next((last - first for name, first, last in ranges if name == role and last > first), None)
        return tuning(tuple(known), (), Machine(topology, ranks, role, sms), Evaluator(self.faults), scope, self.faults)
