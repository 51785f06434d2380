"""Turns a compiled dispatch, and a plan or chance, into the outcome of one run: its kernel on host ranks beside the
simulation, there and back with one table after the other.

Assumes the dispatch and the plan were proved. Compares every byte of every result. Without a C++ compiler only the
simulation runs, and the trial says so. Does not print.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from commdsl.build import host_rows
from commdsl.build.host_rows import RowsCall
from commdsl.commands.arguments import UsageError
from commdsl.commands.budget import refuse_large
from commdsl.commands.trial import COPIES, SEED, Found, Settings, Trial, find_dtype, make_array, tried
from commdsl.commands.trial_keys import crossing, trial_keys
from commdsl.compiler import CompiledDispatch
from commdsl.ir import simulate
from commdsl.ir.dispatches import BY_QUERY, ByKey, ByTable, Dispatch, Route
from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import NOWHERE, Longs, Mask, Routes
from commdsl.ir.simulate import Bytes, Copy
from commdsl.machine.dtypes import DType
from commdsl.planner.chance import random_plan, varied
from commdsl.program.runs import Shipment

ROW_BYTES = 64
"""Of a row, unless said."""

MOST_ROWS = 200  # of a rank, where chance draws
DRAWS = 8
MOST_COPIES = 3
HOST_LANES = 2
SUMMED = ("float32", "float16", "bfloat16")
"""The element types in which the kernel adds copies up."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """One table of each route of a dispatch: by route the plan whose rows take it."""

    name: str
    plans: tuple[DispatchPlan, ...]


@dataclass(frozen=True, eq=False)
class RowTrial:
    """A trial, and what was moved: by table what rank r receives from rank s on the way there, in bytes at [r, s]."""

    trial: Trial
    dtype: str
    row_bytes: int
    tables: tuple[str, ...]
    rows: int
    sent: tuple[Longs, ...]


def trial_rows(compiled: CompiledDispatch, plan: DispatchPlan | None, settings: Settings) -> RowTrial:
    """Runs there and back, by the plan, or by one random table after another. What is wrong is in `fault`."""
    dispatch = compiled.dispatch
    dtype = row_type(dispatch, settings)
    width = row_bytes(dtype, settings)
    (first, *_) = dispatch.routes
    if isinstance(first, ByKey) and plan is None:
        keyed = trial_keys(compiled, first, dtype, width, settings)
        crosses = sum(crossing(tensor.stretch, width, dtype) for tensor in dispatch.tensors)
        sent = tuple(counts * crosses for counts in keyed.counts)
        return RowTrial(keyed.trial, settings.dtype, width, keyed.kinds, keyed.rows, sent)
    traffics = drawn(dispatch) if plan is None else (given(dispatch, plan),)
    dice = np.random.default_rng(SEED)
    ways = [ways_of(dispatch, traffic) for traffic in traffics]
    moved = sum(int(way.goes.length.sum()) for some in ways for way in some)
    refuse_large(COPIES * 2 * moved * width, width, dispatch.num_ranks)
    legs = [
        leg
        for traffic, some in zip(traffics, ways, strict=True)
        for leg in _legs(dispatch, traffic, some, dtype, width, dice)
    ]
    packed, lanes = compiled.plan.push.packed, (min(HOST_LANES, compiled.plan.comm.lanes),) * dispatch.num_ranks
    calls = [RowsCall(leg.flows, leg.inputs, packed, lanes, compiled.plan.tile_bytes) for leg in legs]
    made = RowTrial(
        Trial(0, None, "", 0, "", 0.0),
        settings.dtype,
        width,
        tuple(traffic.name for traffic in traffics),
        sum(int(flow.routes.length.sum()) for leg in legs for flow in leg.flows),
        tuple(sum((flow.routes.counts * width for flow in leg.flows), _none(dispatch)) for leg in legs if leg.goes),
    )
    return replace(made, trial=_ran(compiled, legs, calls, dtype, settings))


def _none(dispatch: Dispatch) -> Longs:
    return np.zeros((dispatch.num_ranks, dispatch.num_ranks), np.int64)


def _ran(
    compiled: CompiledDispatch, legs: Sequence[Leg], calls: Sequence[RowsCall], dtype: DType, settings: Settings
) -> Trial:
    summed = dtype.name if any(flow.is_sum for leg in legs for flow in leg.flows) else ""

    def run() -> Found:
        kernel = host_rows.checking(compiled.plan, summed, mode=settings.mode, sanitize=settings.sanitize)
        return *compare(legs, host_rows.run_calls(kernel, calls)), ()

    return tried(run, settings)


def compare(legs: Sequence[Leg], found: host_rows.Results) -> tuple[int, str]:
    """The bytes compared, and the first difference in words."""
    compared = 0
    for leg, tensors in zip(legs, found, strict=True):
        for name, wanted, got in zip(leg.names, leg.expected, tensors, strict=True):
            for rank, (want, have) in enumerate(zip(wanted, got, strict=True)):
                compared += want.size
                if want.shape != have.shape or not np.array_equal(want, have):
                    return compared, difference(name, rank, leg, want, have)
    return compared, ""


def difference(name: str, rank: int, leg: Leg, want: Bytes, have: Bytes) -> str:
    where = f"`{name}` on rank {rank}, {'there' if leg.goes else 'back'} by {leg.table},"
    if want.shape != have.shape:
        return f"{where} has {len(have)} rows, {len(want)} in the simulation"
    rows = np.flatnonzero((want != have).any(axis=1))
    return f"{where} differs from the simulation in {len(rows):,} rows, first in row {int(rows[0]):,}"


# --- what is asked for ------------------------------------------------------------------------------------------------


def row_type(dispatch: Dispatch, settings: Settings) -> DType:
    """The element type; UsageError where copies come back that cannot be added up in it, or another way than by sum."""
    if settings.op not in (None, "sum"):
        raise UsageError(f"`{dispatch.name}` adds copies up: --op {settings.op} is for schedules")
    dtype = find_dtype(settings.dtype, "sum", reduces=False)
    if _adds_up(dispatch) and dtype.name not in SUMMED:
        raise UsageError(f"copies of a row are added up in one of {', '.join(SUMMED)}, not in {dtype.name}")
    return dtype


def _adds_up(dispatch: Dispatch) -> bool:
    back = () if dispatch.back is None else dispatch.back.names
    return any(dispatch.routes[tensor.route].many for tensor in dispatch.tensors if tensor.name in back)


def row_bytes(dtype: DType, settings: Settings) -> int:
    size = ROW_BYTES if settings.bytes is None else settings.bytes
    if size <= 0 or size % 2 or size % dtype.size:
        raise UsageError(f"--bytes of a row: an even number of whole elements of {dtype.name}, got {size}")
    return size


def misfit(dispatch: Dispatch, plan: DispatchPlan) -> str:
    """Why the plan is no table of the dispatch; "" if it is."""
    if plan.num_ranks != dispatch.num_ranks:
        return f"the plan is for {plan.num_ranks} ranks, not for {dispatch.num_ranks}"
    several = bool(((plan.dest != NOWHERE).sum(axis=1) > 1).any())
    for route in dispatch.routes:
        match route:
            case ByKey():
                return "it goes by keys, and a plan has none"
            case ByTable(name=name, order=order) if order == BY_QUERY and plan.mask is None:
                return f"`{name}` sends keys to queries, and the plan is of rows only"
            case ByTable(name=name, many=False) if several:
                return f"`{name}` has one rank a shard, and the plan sends some to several"
            case _:
                pass
    return ""


def given(dispatch: Dispatch, plan: DispatchPlan) -> Traffic:
    """All routes by one plan. Raises UsageError where it is no table of the dispatch."""
    why = misfit(dispatch, plan)
    if why:
        raise UsageError(f"`{dispatch.name}` cannot run by `{plan.name}`: {why}")
    return Traffic(f"`{plan.name}`", (plan,) * len(dispatch.routes))


def drawn(dispatch: Dispatch) -> tuple[Traffic, ...]:
    """Random tables of every kind. Routes are independent, but for keys, which follow the queries."""
    keys = any(route.order == BY_QUERY for route in dispatch.routes)
    found: list[Traffic] = []
    for number, draw in enumerate(varied(dispatch.num_ranks, MOST_ROWS, DRAWS)):
        base = random_plan(replace(draw, mask=draw.mask or (Mask.FULL if keys else None)), SEED + number)
        dice = np.random.default_rng(SEED + number)
        plans = tuple(
            base if route.order == BY_QUERY or (keys and not route.many) else _anywhere(base, route, dice)
            for route in dispatch.routes
        )
        found.append(Traffic(f"random table {number}", plans))
    return tuple(found)


def _anywhere(base: DispatchPlan, route: Route, dice: np.random.Generator) -> DispatchPlan:
    """The base's shards on a way of their own: to any ranks, to one of them twice, or to none."""
    dest = dice.integers(0, base.num_ranks, (base.shards.num, MOST_COPIES if route.many else 1))
    dest[dice.random(dest.shape) < 0.3] = NOWHERE
    return replace(base, mask=None, dest=dest)


# --- what goes and comes back -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Leg:
    """One call: the way there or back of all tensors by one table, and what the simulation says it leaves."""

    table: str
    goes: bool
    names: tuple[str, ...]
    flows: tuple[Shipment, ...]
    inputs: list[list[Bytes]]  # by tensor, rank
    expected: list[list[Bytes]]


def ways_of(dispatch: Dispatch, traffic: Traffic) -> list[Way]:
    """By tensor."""
    return [_way(dispatch.routes[tensor.route], traffic.plans[tensor.route]) for tensor in dispatch.tensors]


def _legs(
    dispatch: Dispatch, traffic: Traffic, ways: list[Way], dtype: DType, width: int, dice: np.random.Generator
) -> Iterator[Leg]:
    """The way there; then the way back, of other rows, so that what is added up are different numbers."""
    names = tuple(tensor.name for tensor in dispatch.tensors)
    rows = traffic.plans[0].shards.rows
    flows = tuple(Shipment(way.goes, way.goes.counts.sum(axis=1), width) for way in ways)
    inputs = [_random(dice, dtype, rows, width) for _ in ways]
    expected = [simulate.there(way.copies, given) for way, given in zip(ways, inputs, strict=True)]
    yield Leg(traffic.name, True, names, flows, inputs, expected)
    if dispatch.back is None:
        return
    returning = [name in dispatch.back.names for name in names]
    back = tuple(
        Shipment(way.returns, rows, width, is_sum=way.is_sum)
        if comes
        else Shipment(_nothing(way.returns), 0 * rows, width)
        for way, comes in zip(ways, returning, strict=True)
    )
    given = [_random(dice, dtype, flow.rows, width) for flow in flows]
    wanted = [
        _home(way, arrays, rows, dtype) if comes else [np.zeros((0, width), np.uint8) for _ in rows]
        for way, arrays, comes in zip(ways, given, returning, strict=True)
    ]
    yield Leg(traffic.name, False, names, back, given, wanted)


@dataclass(frozen=True, eq=False)
class Way:
    """How one route goes and returns: for the kernel, and for the simulation."""

    goes: Routes
    returns: Routes
    is_sum: bool
    copies: list[Copy]


def _way(route: Route, plan: DispatchPlan) -> Way:
    made = routing(plan)
    if route.order == BY_QUERY:
        assert made.keys is not None
        assert made.keys_back is not None
        return Way(made.keys, made.keys_back, True, simulate.by_query(plan))
    return Way(made.queries, made.queries_back, route.many, simulate.by_source(plan))


def _nothing(routes: Routes) -> Routes:
    """A way that no row takes."""
    none = np.zeros(0, np.int64)
    return Routes(routes.num_ranks, none, none, none, none, none, none, none, none)


def _home(way: Way, given: list[Bytes], rows: Longs, dtype: DType) -> list[Bytes]:
    if not way.is_sum:
        return simulate.back(way.copies, given, rows.tolist(), None, None)

    def widen(part: Bytes) -> simulate.Floats:
        return dtype.to_float32(np.ascontiguousarray(part).view(dtype.storage))

    def narrow(total: simulate.Floats) -> Bytes:
        return np.ascontiguousarray(dtype.from_float32(total)).view(np.uint8)

    return simulate.back(way.copies, given, rows.tolist(), widen, narrow)


def _random(dice: np.random.Generator, dtype: DType, rows: Longs, width: int) -> list[Bytes]:
    """Rows of random elements for every rank."""
    arrays = [make_array(dice, dtype, int(count) * width // dtype.size) for count in rows]
    return [np.ascontiguousarray(one).view(np.uint8).reshape(-1, width) for one in arrays]
