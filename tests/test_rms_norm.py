"""Sums over ranks that are normed row by row: what a text means, its Plan, host ranks beside float64, torch's tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commdsl import compiler
from commdsl.build import host_run
from commdsl.commands.arguments import UsageError
from commdsl.commands.trial import Settings, trial
from commdsl.ir import interpret
from commdsl.language.diagnostics import InternalError
from commdsl.machine.carriers import BULK, ENGINE, LINE, PACKET
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir
from commdsl.program.sizes import device_launch, host_launch
from commdsl.program.verify import verify

torch = pytest.importorskip("torch")

from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - as above
from traced import assert_as_eager  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.overlap import all_reduce_rms_norm, programs, rms_norm  # noqa: E402 - as above

FILE = data_dir("schedules") / "overlap" / "allreduce_rms_norm.comm"
EPS = 1e-5


def compiled(ranks: int) -> compiler.CompiledSchedule:
    made = compiler.compile(FILE, ranks=ranks)
    assert isinstance(made, compiler.CompiledSchedule)
    return made


def given(ranks: int, rows: tuple[int, ...], columns: int, dtype: Any) -> tuple[list[Any], Any, Any]:
    """Rows of every rank, and the residual and the weight of all."""
    draw = torch.Generator().manual_seed(columns)
    x = [torch.randn(*rows, columns, generator=draw).to(dtype) for _ in range(ranks)]
    residual, weight = torch.randn(*rows, columns, generator=draw), torch.randn(columns, generator=draw)
    return x, residual.to(dtype), weight.to(dtype)


def meaning(x: Sequence[Any], residual: Any, weight: Any, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """(z, y) in float64, with the sum rounded to `dtype`, and y."""
    total = x[0].to(torch.float32 if dtype.itemsize < 4 else dtype)
    for one in x[1:]:
        total = total + one.to(total.dtype)  # in the order of the ranks
    y = (total.to(dtype).double() + residual.double()).to(dtype).double()
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double(), y


# --- the text, and its Plan -------------------------------------------------------------------------------------------


def test_meaning() -> None:
    """The oracle adds up x over the ranks and the residual, and norms each row by itself."""
    x, residual, weight = given(3, (4,), 6, torch.float64)
    same = {"residual": [residual.numpy().ravel()] * 3, "w": [weight.numpy()] * 3, "eps": [np.float32([EPS])] * 3}
    inputs = {"x": [one.numpy().ravel() for one in x], **same}
    found = interpret.run(compiled(3).schedule, inputs, BY_NAME["float64"], "sum").outputs
    z, y = meaning(x, residual, weight)
    for rank in range(3):
        np.testing.assert_allclose(found["y"][rank], y.ravel(), rtol=1e-14)
        np.testing.assert_allclose(found["z"][rank], z.ravel(), rtol=1e-6)  # eps is in float32


@pytest.mark.parametrize(("columns", "bytes_of"), [(8192, 2), (100, 2), (7, 4), (5120, 4)])
@pytest.mark.parametrize("rows", [1, 3, 128, 1000])
def test_no_row_is_cut(rows: int, columns: int, bytes_of: int) -> None:
    """What a lane has of a block begins and ends between two rows, however many there are, and however long; or it is
    one of 2, 4 or 8 equal parts of a row, which the blocks of a cluster have.
    """
    moves, row = compiled(4).plan.moves, columns * bytes_of
    for launch in (device_launch, host_launch):
        made = launch(moves, rows * row, row)
        assert made.active_lanes * made.share_bytes >= rows * row
        assert made.rounds * moves.tile_bytes >= made.share_bytes
        if launch is host_launch or made.parts == 1:
            assert made.share_bytes % row == 0
        else:
            assert (made.parts * made.share_bytes, made.active_lanes) == (row, rows * made.parts)
            assert made.active_lanes % made.parts == 0
            assert made.parts in (2, 4, 8)
    with pytest.raises(ValueError, match="whole rows"):
        device_launch(moves, rows * row + 1, row)


def test_lanes_share_few_rows() -> None:
    """Up to 8 lanes share a row while half of all lanes are enough, and a part is long enough, in whole vectors."""
    moves = compiled(2).plan.moves
    parts = {rows: device_launch(moves, rows * 16384, 16384).parts for rows in (1, 8, 9, 16, 32, 33, 128)}
    assert parts == {1: 8, 8: 8, 9: 4, 16: 4, 32: 2, 33: 1, 128: 1}
    assert device_launch(moves, 128 * 16384, 16384).active_lanes == 128  # a row is a block's of its own
    assert [device_launch(moves, row, row).parts for row in (8192, 4000, 2 * 7001, 10240)] == [4, 1, 1, 4]
    assert device_launch(replace(moves, carrier=BULK), 16384, 16384).parts == 1  # other blocks beside the lanes


def test_a_lane_makes_rows_of_what_it_moved() -> None:
    """A Plan in which rows are cut, or are another's, is no legal one."""
    plan = compiled(3).plan
    (role,), moves, by_row = plan.roles, plan.moves, plan.by_row
    assert by_row is not None
    rows = moves.tensors[by_row.rows]
    for phases in (
        (replace(moves, tensors=tuple(replace(one, cut=2) if one is rows else one for one in moves.tensors)), by_row),
        (replace(moves, carrier=ENGINE), by_row),
        (by_row, moves),
        (moves, replace(by_row, rows=by_row.results[0])),
        (moves, replace(by_row, rows=by_row.given[0])),
        (moves, replace(by_row, results=(by_row.rows, by_row.results[1]))),
        (moves, replace(by_row, given=by_row.given[:2])),
    ):
        with pytest.raises(InternalError):
            verify(replace(plan, roles=(replace(role, phases=phases),)))
    verify(plan)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_run(dtype: str) -> None:
    """`commdsl run`: the kernel leaves the sum that the oracle has, bit for bit; of whole numbers there is no norm."""
    found = trial(compiled(3), Settings(64_000, dtype, None, False, False))
    assert (found.fault, bool(found.compiler)) == ("", True)
    with pytest.raises(UsageError, match="int32 is of whole numbers"):
        trial(compiled(3), Settings(64_000, "int32", None, False, False))


def test_no_race() -> None:
    """Nor does ThreadSanitizer see a race, over calls that follow each other, some ranks late."""
    made, options = compiled(2), host_run.Options(sanitize=True, max_delay=0.002)
    calls = []
    for rows in (5, 1, 5):
        x, residual, weight = (
            one if isinstance(one, list) else [one] * 2 for one in given(2, (rows,), 48, torch.float32)
        )
        calls.append(
            {
                "x": [one.numpy().ravel() for one in x],
                "residual": [one.numpy().ravel() for one in residual],
                "w": [one.numpy() for one in weight],
                "eps": [np.float32([EPS])] * 2,
            }
        )
    results = host_run.run_calls(made.plan, made.emitted, calls, BY_NAME["float32"], "sum", options)
    for call, found in zip(calls, results, strict=True):
        shape = (-1, 48)
        z, _ = meaning(
            [torch.tensor(one).view(shape) for one in call["x"]],
            torch.tensor(call["residual"][0]).view(shape),
            torch.tensor(call["w"][0]),
            torch.float32,
        )
        np.testing.assert_allclose(found.outputs["z"][0].reshape(shape), z, rtol=1e-5, atol=1e-6)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_numbers(ranks: int) -> None:
    """Results are those of float64 but for rounding, and the same bits on all ranks: call after call, other shapes
    between them, of rows that travel as words and as lines, of so many that no schedule norms them, and of none.
    """
    cases = [((3,), 40, torch.bfloat16), ((2, 2), 33, torch.float16), ((), 16, torch.float32), ((3,), 8, torch.float64)]
    cases += [((0,), 8, torch.float32), ((80,), 2048, torch.bfloat16), ((513,), 2048, torch.float32)]
    cases += [((3,), 40, torch.bfloat16)]

    def work(rank: int, group: str) -> list[Any]:
        made = []
        for rows, columns, dtype in cases:
            x, residual, weight = given(ranks, rows, columns, dtype)
            made.append(all_reduce_rms_norm(x[rank], residual, weight, EPS, group=group))
        return made

    found = in_group(ranks, work)
    for at, (rows, columns, dtype) in enumerate(cases):
        x, residual, weight = given(ranks, rows, columns, dtype)
        wanted = meaning(x, residual, weight, dtype)
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps + 1e-7, "atol": 2e-6}
        for rank in range(ranks):
            for one, other, first in zip(found[rank][at], wanted, found[0][at], strict=True):
                assert one.dtype == dtype
                torch.testing.assert_close(one.double(), other, **tolerance)
                assert torch.equal(one, first)


@pytest.mark.parametrize("rows", [(3,), (), (2, 2)])
def test_gradients(rows: tuple[int, ...]) -> None:
    """Those of x, the residual and the weight are torch's of the same in float64, and theirs what differences say."""
    x, residual, weight = given(2, rows, 8, torch.float64)
    leaves = [one.clone().requires_grad_() for one in (*x, residual, weight)]
    y = leaves[0] + leaves[1] + leaves[2]
    z = torch.nn.functional.rms_norm(y, (8,), leaves[3], EPS)
    wanted = torch.autograd.grad((z * torch.arange(8)).sum() + y.sin().sum(), leaves)

    def back(rank: int, group: str) -> Any:
        own = [one.clone().requires_grad_() for one in (x[rank], residual, weight)]
        z, y = all_reduce_rms_norm(*own, EPS, group=group)
        return torch.autograd.grad((z * torch.arange(8)).sum() + y.sin().sum(), own)

    for rank, found in enumerate(in_group(2, back)):
        for one, other in zip(found, (wanted[rank], *wanted[2:]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # eps is in float32
    (alone,) = commdsl.threads(1)
    own = [one.clone().requires_grad_() for one in (x[0], residual, weight)]
    assert torch.autograd.gradgradcheck(lambda *leaves: all_reduce_rms_norm(*leaves, EPS, group=alone), own)


def test_torch() -> None:
    """opcheck finds nothing, fake tensors have the shapes of real ones, and torch.compile takes it without a break."""
    (alone,) = commdsl.threads(1)
    x, residual, weight = given(1, (3,), 8, torch.float32)
    own = [one.requires_grad_() for one in (x[0], residual, weight)]
    rms_norm.library()
    torch.library.opcheck(torch.ops.commdsl_overlap.all_reduce_rms_norm.default, (*own, EPS, alone))
    detached = [one.detach() for one in own]
    with FakeTensorMode() as mode:
        found = all_reduce_rms_norm(*map(mode.from_tensor, detached), EPS, group=alone)
    assert [one.shape for one in found] == [x[0].shape] * 2

    def rank_does(rank: int, group: str) -> None:
        def model(x: Any, residual: Any, weight: Any) -> Any:
            z, y = all_reduce_rms_norm(x * 2, residual, weight, EPS, group=group)
            return z.sin() + y

        traced = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True) if rank == 0 else model
        for rows in (2, 3, 5):
            x, residual, weight = given(2, (rows,), 8, torch.float32)
            assert_as_eager(traced, model, (x[rank], residual, weight))

    in_group(2, rank_does)


def test_refusals() -> None:
    """Rows that are not as long as the weight, and tensors of different types, are refused before anything is sent."""
    group, _ = commdsl.threads(2)
    ones = torch.ones
    for given, words in (
        ((ones(2, 8), ones(2, 8), ones(7)), r"`weight` is \(K,\)"),
        ((ones(2, 8), ones(3, 8), ones(8)), r"`weight` is \(K,\)"),
        ((ones(2, 8), ones(2, 8), ones(8).double()), "one floating dtype"),
        ((ones(2, 8).int(), ones(2, 8).int(), ones(8).int()), "one floating dtype"),
        ((ones(2, 8), ones(2, 8).numpy(), ones(8)), "got `numpy.ndarray`"),
        ((ones(2, 8), ones(2, 8), None), "got `None`"),
        ((ones(2, 8), ones(2, 8, device="meta"), ones(8)), "on one device, got cpu, meta and cpu"),
    ):
        with pytest.raises(commdsl.TensorError, match=words):
            all_reduce_rms_norm(*given, group=group)
    for eps in (None, "1e-5", torch.tensor(EPS)):
        with pytest.raises(commdsl.ArgumentError, match="`eps` is a number"):
            all_reduce_rms_norm(ones(2, 8), ones(2, 8), ones(8), eps, group=group)
    op = commdsl.load(programs.NORM, ranks=2)
    for given, words in (
        ((ones(2, 8), ones(2, 8), ones(7), ones(1)), r"a row of `x` \(8,\)"),
        ((ones(2, 8), ones(2, 7), ones(8), ones(1)), "equally long"),
        ((ones(2, 8), ones(2, 8), ones(8), ones(1).double()), "float32"),
        ((ones(2, 8), ones(2, 8), ones(8), ones(2)), r"`eps` is one number, not \(2,\)"),
        ((ones(2, 8).int(), ones(2, 8).int(), ones(8).int(), ones(1)), "floats of one type"),
    ):
        with pytest.raises(commdsl.TensorError, match=words):
            op(*given, group=group)

    def back(rank: int, group: str) -> None:
        _, z = op(ones(2, 8, requires_grad=True), ones(2, 8), ones(8), ones(1), group=group)
        with pytest.raises(commdsl.GradientError, match="`allreduce_rms_norm` has no gradient"):
            z.sum().backward()

    in_group(2, back)


def test_ranks_agree_on_eps() -> None:
    """Each norms by its own, so ranks with different ones would have different rows: both sides are said."""
    x, one = torch.ones(2, 8), torch.ones(8)
    names = commdsl.threads(2)
    found = outcomes(2, lambda rank: all_reduce_rms_norm(x, x, one, (1e-5, 1e-6)[rank], group=names[rank]))
    for error in found:
        assert isinstance(error, commdsl.AgreementError)
        assert "eps 1e-05" in str(error)
        assert "eps 1e-06" in str(error)


def test_few_rows_travel_as_words() -> None:
    """By what a rank sends: words with their flag up to 128 KB, lines up to 4 MB; beyond, and of nothing, there is no
    one launch.
    """

    def body(rank: int, group: str) -> Any:
        def chosen(rows: int) -> Any:
            op = programs.row_program(torch.zeros(rows, 8192, dtype=torch.bfloat16), group)
            return op and (op.program(2).plan.moves.carrier, op.program(2).plan.moves.threads)

        return [chosen(rows) for rows in (0, 1, 8, 9, 256, 257)]

    words, lines = (PACKET, 256), (LINE, 512)
    assert in_group(2, body) == [[None, words, words, lines, lines, None]] * 2
