"""Operators whose products end with a bias and an activation: host ranks beside float64, gradients, what torch's tools
see, and what is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_overlap_ops import (  # noqa: E402 - after the check for torch
    all_gather_matmul_rows,
    gathered,
    given,
    reduced,
    replicated,
    returned,
    scattered,
    slopes,
)
from thread_ranks import in_group  # noqa: E402 - as above
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
from commdsl.overlap.epilogue import Epilogue  # noqa: E402 - as above

Tensors = Sequence[Any]
Meaning = Callable[[Tensors, Tensors, Tensors], list[Any]]

FLOAT8 = torch.float8_e4m3fn
NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def own(product: Callable[[Tensors, Tensors], Tensors]) -> Meaning:
    """Every rank adds its own to the rows that it gets."""
    return lambda x, w, b: [one + other for one, other in zip(product(x, w), b, strict=True)]


def alike(x: Tensors, w: Tensors, b: Tensors) -> list[Any]:
    """All ranks have the same sums, in which the bias is once."""
    return [reduced(x, w)[0] + b[0]] * len(x)


def sent(x: Tensors, w: Tensors, b: Tensors) -> list[Any]:
    """A bias is in what this rank multiplies, before that is sent."""
    made = [(one @ other.t() + added).chunk(len(x), -1) for one, other, added in zip(x, w, b, strict=True)]
    return [torch.cat(columns) for columns in zip(*made, strict=True)]


def all_gather_matmul_kept(x: Any, w: Any, *, bias: Any, group: str) -> Any:
    return all_gather_matmul(x, w, bias=bias, group=group, keep_rows=True)


WAYS = [
    (all_gather_matmul, own(gathered)),
    (all_gather_matmul_kept, own(gathered)),
    (matmul_reduce_scatter, own(scattered)),
    (matmul_all_reduce, alike),
    (matmul_all_to_all, sent),
    (all_to_all_matmul, own(returned)),
    (replicated_matmul, own(replicated)),
]
NAMES = ["gather", "gather, rows kept", "scatter", "reduce", "exchange", "return", "of rows that all ranks have"]
every_way = pytest.mark.parametrize(("call", "meaning"), WAYS, ids=NAMES)


@pytest.fixture(params=["schedule", "sequence"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products beside what travels, or one after the other."""
    if request.param == "sequence":
        for name in ("program", "program_with_rows"):
            monkeypatch.setattr(runs, name, lambda *_: None)
    return str(request.param)


def drawn(call: Any, ranks: int, dtype: Any = torch.float64, rows: int = 2, **shape: Any) -> list[list[Any]]:
    """Of every rank rows, weights and a bias, small whole numbers; what all ranks have alike is one tensor."""
    x, w = given(all_gather_matmul_rows if call is all_gather_matmul_kept else call, ranks, rows, dtype, **shape)
    draw = torch.Generator().manual_seed(ranks)
    b = [torch.randint(-2, 3, one.shape[:1], generator=draw).to(dtype) for one in w]
    return [x[:1] * ranks if call is replicated_matmul else x, w, b[:1] * ranks if call is matmul_all_reduce else b]


def leaves(numbers: list[list[Any]]) -> list[list[Any]]:
    """The same in float64, to be differentiated."""
    of = {one: one.double().requires_grad_() for of_all in numbers for one in of_all}
    return [[of[one] for one in of_all] for of_all in numbers]


@every_way
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float64)], ids=str)
def test_a_bias(call: Any, meaning: Meaning, ranks: int, dtype: Any, way: str) -> None:
    """A result and all three gradients are those of float64, to the bit, and the same when they are made again; rows
    may have dimensions between.
    """
    numbers = drawn(call, ranks, dtype, middle=(3,))
    exact = leaves(numbers)
    results = meaning(*exact)
    flat = [*dict.fromkeys(chain(*exact))]
    wanted = dict(zip(flat, slopes(results, flat), strict=True))

    def rank_does(rank: int, group: str) -> Tensors:
        x, w, b = (one[rank].clone().requires_grad_() for one in numbers)
        made = call(x, w, bias=b, group=group)
        with torch.no_grad():
            for again in (call(x, w, bias=b, group=group), call(x, w, bias=b, group=group)):
                assert torch.equal(again, made)
        return [made, *slopes([made], [x, w, b])]

    for rank, (made, *of_all) in enumerate(in_group(ranks, rank_does)):
        assert made.dtype == dtype
        assert torch.equal(made.double(), results[rank])
        for one, of in zip(of_all, exact, strict=True):
            assert torch.equal(one.double(), wanted[of[rank]])


@every_way
def test_of_a_bias_alone(call: Any, meaning: Meaning) -> None:
    """Where only a bias has a gradient, or only rows and a bias have one, it is the same."""
    numbers = drawn(call, 2)
    exact = leaves(numbers)
    *_, wanted = exact
    due = slopes(meaning(*exact), [*dict.fromkeys(wanted)])

    def rank_does(rank: int, group: str) -> Tensors:
        x, w, b = (one[rank] for one in numbers)
        rows, bias = x.clone().requires_grad_(), b.clone().requires_grad_()
        (alone,) = slopes([call(x, w, bias=bias, group=group)], [bias])
        return [alone, slopes([call(rows, w, bias=bias, group=group)], [rows, bias])[1]]

    for rank, found in enumerate(in_group(2, rank_does)):
        assert all(torch.equal(one, due[rank % len(due)]) for one in found)


def penalty(results: Tensors, of: Tensors) -> Any:
    """On the gradients of squares, each number by its place modulo 3."""
    made = torch.autograd.grad(sum(one.square().sum() for one in results), of, create_graph=True)
    return sum((one.square() * (torch.arange(one.numel()).view(one.shape) % 3)).sum() for one in made)


@every_way
def test_gradients_of_gradients(call: Any, meaning: Meaning) -> None:
    """On ranks, a penalty on all gradients has the gradients that it has on one; several are made at once, too."""
    numbers = drawn(call, 2)
    exact = leaves(numbers)

    flat = [*dict.fromkeys(chain(*exact))]
    of = torch.autograd.grad(penalty([*dict.fromkeys(meaning(*exact))], flat), flat)
    wanted = dict(zip(flat, of, strict=True))

    def rank_does(rank: int, group: str) -> Tensors:
        mine = [one[rank].clone().requires_grad_() for one in numbers]
        made = call(*mine[:2], bias=mine[2], group=group)
        several = torch.stack([torch.full_like(made, factor) for factor in (1, 2)])
        at_once = torch.autograd.grad(made, mine, several, is_grads_batched=True, retain_graph=True)
        for number, one in enumerate(several):
            alone = torch.autograd.grad(made, mine, one, retain_graph=True)
            assert all(torch.equal(one[number], other) for one, other in zip(at_once, alone, strict=True))
        return torch.autograd.grad(penalty([made], mine), mine)

    for rank, found in enumerate(in_group(2, rank_does)):
        for one, of_all in zip(found, exact, strict=True):
            assert torch.equal(one, wanted[of_all[rank]])


@pytest.mark.parametrize(("call", "meaning"), [WAYS[0], *WAYS[4:6]], ids=["gather", "exchange", "return"])
def test_a_sum_is_rounded_once(call: Any, meaning: Meaning, way: str) -> None:
    """With its bias: off by half a unit in the last place of bfloat16, and by what float32 is off."""
    x, w, b = ([(one * torch.pi).bfloat16() for one in of_all] for of_all in drawn(call, 2))
    exact = meaning(*([one.double() for one in of_all] for of_all in (x, w, b)))
    found = in_group(2, lambda rank, group: call(x[rank], w[rank], bias=b[rank], group=group))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2.0**-8, atol=1e-4)


# --- activations ------------------------------------------------------------------------------------------------------


def gelu(x: Any) -> Any:
    return x * torch.special.ndtr(x)


def swiglu(x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


ACTIVATIONS = {"gelu": gelu, "swiglu": swiglu}
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def fractions(ranks: int, dtype: Any, **shape: Any) -> list[list[Any]]:
    """Whose products are where an activation bends."""
    x, w, b = drawn(all_gather_matmul, ranks, torch.float64, **shape)
    return [[(one / 5).to(dtype) for one in of_all] for of_all in (x, w, b)]


@every_activation
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_an_activation(activation: str, has_bias: bool, dtype: Any, way: str) -> None:
    """Without a gradient it is applied to sums in float32 or wider."""
    ranks = 3 if dtype == torch.bfloat16 else 2
    x, w, b = fractions(ranks, dtype, middle=(3,))
    exact = gathered(*([one.double() for one in of_all] for of_all in (x, w)))

    def rank_does(rank: int, group: str) -> Any:
        bias = b[rank] if has_bias else None
        return all_gather_matmul(x[rank], w[rank], bias=bias, activation=activation, group=group)

    for one, product, added in zip(in_group(ranks, rank_does), exact, b, strict=True):
        assert one.dtype == dtype
        due = ACTIVATIONS[activation](product + added.double() if has_bias else product)
        torch.testing.assert_close(one.double(), due, rtol=NEAR[dtype], atol=NEAR[dtype])


@every_activation
@pytest.mark.parametrize("keep_rows", [False, True])
def test_gradients_of_an_activation(activation: str, keep_rows: bool, way: str) -> None:
    """Of rows, weights and a bias, beside those of float64, and their gradients."""
    numbers = fractions(2, torch.float64)
    exact = leaves(numbers)
    results = [ACTIVATIONS[activation](one) for one in own(gathered)(*exact)]
    flat = [*chain(*exact)]
    wanted = slopes(results, flat)

    def rank_does(rank: int, group: str) -> Tensors:
        x, w, b = (one[rank].clone().requires_grad_() for one in numbers)
        made = all_gather_matmul(x, w, bias=b, activation=activation, group=group, keep_rows=keep_rows)
        return [made, *slopes([made], [x, w, b])]

    for rank, (made, *of_all) in enumerate(in_group(2, rank_does)):
        torch.testing.assert_close(made, results[rank], rtol=1e-12, atol=1e-12)
        for one, other in zip(of_all, wanted[rank::2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@every_activation
def test_second_gradients_of_an_activation(activation: str) -> None:
    """What torch finds is what differences say."""
    (group,) = commdsl.threads(1)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (2, 3), (2,))]

    def call(x: Any, w: Any, b: Any) -> Any:
        return all_gather_matmul(x, w, bias=b, activation=activation, group=group)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize(("call", "meaning"), [WAYS[0], *WAYS[2:6]], ids=[NAMES[0], *NAMES[2:6]])
def test_float8(call: Any, meaning: Meaning, way: str) -> None:
    """A bias is of bfloat16, as results are; scales are in what it is added to, and an activation applied."""
    x, w, b = drawn(call, 2, rows=4, middle=())
    scales = torch.tensor(0.5), torch.tensor(0.25)
    wide = meaning([one * 0.125 for one in x], w, b)
    for activation in (None, *(ACTIVATIONS if call is all_gather_matmul else ())):
        ends = {} if activation is None else {"activation": activation}

        def rank_does(rank: int, group: str, ends: Any = ends) -> Any:
            rows, weights = x[rank].to(FLOAT8), w[rank].to(FLOAT8)
            bias = b[rank].bfloat16()
            return call(rows, weights, bias=bias, scale_x=scales[0], scale_w=scales[1], group=group, **ends)

        for one, other in zip(in_group(2, rank_does), wide, strict=True):
            assert one.dtype == torch.bfloat16
            due = other if activation is None else ACTIVATIONS[activation](other)
            torch.testing.assert_close(one.double(), due, rtol=2.0**-7, atol=2.0**-7 if activation else 0.0)


# --- torch's tools ----------------------------------------------------------------------------------------------------


@every_way
def test_torch(call: Any, meaning: Meaning) -> None:
    """opcheck finds nothing; fake tensors have the shapes of real ones."""
    (alone,) = commdsl.threads(1)
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (2, 3), (2,)))
    functional.library()
    name = "all_gather_matmul_rows" if call is all_gather_matmul_kept else call.__name__
    operator = getattr(torch.ops.commdsl_overlap, name).default
    torch.library.opcheck(operator, (x, w, alone), {"bias": b})
    group, _ = commdsl.threads(2)
    (x, _), (w, _), (b, _) = drawn(call, 2, middle=(3,))
    with FakeTensorMode() as mode:
        found = call(*map(mode.from_tensor, (x, w)), bias=mode.from_tensor(b), group=group)
    assert found.shape == meaning([x, x], [w, w], [b, b])[0].shape


@every_activation
def test_torch_of_an_activation(activation: str) -> None:
    """As above; an operator that applies one has no gradient itself, and says so."""
    (alone,) = commdsl.threads(1)
    x, w, b = (torch.randn(shape) for shape in ((4, 3), (2, 3), (2,)))
    functional.library()
    operator = torch.ops.commdsl_overlap.all_gather_matmul.default
    torch.library.opcheck(operator, (x, w, alone), {"bias": b, "activation": activation})
    with pytest.raises(commdsl.GradientError, match="where torch makes it"):
        operator(x, w.requires_grad_(), alone, activation=activation)
    with FakeTensorMode(), torch.no_grad():
        x, w = torch.empty(4, 3, 16), torch.empty(8, 16)
        found = all_gather_matmul(x, w, activation=activation, group=commdsl.threads(2)[0])
    assert found.shape == (8, 3, 4 if activation == "swiglu" else 8)


def test_compiled() -> None:
    """torch.compile takes all without a break, with gradients and without, beside a rank that does not compile."""
    calls = [(call, {}) for call, _ in WAYS]
    calls += [(all_gather_matmul, {"activation": activation}) for activation in ACTIVATIONS]
    numbers = [of_all for call, _ in calls for of_all in drawn(call, 2)]

    def model(group: str, *given: Any) -> Any:
        made = []
        for number, (call, ends) in enumerate(calls):
            x, w, b = given[3 * number : 3 * number + 3]
            made.append(call(x.sin(), w * 2, bias=b.cos(), group=group, **ends).flatten())
        return torch.cat(made).cos()

    assert_compiled(model, numbers)


def assert_compiled(model: Callable[..., Any], numbers: Sequence[Tensors]) -> None:
    """`model`, of a group and what a rank has of each of `numbers`, gives the same on a rank that compiles it."""

    def rank_does(rank: int, group: str) -> None:
        plain = partial(model, group)
        traced = torch.compile(plain, fullgraph=True, backend="aot_eager") if rank == 0 else plain
        tensors = [one[rank] for one in numbers]
        assert_as_eager(traced, plain, tensors)
        with torch.no_grad():
            torch.testing.assert_close(traced(*tensors), plain(*tensors))

    in_group(2, rank_does)


def test_autocast() -> None:
    """A bias is cast as rows and weights are, and has a gradient of its own type."""
    (group,) = commdsl.threads(1)
    x, w, b = (torch.ones(shape, requires_grad=True) for shape in ((2, 8), (8, 8), (8,)))
    for call, _ in WAYS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call(x, w, bias=b, group=group)
        assert found.dtype == torch.bfloat16
        assert torch.autograd.grad(found.sum(), b)[0].dtype == torch.float32


# --- what runs, and what is refused -----------------------------------------------------------------------------------


def test_programs() -> None:
    """The choice is that without a bias or an activation; a gate halves the columns that a kernel is to write."""
    group, _ = commdsl.threads(2)
    x, w = torch.zeros(8, 16), torch.zeros(8, 16)
    for end, name in (
        (Epilogue(x).params, "allgather_matmul_B_1_C_1"),
        (Epilogue(x, activation="gelu").params, "allgather_matmul_A_1_B_1_C_1"),
        (Epilogue(activation="swiglu").params, "allgather_matmul_A_2_C_1"),
    ):
        op = programs.program(programs.GATHER, x, w, group, end)
        assert op is not None
        assert op.name == name
    with FakeTensorMode():
        x, w = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((1024, 16), (24, 16)))
        assert programs.program(programs.GATHER, x, w, group, Epilogue(activation="swiglu").params) is None


def test_a_bias_with_gaps() -> None:
    """It is copied where its numbers do not lie side by side; another one of the same shape is looked at again."""
    x, w, b = drawn(all_gather_matmul, 2)

    def rank_does(rank: int, group: str) -> Tensors:
        wide = torch.stack([b[rank], -b[rank]], 1)
        return [all_gather_matmul(x[rank], w[rank], bias=one, group=group) for one in (wide[:, 0], wide[:, 1])]

    product = gathered(x, w)
    for rank, (one, other) in enumerate(in_group(2, rank_does)):
        assert torch.equal(one, product[rank] + b[rank])
        assert torch.equal(other, product[rank] - b[rank])


def of_another_kind(one: Any) -> list[tuple[Any, str]]:
    """What is refused in place of a tensor of float32 though it has its shape, or none, and in which words."""
    return [
        (one.double(), rf"got {re.escape(str(tuple(one.shape)))} of torch.float64"),
        (one.to("meta"), "on meta"),
        (one.numpy(), "pass torch.from_numpy"),
        (0.0, "pass torch.tensor"),
    ]


@every_way
def test_what_is_no_bias(call: Any, meaning: Meaning) -> None:
    """Refused before anything is sent, with what is wanted; also where calls without one went before."""
    (group,) = commdsl.threads(1)
    x, w, b = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(6)
    call(x, w, bias=b, group=group)
    for bias, words in (
        (b[:5], r"a number for each row of `w`, \(6,\) of torch.float32 on cpu, got \(5,\)"),
        (b[None], r"got \(1, 6\)"),
        *of_another_kind(b),
    ):
        with pytest.raises(commdsl.TensorError, match=words):
            call(x, w, bias=bias, group=group)


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_what_is_no_activation(is_differentiated: bool) -> None:
    """Refused, too; and operators whose results are sums over ranks, or are sent on, have none."""
    (group,) = commdsl.threads(1)
    x, w = torch.zeros(4, 8, requires_grad=is_differentiated), torch.zeros(7, 8)
    with pytest.raises(commdsl.ArgumentError, match="no activation 'relu'; there are gelu, swiglu"):
        all_gather_matmul(x, w, activation="relu", group=group)
    with pytest.raises(commdsl.TensorError, match="a gate and as many columns that it is multiplied with, not 7"):
        all_gather_matmul(x, w, activation="swiglu", group=group)
    with pytest.raises(commdsl.TensorError, match=r"`gelu` is of floats, got torch\.int64"):
        all_gather_matmul(x.detach().long(), w.long(), activation="gelu", group=group)
    for call, _ in WAYS[2:]:
        with pytest.raises(TypeError, match="activation"):
            call(x, w, activation="gelu", group=group)
