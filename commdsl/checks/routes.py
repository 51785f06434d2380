"""C620 to C623: the routes of a dispatch plan lose nothing, overlap nowhere, lead back, and bring each query its keys.

Assumes a resolved plan. Does not trust `plans.routing`, whose result it proves by the laws of `route_laws`: no text can
break them, so what is found here is the compiler's fault. One message a law, for the first run that breaks it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.checks import route_laws
from commdsl.checks.plans import name_of, piece_span
from commdsl.checks.route_laws import Offences
from commdsl.ir.plans import DispatchPlan, Routing
from commdsl.ir.routes import NOWHERE, Longs, Routes
from commdsl.language.diagnostics import Diagnostic, Label

HELP = "the fault is commdsl's: please report the file"


def lost_rows(plan: DispatchPlan, routing: Routing) -> Iterator[Diagnostic]:
    """C620: what a rank sends to another is what that one receives: every shard, whole, to each of its destinations."""
    code, what = "C620", "rows are lost on their way"
    for routes in _ways_there(routing):
        for offences in (
            route_laws.nobody(routes),
            route_laws.out_of_bounds(routes, plan.shards),
            route_laws.not_its_shard(routes, plan.shards),
        ):
            if len(offences):
                yield _fault(plan, routes, offences, code, what)
                return
    sent = _pairs(plan.dest, plan.num_ranks)
    got = routing.queries.shard * plan.num_ranks + routing.queries.dest
    if len(sent) == len(got) and not np.count_nonzero(np.sort(sent) != np.sort(got)):
        return
    either, which = np.unique(np.concatenate((sent, got)), return_inverse=True)
    wanted, arrived = (np.bincount(part, minlength=len(either)) for part in (which[: len(sent)], which[len(sent) :]))
    wrong = (wanted != arrived).nonzero()[0]
    if len(wrong):
        shard, rank = divmod(int(either[wrong[0]]), plan.num_ranks)
        text = f"{name_of(plan, shard)} goes to rank {rank} {wanted[wrong[0]]} times, arrives {arrived[wrong[0]]} times"
        yield Diagnostic(code, what, Label(piece_span(plan, shard), text), help=HELP)


def overlapping_rows(plan: DispatchPlan, routing: Routing) -> Iterator[Diagnostic]:
    """C621: what arrives on a rank lies there without gap or overlap, numbered in that order."""
    for routes in _ways_there(routing):
        order = route_laws.landed(routes)
        for offences in (route_laws.not_tiling(routes, order), route_laws.not_placed(routes, order)):
            if len(offences):
                yield _fault(plan, routes, offences, "C621", "rows that arrive overlap or leave a gap")
                return


def not_identity(plan: DispatchPlan, routing: Routing) -> Iterator[Diagnostic]:
    """C622: there and back again is where a row came from, one tensor a copy."""
    ways = [(routing.queries, routing.queries_back)]
    if routing.keys is not None and routing.keys_back is not None:
        ways.append((routing.keys, routing.keys_back))
    for there, home in ways:
        offences = route_laws.not_returned(there, route_laws.landed(there), home, plan.shards)
        if len(offences):
            yield _fault(plan, there, offences, "C622", "rows do not come back to where they were")
            return


def wrong_keys(plan: DispatchPlan, routing: Routing) -> Iterator[Diagnostic]:
    """C623: each query finds the keys its mask lets it see, all of them, in order, and nothing else travels."""
    if plan.mask is None or routing.keys is None or routing.stretches is None:
        return
    what, home, keys = "a query does not find its keys", plan.dest[:, 0], routing.keys
    lengths, stretches = plan.shards.length, routing.stretches
    for offences in (
        route_laws.wrong_context(lengths, plan.document, plan.position, plan.context),
        route_laws.wrong_stretch(stretches, lengths, plan.document, plan.context, home, plan.mask),
    ):
        if len(offences):
            shard, expected, got = _first(offences)
            text = f"{name_of(plan, shard)} should see {expected} keys, sees {got}"
            yield Diagnostic("C623", what, Label(piece_span(plan, shard), text), help=HELP)
            return
    pairs = plan.needs
    asked = route_laws.asked(keys, stretches, pairs, home, plan.context)
    rows, missing = route_laws.missing_keys(keys, pairs, asked)
    if len(missing):
        query, expected, got = _first(missing)
        key = int(pairs.key[rows[0]])
        where = "does not arrive" if got == NOWHERE else f"lies at row {got}"
        text = f"{name_of(plan, query)} needs {name_of(plan, key)} at row {expected}, where it {where}"
        yield Diagnostic("C623", what, Label(piece_span(plan, query), text), help=HELP)
        return
    unasked = route_laws.unasked_keys(asked)
    if len(unasked):
        key = int(keys.shard[unasked[0]])
        text = f"the keys of {name_of(plan, key)} go to rank {keys.dest[unasked[0]]}, where no query needs them"
        yield Diagnostic("C623", what, Label(piece_span(plan, key), text), help=HELP)


def _ways_there(routing: Routing) -> tuple[Routes, ...]:
    return (routing.queries,) if routing.keys is None else (routing.queries, routing.keys)


def _pairs(dest: Longs, num_ranks: int) -> Longs:
    """Each shard with each of its destinations, as one number."""
    is_sent = dest >= 0
    return is_sent.nonzero()[0] * num_ranks + dest[is_sent]


def _fault(plan: DispatchPlan, routes: Routes, offences: Offences, code: str, what: str) -> Diagnostic:
    row, expected, got = _first(offences)
    shard = int(routes.shard[row])
    text = f"{name_of(plan, shard)} on its way to rank {routes.dest[row]}: expected {expected}, got {got}"
    return Diagnostic(code, what, Label(piece_span(plan, shard), text), help=HELP)


def _first(offences: Offences) -> tuple[int, int, int]:
    return int(offences.row[0]), int(offences.expected[0]), int(offences.got[0])
