"""`dispatch.plan` and `Dispatcher.attend`: attention of documents where a balanced plan computes it, on host ranks,
beside all of it on one in float64; what a Route says to attend to; what is refused.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attend_cases import (  # noqa: E402 - after the check for torch
    DIM,
    HEADS,
    KEY_HEADS,
    apart_after,
    differ,
    drawn,
    routed,
    sender_of,
    whole,
)
from thread_ranks import at_once, in_group, outcomes  # noqa: E402 - after the check for torch
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import dispatch  # noqa: E402 - after the check for torch
from commdsl.dispatch import DispatchError  # noqa: E402 - after the check for torch
from commdsl.machine.errors import ArgumentError  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import AgreementError, TensorError  # noqa: E402 - after the check for torch

LENGTHS = [[700, 20], [90, 1], [60, 130, 0]]
"""The first rank has a long document; what it has too much of goes to both others."""

# --- one call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [{}, {"causal": False}, {"sharing": "query"}, {"causal": False, "sharing": "query"}])
@pytest.mark.parametrize("put", ["rows", "packed"])
def test_attend(terms: dict[str, Any], put: str) -> None:
    """Results and gradients are those of each document by itself, in float32 to 1e-5."""
    causal = terms.get("causal", True)

    def work(rank: int, group: str) -> float:
        route = routed(group, LENGTHS, **terms)
        sender = sender_of(group, 720, put=put) if terms.get("sharing") != "query" else _roomy(group, put)
        tensors = drawn(route.rows, rank)
        wide = [one.detach().double().requires_grad_() for one in tensors]
        out, want = sender.attend(*tensors, route), whole(LENGTHS[rank], *wide, causal=causal)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        gradients = torch.autograd.grad(out, tensors, weight), torch.autograd.grad(want, wide, weight.double())
        return max(differ([out], [want]), differ(*gradients))

    assert max(in_group(3, work)) < 1e-5


@pytest.mark.parametrize("nodes", ["0,1,2", "0,0,1"])
def test_far_ranks(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks are far from each other, and rows travel in messages, results and gradients are the same bits, by the
    plan of ranks that are near.
    """

    def work(rank: int, group: str) -> list[Any]:
        sender = sender_of(group, 720)
        route = dispatch.Route(*made, rank=rank)
        tensors = drawn(route.rows, rank)
        out = sender.attend(*tensors, route)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]

    torch.manual_seed(5)
    made = dispatch.create_qkv_dispatch(3, 360, 3, 2)
    near = in_group(3, work)
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    far = in_group(3, work)

    assert all(torch.equal(*pair) for ranks in zip(near, far, strict=True) for pair in zip(*ranks, strict=True))


def _roomy(group: str, put: str) -> Any:
    """For keys that come once for each shard of queries."""
    widths = (4 * HEADS * DIM, 4 * KEY_HEADS * DIM, 4 * KEY_HEADS * DIM)
    return dispatch.Dispatcher(dispatch.Limits(720, 1440, 4000, 8, widths), group=group, device="cpu", put=put)


def test_compiled() -> None:
    """torch.compile(fullgraph=True) traces a call, and what it made takes other Routes; results are those of eager."""

    def work(rank: int, group: str) -> int:
        sender, counter = sender_of(group, 400), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(sender.attend, fullgraph=True, backend=counter)
        for length in (300, 310, 320, 330):
            route = routed(group, [[length, 20]])
            tensors = drawn(route.rows, length)
            sender.prepare(route, *tensors)
            found, want = compiled(*tensors, route), sender.attend(*tensors, route)
            gradients = (torch.autograd.grad(one.square().sum(), tensors) for one in (found, want))
            assert torch.equal(found, want)
            assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
        return int(counter.frame_count)

    torch.compiler.reset()
    assert in_group(1, work)[0] <= 2


@pytest.mark.parametrize("again", [False, True])
def test_32_layers(again: bool) -> None:
    """A default Dispatcher runs 32 layers forward and backward, also where activations are computed again: as in
    float64 on one rank, to 1e-5.
    """
    assert max(in_group(2, lambda rank, group: apart_after(32, group, rank, [[300], [50, 14]], again=again))) < 1e-5


# --- what a Route says ------------------------------------------------------------------------------------------------


def test_spans() -> None:
    """Spans of all ranks are all tokens, each with all of its document up to itself; shared keys came once."""

    def work(rank: int, group: str) -> tuple[int, int, int]:
        route = routed(group, LENGTHS)
        spans = route.attention.spans()
        assert [span.queries.start for span in spans] == [0, *(span.queries.stop for span in spans[:-1])]
        assert max(span.keys.stop for span in spans) == route.keys
        pairs = 0
        for queries, keys in spans:
            rows, seen = queries.stop - queries.start, keys.stop - keys.start
            pairs += rows * seen - rows * (rows - 1) // 2
        return route.queries, route.rows, pairs

    found = in_group(3, work)
    tokens = [length for mine in LENGTHS for length in mine]

    assert sum(queries for queries, _, _ in found) == sum(tokens)
    assert [rows for _, rows, _ in found] == [sum(mine) for mine in LENGTHS]
    assert sum(pairs for _, _, pairs in found) == sum(length * (length + 1) // 2 for length in tokens)
    assert max(pairs for _, _, pairs in found) < 1.25 * sum(pairs for _, _, pairs in found) / 3


def test_varlen() -> None:
    """Cuts are as flash attention takes them, where each shard has keys of its own; where keys are shared there are
    none, rather than such as walk on to another's.
    """
    torch.manual_seed(3)
    made = dispatch.create_qkv_dispatch(2, 64, 3, 4)
    for rank in range(2):
        route = dispatch.Route(*made, rank=rank)
        rows, keys, longest, most = route.attention.varlen()
        spans = route.attention.spans()

        assert (rows.dtype, keys.dtype) == (torch.int32, torch.int32)
        assert rows.tolist() == [0, *(span.queries.stop for span in spans)]
        assert keys.tolist() == [0, *(span.keys.stop for span in spans)]
        assert int(keys[-1]) == route.keys
        assert (longest, most) == (int(rows.diff().max()), int(keys.diff().max()))


def test_varlen_of_shared_keys() -> None:
    """Two shards of a document on a rank share its keys: cuts are refused, spans say it."""
    made = dispatch.load_plan("balanced_16k")
    for rank in range(made.fwd_q.world_size):
        route = dispatch.Route(*made, rank=rank)
        seen = sum(keys.stop - keys.start for _, keys in route.attention.spans())
        if seen > route.keys:
            with pytest.raises(DispatchError, match="keys are shared"):
                route.attention.varlen()
            break
    else:
        raise AssertionError("the shipped plan shares no keys")


def test_a_plan_is_kept() -> None:
    """The same lengths are the same Route, whatever sequences they come in."""

    def work(rank: int, group: str) -> None:
        assert routed(group, LENGTHS) is routed(group, tuple(map(tuple, LENGTHS)))
        assert routed(group, LENGTHS) is not routed(group, LENGTHS, causal=False)

    in_group(3, work)


def test_shown() -> None:
    """A Route says whose it is, its rows, and how uneven the attention is."""
    shown = in_group(3, lambda rank, group: repr(routed(group, LENGTHS)))

    assert shown[0].startswith("Route(rank 0 of 3: 720 rows, receives ")
    assert shown[2].endswith("% above the mean)")


def test_threads_share_a_route() -> None:
    """Its tables are made once, whoever asks first."""

    def work(rank: int, group: str) -> None:
        route, sender = routed(group, [[300, 41]]), sender_of(group, 341)
        q, k, v = drawn(route.rows, 0)

        def tables(_: int) -> list[Any]:
            sender.prepare(route, q, k, v)
            return [pair[0].data_ptr() for pair in route.ready.values()]

        assert len({tuple(found) for found in at_once(8, tables)}) == 1

    in_group(1, work)


def test_there_is_room_for_every_plan() -> None:
    """Whatever the lengths, a plan is within the Limits of a Dispatcher for as many tokens."""

    def work(rank: int, group: str) -> None:
        dice = random.Random(1)
        for _ in range(20):
            lengths = [[int(dice.paretovariate(0.6) * 40) for _ in range(dice.randrange(6))] for _ in range(5)]
            route = routed(group, lengths)
            limits = dispatch.Limits.for_tokens(max(map(sum, lengths)), 5, (2, 2, 2))
            assert all(most <= has for most, has in zip(route.most, limits.counts, strict=True)), lengths
            assert route.copies[1] <= limits.copies

    in_group(5, work)


# --- what ranks agree on ----------------------------------------------------------------------------------------------


DIFFERENT = {
    "mask": (lambda rank: {"causal": rank == 0}, lambda rank: {}, ("causal", "not causal")),
    "scale": (lambda rank: {}, lambda rank: {"scale": 0.25 + rank}, ("scale 0.25", "scale 1.25")),
    "scale and default": (lambda rank: {}, lambda rank: {"scale": 0.25 if rank else None}, ("0.25", "0.3535")),
}


@pytest.mark.parametrize("put", ["rows", "packed"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ(name: str, put: str) -> None:
    """Ranks that attend by another mask or scale all raise, and each error names both sides; after a reset they agree
    again.
    """
    terms, settings, words = DIFFERENT[name]
    names = commdsl.threads(2)

    def work(rank: int) -> Any:
        route = routed(names[rank], [[300], [50, 14]], **terms(rank))
        sender = sender_of(names[rank], 300, put=put)
        try:
            sender.attend(*drawn(route.rows, rank), route, **settings(rank))
            sender.synchronize()
        except AgreementError as error:
            commdsl.reset(names[rank])
            right = routed(names[rank], [[300], [50, 14]])
            return str(error), sender.attend(*drawn(route.rows, rank), right)
        raise AssertionError("nothing was raised")

    found = outcomes(2, work)

    assert all(isinstance(one, tuple) for one in found), found
    for message, out in found:
        assert all(word in message for word in words), message
        assert out.isfinite().all()


@pytest.mark.parametrize("odd", ["dtype", "shape"])
def test_rows_of_another_kind(odd: str) -> None:
    """Rows that have as many bytes and another dtype or shape are another call."""
    names = commdsl.threads(2)

    def work(rank: int) -> Any:
        route, sender = routed(names[rank], [[300], [64]]), sender_of(names[rank], 300, torch.float16)
        rows = torch.zeros(route.rows, HEADS, DIM, dtype=torch.float16)
        if rank:
            rows = rows.bfloat16() if odd == "dtype" else rows.view(route.rows, HEADS * DIM)
        sender.dispatch(rows, route)
        return sender.synchronize()

    assert {type(one) for one in outcomes(2, work)} == {AgreementError}


# --- what is refused --------------------------------------------------------------------------------------------------


def test_no_plan() -> None:
    """Lengths of other ranks, of none, and words that no plan knows."""

    def work(rank: int, group: str) -> None:
        for given, terms, message in (
            ([[3]], {}, "documents of 2 ranks"),
            ([3, 4], {}, "a list of whole numbers for each rank"),
            ([[3], [0.5]], {}, "a list of whole numbers for each rank"),
            ([[3], [], [-1]][1:], {}, "0 tokens or more, not -1"),
            ([[3], [4]], {"sharing": "never"}, '`sharing` is "rank" or "query"'),
        ):
            with pytest.raises(ArgumentError, match=message):
                routed(group, given, **terms)

    in_group(2, work)


def test_float64() -> None:
    """Without gradients float64 is attended to as in one place; with them it is refused before anything is sent, not in
    the backward pass.
    """

    def work(rank: int, group: str) -> float:
        route, sender = routed(group, LENGTHS), sender_of(group, 720, torch.float64)
        tensors = drawn(route.rows, rank, torch.float64)
        tensors = [one.detach() for one in tensors]
        near = differ([sender.attend(*tensors, route)], [whole(LENGTHS[rank], *tensors)])
        wanted = [one.requires_grad_() for one in tensors]
        for _ in range(2):
            with pytest.raises(TensorError, match=r"float64 rows have no gradient.*torch.no_grad"):
                sender.attend(*wanted, route)
        with torch.no_grad():
            return max(near, differ([sender.attend(*wanted, route)], [whole(LENGTHS[rank], *tensors)]))

    assert max(in_group(3, work)) < 1e-12


def test_no_attention() -> None:
    """A Route without a layout of attention, tensors of other shapes, a Metadata in place of a Route."""

    def work(rank: int, group: str) -> None:
        sender, route = sender_of(group, 64), routed(group, [[64]])
        q, k, v = drawn(64, 0)
        made = dispatch.create_qkv_dispatch(1, 64, 1, 1)
        with pytest.raises(DispatchError, match="not copied or saved: save the Metadata"):
            pickle.dumps(route)
        with pytest.raises(DispatchError, match="does not say what its queries attend to"):
            sender.attend(q, k, v, dispatch.Route(*made[:4], rank=0))
        with pytest.raises(DispatchError, match=r"expected a Route, got `Metadata`: Route\(fwd_q"):
            sender.attend(q, k, v, made.fwd_q)
        for call in (sender.dispatch, sender.collect, sender.prepare):
            with pytest.raises(DispatchError, match="got `tuple`: `dispatch"):
                call(route=tuple(made), **{"q" if call == sender.prepare else "x": q})
        for other, message in (
            (q.tolist(), "got `list`: pass torch.tensor"),
            (q.detach().numpy(), "got `numpy.ndarray`: pass torch.from_numpy"),
            (q.detach().to_sparse(), "got one that is torch.sparse_coo: pass x.to_dense"),
            (q.to("meta"), "on meta"),
        ):
            with pytest.raises(TensorError, match=message):
                sender.dispatch(other, route)
            with pytest.raises(TensorError, match=message):
                sender.attend(other, k, v, route)
        for wrong in ((q[0], k, v), (q, k.double(), v), (q, k[:, :1], v), (q[:, :3], k, v)):
            with pytest.raises(TensorError, match="expected"):
                sender.attend(*wrong, route)
        with pytest.raises(ArgumentError, match='"auto" or one of'):
            sender.attend(q, k, v, route, kernel="none")
        with pytest.raises(DispatchError, match="65 rows, and the Limits are for 64"):
            sender.attend(*drawn(65, 0), routed(group, [[65]]))

    in_group(1, work)
