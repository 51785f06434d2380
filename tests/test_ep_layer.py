"""EPAll2AllLayer by its names and signatures: what it returns on host ranks, beside plain loops over all ranks; every
attribute of its descriptors; growth; refusals; the usage examples of its document.

Assumes ranks that are threads, but for the cases of processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import ep_cases  # noqa: E402 - after the check for torch
import gloo_ranks  # noqa: E402 - after the check for torch
from captured import launches_only  # noqa: E402 - after the check for torch
from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch
from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.machine.errors import ArgumentError  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import (  # noqa: E402 - after the check for torch
    AgreementError,
    CaptureError,
    DispatchError,
    GroupError,
    TensorError,
)

HIDDEN = 8
TOKENS, CHOSEN = torch.zeros(3, HIDDEN), torch.zeros(3, 2, dtype=torch.int32)
KINDS = ("any", "some have none", "all to one expert", "most are dropped", "nobody has tokens")


@dataclass(frozen=True, eq=False)
class Case:
    """What all ranks have in a call. Experts and weights differ from choice to choice."""

    ranks: int
    experts: int
    x: list[Any]
    chosen: list[Any]
    weight: list[Any]

    @staticmethod
    def drawn(kind: str, ranks: int, experts: int, topk: int, most: int, dtype: Any, seed: int = 0) -> Case:
        dice = torch.Generator().manual_seed(seed)
        counts = [int(torch.randint(0, most + 1, (), generator=dice)) for _ in range(ranks)]
        if kind == "some have none":
            counts[seed % ranks] = 0
        if kind == "nobody has tokens":
            counts = [0] * ranks
        chosen = [torch.randint(0, experts + 1, (count, topk), generator=dice) for count in counts]
        if kind == "all to one expert":
            chosen = [torch.full_like(one, experts - 1) for one in chosen]
        if kind == "most are dropped":
            chosen = [torch.where(torch.rand(one.shape, generator=dice) < 0.8, experts, one) for one in chosen]
        x = [torch.randn(count, HIDDEN, generator=dice).to(dtype) for count in counts]
        weight = [torch.randn(count, topk, generator=dice) for count in counts]
        return Case(ranks, experts, x, [one.int() for one in chosen], weight)

    def comes(self, rank: int) -> list[tuple[int, int, int]]:
        """Source, token and choice of each row that a rank receives."""
        share = self.experts // self.ranks
        return [
            (source, token, k)
            for expert in range(rank * share, (rank + 1) * share)
            for source in range(self.ranks)
            for token, k in (self.chosen[source] == expert).nonzero().tolist()
        ]

    def places(self, source: int) -> Any:
        """Of each choice of a rank the row that it becomes."""
        found = torch.full_like(self.chosen[source], -1)
        for rank in range(self.ranks):
            for row, (come, token, k) in enumerate(self.comes(rank)):
                if come == source:
                    found[token, k] = row
        return found

    def scatter_indices(self) -> Any:
        """As callers make them: the choices of all ranks one behind the other, sorted by expert."""
        flat = torch.cat([one.flatten() for one in self.chosen])
        found = torch.empty_like(flat)
        found[torch.argsort(flat, stable=True)] = torch.arange(len(flat), dtype=torch.int32)
        return found.view(-1, self.chosen[0].shape[1])

    def summed(self, source: int, made: Callable[[Any, int], Any], *, local: bool = False, node: int = 0) -> Any:
        """What comes back if expert e makes made(row, e) of a row: added up in float32 by rising choice; or so on each
        rank, rounded, and by rising rank; or these of each node of so many ranks, rounded, and by rising node.
        """
        x, chosen = self.x[source], self.chosen[source]
        found = torch.zeros(x.shape)
        for token, experts in enumerate(chosen.tolist()):
            share = self.experts // self.ranks
            terms = [made(x[token], one).float() for one in experts if one < self.experts]
            if local:
                mine = [[one for one in experts if one // share == rank] for rank in range(self.ranks)]
                parts = [[made(x[token], one).float() for one in ones] for ones in mine if ones]
                terms = [sum(part[1:], part[0]).to(x.dtype).float() for part in parts]
            if local and node:
                where = [rank // node for rank, ones in enumerate(mine) if ones]
                apart = [[term for at, term in zip(where, terms, strict=True) if at == one] for one in sorted({*where})]
                terms = [sum(part[1:], part[0]).to(x.dtype).float() for part in apart]
            for term in terms:
                found[token] += term
        return found.to(x.dtype)


def times(row: Any, expert: int) -> Any:
    """What an expert makes of a row: other for every expert."""
    return (row.float() * (0.3 * (expert % 4) + 1)).to(row.dtype)


def layer_of(case: Case, rank: int, group: str, **options: Any) -> Any:
    dtype, topk = case.x[0].dtype, case.chosen[0].shape[1]
    given = {"max_tokens": 12, "local_world_size": case.ranks, "num_sm": 3, "device": "cpu", "dtype": dtype, **options}
    return ep.EPAll2AllLayer(
        group,
        hidden=HIDDEN,
        topk=topk,
        rank=rank,
        num_tot_experts=case.experts,
        world_size=case.ranks,
        **given,
    )


def there_and_back(layer: Any, case: Case, rank: int, *, weighs: bool = True, scatter: Any = None) -> Any:
    """One call, held to what must come of it."""
    rows, weights, desc = layer.dispatch(
        case.x[rank], case.chosen[rank], case.weight[rank] if weighs else None, full_scatter_indices=scatter
    )
    comes = case.comes(rank)
    total, share = len(comes), case.experts // case.ranks
    assert len(rows) == (total if layer.exact else layer.a2a_ctx.capacity)
    assert all(torch.equal(row, case.x[source][token]) for row, (source, token, _) in zip(rows, comes, strict=False))
    if weighs:
        assert weights.shape == (len(rows),)
        assert weights[:total].tolist() == [float(case.weight[source][token, k]) for source, token, k in comes]
    else:
        assert weights is None
    experts = [int(case.chosen[source][token, k]) for source, token, k in comes]
    made = rows.clone()
    for row, expert in enumerate(experts):
        made[row] = times(rows[row], expert)
    assert set(experts) <= set(range(rank * share, (rank + 1) * share))
    config = layer.ep_config
    node = 0 if config.is_intra_node else config.local_world_size
    assert torch.equal(layer.combine(made, desc), case.summed(rank, times, local=layer.enable_local_combine, node=node))
    return desc


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True], ids=["", "local"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "whole"])
@pytest.mark.parametrize(
    ("ranks", "experts", "topk", "dtype"),
    [
        (1, 3, 1, torch.float16),
        (2, 6, 5, torch.bfloat16),
        (3, 9, 4, torch.float32),
        (4, 12, 2, torch.bfloat16),
    ],
)
def test_there_and_back(ranks: int, experts: int, topk: int, dtype: Any, exact: bool, local: bool) -> None:
    """Rows in their order, weights, and sums over experts of which each makes something else, call after call; with
    local combine too, where a token has several experts on a rank.
    """
    cases = [
        Case.drawn(kind, ranks, experts, topk, 12, dtype, seed) for seed, kind in enumerate((*KINDS, *KINDS[::-1]))
    ]

    def work(rank: int, group: str) -> None:
        layer = layer_of(cases[0], rank, group, exact=exact, capacity=ranks, check=True, enable_local_combine=local)
        for number, case in enumerate(cases):
            there_and_back(layer, case, rank, weighs=number % 3 > 0)
        layer.finalize()

    in_group(ranks, work)


@pytest.mark.parametrize("nodes", ["", "0,0,1,1"], ids=["near", "far"])
@pytest.mark.parametrize("local", [False, True], ids=["", "local_combine"])
def test_two_nodes(local: bool, nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, between two nodes: tokens cross once, and with local combine so do sums; memory grows there, too."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    cases = [Case.drawn(kind, 4, 12, 6, 12, torch.bfloat16, seed) for seed, kind in enumerate(KINDS)]

    def work(rank: int, group: str) -> None:
        options = {"local_world_size": 2, "enable_local_combine": local, "check": True, "capacity": 0.5}
        layer = layer_of(cases[0], rank, group, **options)
        assert layer.a2a_ctx.exchange.experts.plan.push_by_key.node == 2
        for number, case in enumerate(cases):
            there_and_back(layer, case, rank, weighs=number % 3 > 0)
        layer.finalize()

    in_group(4, work)


def test_growth() -> None:
    """Memory that is too small grows, on all ranks; what was received before stays, and is given back once let go."""
    few = Case.drawn("some have none", 2, 4, 3, 2, torch.float32, 1)
    many = Case.drawn("all to one expert", 2, 4, 3, 12, torch.float32, 3)

    def work(rank: int, group: str) -> None:
        layer = layer_of(few, rank, group, capacity=0.25)
        assert layer.a2a_ctx.capacity == 9
        rows, weights, desc = layer.dispatch(few.x[rank], few.chosen[rank], few.weight[rank])
        kept = rows.clone()
        assert there_and_back(layer, many, rank).known.received == len(many.comes(rank))
        assert layer.a2a_ctx.capacity == 2 * 12 * 3
        buffers = layer.a2a_ctx.reallocate_dispatch_output_buf(5)  # there is room for more
        assert [tuple(one.shape) for one in buffers] == [(72, HIDDEN), (72,)]
        assert torch.equal(rows, kept)
        assert weights.shape == (len(rows),)
        home = layer.combine(rows, desc)  # of a call before
        assert torch.equal(home, few.summed(rank, lambda row, _: row))
        del rows, weights, desc
        there_and_back(layer, few, rank)
        held = len(commdsl.memory_summary().held)
        there_and_back(layer, few, rank)
        assert len(commdsl.memory_summary().held) <= held
        assert not layer.a2a_ctx.has_idle
        layer.finalize()

    in_group(2, work)


def test_buffers() -> None:
    """Where rows and weights come to lie is known before they do, and follows a growth."""
    case = Case.drawn("any", 2, 4, 3, 8, torch.float32, 3)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group, capacity=0.25)
        context = layer.a2a_ctx
        for room in (9, 50):
            rows, weights = context.reallocate_dispatch_output_buf(room)
            assert (rows.shape, weights.shape, weights.dtype) == ((room, HIDDEN), (room,), torch.float32)
            assert context.dispatch_output_buf.data_ptr() == rows.data_ptr()
            assert context.weight_recv_buf.data_ptr() == weights.data_ptr()
        found, came, _ = layer.dispatch(case.x[rank], case.chosen[rank], case.weight[rank])
        assert found.data_ptr() == rows.data_ptr()
        assert torch.equal(rows[: len(found)], found)
        assert torch.equal(weights[: len(found)], came)

    in_group(2, work)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("local", [False, True], ids=["", "local"])
def test_memory(local: bool, gradients: bool) -> None:
    """Symmetric memory of a rank is what the README says, and all of it comes back."""
    ranks, tokens, topk, width, room, results = 2, 100, 6, 2 * 1024, 1200, 3

    def work(rank: int, group: str) -> tuple[int, int]:
        def held() -> int:
            return sum(one.nbytes for one in commdsl.memory_summary().held if one.group == group)

        empty = held()
        layer = ep.EPAll2AllLayer(
            group,
            max_tokens=tokens,
            hidden=1024,
            topk=topk,
            rank=rank,
            num_tot_experts=8,
            local_world_size=ranks,
            world_size=ranks,
            enable_local_combine=local,
            device="cpu",
            gradients=gradients,
            results=results,
        )
        assert layer.a2a_ctx.capacity == room
        whole = held() - empty
        layer.finalize()
        return whole, held() - empty

    there = results * (room * (width + 12) + 4 * ranks * tokens * topk)
    again = results * room * width if gradients else 0
    back = tokens * min(ranks if local else topk, topk) * width + 8 * tokens * topk
    for whole, left in in_group(ranks, work):
        assert there + again + back <= whole < there + again + back + (64 << 10)
        assert left <= 4096  # where ranks tell each other of calls: the group's own


def test_any_number_may_be_held() -> None:
    """Rows of more calls than there is memory for are copied out of it; each is what it was."""
    cases = [Case.drawn("any", 2, 4, 2, 8, torch.float32, seed) for seed in range(5)]

    def work(rank: int, group: str) -> None:
        layer = layer_of(cases[0], rank, group, results=2)
        held = [layer.dispatch(case.x[rank], case.chosen[rank], case.weight[rank]) for case in cases]
        for case, (rows, _, desc) in zip(cases, held, strict=True):
            assert [row.tolist() for row in rows] == [case.x[s][t].tolist() for s, t, _ in case.comes(rank)]
            assert torch.equal(layer.combine(rows, desc), case.summed(rank, lambda row, _: row))

    in_group(2, work)


@pytest.mark.parametrize(("whose", "exact"), [("of all ranks", True), ("of this rank", True), ("of all ranks", False)])
def test_scatter_indices(whose: str, exact: bool) -> None:
    """The numbers that callers make give the order that there is without them; others give theirs."""
    case = Case.drawn("any", 3, 6, 3, 10, torch.float32, 5)
    numbers = case.scatter_indices()
    counts = [len(one) for one in case.chosen]

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group, exact=exact)
        own = numbers.split(counts)[rank].contiguous()
        desc = there_and_back(layer, case, rank, scatter=numbers if whose == "of all ranks" else own)
        kept = case.chosen[rank] < case.experts
        assert torch.equal(desc.token_dst_scatter_idx[0, : counts[rank]], case.places(rank))
        total = [len(case.comes(one)) for one in range(3)]
        ends = torch.tensor([sum(total[: one + 1]) for one in range(3)])
        rank_of = torch.searchsorted(ends, numbers, right=True).clamp(max=2)
        turned = torch.where(
            numbers < ends[-1], ends[rank_of] - 1 - (numbers - (ends - torch.tensor(total))[rank_of]), -1
        )
        given = turned.int() if whose == "of all ranks" else turned.int().split(counts)[rank].contiguous()
        rows, weights, desc = layer.dispatch(case.x[rank], case.chosen[rank], case.weight[rank], given)
        comes = case.comes(rank)[::-1]  # each rank's rows, the last first
        assert [row.tolist() for row in rows[: len(comes)]] == [case.x[s][t].tolist() for s, t, _ in comes]
        assert weights[: len(comes)].tolist() == [float(case.weight[s][t, k]) for s, t, k in comes]
        experts = [int(case.chosen[s][t, k]) for s, t, k in comes]
        made = rows.clone()
        for row, one in enumerate(experts):
            made[row] = times(rows[row], one)
        assert torch.equal(layer.combine(made, desc), case.summed(rank, times))
        mine = torch.where(kept, torch.tensor(total)[case.chosen[rank].clamp(max=5) // 2] - 1 - case.places(rank), -1)
        assert torch.equal(desc.token_dst_scatter_idx[0, : counts[rank]].long(), mine)
        first = desc.skipped_token_mapping_indices
        assert [comes[row][:2] for row in first[: len(comes)].tolist()] == [one[:2] for one in comes]
        layer.finalize()

    in_group(3, work)


def test_gradients() -> None:
    """Of tokens and of weights, through the layer's own calls."""
    case = Case.drawn("any", 2, 4, 3, 10, torch.float32, 2)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group)
        x, weight = case.x[rank].clone().requires_grad_(), case.weight[rank].clone().requires_grad_()
        rows, weights, desc = layer.dispatch(x, case.chosen[rank], weight)
        layer.combine(rows * weights[:, None], desc).sum().backward()
        kept = case.chosen[rank] < case.experts
        wanted = (case.weight[rank] * kept).sum(1, keepdim=True).expand_as(x)
        torch.testing.assert_close(x.grad, wanted)
        torch.testing.assert_close(weight.grad, torch.where(kept, case.x[rank].sum(1, keepdim=True), 0))

    in_group(2, work)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16])
def test_weights_in_16_bits(weight_dtype: Any) -> None:
    """Weights come as they were sent, in their dtype."""
    case = Case.drawn("any", 2, 4, 3, 10, torch.bfloat16, 6)
    case = replace(case, weight=[one.to(weight_dtype) for one in case.weight])

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group, weight_dtype=weight_dtype)
        assert layer.dispatch(case.x[rank], case.chosen[rank], case.weight[rank])[1].dtype == weight_dtype
        there_and_back(layer, case, rank)

    in_group(2, work)


def test_float8() -> None:
    """Tokens travel in float8, and what becomes of them comes back in bfloat16."""
    case = Case.drawn("any", 2, 4, 3, 10, torch.float8_e4m3fn, 3)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group)
        rows, _, desc = layer.dispatch(case.x[rank], case.chosen[rank])
        sent = [case.x[source][token].view(torch.uint8).tolist() for source, token, _ in case.comes(rank)]
        assert rows.view(torch.uint8).tolist() == sent
        kept = (case.chosen[rank] < case.experts).sum(1, keepdim=True)
        home = layer.combine(rows.bfloat16(), desc)
        assert torch.equal(home, (case.x[rank].float() * kept).bfloat16())

    in_group(2, work)


# --- descriptors ------------------------------------------------------------------------------------------------------


def test_descriptor_of_one_node() -> None:
    """Every attribute, in the shape that the document has."""
    case = Case.drawn("any", 2, 6, 4, 10, torch.float32, 4)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group)
        _, _, desc = layer.dispatch(case.x[rank], case.chosen[rank])
        tokens, comes = len(case.x[rank]), case.comes(rank)
        assert desc.num_dispatch_token_cur_rank == tokens
        assert desc.num_input_tokens_per_rank.tolist() == [len(one) for one in case.x]
        assert desc.num_input_tokens_per_rank.dtype == torch.int32
        assert desc.send_reqs_recv_tensor is None
        assert desc.topk_indices_tensor.shape == (12, 4)
        assert torch.equal(desc.topk_indices_tensor[:tokens], case.chosen[rank])
        assert (desc.topk_indices_tensor[tokens:] == -1).all()
        assert desc.token_dst_scatter_idx.shape == (1, 12, 4)
        assert torch.equal(desc.token_dst_scatter_idx[0, :tokens], case.places(rank))
        assert (desc.token_dst_scatter_idx[0, tokens:] == -1).all()
        by_choice = {one: row for row, one in enumerate(comes)}
        rows_of = {(s, t): [by_choice.get((s, t, k), -1) for k in range(4)] for s, t, _ in comes}
        firsts = [next(row for row in rows_of[s, t] if row >= 0) for s, t, _ in comes]
        assert desc.skipped_token_mapping_indices.tolist() == firsts
        assert desc.skipped_token_topk_mapping_indices.tolist() == [
            rows_of[s, t] if firsts[row] == row else [-1] * 4 for row, (s, t, _) in enumerate(comes)
        ]

    in_group(2, work)


def test_descriptor_of_two_nodes() -> None:
    """With two ranks a node: choices and places of the same rank of both nodes, and runs of tokens that come here."""
    case = Case.drawn("any", 4, 4, 2, 12, torch.float32, 8)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group, local_world_size=2)
        desc = there_and_back(layer, case, rank)
        assert desc.skipped_token_mapping_indices is None
        assert desc.skipped_token_topk_mapping_indices is None
        assert [tuple(one.shape) for one in (desc.topk_indices_tensor, desc.token_dst_scatter_idx)] == [(2, 12, 2)] * 2
        for node, source in enumerate((rank % 2, 2 + rank % 2)):
            chosen = case.chosen[source]
            assert torch.equal(desc.topk_indices_tensor[node, : len(chosen)], chosen)
            assert torch.equal(desc.token_dst_scatter_idx[node, : len(chosen)], case.places(source))
            here = [any(one // 2 == rank // 2 for one in row if one < 4) for row in chosen.tolist()]
            edges = [at for at in range(len(here) + 1) if (at > 0 and here[at - 1]) != (at < len(here) and here[at])]
            begins, ends = desc.send_reqs_recv_tensor[node].tolist()
            assert (begins[: len(edges) // 2], ends[: len(edges) // 2]) == (edges[::2], edges[1::2])
            assert {*begins[len(edges) // 2 :], *ends[len(edges) // 2 :]} == {-1}
        with pytest.raises(GroupError, match="threads"):
            layer.ep_barrier_all(None, intra_node_only=True)
        layer.ep_barrier_all(None)

    in_group(4, work)


def test_config() -> None:
    """What a config derives from its numbers."""
    config = ep.EPConfig(256, 7168, 8, 256, 9, 32, 8, torch.bfloat16, torch.float32, torch.int32)

    assert (config.num_experts_per_rank, config.is_intra_node, config.num_nodes, config.node) == (8, False, 4, 1)
    assert replace(config, world_size=8, rank=7).is_intra_node
    assert config.most_received == 32 * 256 * 8
    assert config.limits(100) == ep.Limits(256, 8, 100, (14336,), 14336)
    eighth = replace(config, token_dtype=torch.float8_e4m3fn)
    assert eighth.limits(100) == ep.Limits(256, 8, 100, (7168,), 14336)


# --- a device ---------------------------------------------------------------------------------------------------------


DESCRIBED = (
    "topk_indices_tensor",
    "token_dst_scatter_idx",
    "send_reqs_recv_tensor",
    "skipped_token_mapping_indices",
    "skipped_token_topk_mapping_indices",
)


@pytest.mark.parametrize(("a_node", "local"), [(2, True), (1, False)])
@pytest.mark.parametrize("scattered", [False, True], ids=["", "scattered"])
def test_on_a_device(a_node: int, local: bool, scattered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With use_aot the first call of all may be captured, where nothing is read, nor copied from the host: tokens there
    and back, and all that the descriptor says; it launches so many thread blocks.
    """
    gpu = FakeGpu(2)
    gpu.install(monkeypatch)
    case = Case.drawn("any", 2, 4, 2, 8, torch.float32, 1)
    flat = torch.cat([one.flatten() for one in case.chosen])
    numbers = torch.empty_like(flat)
    numbers[torch.argsort(flat, stable=True)] = torch.arange(len(flat), dtype=torch.int32)

    def called(layer: Any, rank: int) -> tuple[Any, ...]:
        given = numbers.view(-1, 2) if scattered else None
        rows, weights, desc = layer.dispatch(case.x[rank], case.chosen[rank], case.weight[rank], given)
        told = [getattr(desc, name) for name in DESCRIBED]
        return rows, weights, layer.combine(rows * weights[:, None], desc), *told[:3]

    def work(rank: int, group: str) -> None:
        gpu.here.rank = rank
        made = {"local_world_size": a_node, "enable_local_combine": local}
        layer = layer_of(case, rank, group, exact=False, use_aot=True, num_sm=5, results=4, **made)
        assert layer.a2a_ctx.exchange.experts.plan.comm.lanes == 5
        with gpu.capturing(), launches_only():
            rows, weights, *captured = called(layer, rank)
        again_rows, again_weights, *again = called(layer, rank)
        total = len(case.comes(rank))
        assert torch.equal(rows[:total], again_rows[:total])
        assert torch.equal(weights[:total], again_weights[:total])
        for one, other in zip(captured, again, strict=True):
            assert other is None if one is None else torch.equal(one, other)
        there_and_back(layer, case, rank)

    in_group(2, work)


def test_nothing_is_read_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sizes are refused there, before anything is sent."""
    (name,) = commdsl.threads(1)
    case = Case(1, 4, [TOKENS], [CHOSEN], [CHOSEN.float()])
    layer = layer_of(case, 0, name)
    monkeypatch.setattr(ep.Exchange, "is_capturing", True)
    with pytest.raises(CaptureError, match="exact=False"):
        layer.dispatch(TOKENS, CHOSEN)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    yield from gloo_ranks.started("ep_cases", tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", [case.__name__ for case in ep_cases.CASES])
def test_processes(ranks: list[Connection], name: str) -> None:
    """What the case states holds on every rank."""
    gloo_ranks.holds(ranks, name)


# --- refused ----------------------------------------------------------------------------------------------------------


WRONG = {
    "dtype": ((TOKENS.half(), CHOSEN), TensorError, "expected torch.float32"),
    "hidden": ((torch.zeros(3, HIDDEN + 1), CHOSEN), TensorError, "8 numbers"),
    "long experts": ((TOKENS, CHOSEN.long()), TensorError, "expected torch.int32"),
    "top-k": ((TOKENS, CHOSEN[:, :1].contiguous()), TensorError, "expected 2 experts"),
    "rows": ((TOKENS, CHOSEN[:2]), TensorError, "expected 2 tokens"),
    "too many": ((torch.zeros(13, HIDDEN), torch.zeros(13, 2, dtype=torch.int32)), DispatchError, "up to 12"),
    "weights": ((TOKENS, CHOSEN, torch.zeros(3, 2).double()), TensorError, "expected torch.float32"),
    "scatter indices": ((TOKENS, CHOSEN, None, CHOSEN[:2]), TensorError, "scatter indices"),
    "an array": ((TOKENS.numpy(), CHOSEN), TensorError, "`input` is a torch tensor, not `numpy.ndarray`.*from_numpy"),
    "no tokens": ((None, CHOSEN), TensorError, "`input` is a torch tensor, not `None`"),
    "a list": ((TOKENS, CHOSEN.tolist()), TensorError, "`exp_indices` is a torch tensor, not `list`"),
    "weight": ((TOKENS, CHOSEN, 0.5), TensorError, "`weight` is a torch tensor, not `float`"),
    "top-k weights": ((TOKENS, CHOSEN, torch.zeros(3, 1)), TensorError, r"`weight`: expected \(3, 2\)"),
    "indices": ((TOKENS, CHOSEN, None, [1]), TensorError, "`full_scatter_indices` is a torch tensor, not `list`"),
}


def test_refused() -> None:
    """What a call cannot take is refused before anything is sent."""
    (name,) = commdsl.threads(1)
    case = Case(1, 4, [TOKENS], [CHOSEN], [CHOSEN.float()])
    layer = layer_of(case, 0, name)
    for arguments, kind, message in WRONG.values():
        with pytest.raises(kind, match=message):
            layer.dispatch(*arguments)
    rows, _, desc = layer.dispatch(TOKENS, CHOSEN)
    with pytest.raises(TensorError, match="expected 6 rows"):
        layer.combine(rows[:5], desc)
    with pytest.raises(TensorError, match=r"torch.float64.*torch.float32.*input.to\(torch.float32\)"):
        layer.combine(rows.double(), desc)
    with pytest.raises(TensorError, match="summed in one of"):
        layer.combine(rows.int(), desc)
    for wrong in (None, rows, desc.known.handle):
        with pytest.raises(ArgumentError, match="`ep_a2a_layout_desc` is an EPAllToAllLayoutDesc"):
            layer.combine(rows, wrong)
    with pytest.raises(TensorError, match="`input` is a torch tensor, not `None`"):
        layer.combine(None, desc)
    layer.finalize()
    with pytest.raises(DispatchError, match="was released"):
        layer.dispatch(TOKENS, CHOSEN)
    for number in (133, 500):
        with pytest.raises(DispatchError, match=f"`num_sm` is a whole number from 1 to 132.*132 SMs, not {number}"):
            layer_of(case, 0, name, num_sm=number)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rank": 1}, DispatchError, "`rank` is 1"),
        ({"world_size": 4}, DispatchError, "`world_size` is 4"),
        ({"num_tot_experts": 5}, DispatchError, "no multiple of 2"),
        ({"local_world_size": 3}, DispatchError, "no multiple of 3"),
        ({"max_tokens": 0}, DispatchError, "`max_tokens`"),
        ({"topk": 33}, DispatchError, "at most"),
        ({"hidden": True}, DispatchError, "`hidden`"),
        ({"num_sm": 0}, DispatchError, "`num_sm`"),
        ({"capacity": 0}, DispatchError, "`capacity`"),
        ({"results": 1}, DispatchError, "2 or more"),
        ({"weight_dtype": torch.float64}, TensorError, "routing weights"),
    ],
)
def test_senseless_layers(change: dict[str, Any], kind: Any, message: str) -> None:
    """Numbers that no layer can have, or that are not the group's, are refused when it is made."""
    names = commdsl.threads(2)
    given = {"max_tokens": 4, "hidden": 8, "topk": 2, "rank": 0, "num_tot_experts": 4, "local_world_size": 2}
    with pytest.raises(kind, match=message):
        ep.EPAll2AllLayer(names[0], **{**given, "world_size": 2, "device": "cpu", **change})


def test_layers_that_differ() -> None:
    """All ranks have to make the same layer."""
    names = commdsl.threads(2)
    case = Case.drawn("any", 2, 4, 2, 8, torch.float32)

    def work(rank: int) -> None:
        layer_of(case, rank, names[rank], max_tokens=12 + rank)

    assert all(isinstance(error, AgreementError) for error in outcomes(2, work))


@pytest.mark.parametrize("option", [{"exact": False}, {"use_aot": True}, {"weight_dtype": torch.float16}])
def test_layers_of_other_settings(option: dict[str, Any]) -> None:
    """Settings that change which calls a layer makes, or what it returns, are compared when it is made."""
    names = commdsl.threads(2)
    case = Case.drawn("any", 2, 4, 2, 8, torch.float32)

    def work(rank: int) -> None:
        layer_of(case, rank, names[rank], **(option if rank else {}))

    found = outcomes(2, work)

    assert {type(one) for one in found} == {AgreementError}
    assert all(next(iter(option)) in str(one) for one in found)


def _calls(case: Case, layer: Any, rank: int) -> dict[str, Callable[[], Any]]:
    """Calls of which the two ranks make different ones, by the argument that differs."""
    x, chosen, weight = case.x[rank], case.chosen[rank], case.weight[rank]
    indices = case.scatter_indices()

    def combined(change: Callable[[Any], Any]) -> None:
        rows, _, desc = layer.dispatch(x, chosen)
        layer.combine(change(rows), desc)

    def weighed() -> None:
        _, _, desc = layer.dispatch(x, chosen)
        rows = torch.zeros(desc.known.exchange.limits.received, HIDDEN)
        ep.combine(desc.known.exchange, rows, desc.known.handle, weight if rank else None)

    return {
        "weights": lambda: layer.dispatch(x, chosen, weight if rank else None),
        "scatter indices": lambda: layer.dispatch(x, chosen, weight, indices if rank else None),
        "float16": lambda: combined(lambda rows: rows.half() if rank else rows.bfloat16()),
        "with weights": weighed,
    }


@pytest.mark.parametrize("name", ["weights", "scatter indices", "float16", "with weights"])
def test_calls_that_differ(name: str) -> None:
    """Ranks that pass other arguments all raise, and each error names both sides."""
    names = commdsl.threads(2)
    case = Case.drawn("any", 2, 4, 2, 8, torch.float32, 1)

    def work(rank: int) -> None:
        layer = layer_of(case, rank, names[rank])
        _calls(case, layer, rank)[name]()
        layer.a2a_ctx.exchange.synchronize()

    found = outcomes(2, work)

    assert {type(one) for one in found} == {AgreementError}
    assert all(name in str(one) for one in found), found


def test_products_with_weights() -> None:
    """Rows times their weights are float32; at the document's dtypes `combine` says which cast it wants, and the cast
    gives the sum that is weighed.
    """
    case = Case.drawn("any", 2, 4, 2, 8, torch.bfloat16, 7)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group)
        rows, weights, desc = layer.dispatch(case.x[rank], case.chosen[rank], case.weight[rank])
        made = rows * weights[:, None]
        for combine in (layer.combine, lambda *both: ep.combine(desc.known.exchange, both[0], desc.known.handle)):
            with pytest.raises(TensorError, match=r"torch.float32.*torch.bfloat16.*\.to\(torch.bfloat16\).*weights"):
                combine(made, desc)
        kept = torch.where(case.chosen[rank] < 4, case.weight[rank], 0)
        wanted = (case.x[rank].float() * kept.sum(1, keepdim=True)).bfloat16()
        torch.testing.assert_close(layer.combine(made.to(rows.dtype), desc), wanted, rtol=2e-2, atol=2e-2)

    in_group(2, work)


@pytest.mark.parametrize("exact", [True, False])
def test_wrong_scatter_indices(exact: bool) -> None:
    """With `check=True` scatter indices that are no order of the rows are refused on all ranks, by the first that is
    wrong; right ones, and those of dropped choices, pass.
    """
    case = Case.drawn("any", 2, 4, 3, 10, torch.float32, 5)
    numbers, counts = case.scatter_indices(), [len(one) for one in case.chosen]
    kept = torch.cat([(one < case.experts) for one in case.chosen])
    places = kept.nonzero().tolist()
    (token, choice), other = places[2], places[5]

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group, check=True, exact=exact)
        mine = (case.x[rank], case.chosen[rank], None)
        there_and_back(layer, case, rank, scatter=torch.where(kept, numbers, -7).int())
        for wrong in (-1, int(numbers[*other]), 10_000):
            given = numbers.clone()
            given[token, choice] = wrong
            for one in (given, given.split(counts)[rank].contiguous()):
                with pytest.raises(DispatchError, match=r"on rank \d have \d+ to \d+, each once, and choice \d"):
                    layer.dispatch(*mine, one)
        given = numbers.clone()
        given[token, choice] = 10_000
        where = (0, token) if token < counts[0] else (1, token - counts[0])
        with pytest.raises(DispatchError, match=f"choice {choice} of token {where[1]} of rank {where[0]} has 10000"):
            layer.dispatch(*mine, given)
        with pytest.raises(TensorError, match=f"of {counts[rank]} or {sum(counts)} tokens, got {sum(counts) + 1}"):
            layer.dispatch(*mine, torch.cat([numbers, numbers[:1]]))
        there_and_back(layer, case, rank, scatter=numbers)

    in_group(2, work)


def test_minus_one_drops() -> None:
    """With `drop_negative` choices of -1 are dropped, as those of E are; without it they are reported."""
    case = Case.drawn("any", 2, 4, 3, 10, torch.float32, 3)

    def work(rank: int, group: str) -> None:
        layer = layer_of(case, rank, group, drop_negative=True)
        chosen = torch.where(case.chosen[rank] == 4, -1, case.chosen[rank])
        chosen[::2] = torch.where(chosen[::2] == -1, 4, chosen[::2])  # both in one call
        given = chosen.clone()
        rows, weights, desc = layer.dispatch(case.x[rank], chosen, case.weight[rank])
        comes = case.comes(rank)
        assert [row.tolist() for row in rows] == [case.x[s][t].tolist() for s, t, _ in comes]
        assert weights.tolist() == [float(case.weight[s][t, k]) for s, t, k in comes]
        assert torch.equal(layer.combine(rows, desc), case.summed(rank, lambda row, _: row))
        assert torch.equal(chosen, given)
        strict = layer_of(case, rank, group)
        strict.dispatch(case.x[rank], torch.full_like(chosen, -1))
        strict.a2a_ctx.exchange.synchronize()

    names = commdsl.threads(2)

    assert {type(one) for one in outcomes(2, lambda rank: work(rank, names[rank]))} == {ep.KeysError}


def test_attributes() -> None:
    """The numbers of the layer have the names of the original, and cannot be set."""
    (name,) = commdsl.threads(1)
    layer = layer_of(Case(1, 4, [TOKENS], [CHOSEN], [CHOSEN.float()]), 0, name)
    wanted = {
        "max_tokens": 12,
        "hidden": HIDDEN,
        "topk": 2,
        "rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "nnodes": 1,
        "node_id": 0,
        "is_intra_node": True,
        "num_tot_experts": 4,
        "experts_per_rank": 4,
        "dtype": torch.float32,
        "weight_dtype": torch.float32,
        "offset_dtype": torch.int32,
    }
    assert {one: getattr(layer, one) for one in wanted} == wanted
    for one in wanted:
        with pytest.raises(AttributeError):
            setattr(layer, one, 1)
