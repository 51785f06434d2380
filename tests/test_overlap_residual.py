"""Operators whose sums have a residual added: host ranks beside float64, gradients, what torch's tools see, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_overlap_ends import (  # noqa: E402 - after the check for torch
    FLOAT8,
    WAYS,
    assert_compiled,
    drawn,
    leaves,
    of_another_kind,
    penalty,
    way,  # noqa: F401 - a fixture
)
from test_overlap_ops import slopes  # noqa: E402 - as above
from thread_ranks import in_group  # noqa: E402 - as above
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.overlap import (  # noqa: E402 - as above
    RowParallelLinear,
    all_to_all_matmul,
    epilogue,
    functional,
    matmul_all_reduce,
    matmul_reduce_scatter,
    programs,
    runs,
)

Tensors = Sequence[Any]
Meaning = Callable[..., list[Any]]

CALLS = (matmul_reduce_scatter, matmul_all_reduce, all_to_all_matmul)
NAMES = ["scatter", "reduce", "return"]
MEANINGS: dict[Any, Meaning] = {call: meaning for call, meaning in WAYS if call in CALLS}
every_call = pytest.mark.parametrize("call", CALLS, ids=NAMES)


def meaning_of(call: Any, x: Tensors, w: Tensors, b: Tensors, t: Tensors) -> list[Any]:
    """What every rank has, of the tensors of all ranks."""
    made = MEANINGS[call](x, w, b)
    if call is matmul_all_reduce:  # alike, so that it is in a sum of all results once
        return [made[0] + t[0]] * len(x)
    return [one + own for one, own in zip(made, t, strict=True)]


def drawn_with(call: Any, ranks: int, dtype: Any = torch.float64, rows: int = 2, **shape: Any) -> list[list[Any]]:
    """As `drawn`, and a residual of every rank, which all have alike where they have one result."""
    x, w, b = drawn(call, ranks, dtype, rows, **shape)
    dice = torch.Generator().manual_seed(ranks + 1)
    like = [one.shape for one in MEANINGS[call](x, w, b)]
    t = [torch.randint(-3, 4, one, generator=dice).to(dtype) for one in like]
    return [x, w, b, t[:1] * ranks if call is matmul_all_reduce else t]


@every_call
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float64)], ids=str)
def test_a_residual(call: Any, has_bias: bool, ranks: int, dtype: Any, way: str) -> None:  # noqa: F811 - the fixture
    """A result and all gradients are those of float64, to the bit, and the same when they are made again; rows may have
    dimensions between.
    """
    numbers = drawn_with(call, ranks, dtype, middle=(3,))
    if not has_bias:
        for one in numbers[2]:
            one.zero_()
    exact = leaves(numbers)
    results = meaning_of(call, *exact)
    flat = [*dict.fromkeys(chain(*exact))]
    wanted = dict(zip(flat, slopes(results, flat), strict=True))

    def rank_does(rank: int, group: str) -> Tensors:
        x, w, b, t = (one[rank].clone().requires_grad_() for one in numbers)
        given = {"bias": b if has_bias else None, "residual": t, "group": group}
        made = call(x, w, **given)
        with torch.no_grad():
            for again in (call(x, w, **given), call(x, w, **given)):
                assert torch.equal(again, made)
            without = call(x, w, bias=given["bias"], group=group)
            assert torch.equal(without.double() + t.double(), made.double())
        return [made, *torch.autograd.grad(made, (x, w, b, t), weighed(made), allow_unused=not has_bias)]

    for rank, (made, *of_all) in enumerate(in_group(ranks, rank_does)):
        assert made.dtype == dtype
        assert torch.equal(made.double(), results[rank])
        for one, of in zip(of_all, exact, strict=True):
            assert (one is None and not has_bias) or torch.equal(one.double(), wanted[of[rank]])


def weighed(result: Any) -> Any:
    """The gradient of a result, of `slopes`."""
    return (torch.arange(result.numel()).view(result.shape) % 3).to(result.dtype)


@every_call
def test_of_a_residual_alone(call: Any) -> None:
    """Where only a residual has a gradient it is that of the result."""
    numbers = drawn_with(call, 2)

    def rank_does(rank: int, group: str) -> None:
        x, w, b, t = (one[rank] for one in numbers)
        own = t.clone().requires_grad_()
        made = call(x, w, bias=b, residual=own, group=group)
        (found,) = torch.autograd.grad(made, own, weighed(made))
        assert torch.equal(found, weighed(made))

    in_group(2, rank_does)


@every_call
def test_gradients_of_gradients(call: Any) -> None:
    """On ranks, a penalty on all gradients has the gradients that it has on one."""
    numbers = drawn_with(call, 2)
    exact = leaves(numbers)

    flat = [*dict.fromkeys(chain(*exact))]
    of = torch.autograd.grad(penalty([*dict.fromkeys(meaning_of(call, *exact))], flat), flat)
    wanted = dict(zip(flat, of, strict=True))

    def rank_does(rank: int, group: str) -> Tensors:
        x, w, b, t = (one[rank].clone().requires_grad_() for one in numbers)
        made = call(x, w, bias=b, residual=t, group=group)
        return torch.autograd.grad(penalty([made], (x, w, b, t)), (x, w, b, t))

    for rank, found in enumerate(in_group(2, rank_does)):
        for one, of_all in zip(found, exact, strict=True):
            assert torch.equal(one, wanted[of_all[rank]])


@every_call
def test_what_is_rounded(call: Any, way: str) -> None:  # noqa: F811 - the fixture
    """A schedule rounds a sum once, with its bias and its residual, but what travels before; one after the other, sums
    over ranks are rounded, and then again with each that is added.
    """
    numbers = [[(one * torch.pi).bfloat16() for one in of_all] for of_all in drawn_with(call, 3)]
    x, w, b, t = ([one.double() for one in of_all] for of_all in numbers)

    def rounded(one: Any) -> Any:
        return one.bfloat16().double()

    def due(rank: int) -> Any:
        if call is all_to_all_matmul:
            return meaning_of(call, x, w, b, t)[rank].bfloat16()
        is_once = way == "schedule"
        blocks = []
        for adder in range(3):
            made = [one.chunk(3)[adder] @ other.t() for one, other in zip(x, w, strict=True)]
            total = sum(one if is_once and number == adder else rounded(one) for number, one in enumerate(made))
            residual = t[adder].chunk(3)[adder] if call is matmul_all_reduce else t[adder]
            ended = total + b[adder] + residual if is_once else rounded(rounded(total) + b[adder]) + residual
            blocks.append(ended.bfloat16())
        return torch.cat(blocks) if call is matmul_all_reduce else blocks[rank]

    found = in_group(3, lambda rank, group: call(*(n[rank] for n in numbers[:2]), **ended(numbers, rank), group=group))
    for rank, one in enumerate(found):
        assert torch.equal(one, due(rank))


def ended(numbers: Sequence[Tensors], rank: int) -> dict[str, Any]:
    return {"bias": numbers[2][rank], "residual": numbers[3][rank]}


@every_call
def test_float8(call: Any, way: str) -> None:  # noqa: F811 - the fixture
    """A residual is of bfloat16, as results are, and no scale is in it."""
    x, w, b, t = drawn_with(call, 2, rows=4)
    scales = {"scale_x": torch.tensor(0.5), "scale_w": torch.tensor(0.25)}
    wanted = meaning_of(call, [one * 0.125 for one in x], w, b, t)

    def rank_does(rank: int, group: str) -> Any:
        ends = {name: one.bfloat16() for name, one in ended([x, w, b, t], rank).items()}
        return call(x[rank].to(FLOAT8), w[rank].to(FLOAT8), **ends, **scales, group=group)

    for one, other in zip(in_group(2, rank_does), wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=2.0**-7, atol=0.0)


def test_a_residual_with_gaps() -> None:
    """It is copied where its rows do not lie one behind another; another one of the same shape is looked at again."""
    x, w, b, t = drawn_with(matmul_reduce_scatter, 2)

    def rank_does(rank: int, group: str) -> Tensors:
        wide = torch.cat([t[rank], -t[rank]], 1)
        return [matmul_reduce_scatter(x[rank], w[rank], residual=one, group=group) for one in wide.chunk(2, 1)]

    product = MEANINGS[matmul_reduce_scatter](x, w, [torch.zeros_like(one) for one in b])
    for rank, (one, other) in enumerate(in_group(2, rank_does)):
        assert torch.equal(one, product[rank] + t[rank])
        assert torch.equal(other, product[rank] - t[rank])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer(sequence_parallel: bool, bias: bool) -> None:
    """A layer's residual is added to what it gives without one, and has the gradient of the result."""
    made = {"sequence_parallel": sequence_parallel, "bias": bias, "dtype": torch.float64}
    rows = 3 if sequence_parallel else 6
    x, alike = torch.randn(6, 6, dtype=torch.float64), torch.randn(rows, 8, dtype=torch.float64)

    def rank_does(rank: int, group: str) -> None:
        layer = RowParallelLinear(12, 8, group=group, **made)
        residual = alike.clone().requires_grad_()
        found = layer(x, residual)
        torch.testing.assert_close(found, layer(x) + residual, rtol=1e-14, atol=1e-14)
        found.backward(weighed(found))
        assert torch.equal(residual.grad, weighed(found))

    in_group(2, rank_does)


# --- torch's tools ----------------------------------------------------------------------------------------------------


@every_call
def test_torch(call: Any) -> None:
    """opcheck finds nothing; fake tensors have the shapes of real ones."""
    (alone,) = commdsl.threads(1)
    x, w, b, t = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (2, 3), (2,), (4, 2)))
    functional.library()
    names = [call.__name__, *([f"{call.__name__}_rows"] if call is all_to_all_matmul else [])]
    for name in names:
        operator = getattr(torch.ops.commdsl_overlap, name).default
        torch.library.opcheck(operator, (x, w, alone), {"bias": b, "residual": t})
        torch.library.opcheck(operator, (x, w, alone), {"residual": t})
    group, _ = commdsl.threads(2)
    numbers = drawn_with(call, 2, middle=(3,))
    with FakeTensorMode() as mode:
        x, w, b, t = (mode.from_tensor(one[0]) for one in numbers)
        assert call(x, w, bias=b, residual=t, group=group).shape == t.shape


def test_compiled() -> None:
    """torch.compile takes all without a break, with gradients and without, beside a rank that does not compile."""
    numbers = [of_all for call in CALLS for of_all in drawn_with(call, 2)]

    def model(group: str, *given: Any) -> Any:
        made = []
        for number, call in enumerate(CALLS):
            x, w, b, t = given[4 * number : 4 * number + 4]
            made.append(call(x.sin(), w * 2, bias=b.cos(), residual=t.exp(), group=group).flatten())
        return torch.cat(made).cos()

    assert_compiled(model, numbers)


# --- what runs, and what is refused -----------------------------------------------------------------------------------


def test_programs() -> None:
    """The choice is that without a residual."""
    group, _ = commdsl.threads(2)
    x, w = torch.zeros(8, 16), torch.zeros(8, 16)
    for end, name in (
        (epilogue.Epilogue(residual=x), "matmul_reducescatter_C_1_R_1"),
        (epilogue.Epilogue(bias=x, residual=x), "matmul_reducescatter_B_1_C_1_R_1"),
    ):
        op = programs.program(programs.SCATTER, x, w, group, end.params)
        assert op is not None
        assert op.name == name


@every_call
def test_what_is_no_residual(call: Any) -> None:
    """Refused before anything is sent, with what is wanted; also where calls without one went before. Autocast makes no
    residual less wide than it is.
    """
    (group,) = commdsl.threads(1)
    x, w, t = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(4, 6)
    call(x, w, residual=t, group=group)
    for residual, words in (
        (t[:3], r"`residual` is as the result, \(4, 6\) of torch.float32 on cpu, got \(3, 6\)"),
        (t[:1], r"got \(1, 6\)"),
        (t[None], r"got \(1, 4, 6\)"),
        *of_another_kind(t),
    ):
        with pytest.raises(commdsl.TensorError, match=words):
            call(x, w, residual=residual, group=group)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(commdsl.TensorError, match=r"of torch.bfloat16 on cpu, got \(4, 6\) of torch.float32"),
    ):
        call(x, w, residual=t, group=group)


def test_who_takes_none() -> None:
    """Operators that send what they make, or gather rows: by their functions, and as torch has them."""
    (group,) = commdsl.threads(1)
    x, w, t = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(4, 6)
    functional.library()
    for call, _ in WAYS:
        if call in CALLS:
            continue
        with pytest.raises(TypeError, match="residual"):
            call(x, w, residual=t, bias=None, group=group)
    for name in runs.RUNS:
        if name.removesuffix("_rows") in epilogue.WITH_RESIDUAL or name == "replicated_matmul":
            continue
        with pytest.raises(commdsl.ArgumentError, match="takes no residual; matmul_reduce_scatter, "):
            getattr(torch.ops.commdsl_overlap, name)(x, w, group, residual=t)


def test_who_takes_no_activation() -> None:
    """As torch has them, too: one of the products that are summed up would be another number."""
    (group,) = commdsl.threads(1)
    x, w = torch.zeros(4, 8), torch.zeros(6, 8)
    functional.library()
    for name in runs.RUNS:
        if name in (*epilogue.WITH_ACTIVATION, "replicated_matmul"):
            continue
        with pytest.raises(commdsl.ArgumentError, match="takes no activation"):
            getattr(torch.ops.commdsl_overlap, name)(x, w, group, activation="gelu")
