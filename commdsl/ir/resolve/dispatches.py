"""Turns a `dispatch` declaration into a Dispatch, for one number of ranks, one topology and values of its parameters.

Assumes nothing beyond the grammar. Does not know a table or a key: bounds and counts are proved at run time, on the
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commdsl.ir.dispatches import Dispatch, RowTensor
from commdsl.ir.resolve.dispatch_back import way_back
from commdsl.ir.resolve.dispatch_routes import RouteRules
from commdsl.ir.resolve.evaluate import Evaluator, Functions, Value
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, Spent, nearest
from commdsl.ir.resolve.parameters import known_counts, parameters
from commdsl.ir.resolve.tuning import OF_DISPATCH, OF_KEYS, Machine, choices, tuning
from commdsl.ir.schedules import RoleSet, Tuning
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label, Severity
from commdsl.language.records import dataclass
from commdsl.language.source import Span
from commdsl.machine.topology import Topology

MOST_TENSORS = 3

BESIDE = ("origins", "mates", "index", "counts", "offsets", "places")
"""What the way there by keys leaves of itself."""


@dataclass(frozen=True)
class Given:
    """What a dispatch is understood for: the machine, and what is said from outside."""

    ranks: int
    topology: Topology
    functions: Functions
    role_sets: tuple[RoleSet, ...]
    params: Mapping[str, int]
    tune: tuple[syn.TuneEntry, ...]


def build_dispatch(decl: syn.DispatchDecl, given: Given, faults: Faults) -> Dispatch | None:
    """What `decl` means; None after an error, which is in `faults`, as are warnings."""
    ranks, topology = given.ranks, given.topology
    if ranks < 1 or ranks > topology.num_ranks:
        faults.report("C502", f"expected 1 to {topology.num_ranks} ranks, got {ranks}", decl.ranks.span,
                      f"`{topology.name}` has {topology.num_ranks}",
                      help="ask for fewer ranks or name a larger topology")  # fmt: skip
        return None
    try:
        return _built(decl, given, faults)
    except Spent:
        return None


def _built(decl: syn.DispatchDecl, given: Given, faults: Faults) -> Dispatch | None:
    ranks, topology = given.ranks, given.topology
    rules = _Rules(decl, given, faults)
    params = rules.parameters()
    rows = [item for item in decl.body if isinstance(item, syn.RowsDecl)]
    routes = RouteRules(decl, ranks, topology, rules.names, rules.evaluator, rules.scope, faults)
    tensors = rules.tensors(rows, routes)
    found, back = routes.routes(), way_back(decl, faults)
    rules.counts(rows)
    role = rules.role()
    tuned = rules.tuning(role)
    rules.unused()
    if any(diagnostic.severity is Severity.ERROR for diagnostic in faults.found):
        return None
    return Dispatch(
        decl.name.text, ranks, params, tensors, found, back, tuned, role, topology, given.role_sets, decl.span
    )


class _Rules:
    """One dispatch, held to the laws that need no table, but for those of its routes."""

    def __init__(self, decl: syn.DispatchDecl, given: Given, faults: Faults) -> None:
        self.decl, self.given, self.faults = decl, given, faults
        self.evaluator = Evaluator(faults)
        self.names = ExpressionRules(faults, given.functions)
        counts = known_counts(decl.ranks, given.ranks, given.topology)
        self.names.know(counts)
        self.scope: dict[str, Value] = {**given.functions, **counts}

    def parameters(self) -> tuple[tuple[str, int], ...]:
        for param in self.decl.params:
            if param.default is not None:
                self.names.expect(param.default, Kind.NUMBER)
            self.names.declare(param.name, Kind.NUMBER)
        found = parameters(self.decl, self.given.params, self.scope, self.evaluator, self.faults)
        self.scope |= dict(found)
        return tuple(found)

    def unused(self) -> None:
        for param in self.decl.params:
            if param.name.span not in self.names.used:
                self.faults.report("C180", f"`{param.name.text}` is never used", param.name.span, "not used",
                                   severity=Severity.WARNING)  # fmt: skip

    # --- tensors and counts -------------------------------------------------------------------------------------------

    def tensors(self, rows: Sequence[syn.RowsDecl], rules: RouteRules) -> tuple[RowTensor, ...]:
        going = [*(row.name for row in rows), *(value.name for value in rules.values)]
        names_once(going, "tensor", self.faults)
        keyed = [*(key.name for key in rules.keys), *(name for back in rules.backs for name in back.names)]
        keyed += [back.weight.name for back in rules.backs if back.weight is not None]
        for taken in [*going, *keyed] if rules.by_key else ():
            if taken.text in BESIDE:
                what = f"`{taken.text}` is what arrives beside rows that go by keys"
                self.faults.report("C102", what, taken.span, "a second of that name",
                                   help="name this one otherwise")  # fmt: skip
        if not 1 <= len(rows) <= MOST_TENSORS:
            at = rows[MOST_TENSORS].span if rows else self.decl.name.span
            label = f"this has {len(rows)}" if rows else "no `rows`"
            self.faults.report("C631", f"a dispatch has 1 to {MOST_TENSORS} tensors", at, label,
                               help="what more there is goes with a dispatch of its own" if rows else
                               "write for example `rows x[T]`")  # fmt: skip
        names = [tensor.name.text for tensor in rows]
        known = [*names, *(value.name.text for value in rules.values)]
        route_of: dict[str, tuple[int, Span]] = {}
        for number, route in enumerate(rules.written):
            for tensor in route.tensors:
                if tensor.text not in known:
                    self.faults.report("C101", f"`{tensor.text}` is not known", tensor.span, "no such tensor",
                                       help=nearest(tensor.text, known))  # fmt: skip
                elif tensor.text in route_of:
                    first = (Label(route_of[tensor.text][1], "first here"),)
                    self.faults.report("C630", f"`{tensor.text}` has two routes", tensor.span, "a second one here",
                                       secondary=first)  # fmt: skip
                route_of.setdefault(tensor.text, (number, tensor.span))
        for declared in rows:
            if declared.name.text not in route_of:
                name = declared.name.text
                self.faults.report("C630", f"`{name}` has no route", declared.span, "goes nowhere",
                                   help=f"write for example `route home[S] for {name}`")  # fmt: skip
        stretches = {row.name.text: rules.stretch(row.cast) for row in rows if row.cast is not None}
        return tuple(RowTensor(name, route_of[name][0], stretches.get(name, 0)) for name in names if name in route_of)

    def counts(self, rows: Sequence[syn.RowsDecl]) -> None:
        """A name counts one thing, and one thing has one name: rows, shards, copies, keys of a row."""
        meaning: dict[str, tuple[str, Span]] = {
            self.decl.ranks.text: ("the number of ranks", self.decl.ranks.span),
            **{param.name.text: ("a parameter", param.name.span) for param in self.decl.params},
        }
        name_of: dict[str, syn.Name] = {}
        for what, name in self._counted(rows):
            known, where = meaning.get(name.text, (f"the number of {what}", name.span))
            before = name_of.get(what, name)
            if known != f"the number of {what}":
                self.faults.report("C634", f"`{name.text}` is {known}", name.span, f"here of {what}",
                                   secondary=(Label(where, "first here"),), help="name this one otherwise")  # fmt: skip
            elif what != "copies" and before.text != name.text:
                self.faults.report("C634", f"the number of {what} is `{before.text}`", name.span, "another name here",
                                   secondary=(Label(before.span, "first here"),),
                                   help=f"all of a dispatch have equally many: write `{before.text}`")  # fmt: skip
            else:
                meaning.setdefault(name.text, (known, where))
                name_of.setdefault(what, name)

    def _counted(self, rows: Sequence[syn.RowsDecl]) -> list[tuple[str, syn.Name]]:
        used = [("rows", tensor.count) for tensor in rows]
        for item in self.decl.body:
            match item:
                case syn.TableRoute():
                    used.append(("shards", item.shards))
                    used += [] if item.copies is None else [("copies", item.copies)]
                case syn.KeyDecl() | syn.ValueDecl():
                    used += [("rows", item.rows), ("keys of a row", item.per_row)]
                case syn.BackDecl(weight=syn.Weight(_, count, per_row)):
                    used += [("rows", count), ("keys of a row", per_row)]
                case _:
                    pass
        return used

    # --- the machine --------------------------------------------------------------------------------------------------

    def role(self) -> str | None:
        names = [name for roles in self.given.role_sets for name, _, _ in roles.roles]
        found = [item for item in self.decl.body if isinstance(item, syn.On)]
        for item in found[:1]:
            if item.role.text not in names:
                help = nearest(item.role.text, names) or "declare it: `roles NAME { ROLE sms 0 ..< 16 }`"
                self.faults.report("C117", f"there is no role `{item.role.text}`", item.role.span, "not declared",
                                   help=help)  # fmt: skip
        for item in found[1:]:
            self.faults.report("C506", "a dispatch runs on one role", item.span, f"already on `{found[0].role.text}`")
        return found[0].role.text if found and found[0].role.text in names else None

    def tuning(self, role: str | None) -> Tuning:
        allowed = OF_KEYS if any(isinstance(item, syn.KeyRoute) for item in self.decl.body) else OF_DISPATCH
        entries = tuple(entry for item in self.decl.body if isinstance(item, syn.Tune) for entry in item.entries)
        for entry in entries:
            key = entry.key.text
            if key in allowed and not choices(key) and not isinstance(entry.value, syn.Quantity):
                self.names.expect(entry.value, Kind.NUMBER)
        ranges = (item for roles in self.given.role_sets for item in roles.roles)
        sms = next((last - first for name, first, last in ranges if name == role and last > first), None)
        machine = Machine(self.given.topology, self.given.ranks, role, sms)
        return tuning(entries, self.given.tune, machine, self.evaluator, self.scope, self.faults, allowed)


def names_once(names: Sequence[syn.Name], what: str, faults: Faults) -> None:
    """C102 for each name that stands among those before it."""
    first: dict[str, Span] = {}
    for name in names:
        if name.text in first:
            faults.report("C102", f"{what} `{name.text}` is declared twice", name.span, "a second time here",
                          secondary=(Label(first[name.text], "first here"),))  # fmt: skip
        first.setdefault(name.text, name.span)
