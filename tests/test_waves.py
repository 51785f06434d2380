"""Pipelines: pieces run through the same steps, one behind the other, and what is then at work at once is one step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_calls import USES, check, moves

from commdsl.ir import interpret
from commdsl.ir.schedules import Step
from commdsl.language.diagnostics import CommError
from commdsl.machine import dtypes

CHAIN = (Path(__file__).parent.parent / "schedules/collectives/broadcast_chain.comm").read_text(encoding="utf-8")

BY_ARITHMETIC = """schedule broadcast_chain(root = 0, K = 8) for P ranks where P >= 2 and K >= 1 {
  inout x[K]
  ensure broadcast(x, root)

  for s in 0 ..< P - 2 + K {
    each r, i in 0 ..< K where (r - root) % P + i == s and (r - root) % P < P - 1 { put x[i] -> x[i] @ (r + 1) % P }
  }
}
"""


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 1), (2, 3), (5, 1), (5, 3), (4, 9)])
def test_a_chain(ranks: int, pieces: int) -> None:
    """The shipped chain has the moves, row by row, of one whose condition says what is sent when."""
    written = check(BY_ARITHMETIC, ranks, K=pieces, root=1)

    assert moves(check(CHAIN, ranks, K=pieces, root=1)) == moves(written)


def test_waves_are_counted() -> None:
    """A wave is a step of its own, and says its number and the loops around."""
    text = """schedule twice for P ranks where P == 3 {
  inout x[2]
  inout y[2]
  ensure broadcast(x, 0)
  ensure broadcast(y, 0)
  for s in 0 ..< 2 {
    pipeline i in 0 ..< 2 {
      each r where r == 0 { if s == 0 { put x[i] -> x[i] @ 1 } else { put y[i] -> y[i] @ 1 } }
      each r where r == 1 { if s == 0 { put x[i] -> x[i] @ 2 } else { put y[i] -> y[i] @ 2 } }
    }
  }
}
"""
    steps = check(text, 3).steps

    assert [step.bindings for step in steps] == [(("s", s), ("wave", wave)) for s in range(2) for wave in range(3)]


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_calls_in_waves(pieces: int) -> None:
    """The steps of what is called are steps of a pipeline; pieces may take differently many."""
    text = """schedule there_and_back(K = 2) for P ranks where P == 4 {
  inout x[K]
  ensure allreduce(x)
  pipeline i in 0 ..< K {
    let root = i % P
    do reduce_tree(x[i]) with root = root
    if i % 2 == 1 { do broadcast_chain(x[i]) with root = root, K = 1 } else { do broadcast_tree(x[i]) with root = root }
  }
}
"""
    schedule = check(USES + text, 4, K=pieces)
    given = [np.arange(64, dtype=np.int32) + 100 * rank for rank in range(4)]
    outputs = interpret.run(schedule, {"x": given}, dtypes.INT32, "sum").outputs

    assert all(np.array_equal(array, np.sum(given, axis=0)) for array in outputs["x"])
    assert schedule.num_steps == {1: 4, 2: 1 + 5, 5: 4 + 4}[pieces]


def test_pieces_in_each_others_way() -> None:
    """What two pieces of a wave both write is refused as in one step."""
    text = """schedule narrow for P ranks where P == 3 {
  input x
  output y[2]
  scratch t[2]
  ensure each r, i in 0 ..< 2 where r == 2 { y[i] == x @ i }
  pipeline i in 0 ..< 2 {
    each r where r == i { put x -> t[0] @ 2 }
    each r where r == i { put x -> t[0] @ 2 }
    each r where r == 2 { copy t[0] -> y[i] }
  }
}
"""
    with pytest.raises(CommError) as caught:
        check(text, 3)
    assert [found.code for found in caught.value.diagnostics] == ["C302"]


def test_a_loop_of_nothing() -> None:
    """A pipeline over nothing, or of no steps, is no step."""
    text = """schedule shift for P ranks where P >= 2 {
  input x
  output y
  ensure permutation(x -> y) r -> (r + 1) % P
  pipeline i in 0 ..< 0 { each r { put x -> y @ r } }
  pipeline i in 0 ..< 3 { let k = i   if k > 5 { each r { put x -> y @ k } } }
  each r { put x -> y @ (r + 1) % P }
}
"""
    assert len([step for step in check(text, 4).steps if isinstance(step, Step)]) == 1
