"""Gradients of gradients of every operator on host ranks, compared with the same arithmetic on one rank in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attend_cases  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - after the check for torch
from torch.overrides import BaseTorchFunctionMode  # noqa: E402

import commdsl  # noqa: E402
from commdsl import ep, overlap  # noqa: E402
from commdsl.attention import attention  # noqa: E402

Tensors = Sequence[Any]
WIDTH = 4


@dataclass(frozen=True)
class Operator:
    """`call`: one rank's call, on its leaves. `meaning`: the results of all ranks from the leaves of all ranks; None
    for a rank whose result is undefined. `shapes`: of a rank's leaves. `is_shared`: whether all ranks compute one loss.
    `tolerance`: larger where the operator has no float64.
    """

    name: str
    call: Callable[..., Any]
    meaning: Callable[[list[Tensors]], list[Any]]
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    is_shared: bool = False
    tolerance: float = 1e-9


def lengths(ranks: int) -> list[int]:
    """Of blocks that are not as long as each other; one is empty."""
    return [(2 * rank + 3) % 4 for rank in range(ranks)]


def sent(ranks: int) -> list[list[int]]:
    """Rows that each rank sends to each."""
    return [[(source + 2 * dest) % 3 for dest in range(ranks)] for source in range(ranks)]


def came(ranks: int, rank: int) -> list[int]:
    return [row[rank] for row in sent(ranks)]


# --- what operators mean ----------------------------------------------------------------------------------------------


def firsts(leaves: list[Tensors]) -> list[Any]:
    return [one[0] for one in leaves]


def summed(leaves: list[Tensors], *, divided: bool = False) -> list[Any]:
    total = sum(firsts(leaves))
    return [total / len(leaves) if divided else total] * len(leaves)


def gathered(leaves: list[Tensors]) -> list[Any]:
    return [torch.cat(firsts(leaves))] * len(leaves)


def scattered(leaves: list[Tensors], *, divided: bool = False) -> list[Any]:
    return list(summed(leaves, divided=divided)[0].chunk(len(leaves)))


def exchanged(leaves: list[Tensors]) -> list[Any]:
    blocks = [one.chunk(len(leaves)) for one in firsts(leaves)]
    return [torch.cat(columns) for columns in zip(*blocks, strict=True)]


def from_root(leaves: list[Tensors], root: int) -> list[Any]:
    return [leaves[root][0]] * len(leaves)


def at_root(whole: Any, ranks: int, root: int) -> list[Any]:
    return [whole if rank == root else None for rank in range(ranks)]


def uneven_blocks(leaves: list[Tensors], *, divided: bool = False) -> list[Any]:
    return list(summed(leaves, divided=divided)[0].split(lengths(len(leaves))))


def unevenly_exchanged(leaves: list[Tensors]) -> list[Any]:
    blocks = [one.split(rows) for one, rows in zip(firsts(leaves), sent(len(leaves)), strict=True)]
    return [torch.cat(columns) for columns in zip(*blocks, strict=True)]


def shifted(leaves: list[Tensors]) -> list[Any]:
    return [leaves[rank - 1][0] for rank in range(len(leaves))]


# --- the operators ----------------------------------------------------------------------------------------------------


def rows(count: Callable[[int, int], int]) -> Callable[[int, int], list[tuple[int, ...]]]:
    """The shape of one leaf, from ranks and rank."""
    return lambda ranks, rank: [(count(ranks, rank), WIDTH)]


ANY, EACH = rows(lambda *_: 3), rows(lambda ranks, _: 2 * ranks)


def collective(name: str, meaning: Any, shapes: Any, **settings: Any) -> Operator:
    def call(rank: int, ranks: int, group: str, x: Any) -> Any:
        found = {key: value(ranks, rank) if callable(value) else value for key, value in settings.items()}
        return getattr(commdsl, name)(x, group=group, **found)

    words = [value if isinstance(value, str | int) else key for key, value in settings.items()]
    return Operator(" ".join(map(str, (name, *words))), call, meaning, shapes)


def loaded(name: str, meaning: Any, shapes: Any, op: str = "sum", **params: int) -> Operator:
    def call(rank: int, ranks: int, group: str, x: Any) -> Any:
        op_of = commdsl.load(name, params=params, ranks=ranks)
        if name.endswith("_uneven"):
            known = [*sent(ranks)[rank], *came(ranks, rank)] if name.startswith("alltoall") else lengths(ranks)
            return op_of(x, group=group, op=op, lengths=known)
        return op_of(x, group=group, op=op)

    return Operator(" ".join(map(str, (name, op, *params.values()))), call, meaning, shapes)


def means(meaning: Any) -> Any:
    return lambda leaves: meaning(leaves, divided=True)


def of_root(root: int) -> Any:
    return lambda leaves: from_root(leaves, root)


OWN_LENGTH, ALL_LENGTHS = rows(lambda ranks, rank: lengths(ranks)[rank]), rows(lambda ranks, _: sum(lengths(ranks)))
SENT_LENGTHS = rows(lambda ranks, rank: sum(sent(ranks)[rank]))


def splits(ranks: int, rank: int) -> list[int]:
    return lengths(ranks)


COLLECTIVES = [
    collective("all_reduce", summed, ANY),
    collective("all_reduce", means(summed), ANY, op="avg"),
    collective("all_gather", gathered, ANY),
    collective("all_gather", gathered, OWN_LENGTH, output_split_sizes=splits),
    collective("reduce_scatter", scattered, EACH),
    collective("reduce_scatter", means(scattered), EACH, op="avg"),
    collective("reduce_scatter", uneven_blocks, ALL_LENGTHS, input_split_sizes=splits),
    collective("reduce_scatter", means(uneven_blocks), ALL_LENGTHS, op="avg", input_split_sizes=splits),
    collective("all_to_all", exchanged, EACH),
    collective(
        "all_to_all",
        unevenly_exchanged,
        SENT_LENGTHS,
        input_split_sizes=lambda ranks, rank: sent(ranks)[rank],
        output_split_sizes=came,
    ),
    collective("broadcast", of_root(0), ANY, root=0),
    collective("broadcast", of_root(1), ANY, root=1),
]

LOADED = [
    loaded("allreduce_ring", summed, ANY),
    loaded("allreduce_twoshot", means(summed), ANY, "avg"),
    loaded("allgather_ring", gathered, ANY),
    loaded("allgather_uneven", gathered, OWN_LENGTH),
    loaded("reducescatter_ring", scattered, EACH),
    loaded("reducescatter_direct", means(scattered), EACH, "avg"),
    loaded("reducescatter_uneven", uneven_blocks, ALL_LENGTHS),
    loaded("alltoall_direct", exchanged, EACH),
    loaded("alltoall_uneven", unevenly_exchanged, SENT_LENGTHS),
    loaded("broadcast_chain", of_root(0), ANY),
    loaded("broadcast_tree", of_root(1), ANY, root=1),
    loaded("reduce_tree", lambda leaves: at_root(summed(leaves)[0], len(leaves), 1), ANY, root=1),
    loaded("reduce_tree", lambda leaves: at_root(means(summed)(leaves)[0], len(leaves), 0), ANY, "avg"),
    loaded("gather_direct", lambda leaves: at_root(gathered(leaves)[0], len(leaves), 0), ANY),
    loaded("scatter_direct", lambda leaves: [*leaves[1][0].chunk(len(leaves))], EACH, root=1),
    loaded("permutation_shift", shifted, ANY),
]


def product(name: str, meaning: Any, shapes: Any, *, is_shared: bool = False, **settings: Any) -> Operator:
    """With a bias, where there are three leaves, and a residual, where there are four."""

    def call(rank: int, ranks: int, group: str, x: Any, w: Any, *ends: Any) -> Any:
        beside = dict(zip(("bias", "residual"), ends, strict=False))
        return getattr(overlap, name)(x, w, group=group, **beside, **settings)

    return Operator(" ".join((name, *settings)), call, meaning, shapes, is_shared)


def plus(made: list[Any], leaves: list[Tensors]) -> list[Any]:
    """With bias and residual of each rank."""
    return [one + sum(ends[1:], ends[0]) if ends else one for one, (_, _, *ends) in zip(made, leaves, strict=True)]


def gather_product(leaves: list[Tensors]) -> list[Any]:
    x = torch.cat(firsts(leaves))
    return plus([x @ one[1].t() for one in leaves], leaves)


def scatter_product(leaves: list[Tensors]) -> list[Any]:
    total = sum(one[0] @ one[1].t() for one in leaves)
    return plus([*total.chunk(len(leaves))], leaves)


def reduce_product(leaves: list[Tensors]) -> list[Any]:
    """Of the bias and the residual that all ranks have alike."""
    total = sum(one[0] @ one[1].t() for one in leaves)
    return plus([total], leaves[:1]) * len(leaves)


def exchange_product(leaves: list[Tensors]) -> list[Any]:
    made = [(x @ w.t() + bias).chunk(len(leaves), -1) for x, w, bias in leaves]
    return [torch.cat(columns) for columns in zip(*made, strict=True)]


def return_product(leaves: list[Tensors]) -> list[Any]:
    blocks = zip(*(one[0].chunk(len(leaves)) for one in leaves), strict=True)
    return plus([torch.cat(one, -1) @ other[1].t() for one, other in zip(blocks, leaves, strict=True)], leaves)


PRODUCTS = [
    product("all_gather_matmul", gather_product, lambda *_: [(2, 3), (5, 3), (5,)]),
    product("all_gather_matmul", gather_product, lambda *_: [(2, 3), (5, 3), (5,)], keep_rows=True),
    product("matmul_reduce_scatter", scatter_product, lambda ranks, _: [(2 * ranks, 3), (5, 3), (5,), (2, 5)]),
    product("matmul_all_reduce", reduce_product, lambda *_: [(2, 3), (5, 3), (5,), (2, 5)], is_shared=True),
    product("matmul_all_to_all", exchange_product, lambda ranks, _: [(2, 3), (2 * ranks, 3), (2 * ranks,)]),
    product("all_to_all_matmul", return_product, lambda ranks, _: [(2 * ranks, 3), (5, 3 * ranks), (5,), (2, 5)]),
]


def to_the_next_rank(rank: int, ranks: int, group: str, x: Any) -> Any:
    """Tokens whose one expert is on the next rank."""
    if group not in KEPT:
        KEPT[group] = ep.Exchange(ep.Limits(3, 1, 3, (4 * WIDTH,), 4 * WIDTH), ranks, group, "cpu")
    there = ep.dispatch(KEPT[group], x.float(), torch.full((3, 1), (rank + 1) % ranks, dtype=torch.int32))
    return there.rows.double()


KEPT: dict[str, Any] = {}
"""The Exchange of each group, which its operators find as long as somebody has it."""

EXPERTS = [Operator("ep.dispatch", to_the_next_rank, shifted, ANY, tolerance=1e-3)]

OPERATORS = [*COLLECTIVES, *LOADED, *PRODUCTS, *EXPERTS]
NAMES = [one.name for one in OPERATORS]


def drawn(operator: Operator, ranks: int) -> list[Tensors]:
    """The leaves of every rank. Where the loss is one, what follows the product is the same on all ranks."""
    dice = torch.Generator().manual_seed(ranks)
    found = [
        [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in operator.shapes(ranks, rank)]
        for rank in range(ranks)
    ]
    return [[*own[:2], *found[0][2:]] for own in found] if operator.is_shared else found


def factors(like: Any, rank: int) -> Any:
    """Numbers that differ between places, and between ranks."""
    return (torch.arange(like.numel(), dtype=like.dtype).view(like.shape) % 5 - 1.5) * (rank + 1)


def loss(result: Any, rank: int) -> Any:
    return (result.pow(3) * factors(result, rank)).sum() / 10


def penalty(gradients: Tensors, rank: int) -> Any:
    return sum(((one.square() + one) * factors(one, rank)).sum() for one in gradients)


def alone(operator: Operator, given: list[Tensors]) -> tuple[list[Tensors], list[Tensors]]:
    """First and second gradients of all ranks' leaves, on one rank. Where the loss is one, results, biases and
    residuals that all ranks have alike are in it once.
    """
    leaves = [[one.clone().requires_grad_() for one in own] for own in given]
    if operator.is_shared:
        leaves = [[*own[:2], *leaves[0][2:]] for own in leaves]
    places = {leaf: rank for rank, own in reversed([*enumerate(leaves)]) for leaf in own}

    def total(results: list[Any]) -> Any:
        counted = results[:1] if operator.is_shared else results
        return sum(loss(one, rank) for rank, one in enumerate(counted) if one is not None)

    slopes = torch.autograd.grad(total(operator.meaning(leaves)), [*places], create_graph=True, materialize_grads=True)
    of = dict(zip(places, slopes, strict=True))
    lost = total(operator.meaning([[of[own[0]], *own[1:]] for own in leaves]))
    lost = lost + sum(penalty([of[leaf]], 0 if operator.is_shared else rank) for leaf, rank in places.items())
    further = dict(zip(places, torch.autograd.grad(lost, [*places], materialize_grads=True), strict=True))
    return [[of[leaf].detach() for leaf in own] for own in leaves], [[further[leaf] for leaf in own] for own in leaves]


def check(operator: Operator, ranks: int, mode: Callable[[], Any] = nullcontext) -> None:
    """Gradients, and those of a penalty on them and of the operator called on them, are those of one rank."""
    given = drawn(operator, ranks)
    wanted = alone(operator, given)
    is_defined = [one is not None for one in operator.meaning(given)]

    def work(rank: int, group: str) -> tuple[Tensors, Tensors]:
        side = 0 if operator.is_shared else rank

        def lost(leaves: Tensors) -> Any:
            made = operator.call(rank, ranks, group, *leaves)
            return loss(made if is_defined[rank] else 0 * made, side)

        leaves = [one.clone().requires_grad_() for one in given[rank]]
        with mode():
            slopes = torch.autograd.grad(lost(leaves), leaves, create_graph=True)
            further = torch.autograd.grad(lost([slopes[0], *leaves[1:]]) + penalty(slopes, side), leaves)
        return [one.detach() for one in slopes], further

    for rank, found in enumerate(in_group(ranks, work)):
        for ours, theirs in zip(found, (wanted[0][rank], wanted[1][rank]), strict=True):
            torch.testing.assert_close([*ours], [*theirs], rtol=operator.tolerance, atol=operator.tolerance)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_numbers(operator: Operator, ranks: int) -> None:
    """First and second gradients on 2, 3 and 4 ranks are those of one rank."""
    check(operator, ranks)


@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_through_the_dispatcher(operator: Operator) -> None:
    """The operators of torch have the same second gradients as calls that skip its dispatcher."""
    check(operator, 2, BaseTorchFunctionMode)


# --- what has none ----------------------------------------------------------------------------------------------------


def attended(rank: int, group: str) -> Any:
    return lambda x: attention(*(x.view(1, 4, 2, 8),) * 3, group)


def dispatched_and_combined(rank: int, group: str) -> Any:
    exchange = ep.Exchange(ep.Limits(8, 1, 16, (32,), 32), 2, group, "cpu")
    expert = torch.full((8, 1), 1 - rank, dtype=torch.int32)

    def call(x: Any) -> Any:
        there = ep.dispatch(exchange, x.view(8, 8), expert)
        return ep.combine(exchange, there.rows, there.handle)

    return call


def document_attention(rank: int, group: str) -> Any:
    sender, route = attend_cases.sender_of(group, 8), attend_cases.routed(group, ((5, 3), (2, 6)))

    def call(x: Any) -> Any:
        q, k, v = (one.detach() * x.sum() for one in attend_cases.drawn(route.rows, rank))
        return sender.attend(q, k, v, route)

    return call


@pytest.mark.parametrize("make", [attended, dispatched_and_combined, document_attention])
def test_refused_on_all_ranks(make: Any) -> None:
    """Where there is no second gradient every rank is told so, and none waits for another; the group goes on."""

    def work(rank: int, group: str) -> Any:
        call, x = make(rank, group), torch.linspace(-1, 1, 64).requires_grad_()
        (slope,) = torch.autograd.grad(call(x).pow(2).sum(), x, create_graph=True)
        with pytest.raises(commdsl.GradientError, match=r"no gradient of .* gradient: do without create_graph=True"):
            torch.autograd.grad(slope.pow(2).sum(), x)
        return commdsl.all_reduce(torch.ones(3), group=group)

    assert all(torch.equal(one, torch.full((3,), 2.0)) for one in in_group(2, work))
