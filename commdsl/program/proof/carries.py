"""C210: a Plan of rows carries each tensor to where its dispatch says, in the memory that the caller is given.

Assumes a Plan that `verify` passed and that is proved to keep its order. Follows which tensor's rows each memory comes
to hold, phase by phase, and by which routing; shares nothing with `lower`. Does not know a table or a key: what these
lead to is the routing's, whose laws are proved on the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.ir.dispatches import Back, ByKey, Dispatch, Often, Put
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.program.memory import Home, Rows, Transport
from commdsl.program.phases import Count, FinishBack, Held, PushAgain, PushByKey, Ways
from commdsl.program.plan import Plan


def carries(dispatch: Dispatch, plan: Plan) -> Iterator[Diagnostic]:
    """The first result that is not what the dispatch says."""
    route = dispatch.routes[0]
    ways = _by_keys(dispatch, plan, route) if isinstance(route, ByKey) else _by_tables(dispatch, plan)
    for name, expected, got in ways:
        if expected != got:
            label = Label(dispatch.span, f"expected {_words(expected)}, got {_words(got)}")
            yield Diagnostic("C210", f"the Plan does not carry `{name}` as the dispatch says", label)
            return


def _by_tables(dispatch: Dispatch, plan: Plan) -> Iterator[tuple[str, Held, Held]]:
    """By tensor: straight to its place unless it is packed, and where rows wait what they are finished to."""
    packed = dispatch.put is Put.PACKED or plan.transport is Transport.NVSHMEM
    push, held = plan.push, _held(plan)
    yield "the tensors", tuple(tensor.name for tensor in dispatch.tensors), tuple(rows.name for rows in push.given)
    for tensor, copied in zip(dispatch.tensors, push.copied, strict=True):
        name = tensor.name
        ways: set[Held] = {(f"rows of {name}", "pushed", "finished")}
        ways |= set() if packed else {(f"rows of {name}", "pushed")}
        yield name, _sorted(ways), _sorted(held.get(Rows(name, Home.RESULT), set()))
        many = dispatch.routes[tensor.route].many
        yield name, (f"a row to {'many' if many else 'one'}",), (f"a row to {'many' if copied else 'one'}",)


def _by_keys(dispatch: Dispatch, plan: Plan, route: ByKey) -> Iterator[tuple[str, Held, Held]]:
    """There each tensor beside where its rows come from; back what was made of them, added up as the dispatch says."""
    order = sorted(range(route.num_keys), key=lambda key: (route.rank_of[key], key))
    places = tuple(str(order.index(key)) for key in range(route.num_keys))
    held = _held(plan)
    for phase in plan.comm.phases:
        match phase:
            case Count() | PushAgain() | FinishBack():
                yield route.key, (route.key, *places), (phase.keys.name, *map(str, phase.positions))
            case PushByKey():
                yield route.key, (route.key,), (phase.keys.name,)
            case _:
                pass
    for name, ways in _brought(dispatch, plan, route):
        yield name, _sorted(ways), _sorted(held.get(Rows(name, Home.RESULT), set()))


def _brought(dispatch: Dispatch, plan: Plan, route: ByKey) -> Iterator[tuple[str, set[Held]]]:
    """By result what its rows are to be: there, there again, back as numbers or as what was made of rows."""
    if plan.name == dispatch.name:
        for tensor in dispatch.tensors:
            cast = _cast(tensor.stretch)
            yield tensor.name, _arrives(tensor.name, f"by key{cast}", route)
            if tensor.stretch:
                yield f"scales of {tensor.name}", _arrives(f"scales of {tensor.name}", f"by key{cast}", route)
        if route.value is not None:
            came = f"values of {route.value}", "beside the rows"
            yield route.value, {came, (*came, *_across(route.node))}
    elif plan.name == f"{dispatch.name}_again":
        yield "rows", _arrives("rows", "again by places, origins, offsets, counts", route)
    elif plan.name == f"{dispatch.name}_values":
        yield "values", {("rows of values", *HOME, "each word")}
    elif dispatch.back is not None:
        yield from _back(dispatch.back, route)


def _arrives(name: str, how: str, route: ByKey) -> set[Held]:
    """A tensor's rows, to places of each key; those that travel once to the first, and from there to the others."""
    came = (f"rows of {name}", f"pushed {how}, {route.often.value}, aligned {route.aligned}")
    ways = {came, (*came, *_across(route.node))}
    return ways | {(*way, "filled by mates at origins") for way in ways if route.often is Often.ONCE}


def _across(node: int) -> Held:
    """What is done besides with rows that go to another node, if there are nodes."""
    return (f"by way of one of {node}", "forwarded") if node else ()


def _cast(stretch: int) -> str:
    return f" as float8 by {stretch}" if stretch else ""


HOME = ("up to offsets", "by origins")


def _back(back: Back, route: ByKey) -> Iterator[tuple[str, set[Held]]]:
    """What comes home: sums of ranks, weighed where they are made, or rows of keys, weighed at home."""
    (name,) = back.names
    times = () if back.weight is None else (f"times {back.weight}",)
    if back.once and route.node:
        sums = f"to one of {route.node}, by {route.key}", f"added up, by {route.key}"
        yield name, {(f"rows of {name}", "added up by mates", *times, *HOME, "each node", *sums)}
    elif back.once:
        yield name, {(f"rows of {name}", "added up by mates", *times, *HOME, "each rank")}
    else:
        yield name, {(f"rows of {name}", *HOME, "each key", *times)}


def _held(plan: Plan) -> Ways:
    """By memory what its rows are when all phases are over."""
    found = Ways(set)
    for phase in plan.comm.routed:
        phase.carry(found)
    return found


def _sorted(ways: set[Held]) -> Held:
    return tuple(", ".join(way) for way in sorted(ways))


def _words(held: Held) -> str:
    return " and ".join(held) or "nothing"
