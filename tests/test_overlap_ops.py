"""Products beside what travels, as operators of torch: host ranks beside float64, gradients, what torch's tools see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - as above
from traced import assert_as_eager  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.overlap import (  # noqa: E402 - as above
    all_gather_matmul,
    all_to_all_matmul,
    functional,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    programs,
    replicated_matmul,
    runs,
)
from commdsl.runtime import products  # noqa: E402 - as above

Tensors = Sequence[Any]


def gathered(x: Tensors, w: Tensors) -> list[Any]:
    """What every rank has of `all_gather_matmul`, of the tensors of all ranks."""
    return [torch.cat([*x]) @ one.t() for one in w]


def scattered(x: Tensors, w: Tensors) -> list[Any]:
    """And of `matmul_reduce_scatter`."""
    total = sum(one @ other.t() for one, other in zip(x, w, strict=True))
    return list(total.chunk(len(x)))


def reduced(x: Tensors, w: Tensors) -> list[Any]:
    """And of `matmul_all_reduce`."""
    return [sum(one @ other.t() for one, other in zip(x, w, strict=True))] * len(x)


def exchanged(x: Tensors, w: Tensors) -> list[Any]:
    """And of `matmul_all_to_all`."""
    made = [(one @ other.t()).chunk(len(x), -1) for one, other in zip(x, w, strict=True)]
    return [torch.cat(columns) for columns in zip(*made, strict=True)]


def all_gather_matmul_rows(x: Any, w: Any, *, group: str) -> Any:
    """The operator of this name: its second result is for gradients."""
    return all_gather_matmul(x, w, group=group, keep_rows=True)


def returned(x: Tensors, w: Tensors) -> list[Any]:
    """And of `all_to_all_matmul`."""
    blocks = zip(*(one.chunk(len(x)) for one in x), strict=True)
    return [torch.cat(one, -1) @ other.t() for one, other in zip(blocks, w, strict=True)]


GATHERING = (all_gather_matmul, all_gather_matmul_rows)
WAYS = [(call, gathered) for call in GATHERING]
WAYS += [(matmul_reduce_scatter, scattered), (matmul_all_reduce, reduced), (matmul_all_to_all, exchanged)]
WAYS += [(all_to_all_matmul, returned)]
NAMES = ["gather", "gather, rows kept", "scatter", "reduce", "exchange", "return"]


def given(call: Any, ranks: int, rows: int = 6, dtype: Any = torch.float64, middle: tuple[int, ...] = ()) -> list[Any]:
    """Of every rank: rows, so many of its own, and weights; small whole numbers, whose sums of products are exact."""
    draw = torch.Generator().manual_seed(ranks + rows)
    count = rows if call in (*GATHERING, matmul_all_to_all) else rows * ranks
    columns = 8 * ranks if call is matmul_all_to_all else 8
    depth = 16 * ranks if call is all_to_all_matmul else 16
    shapes = [(count, *middle, 16)] * ranks + [(columns, depth)] * ranks
    made = [torch.randint(-2, 3, shape, generator=draw).to(dtype) for shape in shapes]
    return [made[:ranks], made[ranks:]]


def slopes(results: Tensors, leaves: Tensors) -> Tensors:
    """Of the sum of all ranks' results, each number times its place modulo 3. What all have alike is in it once."""
    total = sum((one * (torch.arange(one.numel()).view(one.shape) % 3)).sum() for one in dict.fromkeys(results))
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize(("call", "meaning"), WAYS, ids=NAMES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers(call: Any, meaning: Any, ranks: int) -> None:
    """A result and both gradients are those of the same products in float64: in one piece, in several, of no rows; and
    of whole numbers, which no schedule multiplies.
    """
    for dtype, rows in ((torch.bfloat16, 6), (torch.float32, 8192), (torch.float32, 0), (torch.int64, 4)):
        x, w = given(call, ranks, rows, dtype)
        found = in_group(ranks, lambda rank, group, x=x, w=w: call(x[rank], w[rank], group=group))
        exact = [[one.double().requires_grad_() for one in of_all] for of_all in (x, w)]
        wanted = meaning(*exact)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype
            assert torch.equal(one.double(), other)
        if not dtype.is_floating_point:
            continue

        def back(rank: int, group: str, x: Tensors = x, w: Tensors = w) -> Tensors:
            own = [one[rank].clone().requires_grad_() for one in (x, w)]
            return slopes([call(*own, group=group)], own)

        of_x, of_w = zip(*in_group(ranks, back), strict=True)
        for one, other in zip((*of_x, *of_w), slopes(wanted, [*exact[0], *exact[1]]), strict=True):
            assert torch.equal(one.double(), other)


@pytest.mark.parametrize("call", [matmul_reduce_scatter, matmul_all_reduce], ids=NAMES[2:4])
@pytest.mark.parametrize("is_sequence", [False, True], ids=["schedule", "sequence"])
def test_what_is_rounded(call: Any, is_sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that travel are rounded once before they are added; those of the rank that adds only where it multiplies
    first and then sends.
    """
    if is_sequence:
        monkeypatch.setattr(runs, "program", lambda *_: None)
    ranks, rows, depth, columns = 3, 2, 1024, 8
    dice = torch.Generator().manual_seed(0)
    x, w = (
        [torch.randint(-9, 10, shape, generator=dice).to(torch.bfloat16) for _ in range(ranks)]
        for shape in ((ranks * rows, depth), (columns, depth))
    )
    found = in_group(ranks, lambda rank, group: call(x[rank], w[rank], group=group))

    def wanted(adder: int, is_own_rounded: bool) -> Any:
        own = slice(adder * rows, (adder + 1) * rows)
        made = [one[own].double() @ other.double().t() for one, other in zip(x, w, strict=True)]
        travels = [one.bfloat16().double() if rank != adder or is_own_rounded else one for rank, one in enumerate(made)]
        return sum(travels).bfloat16()

    once, twice = (torch.cat([wanted(rank, way) for rank in range(ranks)]) for way in (False, True))
    assert not torch.equal(once, twice)
    results = [torch.cat(found)] if call is matmul_reduce_scatter else found
    assert all(torch.equal(one, twice if is_sequence else once) for one in results)


@pytest.mark.parametrize(("call", "meaning"), WAYS, ids=NAMES)
def test_one_gradient(call: Any, meaning: Any) -> None:
    """Where only one of both has a gradient it is the same; rows may have dimensions between, and results change in
    place.
    """
    x, w = given(call, 2, middle=(3,))
    exact = [[one.clone().requires_grad_() for one in of_all] for of_all in (x, w)]
    results = meaning(*exact)
    wanted = slopes(results, [*exact[0], *exact[1]])

    def back(rank: int, group: str) -> list[Any]:
        rows, weights = x[rank].clone().requires_grad_(), w[rank].clone().requires_grad_()
        of_x = slopes([call(rows, w[rank], group=group).add_(1)], [rows])
        of_w = slopes([call(x[rank], weights, group=group).add_(1)], [weights])
        return [call(x[rank], w[rank], group=group), *of_x, *of_w]

    for rank, (found, of_x, of_w) in enumerate(in_group(2, back)):
        assert torch.equal(found, results[rank])
        assert torch.equal(of_x, wanted[rank])
        assert torch.equal(of_w, wanted[2 + rank])


def by_columns(matrix: Any) -> Any:
    """As the transpose of what torch keeps."""
    return matrix.t().contiguous().t()


def in_wider_rows(matrix: Any) -> Any:
    return torch.cat([matrix, matrix], 1)[:, : matrix.shape[1]]


def place(matrix: Any) -> int:
    return matrix.untyped_storage().data_ptr()


@pytest.mark.parametrize(("call", "meaning"), WAYS, ids=NAMES)
@pytest.mark.parametrize("laid", [by_columns, in_wider_rows])
def test_what_is_multiplied_is_not_copied(call: Any, meaning: Any, laid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, and rows that do not travel, are multiplied where they are, by rows or by columns: so are those of a
    gradient, weights transposed.
    """
    sources, factors = set[int](), set[int]()
    run = products.ByLibrary.__call__

    def noted(one: Any, number: int, *operands: Any, out: Any) -> None:
        for at in range(len(one._tasks[number].products)):
            sources.add(place(operands[2 * at]))
            factors.add(place(operands[2 * at + 1]))
        run(one, number, *operands, out=out)

    x, w = ([laid(one) for one in of_all] for of_all in given(call, 2, 8, torch.float32))
    exact = [[one.double().requires_grad_() for one in of_all] for of_all in (x, w)]
    results = meaning(*exact)
    slopes_of = slopes(results, [*exact[0], *exact[1]])

    def back(rank: int, group: str) -> list[Any]:
        own = [one[rank].detach().requires_grad_() for one in (x, w)]
        made = call(*own, group=group)
        return [made, *slopes([made], own)]

    monkeypatch.setattr(products.ByLibrary, "__call__", noted)
    for rank, made in enumerate(in_group(2, back)):
        for one, other in zip(made, (results[rank], slopes_of[rank], slopes_of[2 + rank]), strict=True):
            assert torch.equal(one.double(), other)
    assert factors == {*map(place, w)}
    assert call in (*GATHERING, all_to_all_matmul) or sources >= {*map(place, x)}


def test_what_lies_otherwise_is_copied() -> None:
    """Neither rows nor columns side by side, or rows that begin anywhere: the numbers are the same."""
    (x, _), (w, _) = given(all_gather_matmul, 2, dtype=torch.float32)
    for laid in (w.repeat(2, 2)[::2, ::2], torch.cat([w, w[:, :1]], 1)[:, :-1]):
        found = in_group(2, lambda _, group, laid=laid: all_gather_matmul(x, laid, group=group))
        assert torch.equal(found[0], torch.cat([x, x]) @ laid.t())


@pytest.mark.parametrize("call", [call for call, _ in WAYS], ids=NAMES)
def test_gradient_of_gradient(call: Any) -> None:
    """A gradient is made of calls that have gradients: what torch finds is what differences say."""
    (group,) = commdsl.threads(1)
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (2, 3)))
    assert torch.autograd.gradgradcheck(lambda x, w: call(x, w, group=group), (x, w))


def replicated(x: Tensors, w: Tensors) -> list[Any]:
    """What every rank has of `replicated_matmul`, of rows that all have."""
    return [x[0] @ one.t() for one in w]


@pytest.mark.parametrize(
    ("call", "meaning"), [*WAYS, (replicated_matmul, replicated)], ids=[*NAMES, "of rows that all have"]
)
def test_gradient_of_gradient_on_ranks(call: Any, meaning: Any) -> None:
    """A penalty on the gradients of all ranks has the gradients that the same products on one rank have. Rows, results
    and gradients that all ranks have alike are in it once.
    """
    ranks = 2
    x, w = given(call, ranks, rows=2, middle=(3,))
    x = x[:1] * ranks if call is replicated_matmul else x

    def penalty(results: Tensors, leaves: Tensors) -> Any:
        slopes = torch.autograd.grad(sum(one.square().sum() for one in results), leaves, create_graph=True)
        return sum((one.square() * (torch.arange(one.numel()).view(one.shape) % 3)).sum() for one in slopes)

    def back(rank: int, group: str) -> Tensors:
        own = [one[rank].clone().requires_grad_() for one in (x, w)]
        return torch.autograd.grad(penalty([call(*own, group=group)], own), own)

    rows, weights = ([one.clone().requires_grad_() for one in dict.fromkeys(of_all)] for of_all in (x, w))
    results, leaves = meaning(rows * (ranks // len(rows)), weights), [*rows, *weights]
    wanted = torch.autograd.grad(penalty([*dict.fromkeys(results)], leaves), leaves)
    for rank, (of_x, of_w) in enumerate(in_group(ranks, back)):
        assert torch.equal(of_x, wanted[rank % len(rows)])
        assert torch.equal(of_w, wanted[len(rows) + rank])


@pytest.mark.parametrize("call", [commdsl.all_reduce, *(call for call, _ in WAYS)], ids=["all_reduce", *NAMES])
def test_gradients_made_at_once(call: Any) -> None:
    """Autograd makes the gradients of several results at once, as for a Jacobian, as it does one after the other."""
    x, w = given(call, 2, rows=2, middle=(3,))

    def back(rank: int, group: str) -> None:
        own = [one[rank].clone().requires_grad_() for one in ((x,) if call is commdsl.all_reduce else (x, w))]
        made = call(*own, group=group)
        several = torch.stack([torch.full_like(made, factor) for factor in (1, 2)])
        found = torch.autograd.grad(made, own, several, is_grads_batched=True, retain_graph=True)
        wanted = zip(*(torch.autograd.grad(made, own, one, retain_graph=True) for one in several), strict=True)
        assert all(torch.equal(one, torch.stack(other)) for one, other in zip(found, wanted, strict=True))

    in_group(2, back)


@pytest.mark.parametrize(("call", "meaning"), WAYS, ids=NAMES)
def test_torch(call: Any, meaning: Any) -> None:
    """opcheck finds nothing; fake tensors have the shapes of real ones."""
    (alone,) = commdsl.threads(1)
    x, w = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (2, 3)))
    functional.library()
    torch.library.opcheck(getattr(torch.ops.commdsl_overlap, call.__name__).default, (x, w, alone))
    group, _ = commdsl.threads(2)
    (x, _), (w, _) = given(call, 2, middle=(3,))
    with FakeTensorMode() as mode:
        found = call(mode.from_tensor(x), mode.from_tensor(w), group=group)
    assert found.shape == meaning([x, x], [w, w])[0].shape


@pytest.mark.parametrize("call", [call for call, _ in WAYS], ids=NAMES)
def test_compiled(call: Any) -> None:
    """torch.compile takes a model without a break, with gradients, for every number of rows; beside a rank that does
    not compile.
    """

    def rank_does(rank: int, group: str) -> None:
        def model(x: Any, w: Any) -> Any:
            return call(x.sin(), w * 2, group=group).cos()

        traced = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True) if rank == 0 else model
        for rows in (6, 8, 10):
            assert_as_eager(traced, model, [one[rank] for one in given(call, 2, rows)])

    in_group(2, rank_does)


def test_rows_that_all_ranks_have() -> None:
    """Each rank multiplies them by its weights; what comes back to them is the sum of what comes back on all ranks."""
    (x, *_), w = given(replicated_matmul, 3)
    leaf, weights = x.clone().requires_grad_(), [one.clone().requires_grad_() for one in w]
    wanted = [leaf @ one.t() for one in weights]
    of_x, *of_w = slopes(wanted, [leaf, *weights])

    def back(rank: int, group: str) -> Tensors:
        own = [one.clone().requires_grad_() for one in (x, w[rank])]
        found = replicated_matmul(*own, group=group)
        return [found, *slopes([found], own)]

    for rank, (found, mine, weight) in enumerate(in_group(3, back)):
        assert torch.equal(found, wanted[rank])
        assert torch.equal(mine, of_x)
        assert torch.equal(weight, of_w[rank])


def test_autocast() -> None:
    """Under autocast a call casts as torch's linear layers do."""
    (group,) = commdsl.threads(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x, w = torch.ones(2, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
            assert all_gather_matmul(x, w, group=group).dtype == torch.nn.functional.linear(x, w).dtype


def test_programs() -> None:
    """Schedules multiply what they can; the rest is a collective and a product of torch's."""
    (alone,), (group, _) = commdsl.threads(1), commdsl.threads(2)

    def name(x: Any, group: str = group) -> str:
        op = programs.program(programs.SCATTER, x, torch.zeros(8, 16).to(x), group)
        return "none" if op is None else op.name

    x = torch.zeros(1024, 16)
    assert [name(x), name(x[:6])] == ["matmul_reducescatter_C_1"] * 2
    with FakeTensorMode():  # enough that half of it is worth a step of its own
        assert name(torch.empty(1 << 15, 16)) == "matmul_reducescatter_C_2"
    assert {name(x, alone), name(x[:0]), name(x.int())} == {"none"}
    with FakeTensorMode():  # what a GPU's kernel does not read
        for dtype, columns in ((torch.float32, 16), (torch.bfloat16, 12)):
            x, w = (torch.empty(rows, columns, dtype=dtype, device="cuda") for rows in (1024, 8))
            assert programs.program(programs.GATHER, x, w, group) is None


@pytest.mark.parametrize("call", [call for call, _ in WAYS], ids=NAMES)
def test_ranks_agree_on_rows(call: Any) -> None:
    """As many bytes in rows of another length are another call."""
    half, (x, w) = given(call, 2, rows=8), given(call, 2, rows=4)
    if call in (*GATHERING, all_to_all_matmul):
        x, w = ([torch.cat([one, one], 1) for one in of_all] for of_all in (x, w))
    else:
        w = [torch.cat([one, one]) for one in w]
    names = commdsl.threads(2)
    for error in outcomes(2, lambda rank: call(*(of_all[rank] for of_all in (half, (x, w))[rank]), group=names[rank])):
        assert isinstance(error, commdsl.AgreementError)
        assert "in rows of" in str(error)


def test_refusals() -> None:
    """What is no product, or cannot be shared out, is refused before anything is sent."""
    group, _ = commdsl.threads(2)
    for call, _ in WAYS[:5]:
        for x, w in (((4, 8), (4, 7)), ((8,), (4, 8)), ((4, 8), (8,))):
            with pytest.raises(commdsl.TensorError, match=r"`x` is \(rows, ..., K\) and `w` \(N, K\)"):
                call(torch.zeros(x), torch.zeros(w), group=group)
    x = torch.ones(4, 8)
    numpy, sparse, meta, narrow = x.numpy(), x.to_sparse(), x.to("meta"), x.to(torch.float8_e5m2)
    for call in (matmul_reduce_scatter, replicated_matmul):
        for w, words in (
            (x.double(), "of one dtype and device, got torch.float32 on cpu and torch.float64 on cpu"),
            (meta, "of one dtype and device, got torch.float32 on cpu and torch.float32 on meta"),
            (numpy, "got `numpy.ndarray`: pass torch.from_numpy"),
            (sparse, "takes a dense tensor"),
        ):
            with pytest.raises(commdsl.TensorError, match=words):
                call(x, w, group=group)
        with pytest.raises(commdsl.TensorError, match="no products of complex numbers"):
            call(x.cfloat(), x.cfloat(), group=group)
    with pytest.raises(commdsl.TensorError, match="takes no scales, so it multiplies no"):
        replicated_matmul(narrow, narrow, group=group)
    with pytest.raises(commdsl.TensorError, match="2 ranks share the 5 rows"):
        matmul_reduce_scatter(torch.zeros(5, 8), torch.zeros(4, 8), group=group)
    with pytest.raises(commdsl.TensorError, match="2 ranks share the 5 rows of `w`"):
        matmul_all_to_all(torch.zeros(4, 8), torch.zeros(5, 8), group=group)
    with pytest.raises(commdsl.TensorError, match="2 ranks share the 5 rows of `x`"):
        all_to_all_matmul(torch.zeros(5, 8), torch.zeros(4, 16), group=group)
    with pytest.raises(commdsl.TensorError, match=r"`w` \(N, 2 \* K\)"):
        all_to_all_matmul(torch.zeros(4, 8), torch.zeros(4, 8), group=group)
