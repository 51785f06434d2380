"""Rows that go once per node, on host ranks, bit for bit against the simulation; what crosses; what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from host_keys import going, kernel
from test_float8 import as_given, numbers
from test_keys import KINDS, instead, is_refused, moved, rank_of, without
from test_keys_back import ELEMENTS, Case, Element, calls_of, cases
from test_keys_there import agains, call_of, check_again, differs, judge, reused, wanted

from commdsl.build.host_keys import Array, KeysCall, again, back, bytes_across, there
from commdsl.build.host_ranks import DataRaceError, RowsError, Running
from commdsl.checks import check_carried, check_routed
from commdsl.commands.dump_plans import plan_text
from commdsl.commands.dumps import dispatch_lines
from commdsl.commands.trial_keys import travelled
from commdsl.compiler import CheckedDispatch
from commdsl.ep import simulate
from commdsl.ir.dispatches import ByKey, Often
from commdsl.language.diagnostics import InternalError
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.proof.regions import order_of_regions
from commdsl.program.timeouts import NO_ROOM, CommTimeout
from commdsl.program.verify import verify

FORMS = ("once per node", "once per node by index")


def per_rank(often: str) -> str:
    """The form that has the same results."""
    return often.replace("node", "rank")


def across(of: CheckedDispatch, call: KeysCall) -> np.ndarray:
    """(ranks, ranks): at [r, s] the bytes of the rows of s that have a key in the node of r, if that is another and r
    has the number of s in its node: each row once.
    """
    ranks, node, rank_of_key = of.plan.num_ranks, of.plan.push_by_key.node, np.append(rank_of(of), -1)
    width = sum(int(np.prod(tensor[0].shape[1:])) * tensor[0].itemsize for tensor in call.tensors)
    found = np.zeros((ranks, ranks), np.int64)
    for source, keys in enumerate(call.keys):
        nodes = [set((rank_of_key[row[row < len(rank_of_key) - 1]] // node).tolist()) for row in keys]
        for rail in range(source % node, ranks, node):
            if rail != source:
                found[rail, source] = width * sum(rail // node in one for one in nodes)
    return found


# --- right ------------------------------------------------------------------------------------------------------------


CASES = [
    (4, 2, FORMS[0], 16, 8, 1, (32, 6, 2)),
    (6, 2, FORMS[1], 4, 5, 2, (48, 30)),
    (8, 4, FORMS[0], 3, 32, 1, (64,)),
    (4, 1, FORMS[0], 1, 8, 3, (10, 16)),
]
"""Ranks, ranks of a node, form, alignment, keys a row, keys of a rank, widths."""


@pytest.mark.parametrize(
    ("ranks", "node", "often", "aligned", "a_row", "share", "widths"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{case[2][9:]}-{case[4]}" for case in CASES],
)
def test_against_simulation(
    ranks: int, node: int, often: str, aligned: int, a_row: int, share: int, widths: tuple[int, ...]
) -> None:
    """Bit for bit what goes once per rank has, call after call without a join in between, as one launch, and as two on
    some ranks.
    """
    of = going(ranks, share * ranks, often, aligned, tensors=len(widths), node=node)
    kinds = KINDS if ranks < 8 else KINDS[:4]
    for seed, halved in enumerate(((), range(0, ranks, 2))):
        calls = [
            call_of(kind, ranks, share * ranks, a_row, 9 * seed + at, aligned, widths) for at, kind in enumerate(kinds)
        ]
        running = Running(timeout=20.0, max_delay=0.0005 * seed, seed=seed, halved=frozenset(halved))
        judge(of, calls, per_rank(often), aligned, running)


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "node"), [(4, 2), (6, 3), (6, 2), (8, 4)])
@pytest.mark.parametrize("share", [1, 3, 32])
@pytest.mark.parametrize("often", FORMS, ids=["filled", "by index"])
def test_many(ranks: int, node: int, share: int, often: str) -> None:
    """As above, with few and many keys on a rank and in a row, near and far."""
    aligned = (1, 16, 128)[(ranks + share) % 3]
    for transport in Transport:
        of = going(ranks, ranks * share, often, aligned, node=node, transport=transport)
        nodes = tuple(rank // node for rank in range(ranks)) if transport is Transport.NVSHMEM else ()
        for seed, a_row in enumerate((1, 8, 32)):
            calls = [
                call_of(kind, ranks, ranks * share, a_row, 50 * seed + at, aligned) for at, kind in enumerate(KINDS[:3])
            ]
            running = Running(timeout=60.0, max_delay=0.0003 * seed, seed=seed, nodes=nodes)
            judge(of, calls, per_rank(often), aligned, running)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1)], ids=["rails", "all", "across"])
def test_far(nodes: tuple[int, ...]) -> None:
    """The same where puts are as early and as late as they may be: to other nodes, to all ranks, or to those of the
    node, as which rank is far is the machine's to say.
    """
    of = going(4, 8, FORMS[0], 4, node=2, transport=Transport.NVSHMEM)
    calls = [call_of(kind, 4, 8, 5, at, 4) for at, kind in enumerate(KINDS)]
    for halved in ((), range(4)):
        judge(of, calls, per_rank(FORMS[0]), 4, Running(timeout=20.0, nodes=nodes, halved=frozenset(halved)))


@pytest.mark.parametrize("nodes", [(), (0, 0, 1, 1)], ids=["near", "far"])
@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_float8(nodes: tuple[int, ...], element: str) -> None:
    """Rows are cast once, where they come from; float8 and scales cross, and are forwarded as they are."""
    transport = Transport.NVSHMEM if nodes else Transport.PEER
    of = going(4, 8, FORMS[0], 4, node=2, cast="as float8 by 32", transport=transport)
    dice, calls, given = np.random.default_rng(3), [], []
    for at, kind in enumerate(KINDS):
        call = call_of(kind, 4, 8, 6, at, 4)
        cast = [as_given(numbers(dice, len(keys), 100), element) for keys in call.keys]
        codes = [simulate.quantised(value, 32) for _, value in cast]
        calls.append(replace(call, tensors=([bits for bits, _ in cast], call.tensors[1])))
        given.append(([one for one, _ in codes], call.tensors[1], [scale for _, scale in codes]))
    found = there(kernel(of.plan), calls, Running(timeout=20.0, nodes=nodes))
    for mine, call, tensors in zip(found, calls, given, strict=True):
        theirs = simulate.dispatch(call.keys, tensors, rank_of(of), call.values, 4, 2)
        assert not any(differs(*pair, "once per rank", call) for pair in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("often", FORMS, ids=["filled", "by index"])
def test_again(often: str) -> None:
    """Other rows go to the same places, once per node as well; far ranks too, as one launch and as two."""
    for transport in Transport:
        of = going(4, 8, often, 4, node=2, transport=transport)
        calls = [call_of(kind, 4, 8, 5, at, 4) for at, kind in enumerate(KINDS)]
        ways = agains(of, calls, 4)
        nodes = (0, 0, 1, 1) if transport is Transport.NVSHMEM else ()
        for halved in ((), range(4)):
            running = Running(timeout=20.0, max_delay=0.0003, nodes=nodes, halved=frozenset(halved))
            check_again(again(kernel(of.again), ways, running), of, ways, 4)


@pytest.mark.parametrize("often", FORMS, ids=["filled", "by index"])
def test_silent(often: str) -> None:
    """ThreadSanitizer sees no race, though results of many calls lie in one place; and the last are right."""
    of, calls = going(4, 8, often, 4, node=2), reused(4, 5)
    found = there(kernel(of.plan, sanitize=True), calls, Running(timeout=20.0, max_delay=0.003))
    for mine, theirs in zip(found[-1], wanted(of, calls[-1], 4), strict=True):
        assert not differs(mine, theirs, per_rank(often), calls[-1])
    ways = agains(of, calls, 4)
    check_again(
        again(kernel(of.again, sanitize=True), ways, Running(timeout=20.0, max_delay=0.003))[-1:], of, ways[-1:], 4
    )


@pytest.mark.parametrize("nodes", [(), (0, 0, 1, 1)], ids=["near", "far"])
@pytest.mark.parametrize("kind", ["random", "all to one key", "most are dropped"])
def test_bytes_across(kind: str, nodes: tuple[int, ...]) -> None:
    """What crosses is counted where it is sent: each row once for each other node with a key of it, to its rail."""
    of = going(4, 12, FORMS[0], node=2, transport=Transport.NVSHMEM if nodes else Transport.PEER)
    call = call_of(kind, 4, 12, 8, 7, widths=(96, 4))
    expected = across(of, call)

    assert np.array_equal(bytes_across(kernel(of.plan), call, Running(timeout=20.0, nodes=nodes)), expected)
    assert expected.sum() > 0


# --- back -------------------------------------------------------------------------------------------------------------


BACK = "back y by sum(gate[T, K]) once per node", "back y by sum once per node"


def at_home(case: Case, element: Element, node: int, weighed: bool) -> list[Array]:
    """What comes home: rounded by rank, by node and at home."""
    weights = case.weights if weighed else None
    found = simulate.combine(
        case.rows, case.received, case.call.keys, weights, once=True, node=node, rounded=element.rounded
    )
    return [element.stored(element.rounded(one)) for one in found]


@pytest.mark.parametrize(
    ("ranks", "node", "dtype", "way", "a_row"),
    [
        (4, 2, "float32", BACK[0], 8),
        (4, 2, "bfloat16", BACK[0], 5),
        (6, 2, "float16", BACK[1], 32),
        (8, 4, "bfloat16", BACK[0], 8),
        (3, 1, "float32", BACK[1], 3),
    ],
)
def test_back(ranks: int, node: int, dtype: str, way: str, a_row: int) -> None:
    """Sums of ranks, then of nodes, then at home, bit for bit as stated; as one launch, and as two on some ranks."""
    of, element = going(ranks, 2 * ranks, FORMS[0], node=node, back=way), ELEMENTS[dtype]
    made = kernel(of.back, dtype)
    for seed, halved in enumerate(((), range(0, ranks, 2))):
        drawn = cases(ranks, 2 * ranks, element, seed, a_row, node)
        running = Running(timeout=20.0, max_delay=0.0005 * seed, seed=seed, halved=frozenset(halved))
        found = back(made, calls_of("ranks", drawn, element), running)
        for mine, case in zip(found, drawn, strict=True):
            for one, other in zip(mine, at_home(case, element, node, "gate" in way), strict=True):
                assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stated(dtype: str) -> None:
    """What the simulation says of nodes, beside sums of which none is rounded: three roundings are all that differ."""
    element, node, ranks = ELEMENTS[dtype], 2, 4
    for case in cases(ranks, 8, element, 1, 8, node):
        for source, found in enumerate(
            simulate.combine(
                case.rows, case.received, case.call.keys, case.weights, once=True, node=node, rounded=element.rounded
            )
        ):
            keys, places = case.call.keys[source], case.received[source].places
            exact, size = (np.zeros(found.shape) for _ in range(2))
            for row, which in np.argwhere(places >= 0):
                came = case.rows[keys[row, which] // 2][places[row, which]].astype(np.float64)
                exact[row] += came * case.weights[source][row, which]
                size[row] += np.abs(came * case.weights[source][row, which])
            assert (np.abs(element.rounded(found) - exact) <= (3 * element.unit + 40 * 2.0**-24) * size).all()


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1)], ids=["rails", "all", "across"])
def test_back_far(nodes: tuple[int, ...]) -> None:
    """The same to ranks that are far, whichever they are."""
    of, element = going(4, 8, FORMS[0], node=2, back=BACK[0], transport=Transport.NVSHMEM), ELEMENTS["bfloat16"]
    drawn = cases(4, 8, element, 5, 6, 2)
    for halved in ((), range(4)):
        running = Running(timeout=20.0, nodes=nodes, halved=frozenset(halved))
        found = back(kernel(of.back, "bfloat16"), calls_of("ranks", drawn, element), running)
        for mine, case in zip(found, drawn, strict=True):
            for one, other in zip(mine, at_home(case, element, 2, True), strict=True):
                assert one.tobytes() == other.tobytes()


def test_back_is_silent() -> None:
    """ThreadSanitizer sees no race in many calls one after another."""
    of, element = going(4, 8, FORMS[0], node=2, back=BACK[0]), ELEMENTS["float32"]
    drawn = cases(4, 8, element, 7, 6, 2)
    made = kernel(of.back, "float32", sanitize=True)
    found = back(made, calls_of("ranks", drawn, element), Running(timeout=20.0, max_delay=0.003))
    for one, other in zip(found[-1], at_home(drawn[-1], element, 2, True), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("nodes", [(), (0, 0, 1, 1)], ids=["near", "far"])
def test_bytes_back(nodes: tuple[int, ...]) -> None:
    """One row crosses home for each token and other node that has some of it; the kernel holds what came to that."""
    transport = Transport.NVSHMEM if nodes else Transport.PEER
    of, element = going(4, 8, FORMS[0], node=2, back=BACK[0], transport=transport), ELEMENTS["float32"]
    made = kernel(of.back, "float32")
    drawn = cases(4, 8, element, 3, 8, 2)
    for case, call in zip(drawn, calls_of("ranks", drawn, element), strict=True):
        width = case.rows[0].shape[1] * 4
        there = across(of, replace(case.call, tensors=([np.zeros((1, width), np.uint8)],)))

        assert np.array_equal(bytes_across(made, call, Running(timeout=20.0, nodes=nodes)), there.T)


# --- meant and proved -------------------------------------------------------------------------------------------------


def test_one_node() -> None:
    """On one node nothing crosses: it is what goes once per rank."""
    of, plain = going(4, 8, FORMS[0]), going(4, 8, "once per rank")

    assert of.dispatch.routes == plain.dispatch.routes
    assert of.plan.comm.phases == plain.plan.comm.phases


@pytest.mark.parametrize("often", FORMS, ids=["filled", "by index"])
@pytest.mark.parametrize(("ranks", "node"), [(2, 1), (4, 2)])
def test_proved(ranks: int, node: int, often: str) -> None:
    """Every form is proved, as one launch and as two, and carries what the dispatch says."""
    of = going(ranks, 3 * ranks, often, 8, node=node, back=BACK[0])
    (route,) = of.dispatch.routes

    assert isinstance(route, ByKey)
    assert route.node == node
    for plan in (of.plan, of.again, of.back, of.values):
        assert check_routed(plan) == check_carried(of.dispatch, plan) == ()
        assert not [*order_of_regions(plan)]


def test_shown() -> None:
    """`commdsl show` says how rows go."""
    shown = plan_text(going(4, 8, FORMS[0], node=2).plan)

    assert "once to a node of 2" not in shown.partition("a call")[0]
    assert "to a node of 2 once, and from there to its ranks" in shown
    assert "forward: every lane; reads `crossing` (crossing) of its own rank" in shown
    said = "\n".join(dispatch_lines(going(4, 8, FORMS[0], node=2, back=BACK[1]).dispatch))
    assert "once per rank, and to another node of 2 once" in said
    assert "those of a rank there, then those of a node, one row a node crosses" in said


NODES = going(4, 8, FORMS[0], node=2).plan
(*_, N_PUSH, _, _, N_CROSSED, N_ALL_CROSSED, N_ARRIVED, N_LEARNED, N_FORWARD, _, N_DONE, _, _, _, _, _, _) = (
    NODES.comm.phases
)

MISTAKES = {
    "rows are forwarded before they have come": moved(NODES, N_FORWARD, before=N_ALL_CROSSED),
    "the others do not await the first lane": without(NODES, N_LEARNED),
    "that it knew in the call before will do": instead(NODES, N_LEARNED, calls_back=1),
    "what crossed in the call before will do": instead(NODES, N_ALL_CROSSED, calls_back=1),
    "a lane tells before it pushes": moved(NODES, N_CROSSED, before=N_PUSH),
    "a lane is through before it forwards": moved(NODES, N_DONE, before=N_FORWARD),
}
"""What is wrong, and the Plan with it: a kernel is printed from it."""


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_refused_and_seen(what: str) -> None:
    """The proof refuses it; and where it is run all the same ThreadSanitizer sees a race, or what comes is wrong."""
    plan, of = MISTAKES[what], going(4, 8, FORMS[0], node=2)
    assert is_refused(plan)
    calls = reused(4, 1)
    try:
        found = there(kernel(plan, sanitize=True, checks=False), calls, Running(timeout=2.0, max_delay=0.002))
    except DataRaceError:
        return
    pairs = zip(found[-1], wanted(of, calls[-1], 1), strict=True)
    wrong = [differs(*pair, "once per rank", calls[-1]) for pair in pairs]
    assert any(wrong)


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (without(NODES, N_FORWARD), "0 phases forward rows of nodes of 2, expected 1"),
        (instead(NODES, N_PUSH, node=0), "1 phases forward rows of nodes of 0, expected 0"),
        (instead(NODES, N_PUSH, node=3), "4 ranks are no full nodes of 3"),
        (instead(NODES, N_PUSH, node=4), "4 ranks are more than one node of 4"),
        (instead(NODES, N_PUSH, crossing=None), "rows cross where there are nodes"),
        (instead(NODES, N_PUSH, often=Often.EACH), "arrives beside rows"),
        (instead(NODES, N_FORWARD, to=N_FORWARD.to[:1]), "what is forwarded goes where all rows go"),
    ],
)
def test_not_legal(plan: Plan, law: str) -> None:
    """What a Plan that goes once per node has to be is refused where it is not."""
    with pytest.raises(InternalError, match=law):
        verify(plan)


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_rank_that_stops_is_named(way: str) -> None:
    """All others say which one never came, also those that it sends on for."""
    of, element = going(4, 8, FORMS[0], node=2, back=BACK[0]), ELEMENTS["float32"]
    running, drawn = Running(timeout=0.3, absent=frozenset({3})), cases(4, 8, element, 1, 8, 2)[:1]
    call = replace(drawn[0].call, values=drawn[0].weights)
    made = {
        "there": lambda: there(kernel(of.plan), [call], running),
        "back": lambda: back(kernel(of.back, "float32"), calls_of("ranks", drawn, element), running),
    }
    with pytest.raises(CommTimeout) as raised:
        made[way]()
    assert raised.value.missing == (3,)


def test_no_room() -> None:
    """Where places are more than there is room for, nothing is written behind it, by the source or by who forwards."""
    of, call = going(4, 8, FORMS[0], 4, node=2), call_of("random", 4, 8, 6, 3, 4)
    for room in (0, 7, max(len(one.origins) for one in wanted(of, call, 4)) - 1):
        with pytest.raises(RowsError, match=rf"rows go to rank \d, which has room for {room}") as raised:
            there(kernel(of.plan), [replace(call, room=room)])
        assert raised.value.record.code == NO_ROOM


def test_travelled() -> None:
    """Who hands rows to whom, written out: a row with keys on ranks 0, 2 and 3, one with a key of rank 3 twice."""
    (route,) = going(4, 8, FORMS[0], node=2).dispatch.routes
    assert isinstance(route, ByKey)
    keys = [np.array([[0, 5, 6, 8]], np.int32), np.array([[7, 6, 8, 8]], np.int32), *[np.zeros((0, 4), np.int32)] * 2]

    found = travelled(keys, route, 4)
    assert {pair: int(found[pair]) for pair in zip(*np.nonzero(found), strict=True)} == {
        (0, 0): 1,  # stays
        (2, 0): 1,
        (3, 2): 1,  # sent on
        (3, 1): 1,
    }
    straight = travelled(keys, replace(route, node=0), 4)
    assert straight.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert travelled(keys, replace(route, node=0, often=Often.EACH), 4)[3].tolist() == [1, 2, 0, 0]
