"""What legal phases of rows that go by keys are, and of rows that come back: what their bodies take for granted.

Assumes nothing. Raises InternalError at the first law broken. Does not say what all routed phases have to be:
`verify_calls` does.
"""

from __future__ import annotations

from commdsl.ir.dispatches import MOST_ALIGNED, MOST_KEYS, STRETCHES, Often
from commdsl.program.arriving import beside, scales
from commdsl.program.legal import law as _law
from commdsl.program.memory import Home, Rows, Words
from commdsl.program.phases import (
    AddUp,
    Count,
    Each,
    FillByKey,
    FinishBack,
    Forward,
    Meet,
    PushAgain,
    PushBack,
    PushByKey,
    Pushing,
    Routed,
    Tell,
)
from commdsl.program.plan import Plan


def verify_keys(plan: Plan) -> None:
    """Raises InternalError unless keys, rows and what is told of them fit each other."""
    routed = [phase for role in plan.roles if not role.is_caller for phase in role.routed]
    phases = [phase for phase in routed if phase.is_keyed]
    for phase in phases:
        if isinstance(phase, Count | PushAgain | FinishBack):
            _positions(plan, phase.positions)
    _law(not phases or plan.halves is not None, "nothing behind the push of rows waits for them to come")
    match phases:
        case []:
            return
        case [PushByKey() as push, *_] | [_, PushByKey() as push, *_]:
            before = routed[: routed.index(push)]
            counted = [
                type(phase)
                for phase in before
                if isinstance(phase, Count) or (isinstance(phase, Tell | Meet) and phase.what.name == "addresses")
            ]
            _law(counted == [Count, Tell, Meet], "rows go by keys that were not counted, told and met, in this order")
            (count,) = (phase for phase in phases if isinstance(phase, Count))
            fills = [phase for phase in phases if isinstance(phase, FillByKey)]
            forwards = [phase for phase in phases if isinstance(phase, Forward)]
            _law(len(phases) == 2 + len(forwards) + len(fills), f"rows go by keys in {len(phases)} phases")
            names = [rows.name for rows in push.to]
            told = ("lanes", "room", *names, *(f"{push.keys.name} {key}" for key in range(len(count.positions))))
            _there(count, push)
            _crosses(plan, push, forwards, push.to)
            _told(routed, told, push)
            at = {rows.name: rows for rows in push.to[len(push.rows) :]}
            _filled(push, fills, push.rows, at["origins"], at.get("mates"))
        case [PushAgain() as push, *rest] if all(isinstance(phase, Forward | FillByKey) for phase in rest):
            _again(push)
            _crosses(plan, push, [phase for phase in rest if isinstance(phase, Forward)], (push.to,))
            _told(routed, ("lanes", "room", push.to.name), push)
            found = [phase for phase in rest if isinstance(phase, FillByKey)]
            _filled(push, found, (push.to,), push.origins, Rows("mates", Home.GIVEN))
        case [PushBack() as push, *sums, FinishBack() as finish] if all(isinstance(one, AddUp) for one in sums):
            _back(push, finish)
            _added_up(plan, push, [one for one in sums if isinstance(one, AddUp)], finish)
            _told(routed, ("lanes",), push)
            across = [phase for phase in routed if isinstance(phase, Tell) and phase.what.name == "across"]
            in_order = all(routed.index(one) < routed.index(tell) for one in sums for tell in across)
            _law(in_order, "what crosses is told before it does")
        case _:
            _law(False, "rows come back by one phase, and are summed by another behind it")


def _positions(plan: Plan, positions: tuple[int, ...]) -> None:
    """Keys have positions, each its own, equally many a rank, and on a rank in their order."""
    keys = len(positions)
    _law(0 < keys <= MOST_KEYS, f"there are {keys} keys, expected 1 to {MOST_KEYS}")
    _law(keys % plan.num_ranks == 0, f"{keys} keys on {plan.num_ranks} ranks are not equally many")
    _law(sorted(positions) == list(range(keys)), "two keys have one position")
    key_at = [key for _, key in sorted(zip(positions, range(keys), strict=True))]
    share = keys // plan.num_ranks
    ordered = all(key_at[at] < key_at[at + 1] for at in range(keys - 1) if (at + 1) % share)
    _law(ordered, "the keys of a rank are not in their order")


def _there(count: Count, push: PushByKey) -> None:
    names = [rows.name for rows in push.given]
    _law(count.keys == push.keys, f"`{count.keys.name}` is counted, and rows go by `{push.keys.name}`")
    given = (push.keys, *push.given, *(() if push.value is None else (push.value,)))
    _given(*given)
    made = (*push.to, push.counts, push.offsets, push.places)
    _law(all(rows.home is Home.RESULT for rows in made), "rows that go by keys are there when they come")
    _law(len(push.stretches) == len(names), "each tensor's rows say in what stretches they travel")
    _law(all(stretch in (0, *STRETCHES) for stretch in push.stretches), "a warp shares out what has one scale")
    wanted = [*names, *scales(names, push.stretches)]
    _law([rows.name for rows in push.rows] == wanted, "each tensor's rows go to their result, and so do scales")
    arrives = beside(None if push.value is None else push.value.name, push.often)
    found = tuple(rows.name for rows in push.to[len(wanted) :])
    _law(found == arrives, f"{', '.join(found) or 'nothing'} arrives beside rows, expected {', '.join(arrives)}")
    _law(1 <= push.aligned <= MOST_ALIGNED, f"rows are aligned to {push.aligned}")
    _distinct(*given)
    _distinct(*made)


def _again(push: PushAgain) -> None:
    given = (push.given, push.keys, push.places, push.origins, push.offsets, push.counts)
    _given(*given)
    _distinct(*given)
    _law(push.to.home is Home.RESULT, "rows that go again are there when they come")
    _law(push.to.name == push.given.name, f"`{push.given.name}` goes again, to `{push.to.name}`")
    _law(1 <= push.aligned <= MOST_ALIGNED, f"rows are aligned to {push.aligned}")


def _crosses(plan: Plan, push: PushByKey | PushAgain, forwards: list[Forward], to: tuple[Rows, ...]) -> None:
    """What crosses once per node waits where it is forwarded, all of it, between nodes that are alike."""
    wanted = int(push.node > 0)
    _law(len(forwards) == wanted, f"{len(forwards)} phases forward rows of nodes of {push.node}, expected {wanted}")
    _law(push.often is not Often.EACH or push.node == 0, f"rows that cross once go {push.often.value}")
    _nodes(plan, push)
    for forward in forwards:
        _law(forward.crossing == push.crossing, "what crosses is what is forwarded")
        _law(forward.to == to, "what is forwarded goes where all rows go")


def _nodes(plan: Plan, push: Pushing) -> None:
    """What crosses once per node waits in the heap, between nodes that are full."""
    _law((push.crossing is None) == (push.node == 0), "rows cross where there are nodes")
    if push.crossing is not None:
        _law(0 < push.node < plan.num_ranks, f"{plan.num_ranks} ranks are more than one node of {push.node}")
        _law(plan.num_ranks % push.node == 0, f"{plan.num_ranks} ranks are no full nodes of {push.node}")
        _law(push.crossing.home is Home.CROSSING, f"`{push.crossing.name}` waits until it is sent on")


def _filled(
    push: PushByKey | PushAgain, fills: list[FillByKey], to: tuple[Rows, ...], origins: Rows, mates: Rows | None
) -> None:
    """What came once is filled once, all of it, by what is known of this call's rows."""
    wanted = int(push.often is Often.ONCE)
    _law(len(fills) == wanted, f"rows that go {push.often.value} are filled by {len(fills)} phases, expected {wanted}")
    for fill in fills:
        _law(fill.to == to, "what came once is what is filled")
        _law(fill.origins == origins and fill.mates == mates, "rows are filled by their own origins and mates")


def _back(push: PushBack, finish: FinishBack) -> None:
    optional = [rows for rows in (push.mates, push.weights, finish.weights) if rows is not None]
    _given(push.given, push.origins, push.offsets, finish.keys, *optional)
    _distinct(push.given, push.origins, push.offsets, finish.keys, *optional)
    _law(push.each is finish.each, f"what comes back is of {push.each.value}, and finished of {finish.each.value}")
    sums = push.each.is_sum
    _law((push.mates is not None) == sums, "a rank adds up the places of a row, and knows which they are")
    _law(push.weights is None or sums, "what is not added up where it is is not weighed there")
    _law(finish.weights is None or push.each is Each.ENTRY, "only rows of keys are weighed where they come back")
    _law(push.to.home is Home.WAITING, f"`{push.to.name}` waits until it is summed")
    _law(finish.waiting == push.to, f"`{push.to.name}` comes back, and `{finish.waiting.name}` is summed")
    _law(finish.to.home is Home.RESULT, f"`{finish.to.name}`, which is the sum, is a result")


def _added_up(plan: Plan, push: PushBack, sums: list[AddUp], finish: FinishBack) -> None:
    """What comes home once per node is added up between, by who is told of how many sums a row is."""
    wanted = int(push.each is Each.NODE)
    _law(len(sums) == wanted, f"{len(sums)} phases add up what comes home of {push.each.value}, expected {wanted}")
    _law((push.node > 0) == (push.each is Each.NODE), f"what comes home of {push.each.value} has nodes of {push.node}")
    _nodes(plan, push)
    _law((push.keys is None) == (push.node == 0), "a row's source tells by its keys how many sums there are")
    for one in sums:
        _law(one.crossing == push.crossing and one.to == push.to, "what crosses is what is added up, to where it waits")
        _law(push.keys == one.keys == finish.keys, "rows are told of, added up and finished by their own keys")


def _given(*rows: Rows) -> None:
    for one in rows:
        _law(one.home is Home.GIVEN, f"`{one.name}` ({one.home.value}) is the caller's to give")


def _distinct(*rows: Rows) -> None:
    _law(len({one.name for one in rows}) == len(rows), f"two of {', '.join(one.name for one in rows)} are one")


def _told(phases: list[Routed], addresses: tuple[str, ...], push: Pushing | None = None) -> None:
    """Words have the values that their bodies write and read."""
    has_rows = push is not None and (push.node > 0 or (isinstance(push, PushBack) and push.each.is_sum))
    wanted = {
        "addresses": (*addresses, *(("rows sent",) if has_rows else ())),
        "sent": ("rows",),
        "across": ("bytes",),
    }
    for phase in phases:
        if isinstance(phase, Tell) and isinstance(phase.what, Words) and phase.what.name in wanted:
            said = phase.what.values
            _law(
                said == wanted[phase.what.name],
                f"{len(said)} words are told of keys, expected {len(wanted[phase.what.name])}: `{phase.what.name}`",
            )
