"""Plans are balanced: every token is in the plan once, no rank does too much, few bytes cross slow links.

Assumes no machine. `balance` is held to a count token by token; the full size (512 ranks, 100,000 documents) is
`benchmarks/planner.py`'s, here are its laws on smaller ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.commands.plan import prove
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Mask, Sharing
from commdsl.language.kinds import LinkScope
from commdsl.machine.topology import Link, Topology, switch
from commdsl.planner import packing
from commdsl.planner.balance import Balance, Widths, balance, imbalance
from commdsl.planner.comm_text import comm_text
from commdsl.planner.documents import CapacityError, Goal, State, balanced
from commdsl.planner.flows import flows
from commdsl.planner.packing import Packing, PackingError, Terms, at_home, pack, packing_of, place, to_plan, whole

WIDTHS = Widths(8, 4, 2)
NODE = Link("nvlink", LinkScope.IN_NODE, 450e9, np.inf, 7e-7)


def nodes(count: int, gpus: int, scope: LinkScope = LinkScope.ACROSS_NODES) -> Topology:
    return Topology("nodes", count, gpus, 132, (NODE, Link("rail", scope, 50e9, np.inf, 4e-6)))


def heavy(count: int, seed: int = 0, most: int = 1 << 17) -> np.ndarray:
    """Lengths with a heavy tail: a few documents do most of the attention."""
    drawn = (np.random.default_rng(seed).pareto(1.1, count) + 1) * 600
    return np.clip(drawn, 16, most).astype(np.int64)


def make(home: Packing, topology: Topology, goal: Goal | None = None, terms: Terms | None = None) -> DispatchPlan:
    found = balanced(home, topology, goal or Goal(), terms or Terms("made"))
    prove(found)
    return found


def same(one: DispatchPlan, other: DispatchPlan) -> bool:
    """Equal in everything but where it stands."""
    arrays = ("document", "position", "context", "dest", "piece")
    facts = ("name", "num_ranks", "mask", "sharing", "copies", "query_capacity", "key_capacity", "pieces")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and all(getattr(one, name) == getattr(other, name) for name in facts)
        and np.array_equal(one.shards.rank, other.shards.rank)
        and np.array_equal(one.shards.length, other.shards.length)
    )


def read_back(plan: DispatchPlan) -> DispatchPlan:
    return compiler.check(compiler.read_text(comm_text(plan, ("a comment",)), "made.comm", Path())).plan


# --- the loads --------------------------------------------------------------------------------------------------------


def token_by_token(plan: DispatchPlan) -> tuple[list[int], set[tuple[int, int, int, int]]]:
    """Pairs of tokens by rank, and (document, key token, its home, rank) for every key that some rank needs."""
    tokens: dict[int, list[tuple[int, int, int]]] = {}  # by document: token, home, destination
    for shard in range(plan.shards.num):
        first, length = int(plan.context[shard]), int(plan.shards.length[shard])
        place = int(plan.shards.rank[shard]), int(plan.dest[shard, 0])
        tokens.setdefault(int(plan.document[shard]), []).extend((first + t, *place) for t in range(length))
    pairs, keys = [0] * plan.num_ranks, set()
    last = {(d, int(c)): int(c + n) for d, c, n in zip(plan.document, plan.context, plan.shards.length, strict=True)}
    ends = {d: sorted(end for (document, _), end in last.items() if document == d) for d in tokens}
    for document, rows in tokens.items():
        for query, _, dest in rows:
            if dest == NOWHERE:
                continue
            needs_until = len(rows) if plan.mask is Mask.FULL else min(end for end in ends[document] if end > query)
            pairs[dest] += len(rows) if plan.mask is Mask.FULL else query + 1
            keys |= {(document, key, home, dest) for key, home, _ in rows if key < needs_until}
    return pairs, keys


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("seed", range(6))
def test_balance_token_by_token(mask: Mask, seed: int) -> None:
    """Attention, rows and bytes are what a count of single tokens gives, also of documents on several ranks."""
    rng = np.random.default_rng(seed)
    home = pack(rng.integers(1, 60, 9), switch(4), 5)
    high = home.begin + home.length
    middle = rng.integers(home.begin, high + 1)
    part = np.tile(np.arange(len(home.rank)), 2)
    low, high = np.concatenate((home.begin, middle)), np.concatenate((middle, high))
    cuts = packing.Cuts(part[low < high], low[low < high], high[low < high], rng.integers(-1, 4, (low < high).sum()))
    plan = to_plan(home, cuts, Terms("random", mask))
    loads = balance(plan, switch(4), WIDTHS)
    pairs, keys = token_by_token(plan)

    assert loads.attention.tolist() == pairs
    assert loads.key_rows.tolist() == [sum(dest == rank for *_, dest in keys) for rank in range(4)]
    crossing = sum(home != dest for _, _, home, dest in keys)
    sent = (plan.dest[:, 0] != NOWHERE) & (plan.dest[:, 0] != plan.shards.rank)
    assert loads.bytes.sum() == 8 * plan.shards.length[sent].sum() + 6 * crossing
    assert sum(link.bytes for link in loads.links) == loads.sent_bytes.sum() == loads.received_bytes.sum()


def test_rows_only_have_no_attention() -> None:
    """Without a mask rows travel, several copies of one, too, and nobody attends to anything."""
    text = "plan rows for 3 ranks { rank 0 { doc 4 -> [1 2]   doc 6 -> none   doc 2 -> 0 } }"
    plan = compiler.check(compiler.read_text(text, "rows.comm", Path())).plan
    loads = balance(plan, switch(3), WIDTHS)

    assert loads.attention.tolist() == [0, 0, 0]
    assert loads.query_rows.tolist() == [2, 4, 4]
    assert loads.links[0].bytes == 64
    assert loads.links[0].port.bytes == 64
    assert loads.seconds == 64 / 450e9


def test_links_are_told_apart() -> None:
    """Bytes are counted by class of link, and what has none is not lost."""
    text = "plan across for 4 ranks { full   rank 0 { doc 1 -> 1   doc 2 -> 2   doc 4 -> 3 } }"
    plan = compiler.check(compiler.read_text(text, "across.comm", Path())).plan
    loads = balance(plan, nodes(2, 2, LinkScope.ACROSS_SAME_GPU), WIDTHS)

    assert [(link.name, link.bytes) for link in loads.links] == [("nvlink", 14), ("rail", 28), (None, 56)]
    assert loads.seconds == np.inf


def test_the_slowest_port_counts() -> None:
    """Rank 1 receives less than rank 0 sends, over a port so slow that it takes longer."""
    text = "plan across for 4 ranks { full   rank 0 { doc 1 -> 1   doc 2 -> 2   doc 4 -> 3 } }"
    plan = compiler.check(compiler.read_text(text, "across.comm", Path())).plan
    slow = replace(switch(4), links=(replace(switch(4).links[0], port_bandwidth=(450e9, 10e9, 450e9, 450e9)),))
    loads = balance(plan, slow, WIDTHS)

    assert (loads.links[0].port.who, loads.links[0].port.bytes) == ("rank 1 receives", 14)
    assert loads.seconds == 14 / 10e9


def test_balance_wants_its_ranks() -> None:
    """A plan is weighed on a machine of its size."""
    with pytest.raises(ValueError, match="is for 1 ranks, `switch` has 2"):
        balance(to_plan(place([[5]]), whole(place([[5]])), Terms("one")), switch(2), WIDTHS)


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_pack(ranks: int) -> None:
    """A packed rank is within two shards of its share of tokens, every document is whole, and no part is too short."""
    lengths = heavy(200)
    home = pack(lengths, switch(ranks), 128)
    rows = np.bincount(home.rank, home.length, ranks)

    assert home.document_length.tolist() == lengths.tolist()
    assert abs(rows - lengths.sum() / ranks).max() <= 2 * 128
    assert (home.length >= np.minimum(128, home.document_length[home.document])).all()
    assert (np.diff(home.rank) >= 0).all()


def test_pack_where_tokens_are_few() -> None:
    """More ranks than shards of the least length leave ranks empty; no document is cut to crumbs."""
    home = pack(np.array([1000]), switch(64), 128)

    assert home.length.min() >= 128
    assert home.document_length.tolist() == [1000]


def test_no_document_spans_unlinked_ranks() -> None:
    """Where only equal GPUs of nodes are linked, a document keeps to its node, and nodes share attention."""
    lengths = heavy(3000, most=1 << 14)
    home = pack(lengths, nodes(4, 8, LinkScope.ACROSS_SAME_GPU), 128)
    node = [set((home.rank[home.document == document] // 8).tolist()) for document in range(home.num_documents)]
    tokens = np.bincount(home.rank // 8, home.length)

    assert {len(found) for found in node} == {1}
    assert tokens.max() / tokens.min() < 1.01
    assert sorted(home.document_length.tolist()) == sorted(lengths.tolist())
    assert all(name.startswith("d") for name in home.names)
    assert [lengths[int(name[1:])] for name in home.names] == home.document_length.tolist()


@pytest.mark.parametrize("wrong", [0, -5])
def test_pack_refuses(wrong: int) -> None:
    """A document has a token at least; the fault says which has none."""
    with pytest.raises(PackingError, match=f"document 1 has {wrong} tokens"):
        pack(np.array([7, wrong]), switch(2), 128)


def test_packing_of_a_plan() -> None:
    """A packing made into a plan and taken from it again is the same."""
    home = pack(heavy(50), switch(6), 128)
    again = packing_of(to_plan(home, whole(home), Terms("stay")))

    assert again.names == home.names
    assert all(np.array_equal(getattr(again, n), getattr(home, n)) for n in ("rank", "document", "begin", "length"))


# --- flows ------------------------------------------------------------------------------------------------------------


def test_flows_are_near_and_few() -> None:
    """Load goes to its own node first, across nodes only what the node has too much, in at most P - 1 flows a class."""
    machine = nodes(2, 4)
    load = np.array([9.0, 1, 1, 1, 8, 0, 0, 0]) * 100
    found = flows(load, 250.0, machine.ways)
    across = sum(flow.amount for flow in found if flow.source // 4 != flow.dest // 4)
    after = load.copy()
    for flow in found:
        after[[flow.source, flow.dest]] += (-flow.amount, flow.amount)

    assert after.max() <= 250 + 1e-9
    assert across == pytest.approx(200)
    assert len(found) <= 7


def test_flows_take_ways_over_several_links() -> None:
    """On a ring load passes from neighbour to neighbour, and every flow has a link."""
    ring = Topology("ring", 1, 6, 132, (Link("hop", LinkScope.PAIRS, np.inf, 50e9, 1e-6, ring_pairs(6)),))
    load = np.array([600.0, 0, 0, 0, 0, 0])
    after = load.copy()
    for flow in flows(load, 100.0, ring.ways):
        assert (flow.dest - flow.source) % 6 in (1, 5)
        after[[flow.source, flow.dest]] += (-flow.amount, flow.amount)

    assert after == pytest.approx(np.full(6, 100.0))


def ring_pairs(count: int) -> np.ndarray:
    here = np.arange(count, dtype=np.int32)
    there = (here + 1) % count
    return np.concatenate((np.stack((here, there), 1), np.stack((there, here), 1)))


# --- plans ------------------------------------------------------------------------------------------------------------

MACHINES = [switch(16), nodes(4, 4), nodes(2, 8)]


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: f"{machine.num_nodes}x{machine.gpus_per_node}")
@pytest.mark.parametrize("seed", range(3))
def test_balanced(mask: Mask, machine: Topology, seed: int) -> None:
    """No rank does more than the tolerance allows, nothing is cut too short, and every document is still whole."""
    home = pack(heavy(600, seed), machine, 128)
    plan = make(home, machine, terms=Terms("made", mask))
    before, after = (balance(one, machine, Widths()) for one in (at_home(plan), plan))
    whole_documents = np.bincount(plan.document, plan.shards.length)

    assert imbalance(before.attention) > 0.5
    assert imbalance(after.attention) <= 0.02
    assert after.attention.sum() == before.attention.sum()
    assert whole_documents.tolist() == home.document_length.tolist()
    assert (plan.shards.length >= np.minimum(128, home.document_length[plan.document])).all()


@pytest.mark.parametrize("tolerance", [0.01, 0.05, 0.2])
def test_tolerance_is_kept(tolerance: float) -> None:
    """The tolerance holds whatever it is, and a larger one moves fewer bytes."""
    home = pack(heavy(2000), switch(32), 128)
    moved = []
    for share in (tolerance, 4 * tolerance):
        loads = balance(make(home, switch(32), Goal(tolerance=share)), switch(32), Widths())
        assert imbalance(loads.attention) <= share
        moved.append(loads.bytes.sum())

    assert moved[1] < moved[0]


def test_512_ranks() -> None:
    """512 ranks with a tenth of the documents of the full size are even within 5 %, and quickly so."""
    machine = nodes(64, 8)
    plan = make(pack(heavy(10_000, most=1 << 20), machine, 128), machine)
    loads = balance(plan, machine, Widths())

    assert imbalance(balance(at_home(plan), machine, Widths()).attention) > 5
    assert imbalance(loads.attention) < 0.05
    assert int((plan.dest[:, 0] != plan.shards.rank).sum()) < 3 * 512


def test_what_is_even_stays() -> None:
    """Documents that are balanced where they are do not move."""
    home = place([[4096, 2048]] * 8)

    assert np.array_equal(make(home, switch(8)).dest[:, 0], home.rank)


def test_near_ranks_first() -> None:
    """What the ranks of a node can do among themselves does not cross nodes."""
    home = place([[32768], [64], [64], [64], [32768], [64], [64], [64]])
    loads = balance(make(home, nodes(2, 4)), nodes(2, 4), Widths())

    assert imbalance(loads.attention) <= 0.02
    assert [link.name for link in loads.links] == ["nvlink"]


def test_cheaper_than_equal_shards() -> None:
    """Fewer bytes than every long document in equal shards over all ranks, first and last together, and as even."""
    lengths = [65536, 49152, 32768, 16384, 8192, 8192, 4096, 4096]
    home = place([[length] for length in lengths])
    ours = balance(make(home, switch(8)), switch(8), Widths())
    parts, runs = np.arange(8), np.arange(16)
    low = np.array([length * run // 16 for length in lengths for run in runs])
    high = np.array([length * (run + 1) // 16 for length in lengths for run in runs])
    dest = np.array([min(run, 15 - run) for _ in parts for run in runs])
    zigzag = balance(to_plan(home, packing.Cuts(np.repeat(parts, 16), low, high, dest), Terms("zigzag")), switch(8),
                     Widths())  # fmt: skip

    assert imbalance(zigzag.attention) < 0.02
    assert imbalance(ours.attention) < 0.02
    assert ours.bytes.sum() < zigzag.bytes.sum() / 2


def test_only_links_are_used() -> None:
    """On a machine that does not link all ranks, nothing travels without a link, unless relays are allowed."""
    machine = nodes(4, 4, LinkScope.ACROSS_SAME_GPU)
    lengths = heavy(400)
    loads = balance(make(pack(lengths, machine, 128), machine), machine, Widths())
    relayed_plan = make(pack(lengths, machine, 128, relay=True), machine, Goal(relay=True))
    relayed = balance(relayed_plan, machine, Widths())

    assert None not in {link.name for link in loads.links}
    assert imbalance(relayed.attention) <= 0.02
    assert None in {link.name for link in relayed.links}


def test_capacities_hold() -> None:
    """Capacities bound what a rank receives and stand in the text; if they cannot hold, the fault names the rank."""
    home = pack(heavy(300), switch(8), 128)
    free = balance(make(home, switch(8)), switch(8), Widths())
    queries, keys = int(free.query_rows.max() * 0.95), int(free.key_rows.max() * 0.95)
    tight = make(home, switch(8), terms=Terms("tight", Mask.CAUSAL, queries, keys))
    loads = balance(tight, switch(8), Widths())

    assert loads.query_rows.max() <= queries
    assert loads.key_rows.max() <= keys
    assert same(read_back(tight), tight)
    with pytest.raises(CapacityError, match=r"rank \d+ would receive \d+ rows of queries, may receive 100"):
        make(home, switch(8), terms=Terms("tighter", Mask.CAUSAL, 100, None))


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("seed", range(6))
def test_the_planner_keeps_its_books(mask: Mask, seed: int) -> None:
    """Attention and rows of every rank, as the planner counts them while it moves runs, are those of its plan."""
    rng = np.random.default_rng(seed)
    home = pack(rng.integers(1, 3000, 40), switch(5), 16)
    terms = Terms("counted", mask)
    state = State(home, switch(5).ways, Goal(tolerance=0.01, shortest=16), terms)
    turns = sum(state.turn(0.5) for _ in range(3))
    loads = balance(to_plan(home, state.cuts(), terms), switch(5), Widths())

    assert turns
    assert state.load.tolist() == loads.attention.tolist()
    assert state.queries.tolist() == loads.query_rows.tolist()
    assert state.keys.tolist() == loads.key_rows.tolist()


def test_wrong_machine() -> None:
    """Documents on four ranks are not planned for eight."""
    with pytest.raises(ValueError, match="on 4 ranks, `switch` has 8"):
        make(place([[5]] * 4), switch(8))


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [*MACHINES, nodes(2, 4, LinkScope.ACROSS_SAME_GPU)], ids=lambda m: m.num_ranks)
@pytest.mark.parametrize("mask", list(Mask))
def test_text_is_read_back(machine: Topology, mask: Mask) -> None:
    """A plan's text is proved and means the same plan, and is formatted as `commdsl fmt` would."""
    from commdsl.language.format import format_file
    from commdsl.language.parser import parse
    from commdsl.language.source import Source

    plan = make(pack(heavy(120, 5), machine, 128), machine, terms=Terms("made", mask))
    text = comm_text(plan, ("why",))

    assert same(read_back(plan), plan)
    assert format_file(parse(Source("made.comm", text))) == text


@pytest.mark.parametrize(
    "body",
    [
        "rank 0 { doc 16384 as 8 shards -> 0 1 2 3 3 2 1 0 }   rank 3 { repeat 8 { doc 2048 -> 3 } }",
        "causal   rank 1 { doc a 5 -> 1   doc 7 as 3 0 4 -> 0 }   rank 2 { doc a 9 as 4 5 -> 2 none   doc 0 -> 3 }",
        "full   send once per rank   copies 4   capacity 99 queries   capacity 999 keys   rank 3 { doc 9 -> 0 }",
        "copies 3   rank 0 { doc 4 -> [1 2 2]   doc 5 -> none   doc 6 as 3 3 -> 1 [0 3] }",
        "causal",
    ],
)
def test_any_plan_is_written(body: str) -> None:
    """The text of any plan means that plan: copies, unsent shards, empty shards and ranks, continued documents."""
    plan = compiler.check(compiler.read_text(f"plan p for 4 ranks {{ {body} }}", "p.comm", Path())).plan

    assert same(read_back(plan), plan)


def test_a_plan_is_planned_again() -> None:
    """A plan that is balanced stays, and every document of a plan that is not is at home before it moves."""
    home = pack(heavy(300), switch(8), 128)
    plan = make(home, switch(8))
    again = make(packing_of(plan), switch(8))

    assert same(again, plan)
    assert same(read_back(again), plan)


def loads_of(plan: DispatchPlan) -> Balance:
    return balance(plan, switch(plan.num_ranks), Widths())


def test_sharing_counts() -> None:
    """Sent once per query, keys are received as often as query shards there need them; attention is the same."""
    plan = make(pack(heavy(60), switch(4), 128), switch(4))
    often = loads_of(replace(plan, sharing=Sharing.QUERY))

    assert (often.attention == loads_of(plan).attention).all()
    assert (often.key_rows >= loads_of(plan).key_rows).all()
    assert often.key_rows.sum() > loads_of(plan).key_rows.sum()


def test_sharing_is_a_term() -> None:
    """A plan sends keys as its terms say; a capacity for keys is for those that are sent once per rank."""
    home, often = pack(heavy(60), switch(4), 128), Terms("often", sharing=Sharing.QUERY)

    assert make(home, switch(4), terms=often).sharing is Sharing.QUERY
    assert make(home, switch(4)).sharing is Sharing.RANK
    with pytest.raises(ValueError, match="sent once per rank"):
        make(home, switch(4), terms=replace(often, key_capacity=10**6))
