"""Products of float8 with scales, beside what travels: host ranks beside float64 of the decoded numbers, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_overlap_ops import exchanged, gathered, reduced, returned, scattered  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - as above
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.overlap import (  # noqa: E402 - as above
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    runs,
)

FLOAT8 = torch.float8_e4m3fn
RANKS = 2


WAYS = [
    (all_gather_matmul, gathered),
    (matmul_reduce_scatter, scattered),
    (matmul_all_reduce, reduced),
    (matmul_all_to_all, exchanged),
    (all_to_all_matmul, returned),
]


def given(is_whole: bool, rows: int = 4, depth: int = 64) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Of every rank rows, weights, and a scale of each, that of rows the same on all."""
    dice = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> Any:
        whole = torch.randint(-2, 3, shape, generator=dice).float()
        return (whole if is_whole else torch.randn(shape, generator=dice)).to(FLOAT8)

    x, w = ([drawn(count, depth) for _ in range(RANKS)] for count in (rows, 8))
    return x, w, [torch.tensor(0.25)] * RANKS, [torch.tensor([2.0**rank]) for rank in range(RANKS)]


def decoded(matrices: Sequence[Any], scales: Sequence[Any]) -> list[Any]:
    return [one.double() * scale.double() for one, scale in zip(matrices, scales, strict=True)]


@pytest.mark.parametrize(("call", "meaning"), WAYS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("is_sequence", [False, True], ids=["schedule", "sequence"])
def test_numbers(call: Any, meaning: Any, is_sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers exactly, others as far as bfloat16 goes, whether products overlap or not."""
    if is_sequence:
        monkeypatch.setattr(runs, "program", lambda *_: None)
    for is_whole in (True, False):
        x, w, of_x, of_w = given(is_whole)
        if call is all_to_all_matmul:  # as deep for the columns of each rank
            w = [torch.cat([one, one.flip(0)], 1) for one in w]

        def work(rank: int, group: str, of: Any = (x, w, of_x, of_w)) -> Any:
            rows, weights, *scales = (one[rank] for one in of)
            return call(rows, weights, scale_x=scales[0], scale_w=scales[1], group=group)

        found = in_group(RANKS, work)
        for one, other in zip(found, meaning(decoded(x, of_x), decoded(w, of_w)), strict=True):
            assert one.dtype == torch.bfloat16
            if is_whole:
                assert torch.equal(one.double(), other)
            else:  # of sums of two, each is rounded first
                torch.testing.assert_close(one.double(), other, rtol=2.0**-8, atol=2.0**-8 * float(other.abs().max()))


TEXT = """
schedule {result}_of_float8 for P ranks where P >= 2 {{
  input x float8_e4m3fn
  input w float8_e4m3fn
  scratch a
  output y {result}
  ensure each r {{ y == matmul(x @ (r - 1) % P, w) }}
  each r {{ put x -> a @ (r + 1) % P }}
  each r {{ compute matmul(a, w -> y) }}
  tune {{ protocol engine }}
}}
"""


@pytest.mark.parametrize("result", ["float32", "float16", "bfloat16"])
def test_a_schedule_says_its_types(result: str, tmp_path: Path) -> None:
    """Products are rounded once, to the type that is declared for them; scales follow the inputs of an op."""
    path = tmp_path / "float8.comm"
    path.write_text(TEXT.format(result=result))
    op = commdsl.load(path, ranks=RANKS)
    x, w, of_x, of_w = given(is_whole=False)
    found = in_group(RANKS, lambda rank, group: op(x[rank], w[rank], of_x[rank], of_w[rank], group=group))
    for rank, one in enumerate(found):
        exact = decoded(x, of_x)[rank - 1] @ decoded(w, of_w)[rank].t()
        assert one.dtype == getattr(torch, result)
        assert ((one.double() - exact).abs() <= torch.finfo(one.dtype).eps * exact.abs() + 1e-6).all()


def test_shapes() -> None:
    """torch knows what comes of a call without making it, of an operator and of an op."""
    op = commdsl.load("allgather_matmul", ranks=RANKS)
    group, _ = commdsl.threads(RANKS)
    with FakeTensorMode():
        x, w, scale = torch.empty(4, 64, dtype=FLOAT8), torch.empty(8, 64, dtype=FLOAT8), torch.ones(())
        for (call, _), shape in zip(WAYS, ((8, 8), (2, 8), (4, 8), (8, 4), (2, 8)), strict=True):
            rows = x[:, :32] if call is all_to_all_matmul else x
            made = call(rows, w, scale_x=scale, scale_w=scale, group=group)
            assert (made.shape, made.dtype) == (shape, torch.bfloat16)
        made = op(x, w, scale, scale, group=group)
        assert (made.shape, made.dtype) == ((8, 8), torch.bfloat16)


def test_refusals() -> None:
    """Scales belong to float8, and float8 to scales; both factors lie by rows; there is no gradient."""
    group, _ = commdsl.threads(RANKS)
    op = commdsl.load("matmul_reducescatter", ranks=RANKS)
    x, w = torch.zeros(4, 64).to(FLOAT8), torch.zeros(8, 64).to(FLOAT8)
    one, turned = torch.ones(1), torch.zeros(64, 16).to(FLOAT8).t()
    for rows, weights, scales, words in (
        (x, w, (), "with two scales, and wider floats without, not torch.float8_e4m3fn with 0"),
        (x.float(), w.float(), (one, one), "not torch.float32 with 2"),
        (x.to(torch.float8_e5m2), w.to(torch.float8_e5m2), (one, one), "not torch.float8_e5m2"),
        (x, w, (one, torch.ones(2)), r"one float32 number on cpu, not \(2,\)"),
        (x, w, (one, one.double()), r"not \(1,\) of torch.float64"),
        (x, turned, (one, one), "lies by columns, and is multiplied by rows"),
    ):
        names = dict(zip(("scale_x", "scale_w"), scales, strict=False))
        with pytest.raises(commdsl.TensorError, match=words):
            matmul_reduce_scatter(rows, weights, **names, group=group)
        with pytest.raises(commdsl.TensorError, match=words):
            op(rows, weights, *scales, group=group)
    with pytest.raises(commdsl.TensorError, match=r"got `float`: pass torch\.tensor"):
        matmul_reduce_scatter(x, w, scale_x=1.0, scale_w=1.0, group=group)
    with pytest.raises(commdsl.TensorError, match="takes 2 tensors, or 2 more, got 3"):
        op(x, w, one, group=group)
    with pytest.raises(commdsl.GradientError, match="has no gradient"):
        matmul_all_reduce(x, w, scale_x=one.clone().requires_grad_(), scale_w=one, group=group)
