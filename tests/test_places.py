"""Where the caller's function writes: in place, if it asks for the place, and in the same one until that is read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from commdsl import compiler
from commdsl.program.launches import described
from commdsl.program.visited import started

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above

BEHIND = """schedule behind for P ranks where P >= 2 {
  inout kv
  inout dk float32 like kv
  inout dv float32 like kv
  scratch pk
  scratch pv
  ensure rotation(kv)

  yield grad(kv -> pk, pv)
  for s in 1 ..< P {
    each r {
      put kv -> kv @ (r + 1) % P
      reduce pk -> dk
      reduce pv -> dv
    }
    each r {
      put dk -> dk @ (r + 1) % P
      put dv -> dv @ (r + 1) % P
    }
    yield grad(kv -> pk, pv)
  }
  each r {
    reduce pk -> dk
    reduce pv -> dv
  }
  each r {
    put dk -> dk @ (r + 1) % P
    put dv -> dv @ (r + 1) % P
  }
  yield finish(dk, dv -> dk, dv)
}
"""
"""Gradients that follow their keys a step later: what a visit writes is launched while the next one computes."""

LOOKED_AT = """schedule looked_at for P ranks where P >= 2 {
  inout kv
  output last like kv
  scratch part float32 like kv
  ensure rotation(kv)

  yield attend(kv -> part)
  for s in 1 ..< P {
    each r { put kv -> kv @ (r + 1) % P }
    yield note(part -> last)
    yield attend(kv -> part)
  }
  yield note(part -> last)
}
"""
"""What only functions read stays where it is."""

PIECES = """schedule pieces(K = 3) for P ranks where P >= 2 {
  inout k[2 blocks, K blocks]
  inout dk[2 blocks, K blocks] float32 like k
  ensure rotation(k)

  yield attend(k, dk -> dk)
  for s in 1 ..< P {
    each r {
      put k -> k @ (r + 1) % P
      put dk -> dk @ (r + 1) % P
    }
    yield attend(k, dk -> dk)
  }
  each r { put dk -> dk @ (r + 1) % P }
}
"""


def loaded(text: str, ranks: int) -> Any:
    return commdsl.load({"places.comm": text}, ranks=ranks)


def shown(text: str, ranks: int) -> list[str]:
    plan = compiler.check(compiler.read_text(text, "places.comm", Path()), ranks=ranks).visits  # type: ignore[union-attr]
    assert plan is not None
    return [described(phase, number).partition("  ")[0] for number, phase in started(plan)]


def test_a_place_until_it_is_read() -> None:
    """What is written anew takes the other copy where a launch reads the one before, and the same where none does."""
    visits = [line for line in shown(BEHIND, 4) if " grad: " in line]
    assert [line.partition(" -> ")[2] for line in visits] == ["pk 1, pv 1", "pk 2, pv 2", "pk 1, pv 1", "pk 2, pv 2"]
    visits = [line for line in shown(LOOKED_AT, 4) if line.startswith("visit")]
    assert visits == [
        f"visit {number} {what}"
        for number, what in enumerate(
            ["attend: kv 0 -> part 1", "note: part 1 -> last 1"]
            + [f"{one}" for copy in (1, 2, 1) for one in (f"attend: kv {copy} -> part 1", "note: part 1 -> last 1")]
        )
    ]


@pytest.mark.parametrize("how", ["function", "wrapped", "object", "method"])
def test_in_place(how: str) -> None:
    """With a keyword `out` a function is given what it writes, in the dtype and shape declared, and returns nothing."""
    ranks, op = 3, loaded(BEHIND, 3)

    def body(rank: int, group: str) -> None:
        places: set[int] = set()

        def grad(number: int, kv: Any, *, out: Any) -> None:
            pk, pv = out
            assert {(one.dtype, one.shape) for one in out} == {(torch.float32, kv.shape)}
            places.update(one.data_ptr() for one in out)
            torch.mul(kv.float(), rank + 1.0, out=pk)
            torch.mul(kv.float(), 100.0 * (rank + 1), out=pv)

        class Made:
            def __call__(self, number: int, kv: Any, *, out: Any) -> None:
                grad(number, kv, out=out)

        @functools.wraps(grad)
        def wrapped(*given: Any, **named: Any) -> None:
            grad(*given, **named)

        def finish(number: int, dk: Any, dv: Any, *, out: Any) -> None:
            torch.neg(dk, out=out[0])
            torch.neg(dv, out=out[1])

        chosen = {"function": grad, "wrapped": wrapped, "object": Made(), "method": Made().__call__}[how]
        kv = torch.arange(40.0) + rank
        given = torch.zeros(40)
        _, dk, dv = op.visit(kv.bfloat16(), given, given, grad=chosen, finish=finish, group=group)
        assert torch.equal(dk, -6 * kv)
        assert torch.equal(dv, -600 * kv)
        assert torch.equal(given, torch.zeros(40))
        assert len(places) == 4

    in_group(ranks, body)


def test_or_returned() -> None:
    """Who has the place may still return something else; who names `out` as one of the tensors is given none; and two
    results that are each other's places change them, call after call."""
    op = loaded(BEHIND, 2)

    def body(rank: int, group: str) -> None:
        def grad(number: int, kv: Any, *, out: Any) -> Any:
            out[0].copy_(kv)
            return out[0], kv * 3

        def swapped(number: int, dk: Any, out: Any) -> Any:
            return out, dk

        for _ in range(2):
            kv = torch.full((8,), rank + 1.0)
            _, dk, dv = op.visit(kv, torch.zeros(8), torch.zeros(8), grad=grad, finish=swapped, group=group)
            assert torch.equal(dk, 6 * kv)
            assert torch.equal(dv, 2 * kv)

    in_group(2, body)


def test_a_keyword_alone_returns_nothing() -> None:
    """A function without it that returns nothing is refused, as before."""
    op = loaded(LOOKED_AT, 2)

    def body(rank: int, group: str) -> None:
        with pytest.raises(commdsl.TensorError, match="NoneType"):
            op.visit(torch.ones(4), lambda number, *_: None, group=group)

    in_group(2, body)


def test_pieces_in_first_dimensions() -> None:
    """Blocks may be counted by several dimensions, and results have the shape that was given."""
    op = loaded(PIECES, 2)

    def body(rank: int, group: str) -> None:
        k = torch.arange(2.0 * 3 * 5 * 4).reshape(2, 3, 5, 4).bfloat16()
        flat = k.reshape(30, 4)

        def attend(number: int, k: Any, dk: Any) -> Any:
            assert k.shape == dk.shape or number == 0
            return dk + k.float().reshape(dk.shape)

        last, dk = op.visit(k, torch.zeros(2, 3, 5, 4), attend=attend, group=group)
        assert (last.shape, dk.shape) == (k.shape, k.shape)
        assert torch.equal(dk, 2 * k.float())
        last, dk = op.visit(flat, torch.zeros(30, 4), attend=attend, group=group)
        assert torch.equal(dk, 2 * flat.float())
        with pytest.raises(commdsl.TensorError, match="6 equal blocks"):
            op.visit(k.reshape(3, 2, 20)[:2], torch.zeros(2, 2, 20), attend=attend, group=group)
        with pytest.raises(commdsl.TensorError, match=r"a block of `dk` is \(4,\), one of `k` \(5, 4\)|equally long"):
            op.visit(k, torch.zeros(2, 3, 4), attend=attend, group=group)

    in_group(2, body)
