"""Functions, choices and tables: what they mean where each row has a value of its own, and that they stay small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.compiler import CheckedSchedule
from commdsl.ir import interpret
from commdsl.ir.schedules import Step
from commdsl.language.diagnostics import CommError
from commdsl.machine import dtypes


def check(text: str, ranks: int = 4) -> CheckedSchedule:
    checked = compiler.check(compiler.read_text(text, "test.comm", Path()), ranks=ranks)
    assert isinstance(checked, CheckedSchedule)
    return checked


def shift(by: str, before: str = "") -> str:
    """A permutation that sends to the rank that `by` says."""
    return f"""{before}
schedule shift for P ranks where P >= 2 {{
  input x
  output y
  ensure permutation(x -> y) r -> {by}
  each r {{ put x -> y @ {by} }}
}}
"""


def receivers(checked: CheckedSchedule) -> list[int]:
    (step,) = checked.schedule.steps
    assert isinstance(step, Step)
    return step.moves[0].dest_rank.tolist()


@pytest.mark.parametrize(
    ("by", "wanted"),
    [
        ("[2, 3, 1, 0][r]", [2, 3, 1, 0]),
        ("(r + 1 if r % 2 == 0 else r - 1)", [1, 0, 3, 2]),
        ("(4 / r - 1 if r != 0 else 2)", [2, 3, 1, 0]),  # rank 0 divides by nothing, and is not asked to
        ("(3 if r == 0 else 0 if r == 3 else (2 if r == 1 else 1))", [3, 2, 1, 0]),
        ("flip(r, 1)", [1, 0, 3, 2]),
        ("flip(flip(r, 1), 2)", [3, 2, 1, 0]),
        ("(r + floor_log2(P + 1)) % P", [2, 3, 0, 1]),
    ],
)
def test_values(by: str, wanted: list[int]) -> None:
    """An expression is what it says for every rank, and what is not chosen need not have a value."""
    text = shift(by, "fn flip(r, d) = (r + d if even(r / d) else r - d)\nfn even(n) = n % 2 == 0")

    assert receivers(check(text)) == wanted


def test_tables_by_name() -> None:
    """A table has a name and a length, in a loop too."""
    checked = check(
        """schedule scattered for P ranks where P == 4 {
  input x[3]
  output y[3]
  ensure permutation(x -> y) r -> (r + 1) % P
  let order = [2, 0, 1]
  for s in 0 ..< len(order) {
    each r { put x[order[s]] -> y[order[s]] @ (r + 1) % P }
  }
}
"""
    )
    chunks = [int(step.moves[0].source_chunk[0, 0]) for step in checked.schedule.steps if isinstance(step, Step)]

    assert chunks == [2, 0, 1]


def arms(count: int) -> str:
    """A permutation written as one `else if` for each rank, within an `each` and around one."""
    chain = " else ".join(f"if r == {rank} {{ put x -> y @ ({rank} + 1) % P }}" for rank in range(count))
    around = " else ".join(f"if P == {ranks} {{ }}" for ranks in range(count)) + " else { each r { put y -> z @ r } }"
    return f"""schedule shift for P ranks where P >= 2 {{
  input x
  output y
  output z
  ensure permutation(x -> y) r -> (r + 1) % P
  ensure permutation(x -> z) r -> (r + 1) % P
  each r {{ {chain} }}
  {around}
}}
"""


def test_a_long_chain_of_else_if() -> None:
    """A chain has as many arms as are written: it does not nest."""
    checked = check(arms(300), ranks=300)
    given = [np.array([rank], np.int32) for rank in range(300)]
    outputs = interpret.run(checked.schedule, {"x": given}, dtypes.INT32, "sum").outputs

    assert [int(array[0]) for array in outputs["z"]] == [299, *range(299)]


def test_functions_of_used_files(tmp_path: Path) -> None:
    """A file knows the functions of those that it uses; a fault in one of them shows both places."""
    (tmp_path / "numbers.comm").write_text("fn behind(r, P) = (r + 1) % P\nfn share(a, b) = a / b\n")
    use = 'use "numbers.comm"'
    text = shift("behind(r, P)", use)

    def checked(text: str) -> None:
        compiler.check(compiler.read_text(text, str(tmp_path / "main.comm"), tmp_path), ranks=4)

    checked(text)
    with pytest.raises(CommError) as caught:
        checked(text.replace("behind(r, P) }", "share(r, 0) }"))
    (found,) = caught.value.diagnostics
    assert found.primary.span.source.name.endswith("numbers.comm")
    assert [label.span.text for label in found.secondary] == ["share(r, 0)"]


def test_functions_beside_plans_and_machines() -> None:
    """Topologies, dispatches and plans call them, too."""
    files = compiler.read_text(
        """fn twice(n) = 2 * n
topology box { nodes 1   gpus twice(2) per node   sms twice(twice(33))
  link hop pairs (i, (i + 1) % twice(2)) for i in 0 ..< twice(2)   50 GB/s per pair   1 us
}
plan documents for 2 ranks { rank 0 { doc (twice(8)) -> (twice(1) - 1) } }
dispatch experts(E = twice(P)) for P ranks {
  rows x[T]
  key expert[T, K] of E
  route x by expert / twice(1)
  place by (expert, source rank, row)
}
""",
        "test.comm",
        Path(),
    )
    box = compiler.find_topology(files, "box", 4)

    assert (box.gpus_per_node, box.num_sms) == (4, 132)
    assert compiler.check(files, "documents").plan.num_ranks == 2
    assert compiler.check(files, "experts", ranks=4).dispatch.params == (("E", 8),)
