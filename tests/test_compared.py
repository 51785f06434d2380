"""COMMDSL_DEBUG=1: ranks compare each call before they make it, and say what each of them calls, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl.runtime import groups  # noqa: E402 - as above
from commdsl.runtime.errors import AgreementError  # noqa: E402 - as above

RANKS = 2


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("COMMDSL_DEBUG", "1")
    monkeypatch.setenv("COMMDSL_TIMEOUT", "5")
    return commdsl.threads(RANKS)


def line_of(function: Callable[..., Any], after: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + after}"


def one(x: Any, group: str, **more: Any) -> Any:
    return commdsl.load("allreduce_ring", ranks=RANKS)(x, group=group, **more)


def other(x: Any, group: str, **more: Any) -> Any:
    return commdsl.load("allreduce_oneshot", ranks=RANKS)(x, group=group, **more)


@pytest.mark.parametrize("how", [{}, {"async_op": True}], ids=["at once", "async"])
def test_both_sides(names: tuple[str, ...], how: dict[str, bool]) -> None:
    """Ranks that call something else, or with something else, see both calls and their lines; then they can go on."""

    def call(work: Callable[[int], Any]) -> list[Any]:
        return outcomes(RANKS, lambda rank: found.wait() if hasattr(found := work(rank), "wait") else found)

    x = torch.arange(6.0)
    for turn in range(2):  # the first call of an op, with a set-up, and a later one
        found = call(lambda rank: (one, other)[rank](x, names[rank], **how))
        for error in found:
            assert isinstance(error, AgreementError)
        sides = ("`allreduce_ring` of float32[6] by sum", "`allreduce_oneshot` of float32[6] by sum")
        places = (line_of(one, 1), line_of(other, 1))
        assert f"rank 1 calls {sides[1]} at {places[1]}, rank 0 calls {sides[0]} at {places[0]}" in str(found[0])
        assert f"rank 0 calls {sides[0]} at {places[0]}, rank 1 calls {sides[1]} at {places[1]}" in str(found[1])
        for shape, op in (((6 + turn,), "sum"), ((6,), "max")):
            found = call(
                lambda rank, shape=shape, op=op: (
                    one(torch.ones((6,), dtype=torch.float32), names[rank], **how)
                    if rank
                    else one(torch.ones(shape), names[rank], op=op, **how)
                )
            )
            assert all(isinstance(error, AgreementError) for error in found) == (shape != (6,) or op != "sum")
        found = call(lambda rank: one(x, names[rank], **how))
        assert all(torch.equal(total, 2 * x) for total in found)


def test_nothing_is_kept(names: tuple[str, ...]) -> None:
    """However many calls are compared, what was said of old ones is forgotten."""
    x = torch.arange(6.0)
    outcomes(RANKS, lambda rank: one(x, names[rank]))
    (comm,) = groups.every(names[0])
    board = comm.bootstrap.bootstrap.board
    before = len(board.values)
    outcomes(RANKS, lambda rank: [one(x, names[rank]) for _ in range(10)])
    assert len(board.values) == before


def test_one_call_more(names: tuple[str, ...]) -> None:
    """A call that the others do not make is named when time is up."""
    x = torch.arange(6.0)
    found = outcomes(RANKS, lambda rank: [one(x, names[rank]) for _ in range(2 - rank)])
    assert isinstance(found[0], commdsl.RendezvousError)
    assert found[0].missing == (1,)
    assert "to compare call 1, `allreduce_ring` of float32[6] by sum" in str(found[0])


def test_a_gradient_on_one_rank_alone(names: tuple[str, ...]) -> None:
    """The gradient's call of one rank is not taken for the next call of a rank that has no gradient."""
    x = torch.arange(6.0)

    def work(rank: int) -> Any:
        mine = x.clone().requires_grad_(rank == 0)
        made = one(mine, names[rank])
        if rank == 0:
            made.sum().backward()
            return mine.grad
        return one(x, names[rank])

    found, after = outcomes(RANKS, work), outcomes(RANKS, lambda rank: one(x, names[rank]))
    plain = "`allreduce_ring` of float32[6] by sum"
    for error in found:
        assert isinstance(error, AgreementError)
        assert f"rank 0 calls {plain}, in a backward pass at" in str(error)
        assert f"rank 1 calls {plain} at" in str(error)
    assert all(torch.equal(total, 2 * x) for total in after)
