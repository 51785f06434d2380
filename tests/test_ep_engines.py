"""The forms of vLLM's and SGLang's dispatchers, held to the shapes that these have documented: a mixture of experts by
their calls, beside plain loops. Neither engine is needed.

Assumes ranks that are threads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent))
from captured import launches_only  # noqa: E402 - after the check for torch
from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.ep import engines  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import CaptureError, DispatchError  # noqa: E402 - after the check for torch

RANKS, EXPERTS, TOPK, HIDDEN, MOST = 2, 6, 3, 8, 10
SHARE = EXPERTS // RANKS
COUNTS = (7, 4)


def drawn(rank: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Tokens, whole numbers; three different experts of each, or none; weights."""
    dice = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randint(-8, 9, (COUNTS[rank], HIDDEN), generator=dice).float()
    experts = torch.stack([torch.randperm(EXPERTS, generator=dice)[:TOPK] for _ in range(COUNTS[rank])]).int()
    experts = torch.where(torch.rand(experts.shape, generator=dice) < 0.2, -1, experts)
    return x, experts, torch.rand(experts.shape, generator=dice)


def wanted(rank: int, seed: int = 0) -> Any:
    """Expert e multiplies by e + 1."""
    x, experts, weights = drawn(rank, seed)
    factors = torch.where(experts < 0, 0, experts + 1) * weights
    return x * factors.sum(1, keepdim=True)


def quantized(x: Any) -> tuple[Any, Any]:
    return x.to(torch.int8), torch.full((len(x), 2), 0.5).half()


def exchange_of(group: str, *, quantize: bool = False, local: bool = False) -> Any:
    widths = (HIDDEN, 4) if quantize else (4 * HIDDEN,)
    limits = ep.Limits(MOST, TOPK, RANKS * MOST * TOPK, widths, 4 * HIDDEN)
    return ep.Exchange(limits, EXPERTS, group, "cpu", local_combine=local, gradients=False, results=3)


# --- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exact", "local"), [(True, False), (False, True)])
@pytest.mark.parametrize("quantize", [None, quantized], ids=["", "quantized"])
def test_standard_format(exact: bool, local: bool, quantize: Any) -> None:
    """(R, H) rows, scales beside them, ids among all experts and weights (R, 1), counts: what a top-1 kernel takes."""

    def work(rank: int, group: str) -> None:
        exchange = exchange_of(group, quantize=quantize is not None, local=local)
        way = engines.PrepareAndFinalize(exchange, exact=exact, quantize=quantize)
        assert way.activation_format is engines.Format.STANDARD
        assert (way.topk_indices_dtype(), way.max_num_tokens_per_rank()) == (torch.int32, None)
        assert (way.num_dispatchers(), way.output_is_reduced(), way.supports_async()) == (RANKS, True, False)
        for seed in range(2):
            x, experts, weights = drawn(rank, seed)
            rows, scales, tokens, ids, came = way.prepare(x, weights, experts, EXPERTS, None, False, None, False)
            everyone = torch.cat([drawn(one, seed)[1].flatten() for one in range(RANKS)])
            counts = [int((everyone == SHARE * rank + one).sum()) for one in range(SHARE)]
            total = sum(counts)
            length = total if exact else RANKS * MOST * TOPK
            assert (rows.shape, ids.shape, came.shape) == ((length, HIDDEN), (length, 1), (length, 1))
            assert rows.dtype == (torch.float32 if quantize is None else torch.int8)
            assert scales is None if quantize is None else scales.shape == (length, 2)
            assert tokens.expert_num_tokens.tolist() == counts
            assert (None if tokens.expert_num_tokens_cpu is None else tokens.expert_num_tokens_cpu.tolist()) == (
                counts if exact else None
            )
            assert ids[:total, 0].tolist() == [SHARE * rank + one for one in range(SHARE) for _ in range(counts[one])]
            assert not ((ids[total:] // SHARE) == rank).any()
            made = rows.float() * (ids + 1)
            output = torch.empty(COUNTS[rank], HIDDEN)
            way.finalize(output, made, came, ids, False, None)
            torch.testing.assert_close(output, wanted(rank, seed))

    in_group(RANKS, work)


class Weighs:
    """As vLLM's TopKWeightAndReduce implementations are called."""

    def apply(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
    ) -> Any:
        assert output is None
        assert not apply_router_weight_on_input
        return (fused_expert_output * topk_weights[..., None]).sum(1)


def test_weighed_by_the_engine() -> None:
    """(M, topk, H) of experts go through the engine's own reduction."""

    def work(rank: int, group: str) -> None:
        way = engines.PrepareAndFinalize(exchange_of(group), exact=True)
        x, experts, weights = drawn(rank)
        rows, _, _, ids, came = way.prepare(x, weights, experts, EXPERTS, None, False, None)
        output = torch.empty(COUNTS[rank], HIDDEN)
        way.finalize(output, (rows * (ids + 1))[:, None], came, ids, False, Weighs())
        torch.testing.assert_close(output, wanted(rank))

    in_group(RANKS, work)


@pytest.mark.parametrize("local", [False, True], ids=["", "local"])
@pytest.mark.parametrize("quantize", [None, quantized], ids=["", "quantized"])
def test_batched_format(quantize: Any, local: bool) -> None:
    """(E_l, M, H) with how many count of each; ids and weights stay the caller's, which weighs at home."""

    def work(rank: int, group: str) -> None:
        exchange = exchange_of(group, quantize=quantize is not None, local=local)
        way = engines.PrepareAndFinalize(exchange, batched=True, quantize=quantize)
        assert way.activation_format is engines.Format.BATCHED_EXPERTS
        assert way.max_num_tokens_per_rank() == MOST
        x, experts, weights = drawn(rank)
        rows, scales, tokens, ids, came = way.prepare(x, weights, experts, EXPERTS, None, False, None)
        assert rows.shape == (SHARE, RANKS * MOST, HIDDEN)
        assert scales is None if quantize is None else scales.shape == (SHARE, RANKS * MOST, 2)
        assert (ids, came) == (None, None)
        everyone = [drawn(one) for one in range(RANKS)]
        for own in range(SHARE):
            mine = [
                x[token] for x, chosen, _ in everyone for token, _ in (chosen == SHARE * rank + own).nonzero().tolist()
            ]
            assert int(tokens.expert_num_tokens[own]) == len(mine)
            assert all(map(torch.equal, rows[own].float(), mine))
        factors = torch.arange(SHARE * rank + 1, SHARE * rank + 1 + SHARE)[:, None, None]
        output = torch.empty(COUNTS[rank], HIDDEN)
        way.finalize(output, rows.float() * factors, weights, experts, False, None)
        torch.testing.assert_close(output, wanted(rank))

    in_group(RANKS, work)


def test_weight_on_input() -> None:
    """Where weights are on the input nothing weighs again; for several experts a token it is refused."""
    (name,) = commdsl.threads(1)
    exchange = ep.Exchange(ep.Limits(4, 1, 4, (4 * HIDDEN,), 4 * HIDDEN), 2, name, "cpu")
    way = engines.PrepareAndFinalize(exchange, exact=True)
    x, weights, experts = torch.ones(3, HIDDEN), torch.tensor([[0.5], [1.0], [2.0]]), torch.tensor([[0], [1], [0]])
    rows, _, _, ids, came = way.prepare(x, weights, experts, 2, None, True, None)
    output = torch.empty(3, HIDDEN)
    way.finalize(output, rows, came, ids, True)
    assert torch.equal(output, x * weights)
    for arguments, message in (
        ((x, weights.expand(3, 2), experts.expand(3, 2), 2, None, True, None), "one expert a token"),
        ((x, weights, experts, 3, None, False, None), "of 2 experts"),
    ):
        with pytest.raises(DispatchError, match=message):
            way.prepare(*arguments)
    with pytest.raises(DispatchError, match="without a `prepare`"):
        way.finalize(output, rows, came, ids, True)
    quantizing = engines.PrepareAndFinalize(exchange, quantize=quantized)
    with pytest.raises(DispatchError, match="quantise themselves"):
        quantizing.prepare(x, weights, experts, 2, None, False, None, True)


# --- SGLang -----------------------------------------------------------------------------------------------------------


def test_normal_mode() -> None:
    """(R, H), ids on this rank (R, 1), a list of counts; what is combined has been weighed."""

    def work(rank: int, group: str) -> None:
        way = engines.Dispatcher(exchange_of(group))
        for seed in range(2):
            x, experts, weights = drawn(rank, seed)
            found = way.dispatch(x, SimpleNamespace(topk_weights=weights, topk_ids=experts.long()))
            assert found.format.is_deepep_normal()
            assert found.format.is_deepep()
            assert not found.format.is_standard()
            total = sum(found.num_recv_tokens_per_expert)
            assert found.hidden_states.shape == (total, HIDDEN)
            assert found.hidden_states_scale is None
            counts = found.num_recv_tokens_per_expert
            assert found.topk_ids.tolist() == [[one] for one in range(SHARE) for _ in range(counts[one])]
            made = found.hidden_states * (found.topk_ids + SHARE * rank + 1) * found.topk_weights
            home = way.combine(SimpleNamespace(hidden_states=made, topk_ids=found.topk_ids, topk_weights=None))
            torch.testing.assert_close(home, wanted(rank, seed))

    in_group(RANKS, work)


def test_low_latency_mode() -> None:
    """(E_l, M, H), masked_m and expected_m; weights at home; in two halves, with other work between them."""

    def work(rank: int, group: str) -> None:
        exchange = exchange_of(group, quantize=True, local=True)
        way = engines.Dispatcher(exchange, low_latency=True, quantize=quantized)
        x, experts, weights = drawn(rank)
        assert way.dispatch_a(x, SimpleNamespace(topk_weights=weights, topk_ids=experts)) is None
        found = way.dispatch_b()
        assert found.format.is_deepep_ll()
        assert found.hidden_states.shape == (SHARE, RANKS * MOST, HIDDEN)
        assert found.hidden_states_scale.shape == (SHARE, RANKS * MOST, 2)
        assert found.expected_m == -(-COUNTS[rank] * TOPK * RANKS // EXPERTS)
        everyone = torch.cat([drawn(one)[1].flatten() for one in range(RANKS)])
        assert found.masked_m.tolist() == [int((everyone == SHARE * rank + one).sum()) for one in range(SHARE)]
        factors = torch.arange(SHARE * rank + 1, SHARE * rank + 1 + SHARE)[:, None, None]
        made = found.hidden_states.float() * factors
        way.combine_a(SimpleNamespace(hidden_states=made, topk_ids=experts, topk_weights=weights))
        torch.testing.assert_close(way.combine_b(), wanted(rank))
        for call in (way.dispatch_b, way.combine_b, lambda: way.combine(None)):
            with pytest.raises(DispatchError, match="before it"):
                call()

    in_group(RANKS, work)


def test_what_reads_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sizes, and normal mode, which take them from the device, are refused before anything is sent."""
    (group,) = commdsl.threads(1)
    exchange = exchange_of(group)
    monkeypatch.setattr(ep.Exchange, "is_capturing", True)
    x, experts, weights = drawn(0)
    with pytest.raises(CaptureError, match="exact=False"):
        engines.PrepareAndFinalize(exchange, exact=True).prepare(x, weights, experts, EXPERTS, None, False, None)
    with pytest.raises(CaptureError, match="low_latency=True"):
        engines.Dispatcher(exchange).dispatch_a(x, SimpleNamespace(topk_weights=weights, topk_ids=experts))


def test_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of experts, in both engines' forms, are made and taken back by launches alone."""
    gpu = FakeGpu(2)
    gpu.install(monkeypatch)

    def work(rank: int, group: str) -> None:
        gpu.here.rank = rank
        exchange = exchange_of(group)
        exchange.prepare(torch.float32)
        x, experts, weights = drawn(rank)
        one, other = engines.PrepareAndFinalize(exchange, batched=True), engines.Dispatcher(exchange, low_latency=True)
        first = SHARE * rank + 1 + torch.arange(SHARE)[:, None, None]
        output = torch.empty(COUNTS[rank], HIDDEN)
        with gpu.capturing(), launches_only():
            batches, *_ = one.prepare(x, weights, experts, EXPERTS, None, False, None)
            one.finalize(output, batches * first, weights, experts, False)
            found = other.dispatch(x, SimpleNamespace(topk_weights=weights, topk_ids=experts))
            made = SimpleNamespace(hidden_states=found.hidden_states * first, topk_ids=experts, topk_weights=weights)
            home = other.combine(made)
        torch.testing.assert_close(output, wanted(rank))
        torch.testing.assert_close(home, wanted(rank))

    in_group(RANKS, work)
