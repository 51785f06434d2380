"""Turns Syntax into IR, for one number of ranks, one topology and values of the parameters.

Assumes parsed files, the schedule's own first, then those it uses. Raises CommError with every fault found. Does not
prove anything about the steps: their indices out of range stay in the arrays for `checks` to name.

    budget        what a schedule may take
    faults        the list that mistakes go to, one diagnostic a mistake
    expressions, names, move_rules, plan_rules   mistakes that need no numbers
    evaluate      expressions -> numbers, or arrays of them
    fn            `fn`
    parameters    those given and the defaults -> numbers
    machines      `topology`, `roles`
    cycle_sets    `cycles`
    contracts, clauses, terms, rotations   `ensure`
    casts         `as float8 by 128`, `rounded(float8, 2)`
    epilogues     `with bias b[q], gelu where A == 1`
    rows, steps   `each` -> arrays, a row for every combination of its binders
    waves         `pipeline` -> steps of what acts at once
    call_rules, calls   `do` -> the steps of another schedule
    tasks         `compute`, and `yield` with a body
    tuning        `tune`
    resolver      `schedule`, from all of these
    plans         `plan` -> shards in global order
    meanings      what names stand for and are worth, for editors
    dispatches, dispatch_routes, dispatch_back   `dispatch` -> its tensors, the routes they take, and the way back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from commdsl.ir.dispatches import Dispatch
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.resolve import fn, machines, meanings, parameters
from commdsl.ir.resolve.call_rules import Schedules
from commdsl.ir.resolve.dispatches import Given, build_dispatch
from commdsl.ir.resolve.evaluate import Functions
from commdsl.ir.resolve.expressions import Looked
from commdsl.ir.resolve.faults import Faults, Poisoned, Spent
from commdsl.ir.resolve.names import check_names, duplicates
from commdsl.ir.resolve.plan_rules import check_plan_names
from commdsl.ir.resolve.plans import build_plan
from commdsl.ir.resolve.resolver import Resolver
from commdsl.ir.resolve.tuning import override
from commdsl.ir.schedules import RoleSet, Schedule
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Diagnostic, Severity
from commdsl.language.source import Span
from commdsl.language.syntax import File, ScheduleDecl
from commdsl.machine.topology import Topology

T = TypeVar("T")


def topologies(files: tuple[File, ...]) -> dict[str, Topology]:
    """Every topology of the files by name. Raises CommError with all their faults."""
    faults = Faults()
    found = _topologies(files, _functions(files, Faults()), faults)
    faults.raise_if_any()
    return found


def resolve(
    files: tuple[File, ...],
    decl: ScheduleDecl,
    ranks: int,
    topology: Topology,
    params: Mapping[str, int],
    tune: Mapping[str, int | str] | None = None,
) -> Schedule:
    """What `decl` means for `ranks` ranks of `topology`, with `tune` in place of some of its own tuning. Raises
    CommError with every fault of it, and of the machines and roles beside it.
    """
    faults = Faults()
    functions = _functions(files, faults)
    _topologies(files, functions, faults)
    _check_ops(files, faults)
    role_sets = _role_sets(files, functions, faults)
    schedules = _schedules(files)
    check_names(decl, functions, schedules, tuple(name for roles in role_sets for name, _, _ in roles.roles), faults)
    faults.drop_warnings()
    resolver = Resolver(decl, ranks, topology, functions, schedules, role_sets, faults)
    try:
        resolver.declarations(params, override(tune or {}))
        faults.raise_if_any()
        resolver.body()
    except Spent:
        pass
    faults.raise_if_any()
    return resolver.schedule()


def warnings(files: tuple[File, ...], decl: ScheduleDecl) -> tuple[Diagnostic, ...]:
    """Names of a schedule that nothing uses."""
    faults = Faults()
    roles = tuple(role.name.text for item in _items(files, syn.RolesDecl) for role in item.roles)
    check_names(decl, _functions(files, faults), _schedules(files), roles, faults)
    return tuple(diagnostic for diagnostic in faults.found if diagnostic.severity is Severity.WARNING)


def dispatch_plan(files: tuple[File, ...], decl: syn.PlanDecl) -> DispatchPlan:
    """What a plan means. Raises CommError with every fault of it that needs no routes."""
    faults = Faults()
    functions = _functions(files, faults)
    _check_once(_items(files, syn.PlanDecl), "plan", faults)
    check_plan_names(decl, functions, faults)
    faults.drop_warnings()
    faults.raise_if_any()
    return build_plan(decl, functions, faults)


def plan_warnings(files: tuple[File, ...], decl: syn.PlanDecl) -> tuple[Diagnostic, ...]:
    """Names of a plan that nothing uses."""
    faults = Faults()
    check_plan_names(decl, _functions(files, faults), faults)
    return tuple(diagnostic for diagnostic in faults.found if diagnostic.severity is Severity.WARNING)


def dispatch(
    files: tuple[File, ...],
    decl: syn.DispatchDecl,
    ranks: int,
    topology: Topology,
    params: Mapping[str, int] | None = None,
    tune: Mapping[str, int | str] | None = None,
) -> Dispatch:
    """What a dispatch means, with `tune` in place of some of its own tuning. Raises CommError with every fault of it,
    and of the machines and roles beside it.
    """
    faults = Faults()
    functions = _functions(files, faults)
    _topologies(files, functions, faults)
    _check_ops(files, faults)
    role_sets = _role_sets(files, functions, faults)
    given = Given(ranks, topology, functions, role_sets, params or {}, override(tune or {}))
    found = build_dispatch(decl, given, faults)
    faults.drop_warnings()
    faults.raise_if_any()
    assert found is not None
    return found


def dispatch_warnings(
    files: tuple[File, ...], decl: syn.DispatchDecl, ranks: int, topology: Topology, params: Mapping[str, int]
) -> tuple[Diagnostic, ...]:
    """Parameters of a dispatch that nothing uses."""
    faults = Faults()
    build_dispatch(decl, Given(ranks, topology, _functions(files, faults), (), params, ()), faults)
    return tuple(diagnostic for diagnostic in faults.found if diagnostic.severity is Severity.WARNING)


def admits(
    files: tuple[File, ...], decl: ScheduleDecl, ranks: int, topology: Topology, given: Mapping[str, int] | None = None
) -> bool:
    """Whether the `where` of a schedule holds for so many ranks, its parameters as they are unless `given`."""
    return parameters.admits(decl, _functions(files, Faults()), ranks, topology, given or {})


def declared(files: tuple[File, ...]) -> meanings.Meanings:
    """Of the place of every name that the first file uses, the place of its declaration; what is built in has none."""
    return meanings.meanings(files, _functions(files, Faults()), _schedules(files))


def looked(files: tuple[File, ...], decl: meanings.Scoped) -> tuple[Looked, ...]:
    """Every name that is looked up in a declaration, with the names in sight there."""
    return meanings.looked(decl, _functions(files, Faults()), _schedules(files), ())


def values(files: tuple[File, ...], decl: ScheduleDecl, ranks: int, topology: Topology) -> Mapping[Span, str]:
    """What a schedule's own declarations are for so many ranks, in words, by the places of their names."""
    faults = Faults()
    functions = _functions(files, faults)
    return meanings.values(Resolver(decl, ranks, topology, functions, _schedules(files), (), faults))


def _functions(files: tuple[File, ...], faults: Faults) -> Functions:
    decls = _items(files, syn.FnDecl)
    _check_once(decls, "function", faults)
    return fn.functions(decls, faults)


def _schedules(files: tuple[File, ...]) -> Schedules:
    """By name, the first of each."""
    return {decl.name.text: decl for decl in reversed(_items(files, ScheduleDecl))}


def _check_ops(files: tuple[File, ...], faults: Faults) -> None:
    """What becomes an op has a name of its own."""
    ops = [item for file in files for item in file.items]
    named = [item for item in ops if isinstance(item, syn.ScheduleDecl | syn.DispatchDecl)]
    if all(isinstance(item, syn.ScheduleDecl) for item in named):
        _check_once(named, "schedule", faults)
    else:
        _check_once(named, "op", faults)


def _items(files: tuple[File, ...], kind: type[T]) -> list[T]:
    return [item for file in files for item in file.items if isinstance(item, kind)]


def _check_once(
    decls: Sequence[syn.TopologyDecl | syn.RolesDecl | ScheduleDecl | syn.PlanDecl | syn.DispatchDecl | syn.FnDecl],
    what: str,
    faults: Faults,
) -> None:
    named = dict[str, list[Span]]()
    for decl in decls:
        named.setdefault(decl.name.text, []).append(decl.name.span)
    duplicates(named, what, faults)


def _topologies(files: tuple[File, ...], functions: Functions, faults: Faults) -> dict[str, Topology]:
    decls = _items(files, syn.TopologyDecl)
    _check_once(decls, "topology", faults)
    found = dict[str, Topology]()
    for decl in decls:
        try:
            found.setdefault(decl.name.text, machines.topology(decl, functions, faults))
        except (Poisoned, Spent):
            continue
    return found


def _role_sets(files: tuple[File, ...], functions: Functions, faults: Faults) -> tuple[RoleSet, ...]:
    decls = _items(files, syn.RolesDecl)
    _check_once(decls, "roles", faults)
    found = list[RoleSet]()
    for decl in decls:
        try:
            found.append(machines.roles(decl, functions, faults))
        except (Poisoned, Spent):
            continue
    return tuple(found)
