"""Turns a schedule into everything that is wrong with it, and a Plan into everything that is wrong with that.

Assumes a resolved schedule; for the laws on the Plan one that `verify` accepts. The laws stand in groups: a later group
runs only when the earlier ones found no error, because it relies on what they prove, and so that one mistake gives one
message. A new law is a function and a line here. Does not raise.

    locations, contributions, route_laws   what the laws are stated on: places, what each holds, rows
    cycles, topology, roles, settings   what the machine has
    bounds, inputs, overlap, undefined, size_classes, lengths, classes   what a step may touch
    casts, operations   in which element type it travels, and how it is combined
    promises, conservation, terms, rotations, returns, determinism   what is promised, and kept
    places, exchanges   where a function finds what it is handed
    useless, untouched   what is in vain
    plans, routes   a plan of documents and where its rows go
    built         what no kernel runs
    rest   what there is to judge where moves have no meaning
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from commdsl.checks.bounds import OUT_OF_BOUNDS, out_of_bounds, without
from commdsl.checks.casts import mixed_casts, unsaid_roundings
from commdsl.checks.classes import mixed_types, own_units, unknown_units
from commdsl.checks.conservation import broken_contracts
from commdsl.checks.cycles import broken_cycles
from commdsl.checks.inputs import writes_to_input
from commdsl.checks.lengths import unknown_lengths
from commdsl.checks.locations import Located, statement_key
from commdsl.checks.operations import mixed_operations, other_operations
from commdsl.checks.overlap import overlapping_writes
from commdsl.checks.places import other_places
from commdsl.checks.plans import over_capacity, too_large, too_many_copies
from commdsl.checks.promises import idle_promises, repeated_promises
from commdsl.checks.rest import rest
from commdsl.checks.returns import broken_returns
from commdsl.checks.roles import broken_roles, roles_of_dispatch, unused_roles
from commdsl.checks.rotations import broken_rotations
from commdsl.checks.routes import lost_rows, not_identity, overlapping_rows, wrong_keys
from commdsl.checks.settings import combining_engine, idle_landing, idle_matmul, parting_tile
from commdsl.checks.size_classes import unequal_sizes
from commdsl.checks.topology import missing_links
from commdsl.checks.undefined import undefined_reads
from commdsl.checks.untouched import untouched_chunks
from commdsl.checks.useless import useless_statements
from commdsl.ir.dispatches import Dispatch
from commdsl.ir.plans import DispatchPlan, Routing
from commdsl.ir.products import stopping
from commdsl.ir.rowwise import ending
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import CommError, Diagnostic, Label, Severity
from commdsl.language.syntax import File, ScheduleDecl
from commdsl.machine.topology import switch
from commdsl.program.actors import actors
from commdsl.program.plan import Plan
from commdsl.program.proof.agreement import agreement, agreement_of_rows
from commdsl.program.proof.carries import carries
from commdsl.program.proof.computes import computes
from commdsl.program.proof.hosted import order_of_visits
from commdsl.program.proof.memory import memory, memory_of_launches
from commdsl.program.proof.regions import order_of_regions
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import synchronization
from commdsl.program.proof.visits import visits_compute
from commdsl.program.visited import plan_of, segments

Rule: TypeAlias = Callable[[Located], Iterator[Diagnostic]]
FileRule: TypeAlias = Callable[[tuple[File, ...]], Iterator[Diagnostic]]
PlanRule: TypeAlias = Callable[[Schedule, Round], Iterator[Diagnostic]]
AgreeingRule: TypeAlias = Callable[[Plan, Round], Iterator[Diagnostic]]
VisitedRule: TypeAlias = Callable[[Schedule, Plan], Iterator[Diagnostic]]
RoutedRule: TypeAlias = Callable[[Plan], Iterator[Diagnostic]]
CarriedRule: TypeAlias = Callable[[Dispatch, Plan], Iterator[Diagnostic]]
DispatchRule: TypeAlias = Callable[[Dispatch], Iterator[Diagnostic]]
DispatchPlanRule: TypeAlias = Callable[[DispatchPlan], Iterator[Diagnostic]]
RoutingRule: TypeAlias = Callable[[DispatchPlan, Routing], Iterator[Diagnostic]]
AnyRule = TypeVar("AnyRule")

BESIDE: tuple[tuple[Rule, ...], ...] = ((broken_roles, repeated_promises),)
"""What has nothing to do with the steps: told whatever else is wrong."""

OF_A_STEP: tuple[Rule, ...] = (overlapping_writes, writes_to_input, missing_links, combining_engine)
"""What a statement breaks by itself, or beside others of its step: told also where another one is out of bounds, or
says what has no meaning.
"""

RULES: tuple[tuple[Rule, ...], ...] = (
    (broken_cycles,),
    (out_of_bounds,),
    (*OF_A_STEP, undefined_reads, idle_landing, idle_matmul),
    (unequal_sizes, mixed_types, own_units, unknown_units),
    (broken_contracts, broken_rotations, unknown_lengths),
    (mixed_casts, mixed_operations, parting_tile),
    (unsaid_roundings, other_operations),
    (broken_returns,),
    (other_places,),
    (useless_statements, idle_promises),
)

WARNINGS: tuple[tuple[Rule, ...], ...] = ((untouched_chunks,),)
"""What may be meant so; nothing that is proved."""

VISITED_RULES: tuple[tuple[VisitedRule, ...], ...] = (
    (lambda _, plan: order_of_visits(plan),),
    (visits_compute, memory_of_launches),
)

LAUNCH_RULES: tuple[tuple[PlanRule, ...], ...] = ((synchronization,), (memory,))

ROUTED_RULES: tuple[tuple[RoutedRule, ...], ...] = ((order_of_regions,), (agreement_of_rows,))

AGREEING_RULES: tuple[tuple[AgreeingRule, ...], ...] = ((agreement,),)
"""Of the role beside those who act."""

PLAN_RULES: tuple[tuple[PlanRule, ...], ...] = ((synchronization,), (computes,), (memory,))
"""Of all who act on a rank together."""

FILE_RULES: tuple[tuple[FileRule, ...], ...] = ((unused_roles,),)

CARRIED_RULES: tuple[tuple[CarriedRule, ...], ...] = ((carries,),)

DISPATCH_RULES: tuple[tuple[DispatchRule, ...], ...] = ((roles_of_dispatch,),)

DISPATCH_PLAN_RULES: tuple[tuple[DispatchPlanRule, ...], ...] = ((too_large,),)

ROUTING_RULES: tuple[tuple[RoutingRule, ...], ...] = (
    (lost_rows,),
    (overlapping_rows,),
    (not_identity, wrong_keys),
    (too_many_copies, over_capacity),
)


def check_files(files: tuple[File, ...]) -> tuple[Diagnostic, ...]:
    """Every broken law of a file and what it uses, itself first, that no single schedule shows."""
    return _run(FILE_RULES, lambda rule: rule(files))


def check_schedule(schedule: Schedule) -> tuple[Diagnostic, ...]:
    """Every broken law of the first group that finds an error, what is wrong besides, and the warnings up to there."""
    located = Located(schedule)
    beside = _run(BESIDE, lambda rule: rule(located))
    found = _run((*RULES, *WARNINGS), lambda rule: rule(located))
    found += _beside_outside(schedule, found)
    return tuple(_with_calls(schedule, one) for one in (*beside, *found))


def resolved(decl: ScheduleDecl, resolve: Callable[[ScheduleDecl], Schedule]) -> Schedule:
    """What a text means. Raises CommError with what is wrong with its words; where that is within moves, also with what
    others break by themselves, or beside others of their step.
    """
    try:
        return resolve(decl)
    except CommError as error:
        raise CommError((*error.diagnostics, *_of_rest(decl, error.diagnostics, resolve))) from error


def _of_rest(
    decl: ScheduleDecl, faults: Sequence[Diagnostic], resolve: Callable[[ScheduleDecl], Schedule]
) -> tuple[Diagnostic, ...]:
    left = rest(decl, faults)
    if left is None:
        return ()
    try:
        schedule = resolve(left)
    except CommError as error:
        return (*error.diagnostics, *_of_rest(left, error.diagnostics, resolve))
    located = Located(schedule)
    found = tuple(out_of_bounds(located))
    found += _beside_outside(schedule, found) if found else _run((OF_A_STEP,), lambda rule: rule(located))
    return tuple(_with_calls(schedule, one) for one in found)


def _beside_outside(schedule: Schedule, found: Sequence[Diagnostic]) -> tuple[Diagnostic, ...]:
    """What others break where some statements are out of bounds."""
    outside = {statement_key(one.primary.span) for one in found if one.code == OUT_OF_BOUNDS}
    if not outside:
        return ()
    left = Located(without(schedule, outside))
    return _run((OF_A_STEP,), lambda rule: rule(left))


def check_called(schedule: Schedule) -> tuple[Diagnostic, ...]:
    """The errors of the schedules that one calls, each by itself on as many ranks as it is called for."""
    found: list[Diagnostic] = []
    for call in schedule.called:
        alone = replace(call.schedule, topology=switch(call.schedule.num_ranks))
        broken = [one for one in check_schedule(alone) if one.severity is Severity.ERROR]
        found += check_called(call.schedule) or [_with_calls(schedule, one) for one in broken]
    return tuple(dict.fromkeys(found))


def _with_calls(schedule: Schedule, diagnostic: Diagnostic) -> Diagnostic:
    """What is wrong in a schedule that is called is shown with the place of the call."""
    calls = tuple(Label(span, "called here") for span in schedule.calls_of(diagnostic.primary.span))
    return replace(diagnostic, secondary=(*diagnostic.secondary, *calls)) if calls else diagnostic


def stopped(schedule: Schedule) -> Schedule:
    """Return the schedule as it is lowered: without the row-wise function it ends in, stopping at each product.

    Raises CommError (C592, C593) where no kernel runs one of them, with the calls that lead there.
    """
    try:
        return stopping(ending(schedule)[0]).schedule
    except CommError as error:
        raise CommError(tuple(_with_calls(schedule, one) for one in error.diagnostics)) from error


def check_plan(schedule: Schedule, plan: Plan) -> tuple[Diagnostic, ...]:
    """As `check_schedule`, for the laws on the Plan."""
    if not plan.is_visited:
        acting = Round(actors(plan))
        return _last(_run(PLAN_RULES, lambda rule: rule(schedule, acting)), ((plan, acting),))
    launched = [Round(moves) for moves in segments(plan)]
    found = [one for acting in launched for one in _run(LAUNCH_RULES, partial(_judge, schedule, acting))]
    whole = tuple(found) or _run(VISITED_RULES, lambda rule: rule(schedule, plan))
    return _last(whole, [(plan_of(plan, acting.moves), acting) for acting in launched])


def _last(found: tuple[Diagnostic, ...], launched: Sequence[tuple[Plan, Round]]) -> tuple[Diagnostic, ...]:
    """The role that agrees is held to what those do who act, once that is right."""
    if any(diagnostic.severity is Severity.ERROR for diagnostic in found):
        return found
    every = (_run(AGREEING_RULES, partial(_hold, plan, acting)) for plan, acting in launched)
    return (*found, *(one for some in every for one in some))


def _judge(schedule: Schedule, acting: Round, rule: PlanRule) -> Iterator[Diagnostic]:
    return rule(schedule, acting)


def _hold(plan: Plan, acting: Round, rule: AgreeingRule) -> Iterator[Diagnostic]:
    return rule(plan, acting)


def check_dispatch(dispatch: Dispatch) -> tuple[Diagnostic, ...]:
    """As `check_schedule`, for the laws on a dispatch that hold whatever its tables say."""
    return _run(DISPATCH_RULES, lambda rule: rule(dispatch))


def check_routed(plan: Plan) -> tuple[Diagnostic, ...]:
    """As `check_schedule`, for the laws on a Plan whose phases are proved by region."""
    return _run(ROUTED_RULES, lambda rule: rule(plan))


def check_carried(dispatch: Dispatch, plan: Plan) -> tuple[Diagnostic, ...]:
    """As `check_schedule`, for the laws on a Plan of rows that compare it with its dispatch."""
    return _run(CARRIED_RULES, lambda rule: rule(dispatch, plan))


def check_dispatch_plan(plan: DispatchPlan) -> tuple[Diagnostic, ...]:
    """As `check_schedule`, for the laws on a dispatch plan that need no routes."""
    return _run(DISPATCH_PLAN_RULES, lambda rule: rule(plan))


def check_routing(plan: DispatchPlan, routes: Routing) -> tuple[Diagnostic, ...]:
    """As `check_schedule`, for the laws on the routes of a dispatch plan."""
    return _run(ROUTING_RULES, lambda rule: rule(plan, routes))


def _run(
    groups: tuple[tuple[AnyRule, ...], ...], apply: Callable[[AnyRule], Iterator[Diagnostic]]
) -> tuple[Diagnostic, ...]:
    found: list[Diagnostic] = []
    for group in groups:
        for rule in group:
            found.extend(apply(rule))
        if any(diagnostic.severity is Severity.ERROR for diagnostic in found):
            break
    return tuple(found)
