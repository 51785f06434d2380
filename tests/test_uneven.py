"""Blocks of lengths of their own: any lengths on host ranks beside numpy, what is proved of them, calls of torch."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np
import pytest
from collectives import SCHEDULES
from numpy.typing import NDArray
from plans import changed

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.host_run import Options
from commdsl.ir import interpret
from commdsl.language.diagnostics import InternalError
from commdsl.machine.dtypes import BY_NAME, DType
from commdsl.program.verify import verify

FOLDER = SCHEDULES / "uneven"
Array = NDArray[Any]


def compiled(name: str, ranks: int, **tune: int | str) -> Any:
    return compiler.compile(FOLDER / f"{name}_uneven.comm", ranks=ranks, tune=tune)


def tables(name: str, ranks: int, seed: int) -> list[list[int]]:
    """Lengths of calls: of a few elements, of more than a tile, none at all, all on one rank, none of some."""
    random, count = np.random.default_rng(seed), ranks**2 if name == "alltoall" else ranks
    some, most = (random.integers(0, length, count).tolist() for length in (5, 3000))
    alone = [0] * count
    alone[seed % count] = 2500
    return [most, some, [0] * count, alone, [length * (at % 2) for at, length in enumerate(most)], most[::-1]]


def given(name: str, table: list[int], dtype: DType, seed: int) -> list[Array]:
    """By rank what it has: its block of an all-gather, a block for each rank otherwise."""
    random = np.random.default_rng(seed)
    sizes = table if name == "allgather" else [sum(table)] * len(table)
    if name == "alltoall":
        sizes = np.sum(_square(table), axis=1).tolist()
    return [_stored(random.integers(-9, 9, size), dtype) for size in sizes]


def _square(table: list[int]) -> Array:
    """A row for each rank of what it sends to whom."""
    ranks = isqrt(len(table))
    return np.array(table).reshape(ranks, ranks)


def _stored(values: Array, dtype: DType) -> Array:
    return dtype.from_float32(values.astype(np.float32)) if dtype.is_float else values.astype(dtype.storage)


def wanted(name: str, table: list[int], x: list[Array], dtype: DType) -> list[Array]:
    """By rank what it gets, by numpy; numbers are so small that every sum is exact."""
    if name == "allgather":
        return [np.concatenate(x)] * len(table)
    if name == "alltoall":
        sent = [np.split(one, np.cumsum(row)[:-1]) for one, row in zip(x, _square(table), strict=True)]
        return [np.concatenate(came) for came in zip(*sent, strict=True)]
    total = sum(dtype.to_float32(one).astype(np.int64) if dtype.is_float else one.astype(np.int64) for one in x)
    return [_stored(part, dtype) for part in np.split(total, np.cumsum(table)[:-1])]


def ran(name: str, ranks: int, dtype: str, options: Options, **tune: int | str) -> None:
    """Calls of all kinds of lengths, one behind another on one heap, leave what numpy says."""
    made, of = compiled(name, ranks, lanes=2, **tune), BY_NAME[dtype]
    inputs = [given(name, table, of, seed) for seed, table in enumerate(tables(name, ranks, ranks))]
    every = list(zip(tables(name, ranks, ranks), inputs, strict=True))
    calls = [{"x": x, "n": [np.array(table)]} for table, x in every]
    for (table, x), found in zip(
        every, host_run.run_calls(made.plan, made.emitted, calls, of, "sum", options), strict=True
    ):
        for got, right in zip(found.outputs["y"], wanted(name, table, x, of), strict=True):
            assert np.array_equal(got, right)
        oracle = interpret.run(made.schedule, {"x": x, "n": [np.array(table)]}, of, "sum").outputs["y"]
        assert all(np.array_equal(*pair) for pair in zip(oracle, wanted(name, table, x, of), strict=True))


WAYS = [
    *((name, way) for name in ("allgather", "reducescatter") for way in ("bulk", "packet", "line", "tma")),
    *(("alltoall", way) for way in ("bulk", "tma")),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "protocol"), WAYS)
@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float32"), (3, "int8"), (5, "bfloat16"), (8, "int64")])
def test_any_lengths(name: str, protocol: str, ranks: int, dtype: str) -> None:
    """Every rank gets what it must, whatever lengths there are, none among them, in any memory and element type."""
    shift = BY_NAME[dtype].storage.itemsize * (ranks % 2)
    ran(name, ranks, dtype, Options(max_delay=0.001, shift=shift, timeout=20), protocol=protocol, tile=3840)


def test_no_race() -> None:
    """Under ThreadSanitizer calls of unequal and of no blocks leave each other's cells alone."""
    for name in ("reducescatter", "alltoall"):
        ran(name, 3, "int32", Options(sanitize=True, timeout=60), tile=1024)


def test_a_chunk_has_one_length() -> None:
    """A Plan in which any one operation moves a block of another length is no legal Plan."""
    for name in ("allgather", "reducescatter"):
        plan = compiled(name, 3).plan
        verify(plan)
        ops, refused = plan.moves.ops, 0
        for at in range(ops.num_ops):
            length = ops.length.copy()
            length[at] = (length[at] + 1) % 3
            try:
                verify(changed(plan, ops=replace(ops, length=length)))
            except InternalError:
                refused += 1
            else:
                assert compiler.checks.check_plan(
                    compiled(name, 3).schedule, changed(plan, ops=replace(ops, length=length))
                )
        assert refused


# --- calls of torch ---------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch
from transports import TRANSPORTS  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.machine.errors import ArgumentError  # noqa: E402 - as above
from commdsl.runtime import collective_ops  # noqa: E402 - as above
from commdsl.runtime.errors import AgreementError, TensorError  # noqa: E402 - as above

ROWS = [3, 0, 5]
"""Of each of three ranks."""


def rows_of(rank: int, count: int) -> Any:
    """Rows of three that say whose they are."""
    return torch.arange(count * 3, dtype=torch.float32).reshape(count, 3) + 100 * rank


def every() -> Any:
    """What an all-gather of such rows gives."""
    return torch.cat([rows_of(rank, count) for rank, count in enumerate(ROWS)])


def test_calls_and_gradients() -> None:
    """The way back of the one is the other, of the same lengths; a mean divides its gradient."""

    def body(rank: int, group: str) -> None:
        x = rows_of(rank, ROWS[rank]).requires_grad_()
        y = commdsl.all_gather(x, group=group, output_split_sizes=ROWS)
        assert torch.equal(y, every())
        (y * (rank + 1)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))

        whole = every().requires_grad_()
        own = commdsl.reduce_scatter(whole * (rank + 1), "avg", group=group, input_split_sizes=ROWS)
        assert torch.equal(own, 2 * torch.split(every(), ROWS)[rank])
        own.sum().backward()
        assert torch.equal(whole.grad, torch.full_like(whole, (rank + 1) / 3))
        work = commdsl.all_gather(x.detach(), group=group, output_split_sizes=ROWS, async_op=True)
        assert torch.equal(work.wait(), every())

    in_group(3, body)


SENT = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]
"""Rows that each of three ranks sends to each."""


def splits(rank: int) -> dict[str, list[int]]:
    """What a rank is told of them."""
    return {"input_split_sizes": SENT[rank], "output_split_sizes": [row[rank] for row in SENT]}


def test_to_all_and_back() -> None:
    """Each rank knows what it sends and what comes; gradients go back the way that their rows came."""

    def body(rank: int, group: str) -> None:
        x = rows_of(rank, sum(SENT[rank])).requires_grad_()
        y = commdsl.all_to_all(x * 2, group=group, **splits(rank))
        parts = [torch.split(2 * rows_of(peer, sum(SENT[peer])), SENT[peer])[rank] for peer in range(3)]
        assert torch.equal(y, torch.cat(parts))
        (y * (rank + 1)).sum().backward()
        scale = torch.repeat_interleave(torch.arange(1.0, 4.0), torch.tensor(SENT[rank]))
        assert torch.equal(x.grad, 2 * scale[:, None].expand_as(x))
        again = commdsl.load("alltoall_uneven", ranks=3)
        lengths = [*splits(rank)["input_split_sizes"], *splits(rank)["output_split_sizes"]]
        assert torch.equal(again((2 * x).detach(), lengths=lengths, group=group), y)
        equal = commdsl.all_to_all(rows_of(rank, 6), group=group)
        assert torch.equal(equal[:2], rows_of(0, 6)[2 * rank : 2 * rank + 2])

    in_group(3, body)


def test_a_block_of_another_length() -> None:
    """A rank that expects another number of rows than its peer sends says so, with both numbers; nobody hangs."""
    names = commdsl.threads(3)

    def body(rank: int) -> Any:
        told = splits(rank)
        if rank == 2:
            told["output_split_sizes"] = [3, 1, 0]  # of rank 1, which sends nothing
        return commdsl.all_to_all(rows_of(rank, sum(SENT[rank])), group=names[rank], **told)

    found = outcomes(3, body)
    assert isinstance(found[2], AgreementError)
    assert "rank 1 sends 0 bytes to rank 2, which expects 12" in str(found[2])


def test_far_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads travel where plain stores do not reach; there are as many rounds as the block of one pair takes."""
    for name, value in zip(("COMMDSL_TRANSPORT", "COMMDSL_NODES"), TRANSPORTS["mixed"](3), strict=True):
        monkeypatch.setenv(name, value)
    sent = [[0, 40_000, 1], [0, 0, 0], [2, 0, 0]]

    def body(rank: int, group: str) -> None:
        x = rows_of(rank, sum(sent[rank]))
        y = commdsl.all_to_all(x, [row[rank] for row in sent], sent[rank], group=group)
        parts = [torch.split(rows_of(peer, sum(row)), row)[rank] for peer, row in enumerate(sent)]
        assert torch.equal(y, torch.cat(parts))

    in_group(3, body)


def test_traced() -> None:
    """opcheck finds nothing; torch.compile takes them without a break, and so the ops that are loaded."""
    (alone,) = commdsl.threads(1)
    x = rows_of(0, 4).requires_grad_()
    collective_ops.library()
    check, ops = torch.library.opcheck, torch.ops.commdsl_collectives
    check(ops.all_gather_uneven.default, (x, [4], alone))
    check(ops.reduce_scatter_uneven.default, (x, [4], alone))
    gather = commdsl.load("allgather_uneven", ranks=3)

    def body(rank: int, group: str) -> None:
        def model(x: Any) -> Any:
            y = commdsl.all_gather(x * 2, group=group, output_split_sizes=ROWS)
            return commdsl.reduce_scatter(y, group=group, input_split_sizes=ROWS) + 1

        traced = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
        mine = rows_of(rank, ROWS[rank]).requires_grad_()
        y = traced(mine)
        assert torch.equal(y, 6 * mine + 1)
        y.sum().backward()
        assert torch.equal(mine.grad, torch.full_like(mine, 6.0))
        again = rows_of(rank, ROWS[rank]).requires_grad_()
        gather(again, lengths=ROWS, group=group).sum().backward()
        assert torch.equal(again.grad, torch.full_like(again, 3.0))

    in_group(3, body)


def test_ranks_that_do_not_agree() -> None:
    """A rank that is given other lengths is found before anybody has a result, and both are named."""
    names = commdsl.threads(3)

    def body(rank: int) -> Any:
        mine = ROWS if rank else [3, 1, 5]
        return commdsl.all_gather(rows_of(rank, mine[rank]), group=names[rank], output_split_sizes=mine)

    found = outcomes(3, body)
    assert any(isinstance(one, AgreementError) for one in found)
    assert not any(isinstance(one, torch.Tensor) for one in found)
    said = " ".join(str(one) for one in found)
    assert "blocks of 36, 12, 60 bytes" in said
    assert "blocks of 36, 0, 60 bytes" in said


def test_refused() -> None:
    """What does not fit is said before anything is sent."""

    def body(rank: int, group: str) -> None:
        x = rows_of(rank, ROWS[rank])
        with pytest.raises(TensorError, match=r"`x` is \d rows by its lengths, `n\[rank\]`, got"):
            commdsl.all_gather(torch.ones(9, 3), group=group, output_split_sizes=ROWS)
        with pytest.raises(TensorError, match=r"takes 3 lengths, `n\[rank\]`, got 2"):
            commdsl.all_gather(x, group=group, output_split_sizes=ROWS[:2])
        with pytest.raises(TensorError, match="a length is a number of rows"):
            commdsl.all_gather(x, group=group, output_split_sizes=[3, -1, 5])
        with pytest.raises(ArgumentError, match="`output_split_sizes` and `wire` do not go together"):
            commdsl.all_gather(x, group=group, output_split_sizes=ROWS, wire="float8")
        with pytest.raises(ArgumentError, match="go together: give both, or none"):
            commdsl.all_to_all(x, group=group, input_split_sizes=ROWS)
        with pytest.raises(TensorError, match=f"rank {rank} sends itself 1 rows, and expects 2 of itself"):
            commdsl.all_to_all(torch.ones(3, 3), [2, 2, 2], [1, 1, 1], group=group)
        with pytest.raises(TensorError, match="takes no lengths"):
            commdsl.load("permutation_shift", params={"K": 1}, ranks=3)(x, group=group, lengths=ROWS)

    in_group(3, body)
