"""Metadata of random plans against three other opinions: loops by the book, the simulation, and a document's own rows.

The plans have documents that span ranks, ranks that have or receive nothing, shards without rows, queries that stay.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent))
from dispatch_plans import Case, cases  # noqa: E402 - after the check for torch

from commdsl import dispatch  # noqa: E402 - after the check for torch
from commdsl.dispatch import Metadata, MetadataError  # noqa: E402 - after the check for torch
from commdsl.ir.plans import DispatchPlan  # noqa: E402 - after the check for torch
from commdsl.ir.routes import Mask, Sharing, needs  # noqa: E402 - after the check for torch
from commdsl.planner.chance import Draw, random_plan, varied  # noqa: E402 - after the check for torch

HIDDEN = 3


def by_the_book(lengths: list[list[int]], dests: list[Any]) -> tuple[list[Any], list[list[tuple[int, int, int]]]]:
    """Offsets by rank, shard and copy, and (rank, offset, length) of what each rank sends back: cursors moved on."""
    cursor = [0] * len(lengths)
    back: list[list[tuple[int, int, int]]] = [[] for _ in lengths]
    offsets = []
    for rank, row in enumerate(lengths):
        begin, found = 0, []
        for shard, length in enumerate(row):
            here = []
            for copy, dest in enumerate(dests[rank][shard]):
                here.append(cursor[dest] if dest >= 0 else 0)
                if dest >= 0:
                    back[dest].append((rank, copy * sum(row) + begin, length))
                    cursor[dest] += length
            found.append(here)
            begin += length
        offsets.append(found)
    return offsets, back


def tables_of_keys(plan: DispatchPlan) -> dict[str, Any]:
    """The arguments of `compute_metadata_kv` that say what the plan says."""
    shards, pairs = plan.shards, needs(plan.document, plan.position, plan.mask or Mask.CAUSAL)
    ranks, width = plan.num_ranks, int(np.diff(shards.begin).max(initial=0))
    cell = shards.rank * width + shards.local
    copy = np.zeros(len(pairs.key), np.int64)
    for at in range(1, len(copy)):
        copy[at] = copy[at - 1] + 1 if pairs.key[at] == pairs.key[at - 1] else 0
    copies = int(copy.max(initial=0)) + 1
    mapping, position = np.full((ranks * width, copies, 2), -1), np.full((ranks * width, copies), -1)
    mapping[cell[pairs.key], copy] = np.stack([shards.rank[pairs.query], shards.local[pairs.query]], axis=1)
    position[cell[pairs.key], copy] = pairs.position

    def spread(values: Any, fill: int) -> torch.Tensor:
        found = np.full(ranks * width, fill, np.int64)
        found[cell] = values
        return torch.from_numpy(found.reshape(ranks, width))

    asked = np.bincount(pairs.query, minlength=shards.num)
    rows = np.bincount(pairs.query, weights=shards.length[pairs.key], minlength=shards.num)
    home = spread(plan.dest[:, 0], -1)
    return {
        "kv_to_q_mapping": torch.from_numpy(mapping.reshape(ranks, width, copies, 2)),
        "kv_to_q_rank": torch.from_numpy(position.reshape(ranks, width, copies)),
        "kv_context_size": spread(plan.context, 0),
        "q_to_num_kv_seq": spread(asked, 0),
        "q_to_num_kv_token": spread(rows, 0),
        "seq_len": spread(shards.length, 0),
        "num_seqs": torch.from_numpy(np.diff(shards.begin)),
        "q_dispatch": home,
        "q_seq_to_dst": (home[..., None] == torch.arange(ranks)).long(),
        "max_num_local_seqs": width,
    }


def same(one: Metadata, other: Metadata) -> bool:
    """Whether two tables of Metadata say the same, field by field."""
    names = ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens", "seq_recv_mask", "recv_seq_lens", "num_seqs")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.num_total_recv_tokens == other.num_total_recv_tokens and all(
        mine is theirs if mine is None else torch.equal(mine, theirs) for mine, theirs in pairs
    )


def received(metadata: Metadata) -> int:
    return max(metadata.num_total_recv_tokens)


@pytest.mark.parametrize("copies", [None, 1, 3, 5])
def test_by_the_book(copies: int | None) -> None:
    """Vectorised tables are those of cursors moved along, with more copies than ranks and one rank twice, too."""
    dice = np.random.default_rng(copies or 0)
    for _ in range(60):
        ranks, width = int(dice.integers(1, 5)), int(dice.integers(0, 6))
        lengths = dice.integers(0, 6, (ranks, width)) * dice.integers(0, 2, (ranks, 1))
        dests = dice.integers(-1, ranks, (ranks, width) if copies is None else (ranks, width, copies))
        there, home = dispatch.compute_metadata(torch.from_numpy(lengths), torch.from_numpy(dests))
        offsets, back = by_the_book(lengths.tolist(), dests.reshape(ranks, width, copies or 1).tolist())

        assert there.dst_offset.reshape(ranks, width, copies or 1).tolist() == offsets
        for rank in range(ranks):
            one = home.get_slice(rank)
            columns = (one.dst_rank.tolist(), one.dst_offset.tolist(), one.seq_len.tolist())
            assert list(zip(*columns, strict=True)) == back[rank]
        dispatch.validate(there, home)


@pytest.mark.parametrize("case", cases(varied(5, 40, 48), seed=0), ids=lambda case: case.plan.name)
def test_plans(case: Case) -> None:
    """Metadata of a plan obeys every law, normalised or not; queries come back as they were."""
    dispatch.validate(*case.metadata, mask=case.plan.mask)
    fwd_q, rev_q, fwd_k, rev_k, attention = case.metadata
    normal = [None if part is None else part.normalize_dtype() for part in (fwd_q, rev_q, fwd_k, rev_k)]
    dispatch.validate(*normal, attention, mask=case.plan.mask)
    rows = torch.rand(case.plan.num_ranks, max(case.rows), HIDDEN) + 1
    there = dispatch.orchestrate_simulate(rows, torch.zeros(len(rows), received(fwd_q), HIDDEN), fwd_q)
    home = dispatch.orchestrate_simulate(there, torch.zeros_like(rows), rev_q)
    stays = torch.zeros(rows.shape[:2], dtype=torch.bool)
    shards = case.plan.shards
    for shard in range(shards.num):
        end = shards.row[shard] + shards.length[shard]
        stays[shards.rank[shard], shards.row[shard] : end] = bool((case.plan.dest[shard] < 0).all())
    for rank, length in enumerate(case.rows):
        stays[rank, length:] = True

    assert torch.equal(home, torch.where(stays[..., None], 0, rows))


@pytest.mark.parametrize("case", cases(varied(4, 30, 48), seed=100), ids=lambda case: case.plan.name)
def test_keys_and_back(case: Case) -> None:
    """Every copy of a key comes back as it was to its own place, none to another; sums are those of the copies."""
    _, _, fwd_k, rev_k, _ = case.metadata
    if fwd_k is None:
        return
    ranks, copies, tokens = case.plan.num_ranks, fwd_k.dst_rank.shape[2], max(case.rows)
    rows = torch.rand(ranks, tokens, HIDDEN) + 1
    there = dispatch.orchestrate_simulate(rows, torch.zeros(ranks, received(fwd_k), HIDDEN), fwd_k)
    home = dispatch.orchestrate_simulate(there, torch.zeros(ranks, copies * tokens, HIDDEN), rev_k)
    total = torch.zeros_like(rows)
    for rank, length in enumerate(case.rows):
        parts = home[rank, : copies * length].view(copies, length, HIDDEN)
        sent = parts != 0

        assert torch.equal(parts, sent * rows[rank, :length])
        assert not home[rank, copies * length :].any()
        for part in parts:
            total[rank, :length] += part
    assert torch.equal(dispatch.simulate_reduce(there, torch.zeros_like(rows), fwd_k), total)


@pytest.mark.parametrize("case", cases(varied(6, 40, 48), seed=200), ids=lambda case: case.plan.name)
def test_keys_are_the_document(case: Case) -> None:
    """What a query finds in its stretch is its document from the first row on, up to its own end or to the last."""
    plan = case.plan
    fwd_q, _, fwd_k, _, attention = case.metadata
    if fwd_k is None:
        return
    document, place = (torch.full((plan.num_ranks, max(case.rows), 1), -1) for _ in range(2))
    for shard in range(plan.shards.num):
        begin, length = int(plan.shards.row[shard]), int(plan.shards.length[shard])
        document[plan.shards.rank[shard], begin : begin + length] = int(plan.document[shard])
        context = int(plan.context[shard])
        place[plan.shards.rank[shard], begin : begin + length, 0] = torch.arange(context, context + length)
    moved = {}
    for name, tensor in (("document", document), ("place", place)):
        for kind, metadata in (("q", fwd_q), ("k", fwd_k)):
            output = torch.full((plan.num_ranks, received(metadata), 1), -1)
            moved[name, kind] = dispatch.orchestrate_simulate(tensor, output, metadata)[..., 0]
    whole = np.bincount(plan.document, weights=plan.shards.length).astype(int)
    for rank in range(plan.num_ranks):
        one = attention.get_slice(rank)
        lengths = torch.diff(one.cu_seqlens_q, prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        seen = torch.diff(one.cu_seqlens_kv, prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        for end, rows, begin, keys in zip(one.cu_seqlens_q.tolist(), lengths, one.kv_begin.tolist(), seen, strict=True):
            if not rows:
                continue
            mine, last = int(moved["document", "q"][rank, end - 1]), int(moved["place", "q"][rank, end - 1])

            assert moved["document", "k"][rank, begin : begin + keys].tolist() == [mine] * keys
            assert moved["place", "k"][rank, begin : begin + keys].tolist() == list(range(keys))
            assert keys == (last + 1 if plan.mask is Mask.CAUSAL else whole[mine])


@pytest.mark.parametrize("mask", list(Mask))
def test_the_document_s_tables_say_the_same(mask: Mask) -> None:
    """`compute_metadata` and `compute_metadata_kv` of a plan's tables give what the plan gives."""
    for seed in range(75):
        plan = random_plan(Draw(1 + seed % 5, 30, mask=mask), seed)
        made = dispatch.from_plan(plan)
        tables = tables_of_keys(plan)
        there, home = dispatch.compute_metadata_kv(**tables)
        queries = dispatch.compute_metadata(tables["seq_len"], tables["q_dispatch"])
        layout = dispatch.compute_attn_layout_seqlens(
            tables["seq_len"], tables["q_to_num_kv_token"], tables["q_dispatch"]
        )

        assert same(replace(queries[0], num_seqs=made.fwd_q.num_seqs), made.fwd_q)
        assert same(queries[1], made.rev_q)
        copies = made.fwd_k.dst_rank.shape[2]
        assert torch.equal(there.dst_rank[..., :copies], made.fwd_k.dst_rank)
        assert torch.equal(there.dst_offset[..., :copies], made.fwd_k.dst_offset)
        assert bool((there.dst_rank[..., copies:] == -1).all())
        assert torch.equal(there.num_recv_tokens, made.fwd_k.num_recv_tokens)
        assert all(map(torch.equal, (home.dst_rank, home.dst_offset), (made.rev_k.dst_rank, made.rev_k.dst_offset)))
        assert all(map(torch.equal, layout, made.attention))
        dispatch.validate(*queries, there, home, layout, mask=mask)


def test_rows_once_per_rank() -> None:
    """With keys sent once per rank no rank receives a row of keys twice, and never more than once per query would."""
    for seed in range(40):
        plan = random_plan(Draw(4, 40, sharing=Sharing.RANK), seed)
        once = dispatch.from_plan(plan).fwd_k
        often = dispatch.from_plan(replace(plan, sharing=Sharing.QUERY)).fwd_k
        pairs = [
            (shard, int(rank)) for shard, row in enumerate(once.dst_rank.flatten(0, 1)) for rank in row if rank >= 0
        ]

        assert len(pairs) == len(set(pairs))
        assert all(a <= b for a, b in zip(once.num_total_recv_tokens, often.num_total_recv_tokens, strict=True))


def test_copies_of_a_plan() -> None:
    """Tables have room for the copies that the plan allows; fewer than it needs are refused, with a shard."""
    plan = random_plan(Draw(4, 40, spans=0.9), 3)
    needed = dispatch.from_plan(plan).fwd_k.dst_rank.shape[2]

    assert needed > 1
    assert dispatch.from_plan(replace(plan, copies=needed + 2)).fwd_k.dst_rank.shape[2] == needed + 2
    with pytest.raises(MetadataError, match=rf"copies at rank \d+, shard \d+: expected {needed} or more, got"):
        dispatch.from_plan(replace(plan, copies=needed - 1))


def test_copies_of_rows() -> None:
    """Without a mask a shard may go to several ranks: fwd_q has copies, and there are no keys."""
    plan = random_plan(Draw(3, 20, mask=None), 4)
    plan = replace(plan, dest=np.stack([plan.dest[:, 0], (plan.dest[:, 0] + 1) % 3], axis=1))
    made = dispatch.from_plan(plan)

    assert made[2:] == (None, None, None)
    assert made.fwd_q.dst_rank.shape[2] == 2
    dispatch.validate(*made)


def test_sums_are_rounded_once() -> None:
    """Copies of half precision are summed in float32 in their order: two small ones beside a large one are not lost."""
    there, _ = dispatch.compute_metadata(torch.tensor([[1]]), torch.tensor([[[0, 0, 0]]]))
    rows = torch.tensor([[[2048.0], [1.0], [1.0]]], dtype=torch.float16)

    assert dispatch.simulate_reduce(rows, torch.zeros(1, 1, 1, dtype=torch.float16), there).item() == 2050.0
    with pytest.raises(MetadataError, match="sums are of gradients"):
        dispatch.simulate_reduce(rows.long(), torch.zeros(1, 1, 1).long(), there)


def test_simulation_as_upstream() -> None:
    """Ranks exchange rows, -1 stays, one shard goes to two ranks, shards of one rank lie one after another."""
    there, home = dispatch.compute_metadata(torch.tensor([[2], [3]]), torch.tensor([[1], [0]]))
    rows = torch.arange(6.0).view(2, 3, 1)
    moved = dispatch.orchestrate_simulate(rows, torch.full((2, 3, 1), -1.0), there)

    assert moved[..., 0].tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, -1.0]]
    assert dispatch.orchestrate_simulate(moved, torch.full((2, 3, 1), -1.0), home)[..., 0].tolist() == [
        [0.0, 1.0, -1.0],
        [3.0, 4.0, 5.0],
    ]
    twice, _ = dispatch.compute_metadata(
        torch.tensor([[2], [0], [0]]), torch.tensor([[[1, 2]], [[-1, -1]], [[-1, -1]]])
    )
    moved = dispatch.orchestrate_simulate(torch.ones(3, 2, 1), torch.zeros(3, 2, 1), twice)
    assert moved.sum(dim=1).flatten().tolist() == [0.0, 2.0, 2.0]


def test_simulation_within_the_tensors() -> None:
    """Rows beyond a tensor are refused, with the shard; and tensors must be of the same ranks, and all of them."""
    there, _ = dispatch.compute_metadata(torch.tensor([[2, 3]]), torch.tensor([[0, 0]]))

    with pytest.raises(MetadataError, match=r"seq_len at rank 0, shard 1, replica 0: expected rows in 0 \.\.< 4"):
        dispatch.orchestrate_simulate(torch.ones(1, 4, 1), torch.ones(1, 5, 1), there)
    with pytest.raises(MetadataError, match="dst_offset at rank 0, shard 1, replica 0"):
        dispatch.orchestrate_simulate(torch.ones(1, 5, 1), torch.ones(1, 4, 1), there)
    with pytest.raises(MetadataError, match="same ranks and width"):
        dispatch.orchestrate_simulate(torch.ones(1, 5, 1), torch.ones(1, 5, 2), there)
    with pytest.raises(MetadataError, match="Metadata of all ranks"):
        dispatch.orchestrate_simulate(torch.ones(1, 5, 1), torch.ones(1, 5, 1), there.get_slice(0))


def test_a_million_shards() -> None:
    """Metadata of a million shards takes about a second, as does that of a million keys and queries, proof apart."""
    dice = np.random.default_rng(0)
    lengths, dests = dice.integers(0, 4096, (512, 1954)), dice.integers(-1, 512, (512, 1954))
    begun = time.thread_time()
    there, home = dispatch.compute_metadata(torch.from_numpy(lengths), torch.from_numpy(dests))
    rows = time.thread_time() - begun
    dispatch.validate(there, home)
    torch.manual_seed(0)
    begun = time.thread_time()
    made = dispatch.create_qkv_dispatch(512, 2**19, 140, 8)
    keys = time.thread_time() - begun

    assert int((made.fwd_k.dst_rank >= 0).sum()) > 700_000
    # About 0.3 seconds each on one core; ten times that is a loop over shards, not a busy machine.
    assert (rows < 3, keys < 5) == (True, True)
